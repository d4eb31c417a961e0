package node_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/network"
	"github.com/tripod-run/tripod/internal/node"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/test/fake"
)

func TestReopenAdoptsWhatRunsAndWhatEnded(t *testing.T) {
	b := open(t, t.TempDir())
	pod := b.run(t, "", podConfig("p"))
	runs := b.create(t, pod, containerConfig("runs"))
	ends := b.create(t, pod, containerConfig("ends", "exit-after", "30ms", "exit-code", "5"))
	made := b.create(t, pod, containerConfig("made"))
	must(t, b.StartContainer(t.Context(), runs), b.StartContainer(t.Context(), ends))
	b.close()
	time.Sleep(40 * time.Millisecond) // pacing: a fake container ends at a set time, and no node is open to report it
	b = open(t, b.dir)
	for id, want := range map[string]node.State{runs: node.Running, ends: node.Stopped, made: node.Created} {
		if got := b.state(t, id); got != want {
			t.Errorf("state of %s: got %s, want %s", id, got, want)
		}
	}
	if c, _, err := b.Container(ends); err != nil || c.ExitCode != 5 {
		t.Errorf("container that ended without a node: got %+v, %v; want exit code 5", c, err)
	}
	must(t, b.StopContainer(t.Context(), runs, time.Second), b.StartContainer(t.Context(), made))
	must(t, os.Remove(filepath.Join(b.network.Dir, pod)))
	b = b.reopen(t)
	if p, err := b.Pod(pod); err != nil || p.Ready() {
		t.Errorf("pod that lost its network: got %v, %v; want one that is not ready", p, err)
	}
	must(t, b.RemoveSandbox(t.Context(), pod))
	if left := b.residue(t); len(left) > 0 {
		t.Errorf("residue: got %v, want none", left)
	}
}

// TestN9UnknownRecordVersionIsRefused: the node does not start, and the pods stay untouched.
func TestN9UnknownRecordVersionIsRefused(t *testing.T) {
	b := open(t, t.TempDir())
	b.run(t, "", podConfig("p"))
	must(t, b.store.Put("pods", "x", []byte(`{"version":99}`)))
	before := b.residue(t)
	b.close()
	if _, err := tryOpen(b.dir); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("open: got error %v, want failed precondition", err)
	}
	if after := b.residue(t); !slices.Equal(before, after) {
		t.Errorf("residue after the failed open: got %v, want %v", after, before)
	}
}

// TestBackendThatCannotBeRecovered: the pods of a failed backend stay in the list and accept no orders; other pods do.
func TestBackendThatCannotBeRecovered(t *testing.T) {
	b := open(t, t.TempDir())
	sick, fine := b.run(t, "linux", podConfig("sick")), b.run(t, "wasm", podConfig("fine"))
	id := b.create(t, sick, containerConfig("c"))
	b.close()
	must(t, os.WriteFile(filepath.Join(b.dir, "linux", sick, "containers", id+".json"), []byte("damaged"), 0o600))
	b = open(t, b.dir)
	if p, err := b.Pod(sick); err != nil || len(p.Containers) != 1 {
		t.Errorf("pod of the failed backend: got %v, %v; want its container", p, err)
	}
	if _, err := b.RunSandbox(t.Context(), podConfig("new"), "linux"); !errdefs.IsUnavailable(err) {
		t.Errorf("RunSandbox with the failed backend: got error %v, want unavailable", err)
	}
	for what, err := range map[string]error{
		"start": b.StartContainer(t.Context(), id), "stop": b.StopSandbox(t.Context(), sick), "remove": b.RemoveSandbox(t.Context(), sick),
	} {
		if !errdefs.IsUnavailable(err) {
			t.Errorf("%s a pod of the failed backend: got error %v, want unavailable", what, err)
		}
	}
	for _, h := range b.Handlers() {
		if (h.Err != nil) != (h.Name == "linux") {
			t.Errorf("handler %s: got error %v", h.Name, h.Err)
		}
	}
	must(t, b.RemoveSandbox(t.Context(), fine))
}

// waiting is a backend whose dependency is missing.
type waiting struct {
	*fake.Backend
	there chan struct{}
}

