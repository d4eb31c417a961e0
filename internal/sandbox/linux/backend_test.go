package linux

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
)

// forever is a script that prints "up" and runs until SIGTERM, when it exits with code 7.
const forever = "trap 'exit 7' TERM; echo up; while :; do sleep 1000 & wait $!; done"

func TestLifecycle(t *testing.T) {
	bothRuntimes(t, func(t *testing.T, r *rig) {
		p := r.pod()
		c := p.container("echo out; echo err >&2; exit 3")
		if s := c.status(); s.State != sandbox.StateCreated {
			t.Fatalf("status before the start: got %+v, want created", s)
		}
		c.start()
		s := c.waitExit()
		if s.State != sandbox.StateExited || s.ExitCode != 3 || s.Reason != sandbox.ReasonError || s.FinishedAt.Before(s.StartedAt) ||
			s.StartedAt.IsZero() {
			t.Errorf("status after the exit: got %+v, want exit code 3, reason Error and valid times", s)
		}
		if got := c.log(); !strings.Contains(got, "stdout out\n") || !strings.Contains(got, "stderr err\n") {
			t.Errorf("log: got %q, want a line of stdout and a line of stderr", got)
		}
		if again := c.status(); again != s {
			t.Errorf("status: got %+v, want that of the event: %+v", again, s)
		}
		// A second start is a new run on the same file system.
		c.start()
		if s := c.waitExit(); s.ExitCode != 3 {
			t.Errorf("status after the second exit: got %+v, want exit code 3", s)
		}
		for range 2 {
			if err := r.RemoveContainer(t.Context(), p.Pod, c.Container); err != nil {
				t.Fatal(err)
			}
		}
		if s := c.status(); s.State != sandbox.StateAbsent {
			t.Errorf("status after the removal: got %+v, want absent", s)
		}
	})
}

func TestExitReasons(t *testing.T) {
	bothRuntimes(t, func(t *testing.T, r *rig) {
		p := r.pod()
		for name, test := range map[string]struct {
			script string
			memory int64
			code   int32
			reason string
		}{
			"completed": {"exit 0", 0, 0, sandbox.ReasonCompleted},
			"signal":    {"kill -USR1 $$; sleep 1", 0, 0, ""},
			"oom":       {"dd if=/dev/zero of=/dev/null bs=200M count=1", 16 << 20, 137, sandbox.ReasonOOMKilled},
			"oom child": {"dd if=/dev/zero of=/dev/null bs=200M count=1 & wait $!; exit 3", 16 << 20, 3, sandbox.ReasonError},
		} {
			c := p.container(test.script, func(c *runtimeapi.ContainerConfig) {
				c.Linux.Resources = &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: test.memory}
			}).start()
			s := c.waitExit()
			if test.reason != "" && (s.ExitCode != test.code || s.Reason != test.reason) {
				t.Errorf("%s: got status %+v, want exit code %d, reason %s", name, s, test.code, test.reason)
			}
		}
		c := p.container("dd if=/dev/zero of=/dev/null bs=200M count=1 & wait $!; echo killed; while :; do sleep 1; done",
			func(c *runtimeapi.ContainerConfig) {
				c.Linux.Resources = &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 16 << 20}
			}).start()
		c.waitLog("killed")
		c.stop(0)
		if s := c.status(); s.ExitCode != 137 || s.Reason != sandbox.ReasonError {
			t.Errorf("stopped long after a child was killed: got status %+v, want exit code 137, reason Error", s)
		}
	})
}

func TestStartError(t *testing.T) {
	bothRuntimes(t, func(t *testing.T, r *rig) {
		p := r.pod()
		for name, change := range map[string]func(*runtimeapi.ContainerConfig){
			"no such program": func(c *runtimeapi.ContainerConfig) { c.Command = []string{"/nowhere"} },
			"not executable":  func(c *runtimeapi.ContainerConfig) { c.Command = []string{"/etc/passwd"} },
		} {
			c := p.container("", change)
			err := r.StartContainer(t.Context(), p.Pod, c.Container)
			if !errdefs.IsFailedPrecondition(err) {
				t.Errorf("%s: StartContainer: got error %v, want ErrFailedPrecondition", name, err)
			}
			s := c.status()
			if s.State != sandbox.StateExited || s.ExitCode != sandbox.ExitStartError || s.Reason != sandbox.ReasonStartError || s.Message == "" {
				t.Errorf("%s: got status %+v, want exited with StartError and a message", name, s)
			}
			t.Log(s.Message)
		}
	})
}

