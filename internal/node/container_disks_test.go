package node_test

import (
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox"
)

// TestDisks: only running containers whose backend attaches disks get and lose them.
func TestDisks(t *testing.T) {
	b := open(t, t.TempDir())
	disk := sandbox.Disk{Name: "d", Path: "/dev/d", ReadOnly: true}
	id := b.create(t, b.run(t, "vm", podConfig("machine")), containerConfig("c"))
	if err := b.AttachDisk(t.Context(), id, disk); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("AttachDisk of a created container: got error %v, want ErrFailedPrecondition", err)
	}
	must(t, b.StartContainer(t.Context(), id))
	if err := b.AttachDisk(t.Context(), id, disk); err == nil ||
		!strings.Contains(err.Error(), "asked for {Name:d Path:/dev/d ReadOnly:true} of ") {
		t.Errorf("AttachDisk: got error %v, want the backend's", err)
	}
	if err := b.DetachDisk(t.Context(), id, "d"); err == nil || !strings.Contains(err.Error(), "asked to detach d of ") {
		t.Errorf("DetachDisk: got error %v, want the backend's", err)
	}
	must(t, b.StopContainer(t.Context(), id, 0))
	if err := b.DetachDisk(t.Context(), id, "d"); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("DetachDisk of an ended container: got error %v, want ErrFailedPrecondition", err)
	}
	other := b.create(t, b.run(t, "linux", podConfig("other")), containerConfig("c"))
	if err := b.AttachDisk(t.Context(), other, disk); !errdefs.IsNotImplemented(err) {
		t.Errorf("AttachDisk of another kind: got error %v, want ErrNotImplemented", err)
	}
	if err := b.AttachDisk(t.Context(), "nobody", disk); !errdefs.IsNotFound(err) {
		t.Errorf("AttachDisk of an unknown container: got error %v, want ErrNotFound", err)
	}
}
