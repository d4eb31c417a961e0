package vm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// TestLife: a machine is defined from its image and pod, started, stopped by its power button, started again on the
// same disk, and removed without a trace.
func TestLife(t *testing.T) {
	r := newRig(t)
	p := r.pod("life", func(c *runtimeapi.PodSandboxConfig) {
		c.Annotations["VirtletRootVolumeSize"] = "8Mi"
		c.Annotations["VirtletVCPUCount"] = "2"
	})
	c := r.create(p, "disk", func(c *runtimeapi.ContainerConfig) {
		c.Linux.Resources = &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 64<<20 + 5}
	})
	d := r.driver.guest(c.ID).definition
	if d.CPUs != 2 || d.Memory != 64<<20 || d.UID < 300_000 || len(d.Disks) != 2 || d.Disks[0].Base.Format != "raw" ||
		d.Disks[1].ID != "cidata" ||
		len(d.NICs) != 1 || d.NICs[0].Netns != p.Netns || d.Kernel != nil || len(d.UUID) != 36 {
		t.Errorf("wrong definition %+v", d)
	}
	r.wantState(p, c, sandbox.StateCreated)
	for range 2 {
		r.must(r.StartContainer(r.ctx(), p, c))
		r.must(r.StartContainer(r.ctx(), p, c)) // a repeat
		if s := r.wantState(p, c, sandbox.StateRunning); s.Pid == 0 || s.StartedAt.IsZero() {
			t.Errorf("running machine's status = %+v, want a PID and a start time", s)
		}
		r.must(r.StopContainer(r.ctx(), p, c, time.Minute))
		if s := r.wantState(p, c, sandbox.StateExited); s.ExitCode != 0 || s.Reason != sandbox.ReasonCompleted ||
			s.FinishedAt.Before(s.StartedAt) {
			t.Errorf("stopped machine's status = %+v, want exit code 0, reason Completed", s)
		}
	}
	if log := r.log(p); strings.Count(log, "booted") != 2 || strings.Count(log, "the last word") != 2 {
		t.Errorf("log = %q, want the output of two runs", log)
	}
	if info, err := os.Stat(d.Disks[0].Path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("Stat(root disk) = %v, %v; want mode 0600", info, err)
	}
	r.must(r.RemoveContainer(r.ctx(), p, c))
	r.wantState(p, c, sandbox.StateAbsent)
	r.must(r.StopSandbox(r.ctx(), p))
	r.must(r.StopSandbox(r.ctx(), p))
}

// TestEnds: the container's status says how the machine ended.
func TestEnds(t *testing.T) {
	r := newRig(t)
	p := r.pod("ends")
	c := r.create(p, "disk")
	for cause, want := range map[machine.Cause]sandbox.Status{
		machine.CausePowerOff: {ExitCode: 0, Reason: sandbox.ReasonCompleted},
		machine.CausePanic:    {ExitCode: 1, Reason: sandbox.ReasonGuestPanic},
		machine.CauseOOM:      {ExitCode: 137, Reason: sandbox.ReasonOOMKilled},
		machine.CauseFailed:   {ExitCode: 134, Reason: sandbox.ReasonError},
		machine.CauseUnknown:  {ExitCode: sandbox.ExitUnknown, Reason: sandbox.ReasonUnknown},
	} {
		r.must(r.StartContainer(r.ctx(), p, c))
		code := want.ExitCode
		if cause == machine.CausePanic {
			code = 0
		}
		r.driver.end(c.ID, cause, code)
		got := r.waitEnd(c)
		if got.ExitCode != want.ExitCode || got.Reason != want.Reason || !strings.HasPrefix(got.Message, string(cause)) ||
			got.State != sandbox.StateExited {
			t.Errorf("status after cause %s = %+v, want %+v", cause, got, want)
		}
	}
}