func TestStop(t *testing.T) {
	bothRuntimes(t, func(t *testing.T, r *rig) {
		p := r.pod()
		polite := p.container(forever).start()
		polite.waitLog("up")
		polite.stop(20 * time.Second)
		if s := polite.status(); s.State != sandbox.StateExited || s.ExitCode != 7 {
			t.Errorf("status after the stop: got %+v, want exit code 7", s)
		}
		deaf := p.container("trap '' TERM; echo up; while :; do sleep 1; done").start()
		deaf.waitLog("up")
		began := time.Now()
		deaf.stop(300 * time.Millisecond)
		if s := deaf.status(); s.ExitCode != 137 || time.Since(began) < 300*time.Millisecond {
			t.Errorf("status after %v: got %+v, want exit code 137 after 300 ms", time.Since(began), s)
		}
		deaf.stop(0) // a repeat
		// A second call with a shorter grace ends the first one early.
		deaf.start() // and wait: SIGTERM would end the runtime's process in the container, before the program
		deaf.waitLogs("up", 2)
		first := make(chan error, 1)
		go func() { first <- r.StopContainer(t.Context(), p.Pod, deaf.Container, time.Hour) }()
		deaf.stop(0)
		if err := <-first; err != nil {
			t.Errorf("first StopContainer: %v", err)
		}
		// The end of the context ends the call, but the container is still killed.
		deaf.start()
		deaf.waitLogs("up", 3)
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		if err := r.StopContainer(ctx, p.Pod, deaf.Container, 200*time.Millisecond); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("StopContainer beyond its deadline: got error %v, want DeadlineExceeded", err)
		}
		deaf.waitExitOf(137)
	})
}

// waitExitOf waits for an event with this exit code.
func (c *testContainer) waitExitOf(code int32) {
	for {
		if s := c.waitExit(); s.ExitCode == code && c.status().State == sandbox.StateExited {
			return
		}
	}
}

func TestStopSignal(t *testing.T) {
	bothRuntimes(t, func(t *testing.T, r *rig) {
		p := r.pod()
		c := p.container("trap 'exit 9' USR1; echo up; while :; do sleep 1000 & wait $!; done", func(c *runtimeapi.ContainerConfig) {
			c.StopSignal = runtimeapi.Signal_SIGNAL_SIGUSR1
		}).start()
		c.waitLog("up")
		c.stop(20 * time.Second)
		if s := c.status(); s.ExitCode != 9 {
			t.Errorf("status: got %+v, want exit code 9", s)
		}
	})
}

