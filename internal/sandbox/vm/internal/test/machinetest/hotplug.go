package machinetest

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// hotplug plugs disks into a running machine and takes them away, also by a driver that has just recovered the machine. They
// stay when the guest reboots. A driver that cannot do it says so.
func hotplug(t *testing.T, s Subject) {
	l, d := s.Begin(t), s.Definition(t)
	defer func() { l.Close() }()
	d.Hotplug = true
	// The guest loads drivers only when it boots, so it needs a SCSI disk then.
	first := filepath.Join(d.StateDir, "first")
	must(t, os.WriteFile(first, make([]byte, 1<<20), 0o600))
	d.Disks = append(d.Disks, machine.Disk{ID: "first", File: machine.File{Path: first}, Format: "raw", Bus: machine.BusSCSI})
	console := l.Boot(t, d)
	file := filepath.Join(d.StateDir, "late")
	must(t, os.WriteFile(file, append([]byte("a late disk\n"), make([]byte, 1<<20)...), 0o600))
	open := func(flags int) *os.File {
		f, err := os.OpenFile(file, flags, 0)
		must(t, err)
		t.Cleanup(func() { f.Close() })
		return f
	}
	disk := machine.PlugDisk{LUN: 3, Serial: "late-1", File: open(os.O_RDWR), LogicalBlock: 4096, PhysicalBlock: 4096}
	if err := l.Plug(t.Context(), d.Name, disk); errdefs.IsNotImplemented(err) && errdefs.IsNotImplemented(l.Unplug(t.Context(), d.Name, 3)) {
		must(t, l.Undefine(t.Context(), d.Name))
		return
	} else if err != nil {
		t.Fatal(err)
	}
	must(t, l.Plug(t.Context(), d.Name, disk))
	console.Type("until test -e /sys/bus/scsi/devices/*:3/block/*/size; do sleep 0.1; done; d=$(ls /sys/bus/scsi/devices/*:3/block); " +
		"echo sector-$(cat /sys/block/$d/queue/logical_block_size); tail -c 7 /sys/bus/scsi/devices/*:3/vpd_pg80; echo; dd if=/dev/$d bs=12 count=1; echo from the guest >/dev/$d; sync; echo wrote-$((40+2))")
	for _, want := range []string{"sector-4096", "late-1", "a late disk", "wrote-42"} {
		AwaitLog(t, d, want, 1)
	}
	must(t, l.Close())
	l = s.Begin(t, d.Name)
	for range 2 {
		must(t, l.Unplug(t.Context(), d.Name, 3))
	}
	console.Type("while test -e /sys/bus/scsi/devices/*:3; do sleep 0.1; done; echo gone-$((40+2))")
	AwaitLog(t, d, "gone-42", 1)
	must(t, l.Plug(t.Context(), d.Name, machine.PlugDisk{LUN: 3, Serial: "late-2", File: open(os.O_RDONLY), ReadOnly: true}))
	console.Type("until test -e /sys/bus/scsi/devices/*:3/block/*/size; do sleep 0.1; done; d=$(ls /sys/bus/scsi/devices/*:3/block); echo read-only-$(cat /sys/block/$d/ro); dd if=/dev/$d bs=15 count=1")
	AwaitLog(t, d, "read-only-1", 1)
	AwaitLog(t, d, "from the guest\r\n", 1)
	console.Type("reboot -f")
	AwaitLog(t, d, ready, 2)
	console.Type("tail -c 7 /sys/bus/scsi/devices/*:3/vpd_pg80; echo; echo rebooted-$((40+2))")
	AwaitLog(t, d, "rebooted-42", 1)
	AwaitLog(t, d, "late-2", 1)
	must(t, l.Undefine(t.Context(), d.Name))
	if err := l.Unplug(t.Context(), d.Name, 3); !errdefs.IsNotFound(err) {
		t.Errorf("Unplug of an undefined machine: got error %v, want ErrNotFound", err)
	}
}
