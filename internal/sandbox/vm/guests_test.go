package vm

import (
	"slices"
	"testing"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// TestGuestDisk: the machine's disk with the guest's root is one that no guest can write to, because all machines share it.
func TestGuestDisk(t *testing.T) {
	r := newRig(t, func(s *settings) { s.GuestDisk = "/guest/root.erofs" })
	_, c := r.run("guest", "kernel")
	disks := r.driver.guest(c.ID).definition.Disks
	want := machine.Disk{ID: "guest0", File: machine.File{Path: "/guest/root.erofs"}, Format: "raw", ReadOnly: true, Bus: machine.BusVirtio}
	if !slices.Contains(disks, want) {
		t.Errorf("disks: got %+v, want %+v among them", disks, want)
	}
}