func (w waiting) Recover(ctx context.Context, known []sandbox.Known, sink sandbox.Sink) (sandbox.Found, error) {
	select {
	case <-w.there:
		return w.Backend.Recover(ctx, known, sink)
	default:
		return sandbox.Found{}, fmt.Errorf("nobody is at home: %w", sandbox.ErrAway)
	}
}

// TestBackendThatWaits: while a backend's dependency is missing, its handler reports the reason and its pods accept no
// orders. Afterwards the pods are recovered and incomplete ones removed.
func TestBackendThatWaits(t *testing.T) {
	b := open(t, t.TempDir())
	pod := b.run(t, "vm", podConfig("vm"))
	id := b.create(t, pod, containerConfig("c"))
	must(t, b.StartContainer(t.Context(), id))
	b.close()
	there := make(chan struct{})
	b, err := openChanged(b.dir, func(backends map[string]sandbox.Backend, fakes map[string]*fake.Backend) {
		backends["vm"] = waiting{fakes["vm"], there}
	})
	must(t, err)
	t.Cleanup(b.close)
	if c, _, err := b.Container(id); err != nil || c.State != node.Running {
		t.Errorf("container of the waiting backend: got %v, %v; want Running", c, err)
	}
	for _, h := range b.Handlers() {
		if h.Name == "vm" && (h.Err == nil || !strings.Contains(h.Err.Error(), "nobody is at home")) || h.Name != "vm" && h.Err != nil {
			t.Errorf("handler %s: got error %v", h.Name, h.Err)
		}
	}
	if err := b.StopSandbox(t.Context(), pod); !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "nobody is at home") {
		t.Errorf("StopSandbox with the waiting backend: got error %v, want unavailable", err)
	}
	if _, err := b.RunSandbox(t.Context(), podConfig("new"), "vm"); !errdefs.IsUnavailable(err) {
		t.Errorf("RunSandbox with the waiting backend: got error %v, want unavailable", err)
	}
	must(t, b.RemoveSandbox(t.Context(), b.run(t, "linux", podConfig("other"))))
	close(there)
	eventually(t, "orders for pods of a backend that is there again are taken", func() bool {
		err := b.StopContainer(t.Context(), id, 0)
		if err != nil && !errdefs.IsUnavailable(err) {
			t.Fatal(err)
		}
		return err == nil
	})
	for _, h := range b.Handlers() {
		if h.Err != nil {
			t.Errorf("handler %s: got error %v, want none", h.Name, h.Err)
		}
	}
	must(t, b.RemoveSandbox(t.Context(), pod))
}

// stuckNetwork does not return from Teardown until its context ends.
type stuckNetwork struct {
	*fake.Network
	hangs chan string
}

func (s stuckNetwork) Teardown(ctx context.Context, a network.Attachment) error {
	select {
	case s.hangs <- a.ID:
	default:
	}
	<-ctx.Done()
	return context.Cause(ctx)
}

// setIntent records an intent of a pod, as left by a daemon that dies during the order.
func setIntent(t *testing.T, b *bench, id string, call node.Call) {
	t.Helper()
	var record map[string]any
	must(t, b.store.All("pods", func(key string, raw []byte) error {
		if key != id {
			return nil
		}
		return json.Unmarshal(raw, &record)
	}))
	record["intent"] = call
	raw, err := json.Marshal(record)
	must(t, err, b.store.Put("pods", id, raw))
}

