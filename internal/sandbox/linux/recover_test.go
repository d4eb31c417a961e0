package linux

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/mnt"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/oci"
)

// TestRecoverRunning: a new backend finds running containers and records their further output and their exit.
func TestRecoverRunning(t *testing.T) {
	bothRuntimes(t, func(t *testing.T, r *rig) {
		p := r.pod(func(c *runtimeapi.PodSandboxConfig) {
			c.Linux.SecurityContext.NamespaceOptions.Pid = runtimeapi.NamespaceMode_POD
		})
		c := p.container("trap 'echo down; exit 7' TERM; echo up; while :; do sleep 1000 & wait $!; done").start()
		created := p.container("exit 0")
		c.waitLog("up")
		before := c.status()
		found := r.restart(p.known(c, created))
		if !found.Sandboxes[p.ID] {
			t.Error("the sandbox was not found")
		}
		if after := found.Containers[c.ID]; after.Pid != before.Pid || after.State != sandbox.StateRunning ||
			!after.StartedAt.Equal(before.StartedAt) {
			t.Errorf("status of the running container: got %+v, want %+v", after, before)
		}
		if s := found.Containers[created.ID]; s.State != sandbox.StateCreated {
			t.Errorf("status of the other container: got %+v, want created", s)
		}
		if err := unix.Kill(before.Pid, unix.SIGTERM); err != nil {
			t.Fatal(err)
		}
		if s := c.waitExit(); s.ExitCode != 7 {
			t.Errorf("status: got %+v, want exit code 7", s)
		}
		if got, want := c.log(), "stdout up\nstdout down\n"; got != want {
			t.Errorf("log: got %q, want %q", got, want)
		}
	})
}

// TestRecoverExited: a new backend finds the exit code of a container that ended while the daemon was down.
func TestRecoverExited(t *testing.T) {
	bothRuntimes(t, func(t *testing.T, r *rig) {
		p := r.pod()
		c := p.container(forever).start()
		c.waitLog("up")
		h, _ := r.ledger.Find(p.ID, c.ID)
		s, _ := h.Snapshot()
		r.abandon()
		watch, err := process.Adopt(s.Conmon)
		if err != nil {
			t.Fatal(err)
		}
		if err := unix.Kill(s.Init.Pid, unix.SIGTERM); err != nil {
			t.Fatal(err)
		}
		if !watch.WaitFor(10 * time.Second) {
			t.Fatal("conmon did not exit within 10 s")
		}
		r.Backend = nil
		found := r.restart(p.known(c))
		if s := found.Containers[c.ID]; s.State != sandbox.StateExited || s.ExitCode != 7 || s.Reason != sandbox.ReasonError {
			t.Errorf("status: got %+v, want exited with code 7 and reason Error", s)
		}
	})
}

