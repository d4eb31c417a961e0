package machinetest

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/boot"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/test/harness/gptdisk"
	"github.com/tripod-run/tripod/test/loopdev"
)

// bootsByUEFI checks that the machine boots a disk for UEFI, that the firmware keeps its variables in the machine's own
// file, and that the machine boots again with that file.
func bootsByUEFI(t *testing.T, s Subject) {
	l, d := s.Begin(t), s.uefiDefinition(t, gptdisk.Bootable())
	defer l.Close()
	code, err := os.Stat(d.UEFI.Code.Path)
	must(t, err)
	l.mustDefine(t, d)
	for run := range 2 {
		must(t, l.Start(t.Context(), d.Name))
		if end := l.End(d.Name); end.Cause != machine.CausePowerOff {
			t.Errorf("end of run %d = %+v, want a power-off", run, end)
		}
		AwaitLog(t, d, gptdisk.Text, run+1)
	}
	AwaitLog(t, d, gptdisk.Kept+gptdisk.Text, 1)
	vars, err := os.ReadFile(d.UEFI.Vars.Path)
	must(t, err)
	if name := []byte("B\x00o\x00o\x00t\x00O\x00r\x00d\x00e\x00r\x00"); !bytes.Contains(vars, name) {
		t.Error("the machine's UEFI variables lack BootOrder, which the firmware sets")
	}
	if after, err := os.Stat(d.UEFI.Code.Path); err != nil || !after.ModTime().Equal(code.ModTime()) {
		t.Errorf("the firmware's file changed, or Stat failed: %v", err)
	}
	must(t, l.Undefine(t.Context(), d.Name))
}

// variablesOnDevice checks that a machine whose root disk and UEFI variables are parts of one block device boots, and that
// the next machine finds the variable of the first. A driver that cannot do it says so.
func variablesOnDevice(t *testing.T, s Subject) {
	const varsOffset, rootOffset = 256 << 10, 1 << 20
	var device string
	for run := range 2 {
		l, d := s.Begin(t), s.uefiDefinition(t, gptdisk.Bootable())
		defer l.Close()
		vars, err := os.ReadFile(d.UEFI.Vars.Path)
		must(t, err)
		if run == 0 {
			file := filepath.Join(t.TempDir(), "device")
			content := make([]byte, rootOffset+gptdisk.Size)
			copy(content[varsOffset:], vars)
			copy(content[rootOffset:], gptdisk.Bootable())
			must(t, os.WriteFile(file, content, 0o600))
			device = loopdev.Attach(t, file)
		}
		d.Disks[0].Path, d.Disks[0].Offset, d.Disks[0].Size = device, rootOffset, gptdisk.Size
		d.UEFI.Vars = machine.FilePart{File: machine.File{Path: device}, Offset: varsOffset, Size: uint64(len(vars))}
		if err := l.Define(t.Context(), d); errdefs.IsNotImplemented(err) {
			return
		} else if err != nil {
			t.Fatal(err)
		}
		must(t, l.Start(t.Context(), d.Name))
		if end := l.End(d.Name); end.Cause != machine.CausePowerOff {
			t.Errorf("end of machine %d = %+v, want a power-off", run, end)
		}
		AwaitLog(t, d, []string{gptdisk.Text, gptdisk.Kept + gptdisk.Text}[run], 1)
		must(t, l.Undefine(t.Context(), d.Name))
	}
}

// noBootByUEFI checks that the console of a machine with an empty disk shows that UEFI finds nothing to boot.
func noBootByUEFI(t *testing.T, s Subject) {
	l, d := s.Begin(t), s.uefiDefinition(t, make([]byte, gptdisk.Size))
	defer l.Close()
	l.mustDefine(t, d)
	must(t, l.Start(t.Context(), d.Name))
	Await(t, "the firmware's shell waits for input", func() bool {
		output, err := os.ReadFile(d.SerialLog)
		must(t, err)
		return len(output) <= boot.ConsoleSize && boot.OfConsole(string(output)).Failed
	})
	must(t, l.Undefine(t.Context(), d.Name))
}

// uefiDefinition returns a machine that boots the given raw disk by UEFI.
func (s Subject) uefiDefinition(t *testing.T, disk []byte) machine.Definition {
	t.Helper()
	found, err := boot.FindUEFI()
	must(t, err)
	d := s.Definition(t)
	root, vars := filepath.Join(d.StateDir, "uefi.raw"), filepath.Join(d.StateDir, "nvram.fd")
	template, err := os.ReadFile(found.Vars)
	must(t, err)
	must(t, os.WriteFile(vars, template, 0o600))
	must(t, os.WriteFile(root, disk, 0o600))
	d.Kernel, d.Initrd, d.Cmdline = nil, nil, ""
	d.UEFI = &machine.UEFI{Code: machine.File{Path: found.Code}, Vars: machine.FilePart{File: machine.File{Path: vars}}}
	d.Disks = []machine.Disk{{ID: "root", File: machine.File{Path: root}, Format: "raw", Bus: machine.BusVirtio}}
	return d
}