// TestN4LeftoversThatHang: a clean-up that hangs at the start delays neither serving nor stopping, and is reported.
func TestN4LeftoversThatHang(t *testing.T) {
	b := open(t, t.TempDir())
	stopped, half := b.run(t, "", podConfig("stopped")), b.run(t, "", podConfig("half"))
	setIntent(t, b, stopped, node.StopPodSandbox)
	b.close()

	stuck := stuckNetwork{hangs: make(chan string, 8)}
	b, err := openConfig(b.dir, func(c *node.Config, _ map[string]*fake.Backend) {
		stuck.Network = c.Network.(*fake.Network)
		c.Network = stuck
	})
	must(t, err)
	if id := <-stuck.hangs; id != stopped {
		t.Fatalf("Teardown: got pod %s, want %s", id, stopped)
	}
	if p, err := b.Pod(half); err != nil || p.State != node.Initiated {
		t.Errorf("pod with the intent to stop: got %v, %v; want Initiated", p, err)
	}
	id := b.run(t, "", podConfig("new"))
	must(t, b.StartContainer(t.Context(), b.create(t, id, containerConfig("c"))))
	eventually(t, "the leftover is reported", func() bool {
		err := b.Leftovers()
		return err != nil && strings.Contains(err.Error(), stopped)
	})
	began := time.Now()
	must(t, b.Close())
	if took := time.Since(began); took >= 10*time.Second { // the time that orders under way get
		t.Errorf("Close took %v, want less than 10 s", took)
	}
	must(t, b.store.Close())

	b = open(t, b.dir) // the plugin works again
	eventually(t, "the leftover is gone", func() bool {
		p, err := b.Pod(stopped)
		return err == nil && p.State == node.Killed && p.Intent == "" && b.Leftovers() == nil
	})
	b.close()
}

// failingNetwork releases nothing while it fails.
type failingNetwork struct {
	*fake.Network
	fails *atomic.Bool
}

func (f failingNetwork) Teardown(ctx context.Context, a network.Attachment) error {
	if f.fails.Load() {
		return fmt.Errorf("out of order: %w", errdefs.ErrUnavailable)
	}
	return f.Network.Teardown(ctx, a)
}

// TestLeftoverOfAnOrderThatSucceeds: a clean-up that an order completed is no longer reported, even before the
// janitor's next attempt.
func TestLeftoverOfAnOrderThatSucceeds(t *testing.T) {
	net := failingNetwork{fails: new(atomic.Bool)}
	b, err := openConfig(t.TempDir(), func(c *node.Config, _ map[string]*fake.Backend) {
		net.Network = c.Network.(*fake.Network)
		c.Network = net
	})
	must(t, err)
	t.Cleanup(b.close)
	id := b.run(t, "", podConfig("p"))
	net.fails.Store(true)
	if err := b.StopSandbox(t.Context(), id); err == nil {
		t.Fatal("StopSandbox succeeded with a failing network, want an error")
	}
	eventually(t, "the leftover is reported", func() bool { return b.Leftovers() != nil })
	net.fails.Store(false)
	must(t, b.RemoveSandbox(t.Context(), id))
	eventually(t, "nothing is left over", func() bool { return b.Leftovers() == nil })
}

// hanging is a backend whose Recover blocks until it is released.
type hanging struct {
	*fake.Backend
	letGo chan struct{}
}

func (h hanging) Recover(ctx context.Context, known []sandbox.Known, sink sandbox.Sink) (sandbox.Found, error) {
	<-h.letGo
	return h.Backend.Recover(ctx, known, sink)
}

// TestN8BackendThatHangsAtStart: the node serves the pods of other backends immediately, and a hanging backend's pods
// after its recovery.
func TestN8BackendThatHangsAtStart(t *testing.T) {
	b := open(t, t.TempDir())
	stuck := b.run(t, "vm", podConfig("stuck"))
	b.close()
	letGo := make(chan struct{})
	b, err := openChanged(b.dir, func(backends map[string]sandbox.Backend, fakes map[string]*fake.Backend) {
		backends["vm"] = hanging{fakes["vm"], letGo}
	})
	must(t, err)
	t.Cleanup(b.close)
	must(t, b.RemoveSandbox(t.Context(), b.run(t, "linux", podConfig("other"))))
	if err := b.StopSandbox(t.Context(), stuck); !errdefs.IsUnavailable(err) {
		t.Errorf("StopSandbox with the hanging backend: got error %v, want unavailable", err)
	}
	close(letGo)
	eventually(t, "orders for its pods are taken", func() bool { return b.RemoveSandbox(t.Context(), stuck) == nil })
}

// late is a backend whose events arrive when the test wants it.
type late struct {
	*fake.Backend
	arrive *atomic.Pointer[func()] // called at the end of StartContainer
	events chan sandbox.Event
}

func (l late) Recover(ctx context.Context, known []sandbox.Known, sink sandbox.Sink) (sandbox.Found, error) {
	arrive := func() {
		for len(l.events) > 0 {
			sink(<-l.events)
		}
	}
	l.arrive.Store(&arrive)
	return l.Backend.Recover(ctx, known, func(e sandbox.Event) { l.events <- e })
}

