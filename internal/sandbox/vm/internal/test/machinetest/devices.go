package machinetest

import (
	"bytes"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/image/qcow2"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent/wire"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/firmware"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// devices: disks of every kind, the ports and the balloon are there; what the guest writes goes where it shall, and
// counters count.
func devices(t *testing.T, s Subject) {
	l, d := s.Begin(t), s.Definition(t)
	defer l.Close()
	extra := func(id string, readOnly bool, bus machine.Bus, content string) {
		path := filepath.Join(d.StateDir, id)
		if err := os.WriteFile(path, append([]byte(content), make([]byte, 1<<20-len(content))...), 0o600); err != nil {
			t.Fatal(err)
		}
		d.Disks = append(d.Disks, machine.Disk{ID: id, File: machine.File{Path: path}, Format: "raw", ReadOnly: readOnly, Bus: bus})
	}
	extra("locked", true, machine.BusVirtio, "cannot be written")
	// A guest that writes the header of another format into its raw disk gains nothing by it (faults I5).
	extra("raw", false, machine.BusVirtio, "to be overwritten")
	extra("scsi", false, machine.BusSCSI, "a SCSI disk begins so\n")
	extra("more", true, machine.BusSCSI, "another SCSI disk\n")
	extra("part", false, machine.BusSCSI, strings.Repeat("-", 1024)+"in the middle\n")
	part := &d.Disks[len(d.Disks)-1]
	part.Offset, part.Size = 1024, 4096
	console := l.Up(t, d)
	console.Type("dd if=/dev/vda bs=26 count=1 2>/dev/null; dd if=/dev/vda of=/dev/null bs=64k 2>/dev/null; cat /sys/block/vdb/ro; " +
		"echo denied >/dev/vdb; printf 'QFI\\373' >/dev/vdc; echo changed >/dev/vda; sync; " +
		"for d in /sys/bus/scsi/devices/*:*/block/*; do d=${d##*/}; dd if=/dev/$d bs=22 count=1 2>/dev/null; done; " + // sda is whichever the kernel has found first
		"echo parts: $(cat /sys/block/$d/size); echo from the guest >/dev/$d; sync; cat /sys/class/virtio-ports/*/name; cat /sys/block/vd?/serial; echo devices-$((40+2))")
	AwaitLog(t, d, "devices-42", 1)
	raw, err := os.ReadFile(d.SerialLog)
	if err != nil {
		t.Fatal(err)
	}
	said := strings.ReplaceAll(string(raw), "\r", "")
	if at := strings.Index(said, "a SCSI disk"); at < 0 || strings.Index(said, "another SCSI disk") < at || strings.Index(said, "in the middle") < strings.Index(said, "another SCSI disk") {
		t.Errorf("the SCSI disks are not there in their order: %q", said)
	}
	for _, want := range []string{"the base of the root disk", "a SCSI disk begins so", "another SCSI disk", "in the middle", "parts: 8\n", wire.PortName, "org.qemu.guest_agent.0", "\nroot", "locked"} {
		if !strings.Contains(said, want) {
			t.Errorf("the guest does not see %q: %q", want, raw)
		}
	}
	figures, err := l.Stats(t.Context(), d.Name)
	if err != nil {
		t.Fatal(err)
	}
	if b := figures.Blocks["root"]; b.ReadBytes < 1<<20 || b.ReadOps == 0 || b.WriteBytes == 0 || b.WriteOps == 0 {
		t.Errorf("figures of the root disk: %+v", figures.Blocks)
	}
	for _, disk := range d.Disks {
		if figures.Blocks[disk.ID].ReadOps == 0 {
			t.Errorf("disk %s was never read: %+v", disk.ID, figures.Blocks)
		}
	}
	if figures.BalloonActual == 0 || figures.BalloonActual > d.Memory {
		t.Errorf("the balloon leaves the guest %d bytes of %d", figures.BalloonActual, d.Memory)
	}
	for range 2 { // it can be killed and started, and has its disks again
		if err := l.Destroy(t.Context(), d.Name); err != nil {
			t.Fatal(err)
		}
		if err := l.Start(t.Context(), d.Name); err != nil {
			t.Fatal(err)
		}
	}
	if err := l.Undefine(t.Context(), d.Name); err != nil {
		t.Error(err)
	}
	for path, want := range map[string]string{d.Disks[0].Base.Path: "the base", d.Disks[1].Path: "cannot be written", d.Disks[2].Path: "QFI\xfb", part.Path: strings.Repeat("-", 1024) + "from the guest\n"} {
		if raw, err := os.ReadFile(path); err != nil || !bytes.HasPrefix(raw, []byte(want)) {
			t.Errorf("%s begins with %.20q, %v", path, raw, err)
		}
	}
}

// bootsFromDisk: the firmware boots from an overlay on an image; what the guest writes is there after a restart, in the
// overlay alone.
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
	if err := qcow2.CreateOverlay(t.Context(), overlay, info.VirtualSize, qcow2.Overlay{}); err != nil {
		t.Fatal(err)
	}
	d.Kernel, d.Initrd, d.Cmdline = nil, nil, ""
	d.Disks = []machine.Disk{{
		ID: "root", File: machine.File{Path: overlay}, Format: "qcow2", Bus: machine.BusVirtio,
		Base: &machine.Base{File: machine.File{Path: s.Guest.Disk}, Format: "qcow2"},
	}}
	console := l.Up(t, d)
	console.Type("echo kept-$((40+2)) >/disk/kept; sync; cat /disk/kept; echo so")
	AwaitLog(t, d, "kept-42", 1)
	if err := l.Shutdown(t.Context(), d.Name); err != nil {
		t.Fatal(err)
	}
	if end := l.End(d.Name); end.Cause != machine.CausePowerOff {
		t.Errorf("ended: %+v", end)
	}
	if err := l.Start(t.Context(), d.Name); err != nil {
		t.Fatal(err)
	}
	console = Attach(t, d)
	AwaitLog(t, d, ready, 2)
	console.Type("cat /disk/kept")
	AwaitLog(t, d, "kept-42", 2)
	if err := l.Undefine(t.Context(), d.Name); err != nil {
		t.Error(err)
	}
	if after, err := os.Stat(s.Guest.Disk); err != nil || !after.ModTime().Equal(before.ModTime()) || after.Size() != before.Size() {
		t.Errorf("the base has changed: %v", err)
	}
}

