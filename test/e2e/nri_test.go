package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/nri/pkg/api"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// The calls for a pod and a container that run until they are stopped.
var (
	podCalls       = []string{"RunPodSandbox", "StopPodSandbox", "RemovePodSandbox"}
	containerCalls = []string{"CreateContainer", "PostCreateContainer", "StartContainer", "PostStartContainer", "StopContainer",
		"RemoveContainer"}
)

// hookGate blocks the first call of a plugin that matches until it is opened.
type hookGate struct {
	call          string
	reached, open chan nriEvent
	once          sync.Once
}

func newHookGate(call string) *hookGate {
	return &hookGate{call: call, reached: make(chan nriEvent, 1), open: make(chan nriEvent)}
}

func (g *hookGate) on(ctx context.Context, e nriEvent) error {
	if e.call != g.call {
		return nil
	}
	g.once.Do(func() {
		g.reached <- e
		select {
		case <-g.open:
		case <-ctx.Done():
		}
	})
	return nil
}

// receive returns the next value of a channel.
func receive[T any](t *testing.T, from <-chan T) (v T) {
	t.Helper()
	select {
	case v = <-from:
	case <-time.After(waitLimit):
		t.Fatal("timeout")
	}
	return v
}

// failOnce returns a function for nriPlugin.on that fails the first call of this name.
func failOnce(call string) func(context.Context, nriEvent) error {
	var once sync.Once
	return func(_ context.Context, e nriEvent) (err error) {
		if e.call == call {
			once.Do(func() { err = errors.New("induced failure") })
		}
		return err
	}
}

