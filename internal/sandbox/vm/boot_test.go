package vm

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/config"
	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/boot"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/rootdisk"
	"github.com/tripod-run/tripod/test/loopdev"
)

// The output of SeaBIOS for a disk without a boot sector, and for a disk with one.
const (
	outputNoDevice = "SeaBIOS (version 1.16.2)\nBooting from Hard Disk...\nBoot failed: not a bootable disk\n\nNo bootable device.  Retrying in 30 seconds.\n"
	// The console's output of OVMF for an empty disk.
	noUEFIBoot    = "BdsDxe: failed to load Boot0001 \"UEFI Misc Device\" from PciRoot(0x0)/Pci(0x1,0x0): Not Found\r\nBdsDxe: starting Boot0002 \"EFI Internal Shell\" from Fv(7CB8)\r\nShell> "
	outputBooting = "SeaBIOS (version 1.16.2)\nBooting from Hard Disk...\nBooting from 0000:7c00\n"
)

// wantNoBoot waits for the end of a machine that could not boot, and checks that status and log contain the reason.
func (r *rig) wantNoBoot(p *sandbox.Pod, c *sandbox.Container, reason string) {
	r.Helper()
	s := r.waitEnd(c)
	if s.Reason != sandbox.ReasonNoBootableDevice || s.ExitCode != sandbox.ExitStartError || !strings.Contains(s.Message, reason) {
		r.Errorf("status = %+v, want NoBootableDevice because %q", s, reason)
	}
	if log := r.log(p); strings.Count(log, "stderr F tripod: ") != 1 || !strings.Contains(log, "firmware: Booting from Hard Disk...") ||
		!strings.Contains(log, reason) {
		r.Errorf("log = %q, want the firmware's output and, once, %q", log, reason)
	}
}

// TestV5NoBootableDevice: a machine whose firmware finds nothing to boot is killed. Status, event and log contain the
// firmware's output, and the next run can boot.
func TestV5NoBootableDevice(t *testing.T) {
	r := newRig(t)
	r.driver.firmware = outputNoDevice
	p, c := r.run("unbootable", "disk")
	r.wantNoBoot(p, c, "not a bootable disk")
	r.driver.firmware = outputBooting
	r.must(r.StartContainer(r.ctx(), p, c))
	r.must(r.StopContainer(r.ctx(), p, c, time.Minute))
	if s := r.waitEnd(c); s.Reason != sandbox.ReasonCompleted || s.Message == "" {
		t.Errorf("status after the next run = %+v, want reason Completed", s)
	}
}

// TestV5BootSectorWithoutCode: a BIOS starts a UEFI disk and never returns, but the backend knows that the boot sector has
// no code.
func TestV5BootSectorWithoutCode(t *testing.T) {
	r := newRig(t)
	r.driver.firmware = outputBooting
	p := r.pod("uefi", byFirmware("bios"))
	c := r.create(p, "disk-uefi")
	r.must(r.StartContainer(r.ctx(), p, c))
	r.wantNoBoot(p, c, "UEFI only")
}

// byFirmware sets the annotation that chooses the firmware, unless the given value is empty.
func byFirmware(value string) func(*runtimeapi.PodSandboxConfig) {
	return func(c *runtimeapi.PodSandboxConfig) { c.Annotations["tripod.dev/vm.firmware"] = value }
}

// withUEFI gives the rig's node a UEFI firmware, whose template of the variables is the text "template".
func withUEFI(t *testing.T) func(*settings) {
	dir := t.TempDir()
	found := boot.UEFI{Code: filepath.Join(dir, "code.fd"), Vars: filepath.Join(dir, "vars.fd")}
	if err := os.WriteFile(found.Vars, []byte("template"), 0o600); err != nil {
		t.Fatal(err)
	}
	return func(c *settings) { c.UEFI = func() (boot.UEFI, error) { return found, nil } }
}

