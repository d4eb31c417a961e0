package oci

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/config"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
	"github.com/tripod-run/tripod/internal/sandbox/vm"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent/wire"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/guestapi"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/resources"
	"github.com/tripod-run/tripod/internal/stats"
)

// fakeGuest is the guest of pod "p". Its function answers each call, and writes to out like the guest.
type fakeGuest struct {
	answer func(ctx context.Context, r guestapi.Request, body, out io.ReadWriter) error

	mu    sync.Mutex
	calls []guestapi.Method
}

func (g *fakeGuest) Wait(context.Context) error { return nil }

// Stream behaves like agent.Agent.Stream: a writer that fails does not end the call.
func (g *fakeGuest) Stream(ctx context.Context, _ wire.Op, request []byte, with sandbox.ExecRequest) (int32, error) {
	var r guestapi.Request
	if err := json.Unmarshal(request, &r); err != nil {
		return 0, err
	}
	g.mu.Lock()
	g.calls = append(g.calls, r.Method)
	g.mu.Unlock()
	type both struct {
		io.Reader
		io.Writer
	}
	answered := make(chan error, 1)
	go func() {
		answered <- g.answer(ctx, r, both{Reader: with.Stdin}, both{Writer: forgiving{with.Stdout}})
	}()
	select {
	case err := <-answered:
		return 0, err
	case <-ctx.Done():
		return 0, context.Cause(ctx)
	}
}

func (g *fakeGuest) called(method guestapi.Method) (times int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, m := range g.calls {
		if m == method {
			times++
		}
	}
	return times
}

// forgiving is a writer that hides errors.
type forgiving struct{ to io.Writer }

func (f forgiving) Write(p []byte) (int, error) {
	_, _ = f.to.Write(p)
	return len(p), nil
}

// fakeMachines is the machine of pod "p". It counts when it is killed, which fails.
type fakeMachines struct {
	machines
	driver  plugs
	cgroups resources.Cgroups
	machine vm.Machine
	kills   int
}

func (m *fakeMachines) Driver() machine.Driver             { return &m.driver }
func (m *fakeMachines) Cgroups() resources.Cgroups         { return m.cgroups }
func (m *fakeMachines) Machine(string) (vm.Machine, error) { return m.machine, nil }
func (m *fakeMachines) Definition(string) (*machine.Definition, error) {
	return &m.machine.Definition, nil
}

func (m *fakeMachines) Requested(*sandbox.Pod, *sandbox.Container) (cpus int, fixed bool, err error) {
	return 1, false, nil
}

func (m *fakeMachines) SetCPUs(_ string, cpus int) error {
	m.machine.CPUs = cpus
	return nil
}

// UpdateContainer limits the machine's cgroup.
func (m *fakeMachines) UpdateContainer(_ context.Context, _ *sandbox.Pod, c *sandbox.Container) error {
	res, d := c.Config.GetLinux().GetResources(), m.machine.Definition
	memory := uint64(res.GetMemoryLimitInBytes())
	if memory > d.MostMemory() {
		return errdefs.ErrNotImplemented
	}
	return m.cgroups.Limit(d.Cgroup, memory, res)
}

func (m *fakeMachines) StopContainer(context.Context, *sandbox.Pod, *sandbox.Container, time.Duration) error {
	m.kills++
	return errdefs.ErrInternal
}

// plugs is a driver that accepts all devices and sizes.
type plugs struct {
	machine.Driver
	added []int // the arguments of AddCPUs
}

func (d *plugs) Unplug(context.Context, string, int) error            { return nil }
func (d *plugs) Plug(context.Context, string, machine.PlugDisk) error { return nil }
func (d *plugs) SetMemory(context.Context, string, uint64) error      { return nil }
func (d *plugs) AddCPUs(_ context.Context, _ string, cpus int) error {
	d.added = append(d.added, cpus)
	return nil
}

// rig is a backend with a pod "p", whose machine runs, and its running container "c". No process is started.
type rig struct {
	*Backend
	pod       *sandbox.Pod
	container *sandbox.Container
	life      *life
	handle    *handle
	machines  *fakeMachines
	logFile   string
}