// TestV1DeafGuest: if a guest ignores its power button, the button is pressed again, and the machine is killed after
// the grace.
func TestV1DeafGuest(t *testing.T) {
	r := newRig(t)
	p, c := r.run("deaf", "disk")
	r.driver.deaf = true
	begin := time.Now()
	r.must(r.StopContainer(r.ctx(), p, c, 1500*time.Millisecond))
	if took := time.Since(begin); took < 1500*time.Millisecond {
		t.Errorf("killed after %v, want at least 1.5s", took)
	}
	if s := r.wantState(p, c, sandbox.StateExited); s.ExitCode != sandbox.ExitKilled || s.Reason != sandbox.ReasonError {
		t.Errorf("status = %+v, want exit code 137, reason Error", s)
	}
	if n := r.driver.guest(c.ID).pressed; n != 2 {
		t.Errorf("the power button was pressed %d times, want 2", n)
	}
}

// TestStartFails: the error and the status of a failed start contain the hypervisor's message, and the next start can
// succeed.
func TestStartFails(t *testing.T) {
	r := newRig(t)
	p := r.pod("fails")
	c := r.create(p, "disk")
	r.driver.refuse = errors.New("no such accelerator")
	if err := r.StartContainer(r.ctx(), p, c); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "no such accelerator") {
		t.Errorf("StartContainer error = %v, want ErrFailedPrecondition with the hypervisor's message", err)
	}
	if s := r.wantState(p, c, sandbox.StateExited); s.ExitCode != sandbox.ExitStartError || s.Reason != sandbox.ReasonStartError ||
		!strings.Contains(s.Message, "no such accelerator") {
		t.Errorf("status = %+v, want StartError with the hypervisor's message", s)
	}
	r.driver.refuse = nil
	r.must(r.StartContainer(r.ctx(), p, c))
	r.wantState(p, c, sandbox.StateRunning)
}

// TestRecover: after the daemon was killed, the next one finds running, ended and created machines.
func TestRecover(t *testing.T) {
	r := newRig(t)
	running, runs := r.run("runs", "disk")
	ended, ends := r.run("ends", "disk")
	created := r.create(r.pod("created"), "kernel")
	before := r.wantState(running, runs, sandbox.StateRunning)
	r.stop()
	r.driver.end(ends.ID, machine.CausePanic, 1)
	found := r.open()
	if len(found.Sandboxes) != 3 || r.wires.serving() != 3 {
		t.Errorf("found pods %v with %d responders, want 3 with 3", found.Sandboxes, r.wires.serving())
	}
	if s := found.Containers[runs.ID]; s.State != sandbox.StateRunning || !s.StartedAt.Equal(before.StartedAt) {
		t.Errorf("running machine's status = %+v, want state running since %v", s, before.StartedAt)
	}
	if s := found.Containers[ends.ID]; s.State != sandbox.StateExited || s.Reason != sandbox.ReasonGuestPanic {
		t.Errorf("ended machine's status = %+v, want reason GuestPanic", s)
	}
	if log := r.log(ended); strings.Count(log, "the last word") != 1 {
		t.Errorf("ended machine's log = %q, want its last output once", log)
	}
	if s := found.Containers[created.ID]; s.State != sandbox.StateCreated {
		t.Errorf("created machine's status = %+v, want state created", s)
	}
	r.must(r.StartContainer(r.ctx(), ended, ends))
	r.must(r.StopContainer(r.ctx(), running, runs, time.Minute))
	if s := r.waitEnd(runs); s.Reason != sandbox.ReasonCompleted {
		t.Errorf("stopped machine's status = %+v, want reason Completed", s)
	}
}

// TestEndBeforeButton: a machine that ends by itself just before its button is pressed is nothing to warn about.
func TestEndBeforeButton(t *testing.T) {
	var log strings.Builder
	r := newRig(t, func(s *settings) {
		s.Logger = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelWarn}))
	})
	p, c := r.run("gone", "disk")
	r.driver.gone = true
	r.must(r.StopContainer(r.ctx(), p, c, time.Minute))
	r.waitEnd(c)
	if log.Len() > 0 {
		t.Errorf("log: got\n%swant nothing", log.String())
	}
}

// TestRecoverStopped: a stopped pod that waits for its removal has no network, which is nothing to warn about.
func TestRecoverStopped(t *testing.T) {
	var log strings.Builder
	r := newRig(t, func(s *settings) {
		s.Logger = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelWarn}))
	})
	p, c := r.run("stopped", "disk")
	r.must(r.StopContainer(r.ctx(), p, c, time.Minute))
	r.waitEnd(c)
	r.must(r.StopSandbox(r.ctx(), p))
	k := r.known[p.ID]
	k.Stopped = true
	r.known[p.ID] = k
	r.restart()
	if log.Len() > 0 {
		t.Errorf("log: got\n%swant nothing", log.String())
	}
}