// TestFirmware: the disk decides between BIOS and UEFI, unless the annotation does. A machine with UEFI has its own copy of
// the variables, which is removed with the container.
func TestFirmware(t *testing.T) {
	r := newRig(t, withUEFI(t))
	for i, test := range []struct {
		image, annotation string
		uefi              bool
	}{
		{"disk", "", false}, {"disk", "bios", false}, {"disk", "uefi", true},
		{"disk-uefi", "", true}, {"disk-uefi", "bios", false}, {"disk-uefi", "uefi", true},
		{"cd", "", false}, {"cd", "uefi", true}, {"cd-uefi", "", true}, {"cd-uefi", "bios", false},
		{"kernel", "", false}, {"kernel", "bios", false},
	} {
		p := r.pod(fmt.Sprint("firmware", i), byFirmware(test.annotation))
		c := r.create(p, test.image)
		var s state
		r.must(format.Read(r.config.containerFile(c.ID), &s))
		file := r.config.nvramFile(c.ID)
		vars, err := os.ReadFile(file)
		switch got := s.Definition.UEFI; {
		case (got != nil) != test.uefi:
			t.Errorf("image %s, annotation %q: UEFI = %+v, want UEFI: %t", test.image, test.annotation, got, test.uefi)
		case !test.uefi && !errors.Is(err, fs.ErrNotExist):
			t.Errorf("image %s, annotation %q: a machine with a BIOS has UEFI variables (error %v)", test.image, test.annotation, err)
		case test.uefi && (err != nil || string(vars) != "template" || got.Vars.Path != file || s.Unbootable != ""):
			t.Errorf("image %s, annotation %q: state = %+v, variables %q, %v; want a copy of the template", test.image, test.annotation, s, vars,
				err)
		}
		r.must(r.RemoveContainer(r.ctx(), p, c))
		if _, err := os.Stat(file); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("the UEFI variables of a removed container: got error %v, want none left", err)
		}
		r.must(r.RemoveSandbox(r.ctx(), p))
	}
}