// TestNRI covers the specs of the CRI's validation suite about NRI, with the suite's names, and what goes beyond them.
func TestNRI(t *testing.T) {
	ctx := context.Background()
	figures := fmt.Sprintf("127.0.0.1:%d", freePort(t))
	d := harness.StartDaemon(t, harness.Set("nri.request_timeout", "20s"), harness.Set("metrics.address", figures))
	d.Pull(t, harness.Busybox)
	sleep := func(name string) *runtimeapi.ContainerConfig {
		return harness.ContainerConfig(name, harness.Busybox, harness.Sleep())
	}

	t.Run("should receive RunPodSandbox, StopPodSandbox, and RemovePodSandbox in strict order with correct metadata", func(t *testing.T) {
		plugin := connectPlugin(t, d, "00", "pods", &nriPlugin{})
		p := d.RunPod(t, harness.PodConfig(t, "ordered", func(c *runtimeapi.PodSandboxConfig) { c.Annotations = map[string]string{"a": "b"} }))
		ip := p.IP()
		p.Stop()
		p.Remove()
		plugin.waitCalls(t, p.ID, podCalls...)
		got, want := plugin.pod(p.ID), p.Config
		if got.Name != want.Metadata.Name || got.Namespace != want.Metadata.Namespace || got.Uid != want.Metadata.Uid ||
			got.Labels["test"] != want.Labels["test"] || got.Annotations["a"] != "b" || !slices.Equal(got.Ips, []string{ip}) {
			t.Errorf("pod: got %v, want the metadata of %v and the address %s", got, want, ip)
		}
	})
	t.Run("should receive CreateContainer, StartContainer, StopContainer, and RemoveContainer in strict order with correct metadata",
		func(t *testing.T) {
			plugin := connectPlugin(t, d, "00", "containers", &nriPlugin{})
			c := startPod(t, d).Run(sleep("ordered"))
			if m := plugin.container(c.ID); m.Name != "ordered" || m.PodSandboxId != c.Pod.ID || m.Args[0] != "sh" || m.Linux.CgroupsPath == "" ||
				len(m.Linux.Namespaces) == 0 || m.State != api.ContainerState_CONTAINER_RUNNING || m.Pid == 0 {
				t.Errorf("container: got %v, want that of %v", m, c.Config)
			}
			c.Stop(0)
			plugin.waitCalls(t, c.ID, containerCalls[:5]...)
			c.Remove()
			plugin.waitCalls(t, c.ID, containerCalls...)
		})
	t.Run("should receive CreateContainer, StartContainer, StopContainer, and RemoveContainer for a container that exits with a non-zero code",
		func(t *testing.T) {
			plugin := connectPlugin(t, d, "00", "failed", &nriPlugin{})
			c := startPod(t, d).Run(harness.ContainerConfig("failed", harness.Busybox, harness.Shell("exit 1")))
			c.WaitExit(1)
			plugin.waitCalls(t, c.ID, containerCalls[:5]...)
			if m := plugin.container(c.ID); m.ExitCode != 1 || m.State != api.ContainerState_CONTAINER_STOPPED {
				t.Errorf("container: got %v, want one that stopped with exit code 1", m)
			}
			c.Remove()
			plugin.waitCalls(t, c.ID, containerCalls...)
		})
	for name, check := range map[string]func(t *testing.T, id string, config *runtimeapi.PodSandboxConfig){
		"should not expose sandbox while RunPodSandbox hook is in progress": func(t *testing.T, id string, _ *runtimeapi.PodSandboxConfig) {
			if slices.Contains(listedPods(t, d, nil), id) {
				t.Error("the sandbox is listed while the hook runs")
			}
			_, err := d.CRI().PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id})
			wantCode(t, err, codes.NotFound)
		},
		"should not start workload containers until RunPodSandbox hook completes": func(t *testing.T, id string,
			config *runtimeapi.PodSandboxConfig) {
			if _, err := create(d, &harness.Pod{ID: id, Config: config}, sleep("early")); err == nil {
				t.Error("CreateContainer succeeded while the hook of the sandbox runs")
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			g := newHookGate("RunPodSandbox")
			connectPlugin(t, d, "00", "gate", &nriPlugin{on: g.on})
			config := harness.PodConfig(t, "hidden")
			made := make(chan *harness.Pod, 1)
			go func() { made <- d.RunPod(t, config) }()
			e := receive(t, g.reached)
			check(t, e.pod, config)
			close(g.open)
			p := receive(t, made)
			if p.ID != e.pod {
				t.Errorf("RunPodSandbox: got %s, want %s", p.ID, e.pod)
			}
			p.Run(sleep("late"))
			p.Remove()
		})
	}
	t.Run("should fail RunPodSandbox and clean up when the NRI hook errors, then allow retry", func(t *testing.T) {
		early := connectPlugin(t, d, "00", "early", &nriPlugin{})
		plugin := connectPlugin(t, d, "10", "refuses", &nriPlugin{on: failOnce("RunPodSandbox")})
		before := harness.Snapshot(d)
		config := harness.PodConfig(t, "refused")
		_, err := d.Runtime().RunPodSandbox(ctx, config, "")
		wantCode(t, err, codes.FailedPrecondition)
		if err == nil || !strings.Contains(err.Error(), "induced failure") {
			t.Errorf("RunPodSandbox: got error %v, want the plugin's", err)
		}
		if got := listedPods(t, d, nil); len(got) != 0 {
			t.Errorf("pods: got %v, want none", got)
		}
		// The pod's network is released in the background.
		harness.Eventually(t, waitLimit, func() error { return before.Leaks(harness.Snapshot(d)) })
		refused := plugin.events[0].pod
		early.waitCalls(t, refused, podCalls...)
		p := d.RunPod(t, config)
		if s := p.Status(); s.State != ready || p.ID == refused {
			t.Errorf("retry: got %s of pod %s, want a ready pod other than %s", s.State, p.ID, refused)
		}
		p.Remove()
	})
	t.Run("should stop all workload containers and keep sandbox accessible while StopPodSandbox hook is in progress", func(t *testing.T) {
		g := newHookGate("StopPodSandbox")
		plugin := connectPlugin(t, d, "00", "gate", &nriPlugin{on: g.on})
		c := startPod(t, d).Run(sleep("c"))
		stopped := make(chan error, 1)
		go func() { stopped <- d.Runtime().StopPodSandbox(ctx, c.Pod.ID) }()
		receive(t, g.reached)
		if s := c.Status(); s.State != exited {
			t.Errorf("container while the hook runs: got %s, want exited", s.State)
		}
		if s := c.Pod.Status(); s.Id != c.Pod.ID || s.GetNetwork().GetIp() == "" {
			t.Errorf("sandbox while the hook runs: got %v, want it with its address", s)
		}
		plugin.waitCalls(t, c.ID, containerCalls[:5]...)
		close(g.open)
		if err := receive(t, stopped); err != nil {
			t.Error(err)
		}
	})
	t.Run("should handle StopPodSandbox idempotently and never reuse sandbox", func(t *testing.T) {
		plugin := connectPlugin(t, d, "00", "stops", &nriPlugin{})
		p := startPod(t, d)
		p.Stop()
		p.Stop()
		_, err := create(d, p, sleep("c"))
		wantCode(t, err, codes.FailedPrecondition)
		plugin.waitCalls(t, p.ID, podCalls[:2]...)
		if len(plugin.events) != 2 {
			t.Errorf("events: got %v, want those of the pod only", plugin.events)
		}
	})
	t.Run("should not expose container while CreateContainer hook is in progress", func(t *testing.T) {
		g := newHookGate("CreateContainer")
		connectPlugin(t, d, "00", "gate", &nriPlugin{on: g.on})
		p := startPod(t, d)
		made := make(chan string, 1)
		go func() {
			id, err := create(d, p, sleep("c"))
			if err != nil {
				t.Error(err)
			}
			made <- id
		}()
		e := receive(t, g.reached)
		list, err := d.Runtime().ListContainers(ctx, &runtimeapi.ContainerFilter{PodSandboxId: p.ID})
		if err != nil || len(list) != 0 {
			t.Errorf("containers while the hook runs: got %v, error %v; want none", list, err)
		}
		_, err = d.CRI().ContainerStatus(ctx, &runtimeapi.ContainerStatusRequest{ContainerId: e.container})
		wantCode(t, err, codes.NotFound)
		close(g.open)
		if id := receive(t, made); id != e.container {
			t.Errorf("CreateContainer: got %s, want %s", id, e.container)
		}
	})
	t.Run("should fail CreateContainer when the NRI hook errors, leak nothing, and allow retry", func(t *testing.T) {
		p := startPod(t, d)
		before := harness.Snapshot(d)
		plugin := connectPlugin(t, d, "00", "refuses", &nriPlugin{on: failOnce("CreateContainer")})
		_, err := create(d, p, sleep("c"))
		wantCode(t, err, codes.FailedPrecondition)
		list, err := d.Runtime().ListContainers(ctx, &runtimeapi.ContainerFilter{PodSandboxId: p.ID})
		if err != nil || len(list) != 0 {
			t.Errorf("containers: got %v, error %v; want none", list, err)
		}
		plugin.waitCalls(t, plugin.events[0].container, "CreateContainer", "StopContainer", "RemoveContainer")
		after := harness.Snapshot(d)
		before.Files, after.Files = nil, nil // the plugin's connection
		if err := before.Leaks(after); err != nil {
			t.Error(err)
		}
		c := p.Run(sleep("c"))
		c.Stop(0)
		c.Remove()
	})
	t.Run("should synchronize a newly connected plugin with existing pods and containers", func(t *testing.T) {
		p := startPod(t, d)
		c, ended := p.Run(sleep("c")), p.Run(harness.ContainerConfig("e", harness.Busybox, harness.Shell("exit 3")))
		ended.WaitExit(3)
		plugin := connectPlugin(t, d, "10", "late", &nriPlugin{})
		if want := []string{p.ID, c.ID, ended.ID}; !slices.Equal(plugin.synced, want) {
			t.Errorf("synchronised: got %v, want %v", plugin.synced, want)
		}
		if m := plugin.container(ended.ID); m.ExitCode != 3 || m.State != api.ContainerState_CONTAINER_STOPPED {
			t.Errorf("ended container: got %v", m)
		}
		later := p.Run(sleep("later"))
		plugin.waitCalls(t, later.ID, containerCalls[:4]...)
		ended.Remove()
		plugin.waitCalls(t, ended.ID, "RemoveContainer")
	})
	t.Run("should receive a callback for container created during the Synchronize call", func(t *testing.T) { testNRISynchronize(t, d, 1) })
	t.Run("should receive information about all containers without the race condition during initialization",
		func(t *testing.T) { testNRISynchronize(t, d, 4) })
	t.Run("adjustments have an effect, and survive a restart and an update", func(t *testing.T) { testNRIAdjustments(t, d) })
	t.Run("updates by plugins", func(t *testing.T) { testNRIUpdates(t, d) })
	t.Run("impossible adjustments are refused by name", func(t *testing.T) {
		plugin := &nriPlugin{}
		connectPlugin(t, d, "00", "asks", plugin)
		p := startPod(t, d)
		for want, a := range map[string]*api.ContainerAdjustment{
			"adjustment.linux.cgroups_path":            {Linux: &api.LinuxContainerAdjustment{CgroupsPath: "/elsewhere"}},
			"adjustment.rlimits":                       {Rlimits: []*api.POSIXRlimit{{Type: "NOFILE", Hard: 1, Soft: 1}}},
			"adjustment.hooks.create_runtime":          {Hooks: &api.Hooks{CreateRuntime: []*api.Hook{{Path: "relative"}}}},
			"linux.resources.cpu_period":               {Linux: &api.LinuxContainerAdjustment{Resources: &api.LinuxResources{Cpu: &api.LinuxCPU{Period: api.UInt64(1)}}}},
			"adjustment.linux.resources.blockio_class": {Linux: &api.LinuxContainerAdjustment{Resources: &api.LinuxResources{BlockioClass: api.String("fast")}}},
		} {
			plugin.onCreate = func(*api.PodSandbox, *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate) {
				return a, nil
			}
			_, err := create(d, p, sleep("c"))
			if code := status.Code(err); (code != codes.InvalidArgument && code != codes.Unimplemented) || !strings.Contains(err.Error(), want) {
				t.Errorf("CreateContainer: got error %v, want InvalidArgument or Unimplemented for %s", err, want)
			}
		}
	})
	t.Run("should receive UpdatePodSandbox and PostUpdatePodSandbox, and can refuse", func(t *testing.T) {
		plugin := connectPlugin(t, d, "00", "resizes", &nriPlugin{})
		p := startPod(t, d)
		resize := func(shares int64) error {
			_, err := d.CRI().UpdatePodSandboxResources(ctx, &runtimeapi.UpdatePodSandboxResourcesRequest{
				PodSandboxId: p.ID, Resources: &runtimeapi.LinuxContainerResources{CpuShares: shares},
			})
			return err
		}
		if err := resize(300); err != nil {
			t.Fatal(err)
		}
		plugin.waitCalls(t, p.ID, "RunPodSandbox", "UpdatePodSandbox", "PostUpdatePodSandbox")
		refusing := connectPlugin(t, d, "10", "refuses", &nriPlugin{on: failOnce("UpdatePodSandbox")})
		wantCode(t, resize(400), codes.FailedPrecondition)
		plugin.waitCalls(t, p.ID, "RunPodSandbox", "UpdatePodSandbox", "PostUpdatePodSandbox", "UpdatePodSandbox")
		if err := resize(500); err != nil {
			t.Errorf("the retry: %v", err)
		}
		refusing.waitCalls(t, p.ID, "UpdatePodSandbox", "UpdatePodSandbox", "PostUpdatePodSandbox")
	})
	t.Run("calls are counted and timed", func(t *testing.T) {
		resp, err := http.Get("http://" + figures + "/metrics")
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		for _, want := range []string{
			`tripod_nri_calls_total{event="UpdatePodSandbox",plugin="00-resizes",result="ok"} 3`,
			`tripod_nri_calls_total{event="UpdatePodSandbox",plugin="10-refuses",result="error"} 1`,
			`tripod_nri_call_duration_seconds_count{event="UpdatePodSandbox",plugin="10-refuses"} 2`,
		} {
			if err != nil || !strings.Contains(string(text), want) {
				t.Errorf("the metrics lack %s, error %v", want, err)
			}
		}
	})
	t.Run("the status lists the plugins", func(t *testing.T) {
		plugin := connectPlugin(t, d, "42", "answer", &nriPlugin{})
		if info := daemonInfo(t, d); !strings.Contains(info, `"nodePlugins":["42-answer"]`) {
			t.Errorf("verbose status: got %s, want the plugin", info)
		}
		plugin.stub.Stop()
		harness.Eventually(t, waitLimit, func() error {
			if info := daemonInfo(t, d); !strings.Contains(info, `"nodePlugins":[]`) {
				return fmt.Errorf("verbose status: got %s, want no plugin", info)
			}
			return nil
		})
	})
}

