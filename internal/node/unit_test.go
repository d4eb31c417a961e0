package node_test

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/node"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/test/fake"
)

// attempt returns a container's configuration as a kubelet sends it for its nth restart.
func attempt(n uint32, annotations ...string) *runtimeapi.ContainerConfig {
	config := containerConfig("c", annotations...)
	config.Metadata.Attempt = n
	return config
}

// TestKubeletRestartsAUnitPod: a later attempt replaces the container that has ended; the same attempt does not.
func TestKubeletRestartsAUnitPod(t *testing.T) {
	b := open(t, t.TempDir())
	ctx := t.Context()
	pod := b.run(t, "wasm", podConfig("p"))
	first := b.create(t, pod, attempt(0))
	must(t, b.StartContainer(ctx, pod))
	if id := b.create(t, pod, attempt(1)); id != first || b.state(t, pod) != node.Running {
		t.Errorf("CreateContainer for a running attempt = %s in state %s, want %s and Running", id, b.state(t, pod), first)
	}
	b.backend["wasm"].Exit(pod, 1)
	eventually(t, "Stopped", func() bool { return b.state(t, pod) == node.Stopped })
	if _, err := b.CreateContainer(ctx, pod, attempt(0)); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("CreateContainer of the stopped attempt: got error %v, want failed precondition", err)
	}
	other := attempt(1)
	other.Metadata.Name = "other"
	if _, err := b.CreateContainer(ctx, pod, other); !errdefs.IsNotImplemented(err) || !strings.Contains(err.Error(), "has one container") {
		t.Errorf("CreateContainer of a second container: got error %v, want one that errdefs.IsNotImplemented accepts", err)
	}
	sub := b.Subscribe()
	second := b.create(t, pod, attempt(1))
	if second == first || b.state(t, pod) != node.Created || b.state(t, first) != node.Stopped {
		t.Errorf("got the next attempt %s in state %s, the first %s; want a new one Created, the first Stopped", second, b.state(t, pod),
			b.state(t, first))
	}
	must(t, b.StartContainer(ctx, pod), b.RemoveContainer(ctx, first))
	for _, want := range []node.Event{
		{ContainerID: second, Type: runtimeapi.ContainerEventType_CONTAINER_CREATED_EVENT},
		{ContainerID: second, Type: runtimeapi.ContainerEventType_CONTAINER_STARTED_EVENT},
		{ContainerID: first, Type: runtimeapi.ContainerEventType_CONTAINER_DELETED_EVENT},
	} {
		if e := <-sub.Events(); e.Type != want.Type || e.ContainerID != want.ContainerID {
			t.Errorf("got event %s of %s, want %s of %s", e.Type, e.ContainerID, want.Type, want.ContainerID)
		}
	}
	c, _, err := b.Container(pod)
	must(t, err)
	if c.ID != second || c.State != node.Running || c.Config.Metadata.Attempt != 1 || c.ExitCode != 0 {
		t.Errorf("container after the restart: got %+v, want the running attempt %s", c, second)
	}
}

// TestPreviousAttemptsAreBounded: the oldest are dropped first, and the others are recovered with the record.
func TestPreviousAttemptsAreBounded(t *testing.T) {
	b := open(t, t.TempDir())
	pod := b.run(t, "wasm", podConfig("p"))
	var ids []string
	for n := range uint32(20) {
		ids = append(ids, b.create(t, pod, attempt(n)))
		must(t, b.StartContainer(t.Context(), pod), b.StopContainer(t.Context(), pod, 0))
	}
	for range 2 {
		p, err := b.Pod(pod)
		must(t, err)
		var kept []string
		for _, c := range p.Visible() {
			kept = append(kept, c.ID)
		}
		if !slices.Equal(kept, ids[3:]) {
			t.Errorf("got %d attempts %q, want the newest and the 16 before it: %q", len(kept), kept, ids[3:])
		}
		b = b.reopen(t)
	}
	if id := b.create(t, pod, attempt(20)); slices.Contains(ids, id) {
		t.Errorf("CreateContainer = %s, the ID of an earlier attempt", id)
	}
	must(t, b.RemoveSandbox(t.Context(), pod))
	if left := b.residue(t); len(left) > 0 {
		t.Errorf("residue: got %v, want none", left)
	}
}

// TestFailedNextAttemptIsRemoved: if the last attempt is retained and the next one fails, the pod is in the state
// Removed.
func TestFailedNextAttemptIsRemoved(t *testing.T) {
	b := open(t, t.TempDir())
	ctx := t.Context()
	pod := b.run(t, "wasm", podConfig("p"))
	first := b.create(t, pod, attempt(0))
	must(t, b.StartContainer(ctx, pod), b.StopContainer(ctx, pod, 0))
	if _, err := b.CreateContainer(ctx, pod, attempt(1, "create-container", "error(no room)")); err == nil {
		t.Fatal("CreateContainer succeeded, want an error")
	}
	if p, err := b.Pod(pod); err != nil || p.UnitState() != node.Removed || b.state(t, first) != node.Stopped {
		t.Errorf("got pod %s and first attempt %s, %v; want Removed and Stopped", p.UnitState(), b.state(t, first), err)
	}
	if err := b.StartContainer(ctx, pod); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("StartContainer without an attempt: got error %v, want failed precondition", err)
	}
	must(t, b.StartContainer(ctx, b.create(t, pod, attempt(1))))
	if b.state(t, pod) != node.Running {
		t.Errorf("state of the next attempt: got %s, want Running", b.state(t, pod))
	}
}