// TestV3Reboot: after a reboot of the node, no machine runs and the taps are gone. Recover does not find the pod, and
// StopSandbox releases its image.
func TestV3Reboot(t *testing.T) {
	r := newRig(t)
	p, c := r.run("reboot", "disk")
	r.stop()
	r.driver.end(c.ID, machine.CauseUnknown, 255)
	r.must(unix.Unmount(r.config.serialDir(c.ID), unix.MNT_DETACH))
	r.must(os.RemoveAll(r.config.RunDir))
	found := r.open()
	if len(found.Sandboxes) != 0 || len(found.Containers) != 0 {
		t.Errorf("Recover = %+v, want nothing", found)
	}
	r.must(r.StopContainer(r.ctx(), p, c, 0))
	r.must(r.StopSandbox(r.ctx(), p))
	if leased, _ := r.images.Disks(r.ctx()); len(leased) != 0 {
		t.Errorf("leases left: %v", leased)
	}
}

// TestUnknownIsRemoved: recovery removes everything of a pod that is not in the record, and nothing else.
func TestUnknownIsRemoved(t *testing.T) {
	r := newRig(t)
	p, c := r.run("known", "disk")
	lost, _ := r.run("lost", "disk")
	foreign := filepath.Join(r.config.disksDir(), "lost+found")
	r.must(os.Mkdir(foreign, 0o700))
	delete(r.known, lost.ID)
	r.restart()
	r.wantState(p, c, sandbox.StateRunning)
	if leased, _ := r.images.Disks(r.ctx()); len(leased) != 1 {
		t.Errorf("leases = %v, want only the known pod's", leased)
	}
	for _, dir := range []string{r.config.podDir(lost.ID), r.config.diskDir(lost.ID)} {
		if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("Stat(%s) error = %v, want ErrNotExist", dir, err)
		}
	}
	r.must(os.Remove(foreign))
}

// TestWithoutAgent: without an agent, Exec fails and says how to get one, and statistics and Inspect still work.
func TestWithoutAgent(t *testing.T) {
	r := newRig(t)
	p, c := r.run("dumb", "disk")
	if _, err := r.Exec(r.ctx(), p, c, sandbox.ExecRequest{Cmd: []string{"true"}}); !errdefs.IsNotImplemented(err) ||
		!strings.Contains(err.Error(), "TRIPODAGENT") {
		t.Errorf("Exec error = %v, want ErrNotImplemented that names the agent's disk", err)
	}
	if _, err := r.Dial(r.ctx(), p, c, "tcp", "127.0.0.1:1"); !errdefs.IsUnavailable(err) {
		t.Errorf("Dial error = %v, want ErrUnavailable", err)
	}
	if s, err := r.ContainerStats(r.ctx(), p, c); err != nil || s.WritableLayer == nil || s.Cpu == nil {
		t.Errorf("ContainerStats = %v, %v; want disk and CPU", s, err)
	}
	if s, err := r.PodStats(r.ctx(), p); err != nil || s.Memory == nil {
		t.Errorf("PodStats = %v, %v; want memory", s, err)
	}
	info, err := r.Inspect(r.ctx(), p, c)
	r.must(err)
	var v struct {
		Driver     string
		Agent      struct{ Ready bool }
		Definition machine.Definition
	}
	raw, err := json.Marshal(info)
	r.must(err)
	r.must(json.Unmarshal(raw, &v))
	if v.Driver != "fake" || v.Agent.Ready || v.Definition.Name != c.ID {
		t.Errorf("Inspect = %s, want the driver, the definition and no agent", raw)
	}
}

// TestN4NetworkFails: a pod whose taps could not be made is removed without a trace once the network works again.
func TestN4NetworkFails(t *testing.T) {
	r := newRig(t)
	r.wires.set(fmt.Errorf("no taps: %w", errdefs.ErrUnavailable))
	p := r.podConfig("unwired")
	if err := r.CreateSandbox(r.ctx(), p); !errdefs.IsUnavailable(err) {
		t.Errorf("CreateSandbox error = %v, want ErrUnavailable", err)
	}
	if err := r.RemoveSandbox(r.ctx(), p); !errdefs.IsUnavailable(err) {
		t.Errorf("RemoveSandbox while the network fails: error = %v, want ErrUnavailable", err)
	}
	r.wires.set(nil)
	r.must(r.RemoveSandbox(r.ctx(), p))
}