func testNRIAdjustments(t *testing.T, d *harness.Daemon) {
	file := filepath.Join(t.TempDir(), "mounted")
	hooked := filepath.Join(t.TempDir(), "hooked")
	if err := os.WriteFile(file, []byte("from the plugin"), 0o644); err != nil {
		t.Fatal(err)
	}
	plugin := connectPlugin(t, d, "00", "adjusts",
		&nriPlugin{onCreate: func(*api.PodSandbox, *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate) {
			a := &api.ContainerAdjustment{}
			a.AddAnnotation("by", "plugin")
			a.AddEnv("ADDED", "yes")
			a.AddEnv("CHANGED", "z")
			a.AddMount(&api.Mount{Source: file, Destination: "/mounted", Type: "bind", Options: []string{"bind", "ro"}})
			a.AddDevice(&api.LinuxDevice{Path: "/dev/zero2", Type: "c", Major: 1, Minor: 5, FileMode: api.FileMode(0o666)})
			a.AddRlimit("RLIMIT_NOFILE", 333, 222)
			a.AddHooks(&api.Hooks{CreateRuntime: []*api.Hook{{Path: "/bin/sh", Args: []string{"sh", "-c", "echo ran >" + hooked}}}})
			a.SetLinuxMemoryLimit(64 << 20)
			a.SetLinuxCPUShares(333)
			a.SetLinuxPidLimits(55)
			a.SetLinuxOomScoreAdj(new(500))
			a.SetLinuxSysctl("net.ipv4.ip_forward", "1")
			return a, nil
		}})
	p := startPod(t, d)
	config := harness.ContainerConfig("c", harness.Busybox, harness.Sleep(),
		resources(&runtimeapi.LinuxContainerResources{CpuShares: 100, CpuQuota: 50000, CpuPeriod: 100000}))
	config.Envs = []*runtimeapi.KeyValue{{Key: "CHANGED", Value: []byte("x")}, {Key: "KEPT", Value: []byte("y")}}
	c := p.Run(config)
	again, err := create(d, p, config)
	if err != nil || again != c.ID {
		t.Errorf("repeated CreateContainer: got %s, error %v; want %s", again, err, c.ID)
	}
	check := func(when string, memory int64) {
		t.Helper()
		script := `echo "$ADDED/$CHANGED/$KEPT"; cat /mounted; echo; head -c 3 /dev/zero2 | wc -c; ulimit -Hn; cat /proc/1/oom_score_adj /proc/sys/net/ipv4/ip_forward`
		got := strings.Fields(c.Must("sh", "-c", script))
		if want := []string{"yes/z/y", "from", "the", "plugin", "3", "333", "500", "1"}; !slices.Equal(got, want) {
			t.Errorf("%s: got %v in the container, want %v", when, got, want)
		}
		if r := c.Status().GetResources().GetLinux(); r.GetMemoryLimitInBytes() != memory || r.GetCpuShares() != 333 || r.GetCpuQuota() != 50000 {
			t.Errorf("%s: got resources %v, want the plugin's", when, r)
		}
		if got := cgroupFile(t, c, "pids", "pids.max"); got != "55" {
			t.Errorf("%s: got pids.max %s, want 55", when, got)
		}
	}
	check("created", 64<<20)
	if text := read(t, hooked); text != "ran\n" {
		t.Errorf("hook: got %q, want that it ran", text)
	}
	if m := plugin.container(c.ID); m.Annotations["by"] != "plugin" || m.Linux.Resources.Memory.Limit.GetValue() != 64<<20 {
		t.Errorf("the plugin sees %v, want what it adjusted", m)
	}
	if err := d.Runtime().UpdateContainerResources(context.Background(), c.ID,
		&runtimeapi.ContainerResources{Linux: &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 96 << 20}}); err != nil {
		t.Fatal(err)
	}
	check("updated", 96<<20)
	plugin.waitCalls(t, c.ID, append(slices.Clone(containerCalls[:4]), "UpdateContainer", "PostUpdateContainer")...)
	d.Kill()
	d.Start()
	check("restarted", 96<<20)
	later := connectPlugin(t, d, "00", "later", &nriPlugin{})
	if m := later.container(c.ID); m.GetAnnotations()["by"] != "plugin" || m.GetState() != api.ContainerState_CONTAINER_RUNNING {
		t.Errorf("a plugin after the restart sees %v, want the adjusted container", m)
	}
}

