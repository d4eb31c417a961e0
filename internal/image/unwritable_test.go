package image

import (
	"context"
	"syscall"
	"testing"

	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/failpoint"
)

// failingLeases is the lease manager of a store whose metadata cannot be written.
type failingLeases struct {
	leases.Manager
	err error
}

func (f failingLeases) Create(context.Context, ...leases.Opt) (leases.Lease, error) {
	return leases.Lease{}, f.err
}

// TestFaultN5StoreThatCannotBeWritten: operations that add an image return the reason, and the process continues.
func TestFaultN5StoreThatCannotBeWritten(t *testing.T) {
	reg, s := newRegistry(t), open(t, Config{})
	ref := raw(t, tarOf(t, file("a", "b"))).push(t, reg, "app")
	manifest, blobs := localArtifact(t, wasmOf("local"))
	works := s.leases
	s.leases = failingLeases{works, syscall.ENOSPC}
	_, err := s.Pull(t.Context(), ref, PullOptions{})
	wantError(t, err, errdefs.IsResourceExhausted)
	_, err = s.Import(t.Context(), "edge.local/m", manifest, blobs...)
	wantError(t, err, errdefs.IsResourceExhausted)
	s.leases = works
	pull(t, s, ref)
}

// TestFaultN12PanicInAPull: it becomes that pull's error, and the next pull of the image succeeds.
func TestFaultN12PanicInAPull(t *testing.T) {
	failpoint.Needed(t)
	reg, s := newRegistry(t), open(t, Config{})
	ref := raw(t, tarOf(t, file("a", "b"))).push(t, reg, "app")
	check(t, failpoint.Arm("image.pull.record", "1*panic"))
	_, err := s.Pull(t.Context(), ref, PullOptions{})
	wantError(t, err, errdefs.IsInternal)
	pull(t, s, ref)
}