// noBoot: a machine whose disk is zeros tells by its firmware that it cannot boot, and one that boots does not. A
// driver that has just taken the machine over learns it, too.
func noBoot(t *testing.T, s Subject) {
	l, d := s.Begin(t), s.Definition(t)
	defer func() { l.Close() }()
	if _, err := l.Firmware(t.Context(), d.Name); !errdefs.IsNotFound(err) {
		t.Errorf("of a machine that is not defined: %v", err)
	}
	zeros := filepath.Join(d.StateDir, "zeros.img")
	if err := os.WriteFile(zeros, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	d.Kernel, d.Initrd, d.Cmdline, d.Shares = nil, nil, "", nil
	d.Disks = []machine.Disk{{ID: "root", File: machine.File{Path: zeros}, Format: "raw", Bus: machine.BusVirtio}}
	l.defined(t, d)
	if _, err := l.Firmware(t.Context(), d.Name); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("of a machine that does not run: %v", err)
	}
	if err := l.Start(t.Context(), d.Name); err != nil {
		t.Fatal(err)
	}
	l.Close()
	l = s.Begin(t, d.Name)
	var report firmware.Report
	Await(t, "the firmware finds nothing to boot", func() bool {
		said, err := l.Firmware(t.Context(), d.Name)
		if err != nil && !errdefs.IsUnavailable(err) {
			t.Fatal(err)
		}
		report.Read(said)
		return report.Failed
	})
	if report.HandedOver || len(report.Lines) == 0 {
		t.Errorf("%+v", report)
	}
	if err := l.Undefine(t.Context(), d.Name); err != nil {
		t.Error(err)
	}
	works := s.Definition(t)
	l.Up(t, works)
	said, err := l.Firmware(t.Context(), works.Name)
	if report = (firmware.Report{}); err != nil || said == "" {
		t.Errorf("of a machine that boots: %q, %v", said, err)
	}
	if report.Read(said); report.Failed {
		t.Errorf("of a machine that boots: %+v", report)
	}
	if err := l.Undefine(t.Context(), works.Name); err != nil {
		t.Error(err)
	}
}

func itoa(n int) string { return strconv.Itoa(n) }
