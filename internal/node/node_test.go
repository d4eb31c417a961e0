package node_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/node"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/test/fake"
)

func TestLifeOfAPodWithManyContainers(t *testing.T) {
	b := open(t, t.TempDir())
	sub := b.Subscribe()
	pod := b.run(t, "", podConfig("p"))
	if again := b.run(t, "linux", podConfig("p")); again != pod {
		t.Errorf("RunSandbox again = %s, want %s", again, pod)
	}
	one := b.create(t, pod, containerConfig("one"))
	two := b.create(t, pod, containerConfig("two"))
	must(t, b.StartContainer(t.Context(), one), b.StartContainer(t.Context(), two))
	b.backend["linux"].Exit(two, 3)
	eventually(t, "the exit is recorded", func() bool { return b.state(t, two) == node.Stopped })
	c, _, err := b.Container(two)
	must(t, err)
	if c.ExitCode != 3 || c.Reason != sandbox.ReasonError || c.FinishedAt.Before(c.StartedAt) {
		t.Errorf("recorded exit: got %+v, want code 3 and reason Error", c)
	}
	must(t, b.StopContainer(t.Context(), one, time.Second), b.RemoveContainer(t.Context(), one))
	must(t, b.StopSandbox(t.Context(), pod))
	if p, err := b.Pod(pod); err != nil || p.Ready() {
		t.Errorf("pod after StopSandbox: got %v, %v; want one that is not ready", p, err)
	}
	must(t, b.RemoveSandbox(t.Context(), pod), b.RemoveSandbox(t.Context(), pod))
	if left := b.residue(t); len(left) > 0 {
		t.Errorf("residue: got %v, want none", left)
	}
	var got []string
	for len(got) < 12 {
		e := <-sub.Events()
		who := map[string]string{pod: "pod", one: "one", two: "two"}[e.ContainerID]
		got = append(got, who+" "+e.Type.String()[len("CONTAINER_"):])
	}
	want := []string{"pod CREATED_EVENT", "pod STARTED_EVENT", "one CREATED_EVENT", "two CREATED_EVENT", "one STARTED_EVENT",
		"two STARTED_EVENT",
		"two STOPPED_EVENT", "one STOPPED_EVENT", "one DELETED_EVENT", "pod STOPPED_EVENT", "two DELETED_EVENT", "pod DELETED_EVENT"}
	if !slices.Equal(got, want) {
		t.Errorf("events: got  %v\nwant %v", got, want)
	}
}

func TestLifeOfAUnitPod(t *testing.T) {
	b := open(t, t.TempDir())
	config := podConfig("p")
	config.Labels = map[string]string{"vimana.host/domain": "example.com", "vimana.host/server": "foo.Bar", "vimana.host/version": "1.2.3"}
	pod := b.run(t, "wasm", config)
	if pod != "example.com:foo.Bar@1.2.3#0" {
		t.Errorf("first pod of the component: got %q, want number 0", pod)
	}
	other := containerConfig("c")
	other.Labels = map[string]string{"vimana.host/domain": "example.org"}
	if _, err := b.CreateContainer(t.Context(), pod, other); !errdefs.IsInvalidArgument(err) {
		t.Errorf("CreateContainer with other component labels: got error %v, want invalid argument", err)
	}
	id := b.create(t, pod, containerConfig("c"))
	if id != "example.com:foo.Bar@1.2.3#0.1" {
		t.Errorf("first attempt: got %q, want example.com:foo.Bar@1.2.3#0.1", id)
	}
	must(t, b.StartContainer(t.Context(), id))
	if got := b.Components().Running("example.com:foo.Bar@1.2.3"); !slices.Equal(got, []string{pod}) {
		t.Errorf("Running of the component = %v, want %s", got, pod)
	}
	if name, ok := b.Components().Component(pod); !ok || name != "example.com:foo.Bar@1.2.3" {
		t.Errorf("Component(%s) = %q, %v; want example.com:foo.Bar@1.2.3", pod, name, ok)
	}
	ip := func() string { p, err := b.Pod(pod); must(t, err); return p.IPs[0].String() }
	before := ip()
	must(t, b.StopContainer(t.Context(), id, 0))
	if got := b.Components().Running("example.com:foo.Bar@1.2.3"); len(got) != 0 {
		t.Errorf("Running after the stop = %v, want none", got)
	}
	must(t, b.StartContainer(t.Context(), id))
	if ip() != before {
		t.Error("a restart of the container changed the pod's IP")
	}
	must(t, b.StopContainer(t.Context(), id, 0), b.RemoveContainer(t.Context(), id))
	if p, err := b.Pod(pod); err != nil || p.UnitState() != node.Removed || len(p.Visible()) != 0 {
		t.Errorf("pod after RemoveContainer: got %+v, %v; want the state Removed without containers", p, err)
	}
	must(t, b.RemoveSandbox(t.Context(), pod))
	if b = b.reopen(t); b.run(t, "wasm", config) != "example.com:foo.Bar@1.2.3#1" {
		t.Error("the second pod of the component does not have number 1")
	}
}