// newRig makes a rig, in the bubble of a test.
func newRig(t *testing.T, guest *fakeGuest) *rig {
	t.Helper()
	dir, log := t.TempDir(), slog.New(slog.NewTextHandler(t.Output(), nil))
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	r := &rig{logFile: filepath.Join(dir, "logs", "c.log")}
	r.pod = &sandbox.Pod{ID: "p", Config: &runtimeapi.PodSandboxConfig{LogDirectory: filepath.Dir(r.logFile)}}
	r.container = &sandbox.Container{ID: "c", Config: &runtimeapi.ContainerConfig{LogPath: "c.log"}}
	cfg := vm.Config{VM: config.Default().VM, Root: filepath.Join(dir, "root"), RunDir: filepath.Join(dir, "run")}
	for _, d := range []string{filepath.Join(cfg.Root, "oci", "p"), filepath.Join(cfg.RunDir, "oci", "p"), filepath.Dir(r.logFile)} {
		must(os.MkdirAll(d, 0o700))
	}
	ctx, end := context.WithCancel(context.Background())
	r.machines = &fakeMachines{machine: vm.Machine{
		Definition: machine.Definition{CPUs: 2, Memory: 256<<20 + resources.GuestOverhead}, CPUs: 2, StartedAt: time.Now(), Running: true,
	}}
	r.Backend = &Backend{
		cfg: cfg, machines: r.machines, images: allImages{}, log: log, sampler: stats.NewSampler(8), ctx: ctx, close: end,
		pods: map[string]*podMachine{"p": {pod: r.pod, watching: true}},
	}
	r.ledger = ledger.New[state, life](format, r.containerFile, log)
	r.guestOf = func(string) (guestAgent, error) { return guest, nil }
	must(r.ledger.Create("p", "c", state{Record: ledger.Record{ID: "c", Phase: ledger.Created}}))
	r.handle, r.life = r.ledger.Loaded("c"), r.newLife(r.pod, r.container, false)
	must(r.handle.Begin(r.life, func(s *state) { s.Start() }))
	t.Cleanup(func() {
		end()
		r.tasks.Wait()
	})
	return r
}

// follow copies the log, as after StartContainer.
func (r *rig) follow() { r.tasks.Go(func() { r.life.log.Follow(r.ctx, r.logOf("p", "c")) }) }

// noLog completes the container's log, which is empty.
func (r *rig) noLog() {
	r.life.log.Follow(r.ctx, func(context.Context, int64, io.Reader, io.Writer) error { return nil })
}

// entry returns an entry of a log. n has two digits.
func entry(n int) string { return fmt.Sprintf("2016-10-06T00:17:09.669794202Z stdout F line %d\n", n) }

// ended is what the guest says about the container's end.
func ended() sandbox.Status {
	return sandbox.Status{State: sandbox.StateExited, ExitCode: 3, Reason: sandbox.ReasonError}
}

// TestEndWaitsForTheLog: the end of a container is recorded with its whole log, if that is long and its copy is interrupted, and
// StopContainer does not kill the machine meanwhile. It does not wait for a guest that sends nothing, and not for ever.
func TestEndWaitsForTheLog(t *testing.T) {
	const entries = 100
	for name, c := range map[string]struct {
		pause time.Duration // before each entry
		atEnd func() error
		want  int // entries
		most  time.Duration
	}{
		"slow":    {lateTime / 10, func() error { return nil }, entries, drainMax},
		"silent":  {time.Hour, nil, 0, drainTime},
		"endless": {drainTime / 2, nil, int(2 * drainMax / drainTime), drainMax + time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, &fakeGuest{answer: func(ctx context.Context, r guestapi.Request, _, out io.ReadWriter) error {
					if r.Method != guestapi.MethodLog {
						return nil
					}
					for n := int(r.Offset) / len(entry(10)); n < entries || c.atEnd == nil; n++ {
						select {
						case <-time.After(c.pause):
						case <-ctx.Done():
							return ctx.Err()
						}
						if _, err := out.Write([]byte(entry(10 + n%90))); err != nil {
							return err
						}
						if n%7 == 0 {
							return errdefs.ErrUnavailable // the connection is interrupted
						}
					}
					return c.atEnd()
				}})
				r.follow()
				began := time.Now()
				r.end(r.handle, r.life, ended())
				if err := r.StopContainer(t.Context(), r.pod, r.container, 0); err != nil {
					t.Error(err)
				}
				if took := time.Since(began); took > c.most {
					t.Errorf("time until the end was recorded: got %s, want at most %s", took, c.most)
				}
				raw, err := os.ReadFile(r.logFile)
				if got := strings.Count(string(raw), "\n"); err != nil || got < c.want-1 || c.atEnd != nil && got != c.want {
					t.Errorf("entries of the log: got %d, error %v; want %d", got, err, c.want)
				}
				if s, _ := r.Status(t.Context(), r.pod, r.container); s.State != sandbox.StateExited || s.ExitCode != 3 {
					t.Errorf("status: got %+v, want exit code 3", s)
				}
				if r.machines.kills != 0 {
					t.Errorf("the machine was killed")
				}
			})
		})
	}
}

