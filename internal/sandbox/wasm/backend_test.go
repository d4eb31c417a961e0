package wasm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/code"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/launch"
)

// TestLife creates, starts, stops, restarts and removes a server.
func TestLife(t *testing.T) {
	r := newRig(t)
	p := r.pod("p")
	c := r.create(p, "world=grpc life")
	r.wantState(p, c, sandbox.StateCreated)
	for range 2 {
		r.must(r.StartContainer(r.ctx(), p, c))
		if s := r.wantState(p, c, sandbox.StateRunning); s.Pid == 0 || time.Since(s.StartedAt) > time.Minute {
			t.Errorf("container status = %+v", s)
		}
		if got := r.greeting(); got != "hello" {
			t.Errorf("greeting = %q, want hello", got)
		}
		r.must(r.StartContainer(r.ctx(), p, c)) // repeated
		r.must(r.StopContainer(r.ctx(), p, c, time.Second))
		if s := r.wantState(p, c, sandbox.StateExited); s.ExitCode != 0 || s.Reason != sandbox.ReasonCompleted ||
			s.FinishedAt.Before(s.StartedAt) {
			t.Errorf("container status = %+v", s)
		}
		r.must(r.StopContainer(r.ctx(), p, c, 0))
	}
	r.must(r.RemoveContainer(r.ctx(), p, c))
	r.must(r.RemoveContainer(r.ctx(), p, c))
	r.wantState(p, c, sandbox.StateAbsent)
	log, err := os.ReadFile(filepath.Join(p.Config.LogDirectory, "c.log"))
	if err != nil || strings.Count(string(log), "started main.wasm") != 2 {
		t.Errorf("log = %q, %v; want two starts", log, err)
	}
}

// TestCommandEnds checks that the exit of a command is reported once, with its exit code.
func TestCommandEnds(t *testing.T) {
	r := newRig(t)
	p, c := r.run("p", "world=command after=10ms code=7")
	s := r.waitExit(c)
	if s.State != sandbox.StateExited || s.ExitCode != 7 || s.Reason != sandbox.ReasonError {
		t.Errorf("exit status = %+v", s)
	}
	if again := r.wantState(p, c, sandbox.StateExited); again != s {
		t.Errorf("status = %+v, want %+v as reported", again, s)
	}
	if at := r.ports.address("tcp 80"); at != "" {
		t.Errorf("the command has port %s, want none", at)
	}
	r.must(r.StartContainer(r.ctx(), p, c))
	if again := r.waitExit(c); !again.StartedAt.After(s.StartedAt) {
		t.Errorf("exit status of the second run = %+v, want a start after %v", again, s.StartedAt)
	}
	select {
	case e := <-r.events:
		t.Errorf("unexpected event: %+v", e)
	default:
	}
}

// TestStopForces checks that StopContainer kills the container after its grace period or that of a later stop.
func TestStopForces(t *testing.T) {
	r := newRig(t)
	p, c := r.run("p", "deaf")
	began := time.Now()
	r.must(r.StopContainer(r.ctx(), p, c, 100*time.Millisecond))
	if s := r.status(p, c); s.ExitCode != sandbox.ExitKilled || time.Since(began) < 100*time.Millisecond {
		t.Errorf("exit status = %+v after %s, want killed after 100ms", s, time.Since(began))
	}
	r.must(r.StartContainer(r.ctx(), p, c))
	patient := make(chan error, 1)
	go func() { patient <- r.StopContainer(r.ctx(), p, c, time.Hour) }()
	r.must(r.StopContainer(r.ctx(), p, c, 0))
	r.must(<-patient)
	r.must(r.StartContainer(r.ctx(), p, c))
	ctx, cancel := context.WithTimeout(r.ctx(), 50*time.Millisecond)
	defer cancel()
	if err := r.StopContainer(ctx, p, c, time.Hour); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("StopContainer with a cancelled context = %v, want DeadlineExceeded", err)
	}
	r.wantState(p, c, sandbox.StateRunning)
}

// TestFaultI6BadComponents checks that CreateContainer reports what is wrong with a component.
func TestFaultI6BadComponents(t *testing.T) {
	r := newRig(t, func(c *Config) { c.CompileTimeout = 2 * time.Second })
	for words, want := range map[string]struct {
		is  func(error) bool
		say string
	}{
		"invalid":  {errdefs.IsInvalidArgument, `unknown import "example:none/thing"`},
		"limit":    {errdefs.IsInvalidArgument, "within the limits of this node: more than 2 GiB"},
		"slow":     {errdefs.IsInvalidArgument, "wasm.compile_timeout"},
		"mismatch": {errdefs.IsInvalidArgument, "function greet: result: string, not u32"},
		"crash":    {func(err error) bool { return !errdefs.IsInvalidArgument(err) }, "the compiler failed"},
	} {
		t.Run(words, func(t *testing.T) {
			p := r.pod(words)
			c := r.container(p, words)
			_, err := r.CreateContainer(r.ctx(), p, c)
			if err == nil || !want.is(err) || !strings.Contains(err.Error(), want.say) {
				t.Errorf("CreateContainer = %v", err)
			}
			r.wantState(p, c, sandbox.StateAbsent)
		})
	}
}