func (c *testContainer) handle(t *testing.T) *handle {
	t.Helper()
	h, err := c.pod.r.ledger.Find(c.pod.ID, c.ID)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// TestC3LogPathEscapes: a log path never leads out of the log directory.
func TestC3LogPathEscapes(t *testing.T) {
	r := newRig(t, "runc")
	p := r.pod()
	outside := t.TempDir()
	for _, bad := range []string{"../x.log", "/abs/../../x.log", "a/../../x", "a:b.log", "."} {
		c := &sandbox.Container{ID: newID(), ImageID: busybox, Config: &runtimeapi.ContainerConfig{
			Metadata: &runtimeapi.ContainerMetadata{Name: "c"}, Image: &runtimeapi.ImageSpec{Image: busybox}, LogPath: bad,
		}}
		if err := r.Validate(p.Pod, c); !errdefs.IsInvalidArgument(err) {
			t.Errorf("Validate with log path %q: got error %v, want ErrInvalidArgument", bad, err)
		}
	}
	if err := os.MkdirAll(filepath.Join(p.logs, "dir"), 0o755); err != nil {
		t.Fatal(err)
	}
	for link, target := range map[string]string{"link": outside, "dir/0.log": filepath.Join(outside, "0.log"), "fifo": ""} {
		if target == "" {
			_ = unix.Mkfifo(filepath.Join(p.logs, link), 0o600)
		} else if err := os.Symlink(target, filepath.Join(p.logs, link)); err != nil {
			t.Fatal(err)
		}
	}
	for _, bad := range []string{"link/0.log", "dir/0.log", "fifo"} {
		c := p.container("echo hello", func(c *runtimeapi.ContainerConfig) { c.LogPath = bad })
		if err := r.StartContainer(t.Context(), p.Pod, c.Container); err == nil {
			t.Errorf("StartContainer with log path %q succeeded, want an error", bad)
		}
	}
	if entries, _ := os.ReadDir(outside); len(entries) > 0 {
		t.Errorf("files outside of the log directory: got %v, want none", entries)
	}
}

func TestReopenLog(t *testing.T) {
	bothRuntimes(t, func(t *testing.T, r *rig) {
		p := r.pod()
		c := p.container("echo one; cat; echo two; "+forever, func(c *runtimeapi.ContainerConfig) { c.Stdin, c.StdinOnce = true, true }).start()
		c.waitLog("one")
		// The log was not rotated, so its content must stay.
		if err := r.ReopenLog(t.Context(), p.Pod, c.Container); err != nil {
			t.Fatal(err)
		}
		c.waitLog("one")
		if err := os.Rename(c.logFile(), c.logFile()+".1"); err != nil {
			t.Fatal(err)
		}
		if err := r.ReopenLog(t.Context(), p.Pod, c.Container); err != nil {
			t.Fatal(err)
		}
		if got := c.log(); got != "" {
			t.Errorf("content of the new log: got %q, want none", got)
		}
		// The end of stdin lets the program continue.
		if err := r.Attach(t.Context(), p.Pod, c.Container,
			sandbox.AttachRequest{Stdin: strings.NewReader("in\n"), Stdout: stopAt("two")}); err == nil {
			t.Error("attach ended without the writer's error")
		}
		c.waitLog("in")
		c.waitLog("two")
		c.stop(0)
		if err := r.ReopenLog(t.Context(), p.Pod, c.Container); !errdefs.IsFailedPrecondition(err) {
			t.Errorf("ReopenLog of a stopped container: got error %v, want ErrFailedPrecondition", err)
		}
	})
}

// stopAt returns a writer that fails once it has received text.
func stopAt(text string) writerFunc {
	var got strings.Builder
	return func(p []byte) (int, error) {
		got.Write(p)
		if strings.Contains(got.String(), text) {
			return 0, errors.New("enough")
		}
		return len(p), nil
	}
}

type writerFunc func(p []byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

func TestUpdate(t *testing.T) {
	bothRuntimes(t, func(t *testing.T, r *rig) {
		p := r.pod()
		c := p.container(forever, func(c *runtimeapi.ContainerConfig) {
			c.Linux.Resources = &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 64 << 20, CpuShares: 100}
		}).start()
		c.Config.Linux.Resources.MemoryLimitInBytes = 96 << 20
		if err := r.UpdateContainer(t.Context(), p.Pod, c.Container); err != nil {
			t.Fatal(err)
		}
		check := func() {
			t.Helper()
			st, err := r.ContainerStats(t.Context(), p.Pod, c.Container)
			if err != nil {
				t.Fatal(err)
			}
			if got := st.Memory.GetAvailableBytes().GetValue() + st.Memory.GetWorkingSetBytes().GetValue(); got != 96<<20 {
				t.Errorf("memory limit: got %d bytes, want %d", got, 96<<20)
			}
		}
		check()
		c.stop(0)
		c.start()
		check()
	})
}

func TestStats(t *testing.T) {
	r := newRig(t, "runc")
	p := r.pod()
	c := p.container(forever)
	if st, err := r.ContainerStats(t.Context(), p.Pod, c.Container); err != nil || st.Cpu != nil || st.WritableLayer == nil {
		t.Errorf("stats of a created container: got %v, error %v; want only the writable layer", st, err)
	}
	c.start()
	st, err := r.ContainerStats(t.Context(), p.Pod, c.Container)
	if err != nil || st.Cpu.GetUsageCoreNanoSeconds().GetValue() == 0 || st.Memory.GetWorkingSetBytes().GetValue() == 0 {
		t.Errorf("container stats: got %v, error %v; want CPU and memory", st, err)
	}
	pod, err := r.PodStats(t.Context(), p.Pod)
	if err != nil || pod.Cpu.GetUsageCoreNanoSeconds().GetValue() == 0 || pod.Process.GetProcessCount().GetValue() == 0 {
		t.Errorf("pod stats: got %v, error %v; want CPU and processes", pod, err)
	}
	for _, target := range []*sandbox.Container{nil, c.Container} {
		got, err := r.Inspect(t.Context(), p.Pod, target)
		if err != nil || got["pid"] == nil || got["sandboxID"] != p.ID {
			t.Errorf("Inspect: got %v, error %v; want pid and sandboxID", got, err)
		}
	}
}

func TestPodLimits(t *testing.T) {
	r := newRig(t, "runc")
	p := r.pod(func(c *runtimeapi.PodSandboxConfig) {
		c.Linux.Resources = &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 64 << 20, CpuQuota: 50000, CpuPeriod: 100000, CpuShares: 512}
		c.Linux.Overhead = &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 16 << 20}
	})
	p.container(forever).start()
	st, err := r.PodStats(t.Context(), p.Pod)
	if err != nil || st.Memory.GetAvailableBytes().GetValue()+st.Memory.GetWorkingSetBytes().GetValue() != 80<<20 {
		t.Errorf("pod stats: got %v, error %v; want a memory limit of 80 MiB", st, err)
	}
}

func TestImageVolume(t *testing.T) {
	bothRuntimes(t, func(t *testing.T, r *rig) {
		p := r.pod()
		c := p.container("cat /vol/passwd; touch /vol/x || echo read-only; "+forever, func(c *runtimeapi.ContainerConfig) {
			c.Mounts = []*runtimeapi.Mount{{ContainerPath: "/vol", Image: &runtimeapi.ImageSpec{Image: busybox}, ImageSubPath: "etc",
				Readonly: true}}
		}).start()
		c.waitLog("user:x:1000")
		c.waitLog("read-only")
	})
}