// TestRecoverAfterReboot: without the run directory and with another boot ID, all containers have ended. They can still
// be removed, and started in a new sandbox.
func TestRecoverAfterReboot(t *testing.T) {
	r := newRig(t, "runc")
	p := r.pod()
	c := p.container(forever).start()
	c.waitLog("up")
	h, _ := r.ledger.Find(p.ID, c.ID)
	s, _ := h.Snapshot()
	for _, id := range []process.ID{s.Conmon, s.Init} { // conmon first: it writes no exit file
		if watch, err := process.Adopt(id); err == nil {
			_ = watch.Signal(unix.SIGKILL)
			watch.WaitFor(10 * time.Second)
		}
	}
	c.waitExit()
	r.abandon()
	if err := r.runtime.Delete(t.Context(), c.ID); err != nil {
		t.Fatal(err)
	}
	for _, m := range mountsBelow(filepath.Dir(r.cfg.Root)) {
		if err := mnt.Unmount(m); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.RemoveAll(r.cfg.RunDir); err != nil {
		t.Fatal(err)
	}
	s.Phase, s.BootID = ledger.Running, "another"
	if err := format.Write(r.cfg.stateFile(h.PodID, h.ID), s); err != nil {
		t.Fatal(err)
	}
	r.Backend = nil
	found := r.restart(p.known(c))
	if found.Sandboxes[p.ID] {
		t.Error("Recover found the sandbox, want it missing after a reboot")
	}
	if s := found.Containers[c.ID]; s.State != sandbox.StateExited || s.ExitCode != sandbox.ExitUnknown || s.Reason != sandbox.ReasonUnknown {
		t.Errorf("status: got %+v, want exited with an unknown exit code", s)
	}
	if err := r.CreateSandbox(t.Context(), p.Pod); err != nil {
		t.Fatal(err)
	}
	c.start().stop(0)
}

// TestN2ConmonKilled: if a container's monitor is killed, the container is killed and reported.
func TestN2ConmonKilled(t *testing.T) {
	bothRuntimes(t, func(t *testing.T, r *rig) {
		p := r.pod()
		c := p.container(forever).start()
		c.waitLog("up")
		h, _ := r.ledger.Find(p.ID, c.ID)
		s, _ := h.Snapshot()
		if err := unix.Kill(s.Conmon.Pid, unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		got := c.waitExit()
		if got.ExitCode != sandbox.ExitUnknown || got.Reason != sandbox.ReasonUnknown || !strings.Contains(got.Message, "monitor") {
			t.Errorf("status: got %+v, want an unknown exit code because of the monitor", got)
		}
		if init, err := process.Adopt(s.Init); err == nil && !init.WaitFor(5*time.Second) {
			t.Error("the container's init still runs")
		}
		c.start().stop(0) // it can be started again
	})
}

// TestRecoverRemovesOrphans: pods and containers that are not in the record are removed; foreign files and snapshots
// stay.
func TestRecoverRemovesOrphans(t *testing.T) {
	bothRuntimes(t, func(t *testing.T, r *rig) {
		p, keep := r.pod(), r.pod()
		orphan, kept := p.container(forever).start(), keep.container(forever).start()
		if _, err := r.images.Prepare(t.Context(), "vm-something", busybox, nil); err != nil {
			t.Fatal(err)
		}
		foreign := filepath.Join(r.cfg.Root, "README")
		if err := os.WriteFile(foreign, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		init, err := process.Open(orphan.status().Pid)
		if err != nil {
			t.Fatal(err)
		}
		defer init.Close()
		r.restart(keep.known(kept))
		if init.Alive() { // kill(2) would also find a zombie that nobody has reaped yet
			t.Error("the orphan's init still runs")
		}
		if s := kept.status(); s.State != sandbox.StateRunning {
			t.Errorf("status of the recorded container: got %+v, want running", s)
		}
		for _, dir := range []string{r.cfg.podDir(p.ID), r.cfg.podRunDir(p.ID)} {
			if ledger.Exists(dir) {
				t.Errorf("%s still exists", dir)
			}
		}
		if !ledger.Exists(foreign) {
			t.Error("a foreign file was removed")
		}
		_ = os.Remove(foreign)
		if keys, _ := r.images.Snapshots(t.Context()); len(keys) != 2 {
			t.Errorf("snapshots: got %v, want those of the recorded container and of the other user", keys)
		}
		_ = r.images.Release(t.Context(), "vm-something")
	})
}

// TestRecoverStarting: an interrupted start is rolled back unless the program was started.
func TestRecoverStarting(t *testing.T) {
	bothRuntimes(t, func(t *testing.T, r *rig) {
		p := r.pod()
		c := p.container(forever)
		got := c.launch()
		found := r.restart(p.known(c)) // interrupted between create and start
		if s := found.Containers[c.ID]; s.State != sandbox.StateCreated {
			t.Errorf("status after an interrupted creation: got %+v, want created", s)
		}
		if !got.Init.WaitFor(5*time.Second) || !got.Conmon.WaitFor(5*time.Second) {
			t.Error("processes of the interrupted start still run")
		}
		c.start().waitLog("up")
		h, _ := r.ledger.Find(p.ID, c.ID)
		if err := h.Set(func(s *state) { s.Phase, s.Init, s.Conmon = ledger.Starting, process.ID{}, process.ID{} }); err != nil {
			t.Fatal(err)
		}
		found = r.restart(p.known(c)) // interrupted between start and record
		if s := found.Containers[c.ID]; s.State != sandbox.StateRunning || s.Pid == 0 {
			t.Errorf("status after an unrecorded start: got %+v, want running", s)
		}
		c.stop(10 * time.Second)
		if s := c.status(); s.ExitCode != 7 {
			t.Errorf("status: got %+v, want exit code 7", s)
		}
	})
}

// TestHalfMade: a failed creation can be repeated, and its remains can be removed.
func TestHalfMade(t *testing.T) {
	r := newRig(t, "runc")
	p := r.pod()
	if err := r.CreateSandbox(t.Context(), p.Pod); err != nil { // a repeat
		t.Fatal(err)
	}
	c := &sandbox.Container{ID: newID(), ImageID: busybox, Config: &runtimeapi.ContainerConfig{
		Metadata: &runtimeapi.ContainerMetadata{Name: "c"}, Image: &runtimeapi.ImageSpec{Image: busybox}, Command: []string{"/bin/true"},
		Mounts: []*runtimeapi.Mount{{ContainerPath: "/vol", Image: &runtimeapi.ImageSpec{Image: "sha256:missing"}, Readonly: true}},
	}}
	if _, err := r.CreateContainer(t.Context(), p.Pod, c); !errdefs.IsNotFound(err) {
		t.Fatalf("CreateContainer with a missing image volume: got error %v, want ErrNotFound", err)
	}
	if s, err := r.Status(t.Context(), p.Pod, c); err != nil || s.State != sandbox.StateAbsent {
		t.Errorf("status: got %+v, error %v; want an absent container", s, err)
	}
	c.Config.Mounts[0].Image.Image = busybox
	first, err := r.CreateContainer(t.Context(), p.Pod, c)
	if err != nil {
		t.Fatal(err)
	}
	again, err := r.CreateContainer(t.Context(), p.Pod, c)
	if err != nil || len(again.Mounts) != len(first.Mounts) || again.StopSignal != first.StopSignal || again.SwapLimited != first.SwapLimited {
		t.Errorf("second CreateContainer: got %+v, error %v; want the first answer", again, err)
	}
	// If the caller of a start goes away, the container stays created.
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if err := r.StartContainer(ctx, p.Pod, c); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("StartContainer: got %v, want a deadline error", err)
	}
	if s, err := r.Status(t.Context(), p.Pod, c); err != nil || s.State != sandbox.StateCreated {
		t.Errorf("status: got %+v, error %v; want a created container", s, err)
	}
	if err := r.RemoveContainer(t.Context(), p.Pod, c); err != nil {
		t.Fatal(err)
	}
}

// TestPanicInAStart: a start that panics leaves its conmon creating the container. The container can be removed, and
// started, as if nothing had been started.
func TestPanicInAStart(t *testing.T) {
	failpoint.Needed(t)
	bothRuntimes(t, func(t *testing.T, r *rig) {
		p := r.pod()
		start := func(c *testContainer) {
			t.Helper()
			if err := failpoint.Arm("linux.start-container.conmon", "1*panic"); err != nil {
				t.Fatal(err)
			}
			err := r.StartContainer(t.Context(), p.Pod, c.Container)
			if !errdefs.IsInternal(err) {
				t.Fatalf("got %v, want a panic", err)
			}
		}
		removed := p.container(forever)
		start(removed)
		if err := r.RemoveContainer(t.Context(), p.Pod, removed.Container); err != nil {
			t.Fatal(err)
		}
		if left := oci.Monitors(r.cfg.Root)[removed.ID]; left.Pid != 0 || ledger.Exists(filepath.Join(r.cfg.ociDir(), removed.ID)) {
			t.Errorf("after the removal: got conmon %d and the runtime's state, want neither", left.Pid)
		}
		started := p.container("echo up; " + forever)
		start(started)
		started.start().waitLog("up")
	})
}

// TestRecoverSweepsProbes: the trial container of a daemon that was killed during its probe goes, with its process, its
// directory and its cgroups, also that which crun makes in a v2 hierarchy beside those of v1.
func TestRecoverSweepsProbes(t *testing.T) {
	bothRuntimes(t, func(t *testing.T, r *rig) {
		dead := exec.Command("true")
		if err := dead.Run(); err != nil {
			t.Fatal(err)
		}
		id := fmt.Sprintf("probe-%d-1", dead.Process.Pid)
		dir := filepath.Join(r.cfg.RunDir, id)
		p := r.pod()
		c := p.container(forever)
		config, err := readConfig(r.cfg.bundle(p.ID, c.ID))
		if err != nil {
			t.Fatal(err)
		}
		config.Linux.CgroupsPath = filepath.Join(r.cgroups.Parent, cgroup.Mark+id)
		err = errors.Join(os.Mkdir(dir, 0o700), ledger.WriteJSON(configFile(dir), config))
		if err == nil {
			err = r.runtime.Run(t.Context(), filepath.Join(dir, "log"), "create", "--bundle", dir, "--pid-file", filepath.Join(dir, "pid"), id)
		}
		if err != nil {
			t.Fatal(err)
		}
		pid, err := oci.ReadPid(filepath.Join(dir, "pid"))
		if err != nil {
			t.Fatal(err)
		}
		trial, err := process.Open(pid)
		if err != nil {
			t.Fatal(err)
		}
		defer trial.Close()
		if names := r.cgroups.Names(); !slices.Contains(names, id) {
			t.Errorf("cgroups: got %v, want %s among them", names, id)
		}
		r.restart(p.known(c))
		state := filepath.Join(r.cfg.ociDir(), id)
		if err := trial.Wait(t.Context()); err != nil || ledger.Exists(dir) || ledger.Exists(state) {
			t.Errorf("the trial container's process: %v; directory exists: %v; the runtime knows it: %v", err, ledger.Exists(dir),
				ledger.Exists(state))
		}
		if names := r.cgroups.Names(); slices.Contains(names, id) {
			t.Errorf("cgroups: got %v, want no %s", names, id)
		}
	})
}