// TestVarsStayOnDevice: the UEFI variables of a root disk on a block device are on the device, where the next container
// finds them, until the firmware has variables of another size. If they cannot be there, the container has a file and a
// warning.
func TestVarsStayOnDevice(t *testing.T) {
	file := filepath.Join(t.TempDir(), "device")
	if err := os.WriteFile(file, make([]byte, 8<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	device, template := loopdev.Attach(t, file), filepath.Join(t.TempDir(), "vars.fd")
	const varsAt = rootdisk.VarsOffset + 1024
	driver := ""
	r := newRig(t, func(c *settings) {
		c.UEFI = func() (boot.UEFI, error) { return boot.UEFI{Code: "/code.fd", Vars: template}, nil }
		c.Driver = renamed{c.Driver, &driver}
	})
	for i, test := range []struct {
		name, driver, firmware string
		template               []byte
		want                   string // what is at varsAt
		file                   bool
		warning                string
	}{
		{name: "BIOS", firmware: "bios", template: []byte("unused"), want: "\x00"},
		{name: "new", template: bytes.Repeat([]byte("one "), 1024), want: "one one"},
		{name: "BIOS between", firmware: "bios", template: []byte("unused"), want: "guest"},
		{name: "kept", template: append(bytes.Repeat([]byte("one "), 64), bytes.Repeat([]byte("two "), 960)...), want: "guest"},
		{name: "another size", template: bytes.Repeat([]byte("six "), 2048), want: "six six", warning: "those of another firmware"},
		{name: "too large", template: make([]byte, 1<<20), want: "guest", file: true, warning: "do not fit on the device"},
		{name: "libvirt", driver: "libvirt", template: bytes.Repeat([]byte("two "), 1024), want: "guest", file: true,
			warning: "libvirt cannot keep them"},
	} {
		driver = test.driver
		r.must(os.WriteFile(template, test.template, 0o600))
		p := r.pod(fmt.Sprint("pod", i), byFirmware(test.firmware))
		c := r.create(p, "disk-uefi", func(c *runtimeapi.ContainerConfig) {
			c.Devices = []*runtimeapi.Device{{HostPath: device, ContainerPath: "/", Permissions: "mrw"}}
		})
		var s state
		r.must(format.Read(r.config.containerFile(c.ID), &s))
		want := machine.FilePart{File: machine.File{Path: device}, Offset: rootdisk.VarsOffset, Size: uint64(len(test.template))}
		if test.file {
			want = machine.FilePart{File: machine.File{Path: r.config.nvramFile(c.ID)}}
		}
		if got := s.Definition.UEFI; (got != nil) != (test.firmware != "bios") || got != nil && got.Vars != want {
			t.Errorf("%s: UEFI = %+v, want the variables %+v", test.name, got, want)
		}
		if warnings := strings.Join(s.Warnings, "; "); !strings.Contains(warnings, test.warning) || test.warning == "" && warnings != "" {
			t.Errorf("%s: warnings %q, want %q", test.name, warnings, test.warning)
		}
		f, err := os.OpenFile(device, os.O_RDWR, 0)
		r.must(err)
		got := make([]byte, len(test.want))
		_, err = f.ReadAt(got, varsAt)
		r.must(err)
		if string(got) != test.want {
			t.Errorf("%s: the device's variables have %q, want %q", test.name, got, test.want)
		}
		if test.firmware != "bios" {
			_, err = f.WriteAt([]byte("guest"), varsAt)
			r.must(err)
		}
		r.must(f.Close())
		r.must(r.StartContainer(r.ctx(), p, c))
		r.must(r.StopContainer(r.ctx(), p, c, time.Minute))
		r.must(r.RemoveContainer(r.ctx(), p, c))
		r.must(r.RemoveSandbox(r.ctx(), p))
	}
}

// renamed is a driver with another name, unless that is empty.
type renamed struct {
	machine.Driver
	name *string
}

func (d renamed) Name() string { return cmp.Or(*d.name, d.Driver.Name()) }

// TestFirmwareRefused: CreateContainer refuses UEFI for an image with a kernel, and a disk that needs UEFI if the node has
// no UEFI firmware, or the machine too little memory for it.
func TestFirmwareRefused(t *testing.T) {
	r := newRig(t)
	p := r.pod("kernel", byFirmware("uefi"))
	if _, err := r.CreateContainer(r.ctx(), p, r.container(p, "kernel")); !errdefs.IsNotImplemented(err) ||
		!strings.Contains(err.Error(), "tripod.dev/vm.firmware") {
		t.Errorf("CreateContainer of a kernel with UEFI: got error %v, want ErrNotImplemented that names the annotation", err)
	}
	for i, test := range []struct{ image, annotation string }{{"disk-uefi", ""}, {"disk", "uefi"}} {
		p := r.pod(fmt.Sprint("missing", i), byFirmware(test.annotation))
		if _, err := r.CreateContainer(r.ctx(), p, r.container(p, test.image)); !errdefs.IsFailedPrecondition(err) ||
			!strings.Contains(err.Error(), "UEFI") {
			t.Errorf("CreateContainer of %s without a UEFI firmware: got error %v, want ErrFailedPrecondition", test.image, err)
		}
	}
	withUEFI(t)(&r.config)
	r.restart()
	small := r.container(p, "disk-uefi")
	small.Config.Linux.Resources = &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 48 << 20}
	p.Config.Annotations = nil
	if _, err := r.CreateContainer(r.ctx(), p, small); !errdefs.IsInvalidArgument(err) ||
		!strings.Contains(err.Error(), "memory_limit_in_bytes") {
		t.Errorf("CreateContainer with too little memory for UEFI: got error %v, want ErrInvalidArgument that names the field", err)
	}
	shrinks := r.create(p, "disk-uefi")
	shrinks.Config.Linux.Resources = small.Config.Linux.Resources
	if err := r.UpdateContainer(r.ctx(), p, shrinks); !errdefs.IsInvalidArgument(err) {
		t.Errorf("UpdateContainer to too little memory for UEFI: got error %v, want ErrInvalidArgument", err)
	}
	if err := r.Validate(r.podConfig("wrong", byFirmware("ovmf")), nil); !errdefs.IsInvalidArgument(err) ||
		!strings.Contains(err.Error(), "`bios` or `uefi`") {
		t.Errorf("Validate of an unknown firmware: got error %v, want ErrInvalidArgument with the allowed values", err)
	}
}

// TestRefusedUEFIWritesNothing checks that a machine that cannot boot by UEFI is refused before its image overwrites the
// pod's block device.
func TestRefusedUEFIWritesNothing(t *testing.T) {
	file := filepath.Join(t.TempDir(), "device")
	content := bytes.Repeat([]byte("theirs "), 1<<20)
	if err := os.WriteFile(file, content, 0o600); err != nil {
		t.Fatal(err)
	}
	device := loopdev.Attach(t, file)
	r := newRig(t)
	for i, test := range []struct{ image, annotation string }{{"disk-uefi", ""}, {"disk", "uefi"}} {
		p := r.pod(fmt.Sprint("device", i), byFirmware(test.annotation), func(c *runtimeapi.PodSandboxConfig) {
			c.Annotations["tripod.dev/vm.root-device-overwrite"] = "foreign"
		})
		c := r.container(p, test.image)
		c.Config.Devices = []*runtimeapi.Device{{HostPath: device, ContainerPath: "/", Permissions: "mrw"}}
		if _, err := r.CreateContainer(r.ctx(), p, c); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "UEFI") {
			t.Errorf("CreateContainer of %s without a UEFI firmware: got error %v, want ErrFailedPrecondition", test.image, err)
		}
	}
	if got, err := os.ReadFile(device); err != nil || !bytes.HasPrefix(got, content[:len(got)]) || len(got) < 1<<20 {
		t.Errorf("the device has %d bytes of another content (error %v)", len(got), err)
	}
}

