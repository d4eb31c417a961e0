package machinetest

import (
	"bytes"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/image/disk/qcow2"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent/wire"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/boot"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// devices checks that the guest has disks of every kind, the virtio-serial ports and the balloon, and that the guest's
// writes reach the right files and appear in the statistics.
func devices(t *testing.T, s Subject) {
	l, d := s.Begin(t), s.Definition(t)
	defer l.Close()
	extra := func(id string, readOnly bool, bus machine.Bus, content string) {
		path := filepath.Join(d.StateDir, id)
		must(t, os.WriteFile(path, append([]byte(content), make([]byte, 1<<20-len(content))...), 0o600))
		d.Disks = append(d.Disks, machine.Disk{ID: id, File: machine.File{Path: path}, Format: "raw", ReadOnly: readOnly, Bus: bus})
	}
	extra("locked", true, machine.BusVirtio, "cannot be written")
	// The guest writes the header of another format to this raw disk. This must not change the disk's format (fault
	// I5).
	extra("raw", false, machine.BusVirtio, "to be overwritten")
	extra("scsi", false, machine.BusSCSI, "a SCSI disk begins so\n")
	extra("more", true, machine.BusSCSI, "another SCSI disk\n")
	extra("part", false, machine.BusSCSI, strings.Repeat("-", 1024)+"in the middle\n")
	part := &d.Disks[len(d.Disks)-1]
	part.Offset, part.Size = 1024, 4096
	console := l.Boot(t, d)
	console.Type("dd if=/dev/vda bs=26 count=1 2>/dev/null; dd if=/dev/vda of=/dev/null bs=64k 2>/dev/null; cat /sys/block/vdb/ro; " +
		"echo denied >/dev/vdb; printf 'QFI\\373' >/dev/vdc; echo changed >/dev/vda; sync; " +
		// the kernel chooses the order of sda, sdb, …
		"for d in /sys/bus/scsi/devices/*:*/block/*; do d=${d##*/}; dd if=/dev/$d bs=22 count=1 2>/dev/null; done; " +
		"echo parts: $(cat /sys/block/$d/size); echo from the guest >/dev/$d; sync; cat /sys/class/virtio-ports/*/name; cat /sys/block/vd?/serial; echo devices-$((40+2))")
	AwaitLog(t, d, "devices-42", 1)
	raw, err := os.ReadFile(d.SerialLog)
	if err != nil {
		t.Fatal(err)
	}
	output := strings.ReplaceAll(string(raw), "\r", "")
	if at := strings.Index(output, "a SCSI disk"); at < 0 || strings.Index(output, "another SCSI disk") < at ||
		strings.Index(output, "in the middle") < strings.Index(output, "another SCSI disk") {
		t.Errorf("the SCSI disks are not in the order of the definition: %q", output)
	}
	for _, want := range []string{"the base of the root disk", "a SCSI disk begins so", "another SCSI disk", "in the middle", "parts: 8\n",
		wire.PortName, "org.qemu.guest_agent.0", "\nroot", "locked"} {
		if !strings.Contains(output, want) {
			t.Errorf("the guest's output lacks %q: %q", want, raw)
		}
	}
	figures, err := l.Stats(t.Context(), d.Name)
	if err != nil {
		t.Fatal(err)
	}
	if b := figures.Blocks["root"]; b.ReadBytes < 1<<20 || b.ReadOps == 0 || b.WriteBytes == 0 || b.WriteOps == 0 {
		t.Errorf("the root disk's statistics have zero or too low counters: %+v", figures.Blocks)
	}
	for _, disk := range d.Disks {
		if figures.Blocks[disk.ID].ReadOps == 0 {
			t.Errorf("the statistics show no reads of disk %s: %+v", disk.ID, figures.Blocks)
		}
	}
	if figures.Memory == 0 || figures.Memory > d.Memory {
		t.Errorf("Memory = %d, want 1 to %d bytes", figures.Memory, d.Memory)
	}
	for range 2 { // restart the machine twice with the same disks
		must(t, l.Destroy(t.Context(), d.Name))
		must(t, l.Start(t.Context(), d.Name))
	}
	must(t, l.Undefine(t.Context(), d.Name))
	for path, want := range map[string]string{d.Disks[0].Base.Path: "the base", d.Disks[1].Path: "cannot be written",
		d.Disks[2].Path: "QFI\xfb", part.Path: strings.Repeat("-", 1024) + "from the guest\n"} {
		if raw, err := os.ReadFile(path); err != nil || !bytes.HasPrefix(raw, []byte(want)) {
			t.Errorf("%s begins with %.20q (error %v), want %q", path, raw, err, want)
		}
	}
}

// bootsFromDisk checks that the firmware boots from an overlay on an image, and that the guest's writes survive and
// change only the overlay.
func bootsFromDisk(t *testing.T, s Subject) {
	l, d := s.Begin(t), s.Definition(t)
	defer l.Close()
	image, err := os.Open(s.Guest.Disk)
	if err != nil {
		t.Fatal(err)
	}
	defer image.Close()
	before, err := image.Stat()
	if err != nil {
		t.Fatal(err)
	}
	info, err := qcow2.Inspect(image, before.Size())
	if err != nil {
		t.Fatal(err)
	}
	overlay := filepath.Join(d.StateDir, "boot.qcow2")
	must(t, qcow2.CreateOverlay(t.Context(), overlay, info.VirtualSize, qcow2.Overlay{}))
	d.Kernel, d.Initrd, d.Cmdline = nil, nil, ""
	d.Disks = []machine.Disk{{
		ID: "root", File: machine.File{Path: overlay}, Format: "qcow2", Bus: machine.BusVirtio,
		Base: &machine.Base{File: machine.File{Path: s.Guest.Disk}, Format: "qcow2"},
	}}
	console := l.Boot(t, d)
	console.Type("echo kept-$((40+2)) >/disk/kept; sync; cat /disk/kept; echo so")
	AwaitLog(t, d, "kept-42", 1)
	must(t, l.Shutdown(t.Context(), d.Name))
	if end := l.End(d.Name); end.Cause != machine.CausePowerOff {
		t.Errorf("end after Shutdown = %+v, want a power-off", end)
	}
	must(t, l.Start(t.Context(), d.Name))
	console = Attach(t, d)
	AwaitLog(t, d, ready, 2)
	console.Type("cat /disk/kept")
	AwaitLog(t, d, "kept-42", 2)
	must(t, l.Undefine(t.Context(), d.Name))
	if after, err := os.Stat(s.Guest.Disk); err != nil || !after.ModTime().Equal(before.ModTime()) || after.Size() != before.Size() {
		t.Errorf("the base image changed, or Stat failed: %v", err)
	}
}

// noBoot checks the firmware's output. If the disk is empty, the output must show that the machine cannot boot; a
// driver that has just recovered the machine must find this out too. The output of a bootable machine must show no
// failure.
func noBoot(t *testing.T, s Subject) {
	l, d := s.Begin(t), s.Definition(t)
	defer func() { l.Close() }()
	if _, err := l.Firmware(t.Context(), d.Name); !errdefs.IsNotFound(err) {
		t.Errorf("Firmware of an undefined machine: got error %v, want ErrNotFound", err)
	}
	zeros := filepath.Join(d.StateDir, "zeros.img")
	must(t, os.WriteFile(zeros, make([]byte, 1<<20), 0o600))
	d.Kernel, d.Initrd, d.Cmdline, d.Shares = nil, nil, "", nil
	d.Disks = []machine.Disk{{ID: "root", File: machine.File{Path: zeros}, Format: "raw", Bus: machine.BusVirtio}}
	l.mustDefine(t, d)
	if _, err := l.Firmware(t.Context(), d.Name); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("Firmware of a stopped machine: got error %v, want ErrFailedPrecondition", err)
	}
	must(t, l.Start(t.Context(), d.Name))
	l.Close()
	l = s.Begin(t, d.Name)
	var report boot.Report
	Await(t, "the firmware reports that it found nothing to boot", func() bool {
		output, err := l.Firmware(t.Context(), d.Name)
		if err != nil && !errdefs.IsUnavailable(err) {
			t.Fatal(err)
		}
		report.Read(output)
		return report.Failed
	})
	if report.HandedOver || len(report.Lines) == 0 {
		t.Errorf("report = %+v, want no hand-over, and some lines", report)
	}
	must(t, l.Undefine(t.Context(), d.Name))
	works := s.Definition(t)
	l.Boot(t, works)
	output, err := l.Firmware(t.Context(), works.Name)
	if report = (boot.Report{}); err != nil || output == "" {
		t.Errorf("Firmware of a bootable machine = %q, %v; want some output", output, err)
	}
	if report.Read(output); report.Failed {
		t.Errorf("the firmware of a bootable machine reports a failure: %+v", report)
	}
	must(t, l.Undefine(t.Context(), works.Name))
}

func itoa(n int) string { return strconv.Itoa(n) }