// TestEveryCellOfTheUnitTable puts a unit pod into each state and makes each call.
func TestEveryCellOfTheUnitTable(t *testing.T) {
	ctx := t.Context()
	for _, state := range node.States {
		for _, call := range node.Calls[1:] {
			t.Run(string(state)+"/"+string(call), func(t *testing.T) {
				b := open(t, t.TempDir())
				pod, config := b.unitPodIn(t, state)
				err := map[node.Call]func() error{
					node.CreateContainer:  func() error { _, err := b.CreateContainer(ctx, pod, config); return err },
					node.StartContainer:   func() error { return b.StartContainer(ctx, pod) },
					node.StopContainer:    func() error { return b.StopContainer(ctx, pod, 0) },
					node.RemoveContainer:  func() error { return b.RemoveContainer(ctx, pod) },
					node.StopPodSandbox:   func() error { return b.StopSandbox(ctx, pod) },
					node.RemovePodSandbox: func() error { return b.RemoveSandbox(ctx, pod) },
				}[call]()
				p, _ := b.Pod(pod)
				switch node.Decide(true, state, call) {
				case node.Refused:
					if !errdefs.IsFailedPrecondition(err) {
						t.Errorf("refused call: got error %v, want failed precondition", err)
					}
					if p.UnitState() != state {
						t.Errorf("refused call: got state %s, want %s", p.UnitState(), state)
					}
				case node.Idempotent:
					if err != nil || p.UnitState() != state && state != node.Starting {
						t.Errorf("repeated call: got error %v and state %s, want state %s", err, p.UnitState(), state)
					}
				default:
					if err != nil {
						t.Errorf("valid call: %v", err)
					}
				}
			})
		}
	}
}

// unitPodIn makes a unit pod in a state. The state Starting lasts long enough for a call.
func (b *bench) unitPodIn(t *testing.T, s node.State) (string, *runtimeapi.ContainerConfig) {
	t.Helper()
	ctx := t.Context()
	pod := b.run(t, "wasm", podConfig("p"))
	config := containerConfig("c")
	if s == node.Starting {
		config = containerConfig("c", "start-container", "delay(300ms)")
	}
	if s == node.Initiated {
		return pod, config
	}
	b.create(t, pod, config)
	if s == node.Starting {
		go func() { _ = b.StartContainer(context.WithoutCancel(ctx), pod) }()
		eventually(t, "Starting", func() bool { return b.state(t, pod) == node.Starting })
		return pod, config
	}
	for _, step := range []struct {
		until node.State
		do    func() error
	}{
		{node.Created, func() error { return nil }},
		{node.Running, func() error { return b.StartContainer(ctx, pod) }},
		{node.Stopped, func() error { return b.StopContainer(ctx, pod, 0) }},
		{node.Removed, func() error { return b.RemoveContainer(ctx, pod) }},
		{node.Killed, func() error { return b.StopSandbox(ctx, pod) }},
	} {
		must(t, step.do())
		if step.until == s {
			break
		}
	}
	return pod, config
}