// TestStopIsRepeated: a guest that cannot stop a container at the moment is asked again, with what is left of the grace period.
// Only a guest that never answers is killed with its machine, after it was asked to write the volumes.
func TestStopIsRepeated(t *testing.T) {
	const grace = 30 * time.Second
	t.Run("unavailable", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			var r *rig
			var graces []time.Duration
			guest := &fakeGuest{answer: func(_ context.Context, _ guestapi.Request, body, _ io.ReadWriter) error {
				var stop guestapi.Stop
				if err := json.NewDecoder(body).Decode(&stop); err != nil {
					return err
				}
				if graces = append(graces, stop.Grace); len(graces) < 3 {
					return errdefs.ErrResourceExhausted
				}
				r.noLog()
				r.end(r.handle, r.life, ended())
				return nil
			}}
			r = newRig(t, guest)
			if err := r.StopContainer(t.Context(), r.pod, r.container, grace); err != nil {
				t.Error(err)
			}
			if len(graces) != 3 || graces[0] != grace || graces[2] != grace-2*stopPause {
				t.Errorf("grace periods of the calls: got %v, want three of the rest of %s", graces, grace)
			}
			if r.machines.kills != 0 || guest.called(guestapi.MethodSync) != 0 {
				t.Error("the machine was killed")
			}
		})
	})
	for name, err := range map[string]error{"stuck": nil, "never available": errdefs.ErrUnavailable} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				guest := &fakeGuest{answer: func(ctx context.Context, _ guestapi.Request, _, _ io.ReadWriter) error {
					if err == nil {
						<-ctx.Done()
					}
					return err
				}}
				r := newRig(t, guest)
				began := time.Now()
				if err := r.StopContainer(t.Context(), r.pod, r.container, grace); !errdefs.IsInternal(err) {
					t.Errorf("error: got %v, want the driver's", err)
				}
				if took := time.Since(began); took < grace+lateTime || took > grace+lateTime+syncTime {
					t.Errorf("time: got %s, want %s, and at most %s to write the volumes", took, grace+lateTime, syncTime)
				}
				if r.machines.kills != 1 || guest.called(guestapi.MethodSync) != 1 {
					t.Errorf("kills and calls of sync: got %d and %d, want one each", r.machines.kills, guest.called(guestapi.MethodSync))
				}
			})
		})
	}
}

// TestPlausible: what a guest says about the end of a container is recorded only as far as it can be true.
func TestPlausible(t *testing.T) {
	long := strings.Repeat("é", maxMessage)
	for name, c := range map[string]struct{ says, want sandbox.Status }{
		"exited": {sandbox.Status{Reason: sandbox.ReasonCompleted, Message: "bye"},
			sandbox.Status{Reason: sandbox.ReasonCompleted, Message: "bye"}},
		"killed": {sandbox.Status{Reason: sandbox.ReasonSeccomp, ExitCode: 159},
			sandbox.Status{Reason: sandbox.ReasonSeccomp, ExitCode: 159}},
		"long message": {sandbox.Status{Reason: "Error", Message: "x" + long},
			sandbox.Status{Reason: "Error", Message: "x" + long[:maxMessage-2]}},
		"long reason": {sandbox.Status{Reason: strings.Repeat("x", maxReason+1), ExitCode: 1},
			sandbox.Status{Reason: sandbox.ReasonError, ExitCode: 1}},
		"odd reason":      {sandbox.Status{Reason: "a\nb"}, sandbox.Status{Reason: sandbox.ReasonCompleted}},
		"no reason":       {sandbox.Status{ExitCode: 2}, sandbox.Status{Reason: sandbox.ReasonError, ExitCode: 2}},
		"guest's own one": {sandbox.Status{Reason: "Evicted", ExitCode: 2}, sandbox.Status{Reason: "Evicted", ExitCode: 2}},
	} {
		got := plausible(c.says)
		if got.FinishedAt = c.want.FinishedAt; got != c.want {
			t.Errorf("%s: got %.100q… with %d bytes, reason %q; want %d bytes, reason %q", name, got.Message, len(got.Message), got.Reason,
				len(c.want.Message), c.want.Reason)
		}
	}
	if at := plausible(sandbox.Status{FinishedAt: time.Now().Add(time.Hour)}).FinishedAt; at.After(time.Now()) {
		t.Errorf("time of an end in the future: got %s, want now", at)
	}
}

// TestEndIsPlausible: the guest's words about an end and about a failed start are bounded in the record.
func TestEndIsPlausible(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		huge := ended()
		huge.Message = strings.Repeat("x", 1<<19)
		failed := huge
		failed.Reason = sandbox.ReasonStartError
		r := newRig(t, &fakeGuest{answer: func(_ context.Context, r guestapi.Request, _, out io.ReadWriter) error {
			if r.Method == guestapi.MethodStart {
				return json.NewEncoder(out).Encode(failed)
			}
			return nil
		}})
		r.follow()
		r.end(r.handle, r.life, huge)
		<-r.life.ended
		check := func(what, reason string) {
			t.Helper()
			s, err := r.Status(t.Context(), r.pod, r.container)
			if err != nil || len(s.Message) > maxMessage || s.Reason != reason {
				t.Errorf("%s: got reason %q and %d bytes, error %v; want %q and at most %d", what, s.Reason, len(s.Message), err, reason, maxMessage)
			}
		}
		check("end", sandbox.ReasonError)
		if err := r.StartContainer(t.Context(), r.pod, r.container); !errdefs.IsFailedPrecondition(err) || len(err.Error()) > 2*maxMessage {
			t.Errorf("failed start: got an error of %d bytes, want a failed precondition", len(err.Error()))
		}
		check("failed start", sandbox.ReasonStartError)
	})
}