func testNRIUpdates(t *testing.T, d *harness.Daemon) {
	limit := func(id string, bytes int64) *api.ContainerUpdate {
		u := &api.ContainerUpdate{}
		u.SetContainerId(id)
		u.SetLinuxMemoryLimit(bytes)
		return u
	}
	memory := func(c *harness.Container, want int64) {
		t.Helper()
		if r := c.Status().GetResources().GetLinux(); r.GetMemoryLimitInBytes() != want {
			t.Errorf("memory limit: got %d, want %d", r.GetMemoryLimitInBytes(), want)
		}
	}
	plugin := connectPlugin(t, d, "00", "updates", &nriPlugin{})
	p := startPod(t, d)
	first := p.Run(harness.ContainerConfig("first", harness.Busybox, harness.Sleep()))

	failed, err := plugin.stub.UpdateContainers([]*api.ContainerUpdate{limit(first.ID, 80<<20), limit("unknown", 1<<20)})
	if err != nil || len(failed) != 1 || failed[0].ContainerId != "unknown" {
		t.Errorf("unsolicited updates: got failures %v, error %v; want that of the unknown container", failed, err)
	}
	memory(first, 80<<20)

	plugin.onCreate = func(*api.PodSandbox, *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate) {
		return nil, []*api.ContainerUpdate{limit(first.ID, 70<<20)}
	}
	p.Run(harness.ContainerConfig("second", harness.Busybox, harness.Sleep()))
	memory(first, 70<<20)

	plugin.onUpdate = func(c *api.Container, r *api.LinuxResources) []*api.ContainerUpdate {
		return []*api.ContainerUpdate{limit(c.Id, r.Memory.Limit.GetValue()+1<<20)}
	}
	err = d.Runtime().UpdateContainerResources(context.Background(), first.ID,
		&runtimeapi.ContainerResources{Linux: &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 60 << 20}})
	if err != nil {
		t.Error(err)
	}
	memory(first, 61<<20)
}