func TestCreateContainerRepeats(t *testing.T) {
	b := open(t, t.TempDir())
	for _, handler := range []string{"linux", "wasm"} {
		pod := b.run(t, handler, podConfig(handler))
		id := b.create(t, pod, containerConfig("c"))
		counted := containerConfig("c")
		counted.Annotations["io.kubernetes.container.restartCount"] = "7"
		if again := b.create(t, pod, counted); again != id {
			t.Errorf("%s: CreateContainer again = %s, want %s", handler, again, id)
		}
		changed := containerConfig("c")
		changed.Envs = []*runtimeapi.KeyValue{{Key: "A", Value: []byte("1")}}
		if _, err := b.CreateContainer(t.Context(), pod, changed); !errdefs.IsAlreadyExists(err) {
			t.Errorf("%s: CreateContainer with changed parameters: got error %v, want already exists", handler, err)
		}
		next := containerConfig("c")
		next.Metadata.Attempt = 1
		second := b.create(t, pod, next)
		if second == id {
			t.Errorf("%s: the second attempt has the ID %s of the first", handler, id)
		}
	}
}

// TestN3CallerGoesAwayAndRetries: a caller that goes away and retries gets one pod, and no name stays reserved.
func TestN3CallerGoesAwayAndRetries(t *testing.T) {
	b := open(t, t.TempDir())
	config := podConfig("p", "create-sandbox", "delay(200ms)")
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := b.RunSandbox(ctx, config, ""); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("first RunSandbox: got error %v, want deadline exceeded", err)
	}
	pod := b.run(t, "", config)
	if n := len(b.Pods()); n != 1 {
		t.Errorf("got %d pods, want 1", n)
	}
	c := containerConfig("c", "start-container", "delay(200ms)")
	id := b.create(t, pod, c)
	ctx, cancel = context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := b.StartContainer(ctx, id); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("first StartContainer: got error %v, want deadline exceeded", err)
	}
	must(t, b.StartContainer(t.Context(), id))
	if got := b.state(t, id); got != node.Running {
		t.Errorf("state: got %s, want Running", got)
	}
}

// TestN4FailuresAreRolledBack: after a failure of any step, nothing remains, and the same request succeeds.
func TestN4FailuresAreRolledBack(t *testing.T) {
	for _, step := range []string{"validate", "network-setup", "network-setup.done", "create-sandbox", "create-sandbox.done"} {
		t.Run(step, func(t *testing.T) {
			b := open(t, t.TempDir())
			if _, err := b.RunSandbox(t.Context(), podConfig("p", step, "error(boom)"), ""); err == nil {
				t.Fatal("RunSandbox succeeded, want an error")
			}
			if left := b.residue(t); len(left) > 0 || len(b.Pods()) > 0 {
				t.Errorf("got residue %v and pods %v, want none", left, b.Pods())
			}
			b.run(t, "", podConfig("p"))
		})
	}
	for _, step := range []string{"create-container", "create-container.done"} {
		t.Run(step, func(t *testing.T) {
			b := open(t, t.TempDir())
			pod := b.run(t, "", podConfig("p"))
			if _, err := b.CreateContainer(t.Context(), pod, containerConfig("c", step, "error(boom)")); err == nil {
				t.Fatal("CreateContainer succeeded, want an error")
			}
			if p, err := b.Pod(pod); err != nil || len(p.Containers) > 0 {
				t.Errorf("containers: got %v, %v; want none", p.Containers, err)
			}
			b.create(t, pod, containerConfig("c"))
		})
	}
	t.Run("start-container", func(t *testing.T) {
		b := open(t, t.TempDir())
		pod := b.run(t, "", podConfig("p"))
		id := b.create(t, pod, containerConfig("c", "start-container", "error(no such program)"))
		if err := b.StartContainer(t.Context(), id); err == nil {
			t.Fatal("StartContainer succeeded, want an error")
		}
		c, _, err := b.Container(id)
		must(t, err)
		if c.State != node.Stopped || c.Reason != sandbox.ReasonStartError || c.ExitCode != sandbox.ExitStartError || c.Message == "" {
			t.Errorf("recorded exit: got %+v, want a start error", c)
		}
	})
}