func TestTerminal(t *testing.T) {
	bothRuntimes(t, func(t *testing.T, r *rig) {
		p := r.pod()
		c := p.container("stty size; "+forever, func(c *runtimeapi.ContainerConfig) { c.Tty, c.Stdin = true, true }).start()
		c.waitLog("up")
	})
}

func TestDoctor(t *testing.T) {
	r := newRig(t, "auto")
	for _, f := range Doctor(t.Context(), r.cfg, false) {
		t.Logf("%+v", f)
		if f.Required && !f.OK {
			t.Errorf("required finding: got %+v, want OK", f)
		}
	}
	broken := r.cfg
	broken.Runtime, broken.Conmon = "/nowhere/crun", "/nowhere/conmon"
	bad := 0
	for _, f := range Doctor(t.Context(), broken, false) {
		if f.Required && !f.OK {
			bad++
			if f.Remedy == "" {
				t.Errorf("finding %+v has no remedy", f)
			}
		}
	}
	if bad != 2 {
		t.Errorf("failed findings without crun and conmon: got %d, want 2", bad)
	}
	if _, err := Open(t.Context(), broken, Services{Images: r.images}); !errdefs.IsUnavailable(err) {
		t.Errorf("Open with missing programs: got %v, want ErrUnavailable", err)
	}
}

// TestNotInstalled: a node without an OCI runtime can do without this backend, unless the configuration names a program or
// pods need it.
func TestNotInstalled(t *testing.T) {
	dir := t.TempDir()
	cfg := Config{Root: filepath.Join(dir, "root"), RunDir: filepath.Join(dir, "run")}
	open := func(c Config) error {
		_, err := Open(t.Context(), c, Services{})
		return err
	}
	required := func(optional bool) bool {
		for _, f := range Doctor(t.Context(), cfg, optional) {
			if f.Subject == "linux containers" {
				return f.Required && !f.OK && f.Remedy != ""
			}
		}
		t.Error("Doctor says nothing of the missing programs")
		return false
	}
	bin := filepath.Join(dir, "bin")
	if err := os.Mkdir(bin, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", bin)
	if err := open(cfg); !errdefs.IsNotFound(err) || !strings.Contains(err.Error(), "apt-get install crun") {
		t.Errorf("Open without an OCI runtime: got %v, want not found and how to install one", err)
	}
	if _, err := os.Stat(cfg.Root); !os.IsNotExist(err) {
		t.Errorf("Open without an OCI runtime made %s (%v)", cfg.Root, err)
	}
	if required(true) || !required(false) {
		t.Error("Doctor: the programs must be required only if the node has no other backend")
	}
	for _, named := range []Config{{Runtime: "crun"}, {Runtime: "/nowhere/crun"}} {
		named.Root, named.RunDir = cfg.Root, cfg.RunDir
		if err := open(named); err == nil || errdefs.IsNotFound(err) {
			t.Errorf("Open with the runtime %s, which is missing: got %v, want an error other than not found", named.Runtime, err)
		}
	}
	if err := os.WriteFile(filepath.Join(bin, "crun"), nil, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := open(cfg); !errdefs.IsNotFound(err) || !strings.Contains(err.Error(), "conmon") {
		t.Errorf("Open without conmon: got %v, want not found", err)
	}
	named := cfg
	named.Conmon = "/nowhere/conmon"
	if err := open(named); err == nil || errdefs.IsNotFound(err) {
		t.Errorf("Open with a conmon that is missing: got %v, want an error other than not found", err)
	}
	if err := os.MkdirAll(filepath.Join(cfg.Root, strings.Repeat("0", 64)), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := open(cfg); !errdefs.IsUnavailable(err) || errdefs.IsNotFound(err) || !required(true) {
		t.Errorf("Open without conmon but with a pod: got %v, want unavailable, and a required finding", err)
	}
}

// TestSpecMakesNothing: plugins ask for the specifications of all containers at any time, also while a container is being
// removed, whose root file system would then be mounted again and stay.
func TestSpecMakesNothing(t *testing.T) {
	r := newRig(t, "crun")
	p := r.pod()
	c := p.container("true")
	if config, err := r.Spec(p.Pod, c.Container); err != nil || config.Process == nil {
		t.Fatalf("Spec of a created container = %v, %v", config, err)
	}
	if err := r.RemoveContainer(t.Context(), p.Pod, c.Container); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Spec(p.Pod, c.Container); !errdefs.IsNotFound(err) {
		t.Errorf("Spec of a removed container: got error %v, want ErrNotFound", err)
	}
	if ledger.Exists(r.cfg.bundle(p.ID, c.ID)) {
		t.Error("Spec made the bundle of a removed container again")
	}
}