func (l late) StartContainer(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) error {
	err := l.Backend.StartContainer(ctx, p, c)
	if _, now := c.Config.Annotations["now"]; now {
		(*l.arrive.Load())()
	}
	return err
}

// TestLateReportOfAnEarlierRun: a report that a container has ended does not end the container's next run, whether it
// arrives while the container starts or afterwards.
func TestLateReportOfAnEarlierRun(t *testing.T) {
	for _, handler := range []string{"linux", "vm"} {
		for _, now := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, while it starts: %v", handler, now), func(t *testing.T) {
				l := late{arrive: new(atomic.Pointer[func()]), events: make(chan sandbox.Event, 10)}
				b, err := openChanged(t.TempDir(), func(backends map[string]sandbox.Backend, fakes map[string]*fake.Backend) {
					l.Backend = fakes[handler]
					backends[handler] = l
				})
				must(t, err)
				t.Cleanup(b.close)
				pod, config := b.run(t, handler, podConfig("p")), containerConfig("c")
				if now {
					config.Annotations = map[string]string{"now": ""}
				}
				id := b.create(t, pod, config)
				must(t, b.StartContainer(t.Context(), id), b.StopContainer(t.Context(), id, time.Second))
				eventually(t, "the end is reported", func() bool { return len(l.events) == 1 })
				must(t, b.StartContainer(t.Context(), id))
				arrive := *l.arrive.Load()
				arrive()
				if len(l.events) != 0 || b.state(t, id) != node.Running {
					t.Fatalf("the container is %s after the report, want Running", b.state(t, id))
				}
				backendID := id
				if handler == "vm" {
					backendID = pod
				}
				l.Exit(backendID, 4)
				eventually(t, "the end is reported", func() bool { return len(l.events) == 1 })
				arrive()
				if c, _, err := b.Container(id); err != nil || c.State != node.Stopped || c.ExitCode != 4 {
					t.Errorf("the container is %v, %v after its end; want Stopped with code 4", c, err)
				}
			})
		}
	}
}

// ending is a backend whose container ends after Recover has found it running.
type ending struct {
	*fake.Backend
	id string
}

func (e ending) Recover(ctx context.Context, known []sandbox.Known, sink sandbox.Sink) (sandbox.Found, error) {
	reported := make(chan struct{})
	found, err := e.Backend.Recover(ctx, known, func(event sandbox.Event) {
		sink(event)
		close(reported)
	})
	if err == nil && found.Containers[e.id].State == sandbox.StateRunning {
		e.Exit(e.id, 6)
		<-reported
	}
	return found, err
}

// TestEndDuringRecovery: the end of a container whose start a killed daemon has not recorded, and which ends between its
// discovery by the backend and the comparison with the record, is recorded.
func TestEndDuringRecovery(t *testing.T) {
	b := open(t, t.TempDir())
	pod, config := b.run(t, "", podConfig("p")), containerConfig("c", "start-container.done", "hang")
	id := b.create(t, pod, config)
	started := make(chan error, 1)
	go func() { started <- b.StartContainer(t.Context(), id) }()
	eventually(t, "the backend has started the container", func() bool {
		s, err := b.backend["linux"].Status(t.Context(), &sandbox.Pod{ID: pod, Config: podConfig("p")},
			&sandbox.Container{ID: id, Config: config})
		return err == nil && s.State == sandbox.StateRunning
	})
	killed := t.TempDir() // as a kill of the daemon leaves the files
	must(t, os.CopyFS(killed, os.DirFS(b.dir)))
	must(t, b.RemoveSandbox(t.Context(), pod))
	if err := <-started; err == nil {
		t.Error("StartContainer succeeded, want an error")
	}
	after, err := openChanged(killed, func(backends map[string]sandbox.Backend, fakes map[string]*fake.Backend) {
		backends["linux"] = ending{fakes["linux"], id}
	})
	must(t, err)
	t.Cleanup(after.close)
	if c, _, err := after.Container(id); err != nil || c.State != node.Stopped || c.ExitCode != 6 {
		t.Errorf("the container is %v, %v; want Stopped with code 6", c, err)
	}
}