// TestFaultI8ManyWantOneComponent checks that containers of the same uncompiled image share one compilation.
func TestFaultI8ManyWantOneComponent(t *testing.T) {
	r := newRig(t)
	done := make(chan error, 20)
	for i := range cap(done) {
		p := r.pod("p" + string(rune('a'+i)))
		c := r.container(p, "many")
		go func() {
			_, err := r.CreateContainer(r.ctx(), p, c)
			done <- err
		}()
	}
	for range cap(done) {
		r.must(<-done)
	}
	r.shelf.mu.Lock()
	defer r.shelf.mu.Unlock()
	if r.shelf.opened > 2 { // once for descriptors, once to compile
		t.Errorf("the binary was opened %d times, want at most 2", r.shelf.opened)
	}
}

// TestFaultI7TamperedCode checks that damaged code, or code of another engine, is never loaded but compiled again.
func TestFaultI7TamperedCode(t *testing.T) {
	r := newRig(t)
	p, c := r.run("p", "world=grpc tampered")
	a := r.shelf.images[c.ImageID].artifact
	files, err := filepath.Glob(filepath.Join(r.cache.EntryDir(a.Wasm.Digest.String()), "*.code"))
	r.must(err)
	require.Len(t, files, 1)
	stored, record := files[0], strings.TrimSuffix(files[0], ".code")+".json"
	loaded := code.Name(r.cache.Source(r.ctx(), a), "")
	good, err := os.ReadFile(stored)
	r.must(err)
	for name, spoil := range map[string]func() error{
		"changed": func() error {
			return os.WriteFile(stored, bytes.Replace(good, []byte("grpc"), []byte("evil"), 1), 0o600)
		},
		"cut off":  func() error { return os.Truncate(stored, int64(len(good)/2)) },
		"empty":    func() error { return os.Truncate(stored, 0) },
		"a link":   func() error { return errors.Join(os.Remove(stored), os.Symlink("/etc/passwd", stored)) },
		"gone":     func() error { return os.Remove(stored) },
		"no entry": func() error { return os.Remove(record) },
		"entry of other": func() error {
			return os.WriteFile(record, []byte(`{"version":1,"digest":"sha256:0","engine":"x"}`), 0o600)
		},
		"entry is junk": func() error { return os.WriteFile(record, []byte(`{`), 0o600) },
		// Code that matches its entry but has another engine is refused by the worker.
		"other engine": func() error {
			other := "code of fake engine 0\nworld=grpc evil"
			entry := fmt.Sprintf(`{"version":1,"digest":%q,"engine":"fake engine 1","size":%d,"sha256":%q}`, a.Wasm.Digest, len(other),
				hashOf(other))
			return errors.Join(os.WriteFile(stored, []byte(other), 0o600), os.WriteFile(record, []byte(entry), 0o600))
		},
	} {
		t.Run(name, func(t *testing.T) {
			r.must(r.StopContainer(r.ctx(), p, c, 0))
			for _, w := range r.keeper.All() {
				r.must(w.Conn().Unload(r.ctx(), loaded))
				w.ForgetCode(loaded)
			}
			r.must(spoil())
			r.must(r.StartContainer(r.ctx(), p, c))
			now, err := os.ReadFile(stored)
			if err != nil || !bytes.Equal(now, good) {
				t.Errorf("cached code = %q, %v; want the original", now, err)
			}
			r.wantState(p, c, sandbox.StateRunning)
		})
	}
}