// TestN1FailPoints: if an order fails at any fail point, the pod can be removed and leaves nothing behind.
func TestN1FailPoints(t *testing.T) {
	failpoint.Needed(t)
	r := newRig(t)
	life := func(p *sandbox.Pod) error {
		if err := r.CreateSandbox(r.ctx(), p); err != nil {
			return err
		}
		c := r.container(p, "disk")
		if _, err := r.CreateContainer(r.ctx(), p, c); err != nil {
			return err
		}
		for _, step := range []func() error{
			func() error { return r.StartContainer(r.ctx(), p, c) },
			func() error { return r.UpdateContainer(r.ctx(), p, c) },
			func() error { return r.StopContainer(r.ctx(), p, c, time.Minute) },
			func() error { return r.RemoveContainer(r.ctx(), p, c) },
			func() error { return r.StopSandbox(r.ctx(), p) },
			func() error { return r.RemoveSandbox(r.ctx(), p) },
		} {
			if err := step(); err != nil {
				return err
			}
		}
		return nil
	}
	n := 0
	for _, name := range failpoint.Names() {
		// TestV5Recovered, TestDiskInterrupted
		if !strings.HasPrefix(name, "vm.") || strings.HasPrefix(name, "vm.no-boot.") || strings.HasPrefix(name, "vm.disk.") {
			continue
		}
		n++
		t.Run(name, func(t *testing.T) {
			r.must(failpoint.Arm(name, "1*error"))
			p := r.podConfig(name)
			if err := life(p); err == nil || !strings.Contains(err.Error(), name) {
				t.Errorf("error = %v, want the fail point's", err)
			}
			r.must(failpoint.Arm(name, ""))
			r.must(r.RemoveSandbox(r.ctx(), p))
			r.noneLeft()
			r.must(life(p))
			r.noneLeft()
		})
	}
	if n < 19 {
		t.Errorf("only %d fail points were visited, want at least 19", n)
	}
}

// TestUnknownAnnotations: Inspect warns about unknown annotations, which have no other effect.
func TestUnknownAnnotations(t *testing.T) {
	r := newRig(t)
	p := r.pod("warned", func(c *runtimeapi.PodSandboxConfig) { c.Annotations["VirtletVCPUsCount"] = "2" })
	info, err := r.Inspect(r.ctx(), p, nil)
	r.must(err)
	if !strings.Contains(fmt.Sprint(info["warnings"]), "VirtletVCPUsCount") {
		t.Errorf("Inspect = %v, want a warning about VirtletVCPUsCount", info)
	}
}

// TestCutOffStart: if the caller of a start goes away, the container returns to the state Created and no machine runs,
// whether the driver's event of the machine's end comes early or late.
func TestCutOffStart(t *testing.T) {
	failpoint.Needed(t)
	for _, early := range []bool{false, true} {
		t.Run(fmt.Sprintf("early=%t", early), func(t *testing.T) {
			r := newRig(t)
			p := r.pod("cut")
			c := r.create(p, "disk")
			if early {
				h, err := r.ledger.Find(c.ID, c.ID)
				r.must(err)
				r.driver.destroyed = func() {
					if _, l := h.Snapshot(); l != nil {
						<-l.ended
					}
				}
			}
			r.must(failpoint.Arm("vm.start-container.booted", "hang"))
			ctx, cancel := context.WithTimeout(r.ctx(), 200*time.Millisecond)
			defer cancel()
			err := r.StartContainer(ctx, p, c)
			r.must(failpoint.Arm("vm.start-container.booted", ""))
			if err == nil {
				t.Error("the start succeeded")
			}
			r.wantState(p, c, sandbox.StateCreated)
			if s := r.driver.guest(c.ID).state; s.Phase == machine.Running {
				t.Errorf("the machine's state = %+v, want it not running", s)
			}
			r.driver.destroyed = nil
			r.must(r.StartContainer(r.ctx(), p, c))
		})
	}
}
