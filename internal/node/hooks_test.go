package node_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"
	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/node"
	"github.com/tripod-run/tripod/test/fake"
)

// hooks record their calls, adjust every container, and refuse the call with the given name.
type hooks struct {
	mu     sync.Mutex
	calls  []string
	refuse string
}

var errRefused = errors.New("refused by a plugin")

func (h *hooks) call(name string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.calls = append(h.calls, name)
	if name == h.refuse {
		h.refuse = ""
		return errRefused
	}
	return nil
}

// take returns the calls since the last take.
func (h *hooks) take() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	defer func() { h.calls = nil }()
	return strings.Join(h.calls, " ")
}

func (h *hooks) Active() bool                            { return true }
func (h *hooks) RunPod(context.Context, *node.Pod) error { return h.call("RunPod") }
func (h *hooks) UpdatedPod(context.Context, *node.Pod)   { _ = h.call("UpdatedPod") }
func (h *hooks) StopPod(context.Context, *node.Pod)      { _ = h.call("StopPod") }
func (h *hooks) RemovePod(context.Context, *node.Pod)    { _ = h.call("RemovePod") }
func (h *hooks) UpdatePod(_ context.Context, _ *node.Pod, _, _ *runtimeapi.LinuxContainerResources) error {
	return h.call("UpdatePod")
}

func (h *hooks) CreateContainer(_ context.Context, _ *node.Pod, c *node.Container, _ *specs.Spec) error {
	c.Config = proto.CloneOf(c.Config)
	c.Config.Envs = append(c.Config.Envs, &runtimeapi.KeyValue{Key: "BY", Value: []byte("plugin")})
	c.Adjustment = &nri.ContainerAdjustment{Annotations: map[string]string{"by": "plugin"}}
	return h.call("Create")
}

// adjustedBy returns what CreateContainer added to a configuration.
func adjustedBy(c *runtimeapi.ContainerConfig) string {
	i := slices.IndexFunc(c.GetEnvs(), func(v *runtimeapi.KeyValue) bool { return v.GetKey() == "BY" })
	if i < 0 {
		return ""
	}
	return string(c.GetEnvs()[i].GetValue())
}

func (h *hooks) CreatedContainer(context.Context, *node.Pod, *node.Container) { _ = h.call("Created") }
func (h *hooks) StartContainer(context.Context, *node.Pod, *node.Container) error {
	return h.call("Start")
}
func (h *hooks) StartedContainer(context.Context, *node.Pod, *node.Container) { _ = h.call("Started") }
func (h *hooks) UpdatedContainer(context.Context, *node.Pod, *node.Container) { _ = h.call("Updated") }
func (h *hooks) StopContainer(context.Context, *node.Pod, *node.Container)    { _ = h.call("Stop") }
func (h *hooks) RemoveContainer(context.Context, *node.Pod, *node.Container)  { _ = h.call("Remove") }

// UpdateContainer replaces the requested CPU shares.
func (h *hooks) UpdateContainer(_ context.Context, _ *node.Pod, _ *node.Container,
	change *runtimeapi.LinuxContainerResources) (*runtimeapi.LinuxContainerResources, error) {
	change = proto.CloneOf(change)
	if change != nil {
		change.CpuShares = 77
	}
	return change, h.call("Update")
}

func openHooked(t *testing.T) (*bench, *hooks) {
	t.Helper()
	h := &hooks{}
	b, err := openConfig(t.TempDir(), func(c *node.Config, _ map[string]*fake.Backend) { c.Hooks = h })
	must(t, err)
	t.Cleanup(b.close)
	return b, h
}

// TestHooksInOrder takes a pod of each kind through its life. The record keeps the request and what the hooks made of it.
func TestHooksInOrder(t *testing.T) {
	for _, handler := range []string{"linux", "wasm"} {
		t.Run(handler, func(t *testing.T) {
			b, h := openHooked(t)
			ctx := t.Context()
			want := func(calls string) {
				t.Helper()
				eventually(t, calls, func() bool { h.mu.Lock(); defer h.mu.Unlock(); return len(h.calls) >= len(strings.Fields(calls)) })
				if got := h.take(); got != calls {
					t.Errorf("hooks: got %q, want %q", got, calls)
				}
			}
			pod := b.run(t, handler, podConfig("p"))
			want("RunPod")
			id := b.create(t, pod, containerConfig("c"))
			want("Create Created")
			if same := b.create(t, pod, containerConfig("c")); same != id || h.take() != "" {
				t.Errorf("the same request: got container %s, want %s without a hook", same, id)
			}
			c, _, err := b.Container(id)
			must(t, err)
			if adjustedBy(c.Config) != "plugin" || adjustedBy(c.Request) != "" || c.Adjustment.GetAnnotations()["by"] != "plugin" {
				t.Errorf("container: got config %v, request %v and adjustment %v", c.Config, c.Request, c.Adjustment)
			}
			must(t, b.StartContainer(ctx, id))
			want("Start Started")
			must(t, b.UpdateContainer(ctx, id, &runtimeapi.LinuxContainerResources{CpuShares: 5}))
			want("Update Updated")
			if c, _, err := b.Container(id); err != nil || c.Config.GetLinux().GetResources().GetCpuShares() != 77 {
				t.Errorf("resources: got %v, error %v; want the hook's", c.Config.GetLinux().GetResources(), err)
			}
			must(t, b.UpdateSandbox(ctx, pod, &runtimeapi.LinuxContainerResources{CpuShares: 5}, nil))
			want("UpdatePod UpdatedPod")
			must(t, b.RemoveSandbox(ctx, pod))
			got := strings.Fields(h.take())
			if first := slices.Compact(slices.DeleteFunc(got, func(s string) bool { return s == "Stop" })); !slices.Equal(first,
				[]string{"StopPod", "Remove", "RemovePod"}) {
				t.Errorf("hooks of the removal: got %q, want StopPod, Remove and RemovePod, besides Stop", first)
			}
		})
	}
}