// TestN4NetworkReleaseIsRetried: a stop whose network release fails stops the pod, and the release is retried until it
// succeeds.
func TestN4NetworkReleaseIsRetried(t *testing.T) {
	b := open(t, t.TempDir())
	pod := b.run(t, "", podConfig("p", "network-teardown", "error(plugin is ill)"))
	if err := b.StopSandbox(t.Context(), pod); err == nil {
		t.Fatal("StopSandbox succeeded with a failing CNI DEL, want an error")
	}
	if p, err := b.Pod(pod); err != nil || p.Ready() {
		t.Errorf("pod after the failed release: got %v, %v; want one that is not ready", p, err)
	}
	if err := b.RemoveSandbox(t.Context(), pod); err == nil {
		t.Error("RemoveSandbox succeeded before the lease was free, want an error")
	}
	if leases, _ := b.network.Leases(); len(leases) != 1 {
		t.Errorf("leases: got %v, want one", leases)
	}
}

// TestC2StopAndRemoveInParallelAndDuringCreate: concurrent stops and removals succeed, and nothing remains.
func TestC2StopAndRemoveInParallelAndDuringCreate(t *testing.T) {
	b := open(t, t.TempDir())
	ctx := t.Context()
	must(t, b.StopSandbox(ctx, "0123"), b.RemoveSandbox(ctx, "0123"), b.StopContainer(ctx, "0123", 0), b.RemoveContainer(ctx, "0123"))
	pod := b.run(t, "", podConfig("p"))
	id := b.create(t, pod, containerConfig("runs"))
	must(t, b.StartContainer(ctx, id))
	created := make(chan error, 1)
	go func() {
		_, err := b.CreateContainer(ctx, pod, containerConfig("slow", "create-container", "hang"))
		created <- err
	}()
	go func() { _, _ = b.CreateContainer(ctx, pod, containerConfig("late", "create-container", "delay(5ms)")) }()
	done := make(chan error, 30)
	for range 10 {
		go func() { done <- b.RemoveContainer(ctx, id) }()
		go func() { done <- b.StopSandbox(ctx, pod) }()
		go func() { done <- b.RemoveSandbox(ctx, pod) }()
	}
	for range 30 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	if err := <-created; err == nil {
		t.Error("CreateContainer in a removed pod succeeded, want an error")
	}
	eventually(t, "nothing is left", func() bool { return len(b.residue(t)) == 0 && len(b.Pods()) == 0 })
}

func TestStopOverridesStartAndLongerStop(t *testing.T) {
	b := open(t, t.TempDir())
	ctx := t.Context()
	pod := b.run(t, "", podConfig("p"))
	hangs := b.create(t, pod, containerConfig("hangs", "start-container", "hang"))
	started := make(chan error, 1)
	go func() { started <- b.StartContainer(ctx, hangs) }()
	eventually(t, "Starting", func() bool { return b.state(t, hangs) == node.Starting })
	must(t, b.StopContainer(ctx, hangs, time.Minute))
	if err := <-started; err == nil || b.state(t, hangs) != node.Stopped {
		t.Errorf("overridden start: got error %v and state %s, want an error and Stopped", err, b.state(t, hangs))
	}
	deaf := b.create(t, pod, containerConfig("deaf", "ignore-stop", "true"))
	must(t, b.StartContainer(ctx, deaf))
	slow := make(chan error, 1)
	go func() { slow <- b.StopContainer(ctx, deaf, time.Hour) }()
	must(t, b.StopContainer(ctx, deaf, 10*time.Millisecond))
	if err := <-slow; err != nil {
		t.Errorf("overridden stop: %v", err)
	}
	c, _, err := b.Container(deaf)
	must(t, err)
	if c.ExitCode != 137 {
		t.Errorf("exit code: got %d, want 137", c.ExitCode)
	}
}

// TestN8StuckBackendDelaysNobodyElse: lists, status calls and other pods continue beside an order that hangs.
func TestN8StuckBackendDelaysNobodyElse(t *testing.T) {
	b := open(t, t.TempDir())
	stuck := b.run(t, "", podConfig("stuck"))
	id := b.create(t, stuck, containerConfig("c", "start-container", "hang", "stats", "hang"))
	ctx, cancel := context.WithCancel(t.Context())
	go func() { _ = b.StartContainer(ctx, id) }()
	eventually(t, "Starting", func() bool { return b.state(t, id) == node.Starting })
	fine := b.run(t, "", podConfig("fine"))
	c := b.create(t, fine, containerConfig("c"))
	must(t, b.StartContainer(t.Context(), c))
	if len(b.Pods()) != 2 {
		t.Errorf("Pods() = %d pods, want 2", len(b.Pods()))
	}
	cancel()
	must(t, b.StopContainer(t.Context(), id, 0))
}

