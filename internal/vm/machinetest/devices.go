package machinetest

import (
	"bytes"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/tripod-run/tripod/internal/vm/machine"
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
	console := l.Up(t, d)
	console.Type("dd if=/dev/vda bs=26 count=1 2>/dev/null; dd if=/dev/vda of=/dev/null bs=64k 2>/dev/null; cat /sys/block/vdb/ro; " +
		"echo denied >/dev/vdb; printf 'QFI\\373' >/dev/vdc; echo changed >/dev/vda; sync; " +
		"dd if=/dev/sda bs=22 count=1 2>/dev/null; dd if=/dev/sdb bs=18 count=1 2>/dev/null; cat /sys/class/virtio-ports/*/name; cat /sys/block/vd?/serial; echo devices-$((40+2))")
	AwaitLog(t, d, "devices-42", 1)
	raw, err := os.ReadFile(d.SerialLog)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"the base of the root disk", "a SCSI disk begins so", "another SCSI disk", machine.AgentPort, "org.qemu.guest_agent.0", "\nroot", "locked"} {
		if !strings.Contains(strings.ReplaceAll(string(raw), "\r", ""), want) {
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
	for path, want := range map[string]string{d.Disks[0].Base.Path: "the base", d.Disks[1].Path: "cannot be written", d.Disks[2].Path: "QFI\xfb"} {
		if raw, err := os.ReadFile(path); err != nil || !bytes.HasPrefix(raw, []byte(want)) {
			t.Errorf("%s begins with %.20q, %v", path, raw, err)
		}
	}
}

func itoa(n int) string { return strconv.Itoa(n) }

// zombie tells whether a process is dead and not reaped.
func zombie(pid int) bool {
	raw, err := os.ReadFile(filepath.Join("/proc", itoa(pid), "stat"))
	return err != nil || bytes.Contains(raw, []byte(") Z "))
}