// TestRefusedNextAttemptLeavesTheLast: an ended attempt and its exit remain until the next attempt is accepted.
func TestRefusedNextAttemptLeavesTheLast(t *testing.T) {
	b := open(t, t.TempDir())
	pod := b.run(t, "wasm", podConfig("p"))
	b.create(t, pod, attempt(0))
	must(t, b.StartContainer(t.Context(), pod), b.StopContainer(t.Context(), pod, 0))
	if _, err := b.CreateContainer(t.Context(), pod, attempt(1, "validate", "not like this")); !errdefs.IsInvalidArgument(err) {
		t.Errorf("CreateContainer of an invalid attempt: got error %v, want invalid argument", err)
	}
	if c, _, err := b.Container(pod); err != nil || c.State != node.Stopped || c.ExitCode == 0 {
		t.Errorf("container that ended: got %+v, %v; want Stopped with its exit code", c, err)
	}
}

// TestRemovalInAKilledUnitPodUnlists: the removal succeeds, again and again, and from then on lists omit the container, even
// after a restart.
func TestRemovalInAKilledUnitPodUnlists(t *testing.T) {
	b := open(t, t.TempDir())
	pod := b.run(t, "wasm", podConfig("p"))
	b.create(t, pod, attempt(0))
	must(t, b.StartContainer(t.Context(), pod))
	if err := b.RemoveContainer(t.Context(), pod); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("RemoveContainer of a running container: got error %v, want failed precondition", err)
	}
	must(t, b.StopSandbox(t.Context(), pod))
	unlisted := func() bool {
		c, _, err := b.Container(pod)
		must(t, err)
		return c.Unlisted
	}
	if unlisted() {
		t.Error("the container is unlisted before its removal was requested")
	}
	for range 2 {
		must(t, b.RemoveContainer(t.Context(), pod))
		if !unlisted() {
			t.Error("the container is still listed")
		}
		b = b.reopen(t)
	}
	must(t, b.RemoveSandbox(t.Context(), pod))
	if left := b.residue(t); len(left) > 0 {
		t.Errorf("residue: got %v, want none", left)
	}
}

// naming is a backend that derives component names from images.
type naming struct{ *fake.Backend }

func (n naming) CreateContainer(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) (sandbox.Resolved, error) {
	r, err := n.Backend.CreateContainer(ctx, p, c)
	r.Component = "example.com:" + c.Config.GetImage().GetImage() + "@1.0.0"
	return r, err
}

// TestComponentsNamedByTheBackend: pods without component labels are indexed under the name from their backend until
// the container is removed.
func TestComponentsNamedByTheBackend(t *testing.T) {
	b := openUnit(t, t.TempDir())
	ctx := t.Context()
	pod := b.run(t, "wasm", podConfig("p"))
	if name, ok := b.Components().Component(pod); ok {
		t.Errorf("Component of a pod without a container = %s, want none", name)
	}
	holds := func(component string, running bool) {
		t.Helper()
		if name, _ := b.Components().Component(pod); name != component {
			t.Errorf("Component of the pod = %q, want %q", name, component)
		}
		if got := b.Components().Running(component); slices.Contains(got, pod) != running || len(got) > 1 {
			t.Errorf("Running(%s) = %v, want the pod: %v", component, got, running)
		}
	}
	b.create(t, pod, attempt(0))
	holds("example.com:busybox@1.0.0", false)
	must(t, b.StartContainer(ctx, pod))
	holds("example.com:busybox@1.0.0", true)
	b.close()
	b = openUnit(t, b.dir)
	holds("example.com:busybox@1.0.0", true)
	must(t, b.StopContainer(ctx, pod, 0))
	holds("example.com:busybox@1.0.0", false)
	next := attempt(1)
	next.Image.Image = "other"
	b.create(t, pod, next)
	must(t, b.StartContainer(ctx, pod))
	holds("example.com:other@1.0.0", true)
	if got := b.Components().Running("example.com:busybox@1.0.0"); len(got) > 0 {
		t.Errorf("Running of the first component = %v, want none", got)
	}
	must(t, b.RemoveSandbox(ctx, pod))
	holds("", false)
}

// openUnit starts a node whose backend "wasm" names components itself.
func openUnit(t *testing.T, dir string) *bench {
	t.Helper()
	return openWith(t, dir, "wasm", sandbox.Capabilities{MaxContainers: 1, Components: true},
		func(f *fake.Backend) sandbox.Backend { return naming{f} })
}