func TestPrefixesAndUnknownIDs(t *testing.T) {
	b := open(t, t.TempDir())
	first, second := b.run(t, "", podConfig("a")), b.run(t, "", podConfig("b"))
	if p, err := b.Pod(first[:20]); err != nil || p.ID != first {
		t.Errorf("Pod by prefix = %v, %v; want %s", p, err, first)
	}
	if _, err := b.Pod(""); !errdefs.IsInvalidArgument(err) {
		t.Errorf("Pod with an empty ID: got error %v, want invalid argument", err)
	}
	if _, err := b.Pod("nonesuch"); !errdefs.IsNotFound(err) {
		t.Errorf("Pod with an unknown ID: got error %v, want not found", err)
	}
	for i := 1; i < 64; i++ {
		if first[:i] != second[:i] {
			break
		}
		if _, err := b.Pod(first[:i]); !errdefs.IsInvalidArgument(err) {
			t.Errorf("Pod by an ambiguous prefix: got error %v, want invalid argument", err)
		}
	}
}

func TestUpdateContainerMergesResources(t *testing.T) {
	b := open(t, t.TempDir())
	pod := b.run(t, "", podConfig("p"))
	config := containerConfig("c")
	config.Linux = &runtimeapi.LinuxContainerConfig{Resources: &runtimeapi.LinuxContainerResources{
		CpuShares: 512, MemoryLimitInBytes: 1 << 20,
		HugepageLimits: []*runtimeapi.HugepageLimit{{PageSize: "2MB", Limit: 1}, {PageSize: "1GB", Limit: 1}},
	}}
	id := b.create(t, pod, config)
	must(t, b.UpdateContainer(t.Context(), id, &runtimeapi.LinuxContainerResources{
		MemoryLimitInBytes: 2 << 20, HugepageLimits: []*runtimeapi.HugepageLimit{{PageSize: "2MB", Limit: 2}},
		Unified: map[string]string{"a": "b"},
	}))
	c, _, err := b.reopen(t).Container(id)
	must(t, err)
	r := c.Config.Linux.Resources
	if r.CpuShares != 512 || r.MemoryLimitInBytes != 2<<20 || len(r.HugepageLimits) != 2 || r.HugepageLimits[1].PageSize != "2MB" ||
		r.HugepageLimits[1].Limit != 2 || r.Unified["a"] != "b" {
		t.Errorf("resources after the update: got %v", r)
	}
}

// stubborn is a backend whose starts fail with the container running, and whose stops fail too.
type stubborn struct{ *fake.Backend }

func (s stubborn) StartContainer(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) error {
	return errors.Join(s.Backend.StartContainer(ctx, p, c), errors.New("started, and then something went wrong"))
}

func (stubborn) StopContainer(context.Context, *sandbox.Pod, *sandbox.Container, time.Duration) error {
	return errors.New("it does not end")
}

// TestFailedStartThatCannotBeStoppedRuns: a container that failed to start and cannot be stopped is recorded as
// Running.
func TestFailedStartThatCannotBeStoppedRuns(t *testing.T) {
	b := openWith(t, t.TempDir(), "linux", sandbox.Capabilities{}, func(f *fake.Backend) sandbox.Backend { return stubborn{f} })
	id := b.create(t, b.run(t, "", podConfig("p")), containerConfig("c"))
	if err := b.StartContainer(t.Context(), id); err == nil {
		t.Error("StartContainer succeeded, want an error")
	}
	if got := b.state(t, id); got != node.Running {
		t.Errorf("state: got %s, want Running", got)
	}
}

// TestCloseLetsOrdersFinish: an order whose caller went away is complete and recorded when Close returns.
func TestCloseLetsOrdersFinish(t *testing.T) {
	b := open(t, t.TempDir())
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, err := b.RunSandbox(ctx, podConfig("p", "create-sandbox", "delay(200ms)"), ""); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("RunSandbox: got error %v, want deadline exceeded", err)
	}
	b = b.reopen(t)
	if pods := b.Pods(); len(pods) != 1 || !pods[0].Ready() {
		t.Errorf("pods after the restart: got %v, want one that is ready", pods)
	}
}