// TestUEFIFoundOnce: the firmware that allowed the copy to the pod's block device is that of the machine.
func TestUEFIFoundOnce(t *testing.T) {
	file := filepath.Join(t.TempDir(), "device")
	if err := os.WriteFile(file, make([]byte, 8<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	found := 0
	r := newRig(t, withUEFI(t), func(c *settings) {
		find := c.UEFI
		c.UEFI = func() (boot.UEFI, error) { found++; return find() }
	})
	p := r.pod("device")
	c := r.container(p, "disk-uefi")
	c.Config.Devices = []*runtimeapi.Device{{HostPath: loopdev.Attach(t, file), ContainerPath: "/", Permissions: "mrw"}}
	if _, err := r.CreateContainer(r.ctx(), p, c); err != nil || found != 1 {
		t.Errorf("CreateContainer has searched for the firmware %d times (error %v), want once", found, err)
	}
}

// TestV5NoBootableDeviceUEFI: a machine whose UEFI firmware waits in its shell is killed, with the firmware's output in
// status and log.
func TestV5NoBootableDeviceUEFI(t *testing.T) {
	r := newRig(t, withUEFI(t))
	p, c := r.run("unbootable", "disk-uefi")
	g := r.driver.guest(c.ID)
	r.must(say(&g, noUEFIBoot))
	s := r.waitEnd(c)
	if s.Reason != sandbox.ReasonNoBootableDevice || s.ExitCode != sandbox.ExitStartError ||
		!strings.Contains(s.Message, "failed to load Boot0001") {
		t.Errorf("status = %+v, want NoBootableDevice with the firmware's output", s)
	}
	if log := r.log(p); !strings.Contains(log, "stderr F firmware: BdsDxe: failed to load") || strings.Count(log, "stderr F tripod: ") != 1 {
		t.Errorf("log = %q, want the firmware's output and a line of tripod", log)
	}
}

// TestV5CutOff: CreateContainer refuses a disk whose partitions reach beyond its end.
func TestV5CutOff(t *testing.T) {
	r := newRig(t)
	p := r.pod("cut")
	_, err := r.CreateContainer(r.ctx(), p, r.container(p, "disk-cut"))
	if !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), "cut off") {
		t.Errorf("CreateContainer error = %v, want ErrInvalidArgument because the disk is cut off", err)
	}
}

// TestV5Recovered: if the daemon dies while it kills a machine that cannot boot, the next daemon kills the machine for
// the same reason: the firmware repeats it, or the state file has it.
func TestV5Recovered(t *testing.T) {
	failpoint.Needed(t)
	for _, point := range []string{"vm.no-boot.heard", "vm.no-boot.recorded"} {
		t.Run(point, func(t *testing.T) {
			r := newRig(t)
			r.driver.firmware = outputNoDevice
			t.Cleanup(func() { r.must(failpoint.Arm(point, "")) })
			r.must(failpoint.Arm(point, "error"))
			p, c := r.run("recovered", "disk")
			r.eventually("the firmware's output is read", func() bool {
				var s state
				err := format.Read(r.config.containerFile(c.ID), &s)
				return err == nil && r.driver.guest(c.ID).firmwareRead && (s.NoBoot != "") == (point == "vm.no-boot.recorded")
			})
			r.stop()
			r.must(failpoint.Arm(point, ""))
			if s := r.driver.guest(c.ID).state; s.Phase != machine.Running {
				t.Fatalf("the machine's state = %+v, want it still running", s)
			}
			if point == "vm.no-boot.heard" {
				r.driver.repeatFirmware(c.ID)
			}
			r.open()
			r.wantNoBoot(p, c, "not a bootable disk")
		})
	}
}

// TestV5Silent: if a guest shows no sign of life, its log says so once, even if the daemon restarts, and the machine
// keeps running. The log of a guest that has written to its console does not say so.
func TestV5Silent(t *testing.T) {
	r := newRig(t, func(c *settings) { c.VM.BootTimeout = config.Duration(100 * time.Millisecond) })
	r.driver.firmware = outputBooting
	active, activeContainer := r.run("active", "disk")
	r.driver.mute = true
	p, c := r.run("silent", "disk")
	noted := func() int { return strings.Count(r.log(p), "no sign of life in 100ms") }
	r.eventually("the note", func() bool { return noted() == 1 })
	r.wantState(p, c, sandbox.StateRunning)
	if log := r.log(p); !strings.Contains(log, "stderr F firmware: Booting from 0000:7c00") {
		t.Errorf("log = %q, want the firmware's output", log)
	}
	r.restart()
	next, _ := r.run("silent-too", "disk")
	r.eventually("the note about the next silent guest", func() bool { return strings.Contains(r.log(next), "no sign of life") })
	if n := noted(); n != 1 {
		t.Errorf("the silence is noted %d times, want once", n)
	}
	r.wantState(active, activeContainer, sandbox.StateRunning)
	if log := r.log(active); strings.Contains(log, "no sign of life") {
		t.Errorf("log of the active guest = %q, want no note about silence", log)
	}
}