// TestFaultN5FullDisk checks that components run even if their code cannot be stored.
func TestFaultN5FullDisk(t *testing.T) {
	r := newRig(t)
	if err := os.RemoveAll(r.config.cacheDir()); err != nil {
		t.Fatal(err)
	}
	r.must(os.MkdirAll(r.config.cacheDir(), 0o700))
	r.must(unix.Mount("tmpfs", r.config.cacheDir(), "tmpfs", 0, "size=4k,nr_inodes=2"))
	defer unix.Unmount(r.config.cacheDir(), unix.MNT_DETACH)
	p, c := r.run("full", "world=grpc full "+strings.Repeat("x", 8<<10))
	r.wantState(p, c, sandbox.StateRunning)
	r.must(unix.Mount("", r.config.cacheDir(), "", unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	p, c = r.run("read-only", "world=grpc read-only")
	r.wantState(p, c, sandbox.StateRunning)
	r.must(r.StopContainer(r.ctx(), p, c, 0))
	r.must(r.StartContainer(r.ctx(), p, c))
}

// TestImageGone checks that a container can be restarted after its image was removed, even if its code is lost, and
// that code and image are released after the container was removed.
func TestImageGone(t *testing.T) {
	r := newRig(t)
	p, c := r.run("p", "world=grpc gone")
	digest := r.shelf.images[c.ImageID].artifact.Wasm.Digest.String()
	r.shelf.remove(c.ImageID)
	r.must(r.sweep(r.ctx(), time.Now()))
	r.must(r.StopContainer(r.ctx(), p, c, 0))
	r.must(r.StartContainer(r.ctx(), p, c))
	r.must(r.StopContainer(r.ctx(), p, c, 0))
	r.must(os.RemoveAll(r.config.cacheDir()))
	r.must(r.keeper.Current("node").End(r.ctx()))
	r.restartDaemon()
	r.must(r.sweep(r.ctx(), time.Now()))
	r.must(r.StartContainer(r.ctx(), p, c))
	r.must(r.RemoveSandbox(r.ctx(), p))
	delete(r.known, p.ID)
	r.must(r.sweep(r.ctx(), time.Time{})) // keeps recently used images
	if held, _ := r.shelf.Holds(r.ctx()); len(held) != 1 {
		t.Errorf("holds = %v, want one", held)
	}
	r.must(r.sweep(r.ctx(), time.Now()))
	if held, _ := r.shelf.Holds(r.ctx()); len(held) != 0 {
		t.Errorf("holds after the sweep = %v, want none", held)
	}
	if _, err := os.Stat(r.cache.EntryDir(digest)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("Stat of the removed image's code = %v, want ErrNotExist", err)
	}
}

// TestStartFails checks that a failed start is recorded as the container's exit, with the reason, and that the error
// for a port in use names the annotation.
func TestStartFails(t *testing.T) {
	r := newRig(t)
	p := r.pod("p")
	c := r.create(p, "world=grpc")
	r.ports.fail = unix.EADDRINUSE
	err := r.StartContainer(r.ctx(), p, c)
	if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "vimana.host/port") {
		t.Errorf("StartContainer = %v", err)
	}
	if s := r.wantState(p, c, sandbox.StateExited); s.Reason != sandbox.ReasonStartError || s.ExitCode != sandbox.ExitStartError ||
		s.Message == "" {
		t.Errorf("container status = %+v", s)
	}
	r.ports.fail = nil
	r.must(r.StartContainer(r.ctx(), p, c))
	gone := &sandbox.Container{ID: hashOf("nothing"), Config: &runtimeapi.ContainerConfig{}}
	if err := r.StartContainer(r.ctx(), p, gone); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("StartContainer of an unknown container = %v, want ErrFailedPrecondition", err)
	}
}

// TestAttachLogsUpdateStats checks the optional interfaces of a backend.
func TestAttachLogsUpdateStats(t *testing.T) {
	r := newRig(t)
	p, c := r.run("p", "world=grpc")
	c.Config.Linux.Resources = &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 4 << 20, CpuQuota: 5000}
	r.must(r.UpdateContainer(r.ctx(), p, c))
	s, err := r.ContainerStats(r.ctx(), p, c)
	if err != nil || s.GetMemory().GetWorkingSetBytes().GetValue() != 1<<20+shareOfWorker ||
		s.GetCpu().GetUsageCoreNanoSeconds().GetValue() != 5 {
		t.Errorf("ContainerStats = %v, %v", s, err)
	}
	if s, err := r.PodStats(r.ctx(), p); err != nil || s.GetMemory().GetWorkingSetBytes().GetValue() != 1<<20+shareOfWorker {
		t.Errorf("PodStats = %v, %v", s, err)
	}
	info, err := r.Inspect(r.ctx(), p, c)
	if err != nil || info["worker"] != "node.1" || info["component"] != "registry.example:greeter@1.2.0" {
		t.Errorf("Inspect = %v, %v", info, err)
	}
	if m := r.metrics(r.ctx()); len(m) != 1 || m[0].Component != "registry.example:greeter@1.2.0" || m[0].Stats.MemoryBytes != 1<<20 {
		t.Errorf("metrics = %+v", m)
	}
	log := filepath.Join(p.Config.LogDirectory, "c.log")
	r.must(os.Rename(log, log+".1"))
	r.must(r.ReopenLog(r.ctx(), p, c))
	if text, err := os.ReadFile(log); err != nil || !strings.Contains(string(text), "reopened") {
		t.Errorf("log = %q, %v; want the worker's line reopened", text, err)
	}
	out, attached := &launch.Tail{Limit: 100}, make(chan error, 1)
	go func() { attached <- r.Attach(r.ctx(), p, c, sandbox.AttachRequest{Stdout: out}) }()
	r.eventually("the attached client sees output", func() bool { return string(out.Bytes()) == "attached\n" })
	r.must(r.StopContainer(r.ctx(), p, c, 0))
	r.must(<-attached)
	for what, err := range map[string]error{
		"attach": r.Attach(r.ctx(), p, c, sandbox.AttachRequest{}), "reopen": r.ReopenLog(r.ctx(), p, c),
	} {
		if !errdefs.IsFailedPrecondition(err) {
			t.Errorf("%s of a stopped container = %v, want ErrFailedPrecondition", what, err)
		}
	}
	r.must(r.UpdateContainer(r.ctx(), p, c))
	if s, err := r.ContainerStats(r.ctx(), p, c); err != nil || s.Cpu != nil {
		t.Errorf("ContainerStats of a stopped container = %v, %v; want no CPU statistics", s, err)
	}
}