// TestCreateContainerRepeatsAfterUpdates: a repeated CreateContainer must have the resources that clients asked for last,
// whatever plugins made of them or changed by themselves.
func TestCreateContainerRepeatsAfterUpdates(t *testing.T) {
	adjusted, _ := openHooked(t)
	for name, b := range map[string]*bench{"with plugins": adjusted, "without plugins": open(t, t.TempDir())} {
		t.Run(name, func(t *testing.T) {
			pod := b.run(t, "linux", podConfig("p"))
			id := b.create(t, pod, containerConfig("c"))
			must(t, b.UpdateForPlugin(t.Context(), id, &runtimeapi.LinuxContainerResources{CpuShares: 9}))
			if again := b.create(t, pod, containerConfig("c")); again != id {
				t.Errorf("after a plugin's change: got container %s, want %s", again, id)
			}
			asked := &runtimeapi.LinuxContainerResources{CpuShares: 5}
			must(t, b.UpdateContainer(t.Context(), id, asked))
			if _, err := b.CreateContainer(t.Context(), pod, containerConfig("c")); !errdefs.IsAlreadyExists(err) {
				t.Errorf("the first request, after a client's change: got error %v, want already exists", err)
			}
			config := containerConfig("c")
			config.Linux = &runtimeapi.LinuxContainerConfig{Resources: asked}
			if again := b.create(t, pod, config); again != id {
				t.Errorf("a request with the change: got container %s, want %s", again, id)
			}
		})
	}
}

// TestRefusedByHook: an order that a hook refuses fails with the hook's error, is undone and can be repeated.
func TestRefusedByHook(t *testing.T) {
	b, h := openHooked(t)
	ctx := t.Context()
	refuse := func(name string, order func() error) {
		t.Helper()
		h.refuse = name
		if err := order(); !errors.Is(err, errRefused) {
			t.Errorf("%s: got error %v, want the hook's", name, err)
		}
	}
	refuse("RunPod", func() error { _, err := b.RunSandbox(ctx, podConfig("p"), "linux"); return err })
	if got := h.take(); got != "RunPod RemovePod" {
		t.Errorf("hooks of a refused pod: got %q, want RunPod RemovePod", got)
	}
	if left := b.residue(t); len(left) > 0 || len(b.Pods()) > 0 {
		t.Errorf("after a refused pod: got residue %v and pods %v, want none", left, b.Pods())
	}
	pod := b.run(t, "linux", podConfig("p"))
	refuse("Create", func() error { _, err := b.CreateContainer(ctx, pod, containerConfig("c")); return err })
	if p, err := b.Pod(pod); err != nil || len(p.Visible()) > 0 {
		t.Errorf("after a refused container: got %v, error %v; want none", p.Visible(), err)
	}
	id := b.create(t, pod, containerConfig("c"))
	refuse("Start", func() error { return b.StartContainer(ctx, id) })
	must(t, b.StartContainer(ctx,
		b.create(t, pod, func() *runtimeapi.ContainerConfig { c := containerConfig("c"); c.Metadata.Attempt = 1; return c }())))
	id = b.create(t, pod, containerConfig("d"))
	must(t, b.StartContainer(ctx, id))
	refuse("Update", func() error { return b.UpdateContainer(ctx, id, &runtimeapi.LinuxContainerResources{CpuShares: 5}) })
	refuse("UpdatePod", func() error { return b.UpdateSandbox(ctx, pod, &runtimeapi.LinuxContainerResources{CpuShares: 5}, nil) })
	p, err := b.Pod(pod)
	must(t, err)
	if c, _, err := b.Container(id); err != nil || c.Config.GetLinux().GetResources().GetCpuShares() != 0 ||
		p.Config.GetLinux().GetResources().GetCpuShares() != 0 {
		t.Errorf("after refused updates: got container %v and pod %v, error %v; want no shares", c.Config.GetLinux(), p.Config.GetLinux(), err)
	}
	must(t, b.UpdateContainer(ctx, id, &runtimeapi.LinuxContainerResources{CpuShares: 5}),
		b.UpdateSandbox(ctx, pod, &runtimeapi.LinuxContainerResources{CpuShares: 5}, nil))
}
