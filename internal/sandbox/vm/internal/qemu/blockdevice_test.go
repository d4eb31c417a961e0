package qemu

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/test/machinetest"
	"github.com/tripod-run/tripod/test/loopdev"
)

// TestBlockDevice: a block device of the node becomes a disk of the guest.
func TestBlockDevice(t *testing.T) {
	s := subject(t)
	l, d := s.Begin(t), s.Definition(t)
	defer l.Close()
	image := filepath.Join(d.StateDir, "volume")
	if err := os.WriteFile(image, append([]byte("of the node\n"), make([]byte, 1<<20-12)...), 0o600); err != nil {
		t.Fatal(err)
	}
	device := loopdev.Attach(t, image)
	d.Disks = append(d.Disks, machine.Disk{ID: "disk0", File: machine.File{Path: device}, Format: "raw", Bus: machine.BusVirtio})
	console := l.Boot(t, d)
	console.Type("dd if=/dev/vdb bs=12 count=1 2>/dev/null; echo of the guest >/dev/vdb; sync; echo block-$((40+2))")
	machinetest.AwaitLog(t, d, "block-42", 1)
	machinetest.AwaitLog(t, d, "of the node", 1)
	if err := l.Undefine(t.Context(), d.Name); err != nil {
		t.Error(err)
	}
	if raw, err := os.ReadFile(image); err != nil || !bytes.HasPrefix(raw, []byte("of the guest\n")) {
		t.Errorf("the device begins with %.20q (error %v), want %q", raw, err, "of the guest\n")
	}
	d.Disks[1].Path = "/dev/null" // not a block device
	l2 := s.Begin(t)
	defer l2.Close()
	if err := l2.Define(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	if err := l2.Start(t.Context(), d.Name); err == nil || !strings.Contains(err.Error(), "neither a file nor a block device") {
		t.Errorf("Start with /dev/null as a disk: got error %v, want \"neither a file nor a block device\"", err)
	}
	if err := l2.Undefine(t.Context(), d.Name); err != nil {
		t.Error(err)
	}
}
