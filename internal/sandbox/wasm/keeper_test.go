package wasm

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/launch"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/test/workertest"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workers"
	"github.com/tripod-run/tripod/test/accept"
)

// TestFaultW5WorkerDies checks that a worker's death makes its pods exit with code and reason, does not affect other
// workers' pods, and starts a new worker immediately.
func TestFaultW5WorkerDies(t *testing.T) {
	r := newRig(t, func(c *Config) { c.Workers = WorkerPerNamespace })
	p, c := r.run("p", "world=grpc")
	q := r.pod("q", func(c *runtimeapi.PodSandboxConfig) { c.Metadata.Namespace = "other" })
	d := r.create(q, "world=grpc")
	r.must(r.StartContainer(r.ctx(), q, d))
	first := r.keeper.Current(r.cfg.scopeOf(p))
	r.must(unix.Kill(first.Proc.Pid, unix.SIGKILL))
	s := r.waitExit(c)
	if s.ExitCode != sandbox.ExitKilled || s.Reason != sandbox.ReasonError || !strings.Contains(s.Message, first.Name) ||
		!strings.Contains(s.Message, "signal 9") {
		t.Errorf("exit status = %+v", s)
	}
	r.wantState(q, d, sandbox.StateRunning)
	r.eventually("a new worker is running", func() bool {
		w := r.keeper.Current(first.Scope)
		return w != nil && w != first
	})
	r.must(r.StartContainer(r.ctx(), p, c))
	if got := r.greeting(); got != "hello" {
		t.Errorf("greeting after the restart = %q, want hello", got)
	}
}

// TestFaultW5WorkerIsStuck checks that a worker is killed if its connection broke and it does not answer a new one.
func TestFaultW5WorkerIsStuck(t *testing.T) {
	r := newRig(t)
	_, c := r.run("p", "world=grpc")
	w := r.keeper.Current("node")
	r.must(unix.Kill(w.Proc.Pid, unix.SIGSTOP))
	w.Conn().Close()
	if s := r.waitExit(c); s.ExitCode != sandbox.ExitKilled {
		t.Errorf("exit status = %+v", s)
	}
}

// TestFaultW5WorkerHangs checks that a worker is killed if it keeps its connection but does not respond.
func TestFaultW5WorkerHangs(t *testing.T) {
	r := newRig(t)
	_, c := r.run("p", "world=grpc")
	w := r.keeper.Current("node")
	r.probe(r.ctx(), time.Minute) // the worker responds
	r.must(unix.Kill(w.Proc.Pid, unix.SIGSTOP))
	r.eventually("the hanging worker is killed", func() bool { // repeatedly, because threads stop with a delay
		r.probe(r.ctx(), 50*time.Millisecond)
		return !w.Proc.Alive()
	})
	if s := r.waitExit(c); s.ExitCode != sandbox.ExitKilled || !strings.Contains(s.Message, "signal 9") {
		t.Errorf("exit status = %+v", s)
	}
}

// TestReconnect checks that a broken connection is replaced, and that orders survive the break.
func TestReconnect(t *testing.T) {
	r := newRig(t)
	p, c := r.run("p", "world=grpc")
	w := r.keeper.Current("node")
	for range 3 {
		before := w.Conn()
		before.Close()
		r.eventually("the connection is replaced", func() bool { return w.Conn() != before })
	}
	r.must(r.StopContainer(r.ctx(), p, c, time.Second))
	r.must(r.StartContainer(r.ctx(), p, c))
	w.Conn().Close()
	r.must(r.StopContainer(r.ctx(), p, c, time.Second)) // over a connection that has just broken
	r.wantState(p, c, sandbox.StateExited)
}

// TestFaultN1ReadoptUnnoted checks that a worker whose process was not recorded when the daemon died is recognized by
// its Hello and its command line.
func TestFaultN1ReadoptUnnoted(t *testing.T) {
	r := newRig(t)
	p, c := r.run("p", "world=grpc")
	w := r.keeper.Current("node")
	pid := w.Proc.Pid
	r.killDaemon()
	r.must(format.Write(filepath.Join(w.Dir, "worker.json"), workerRecord{Cgroup: w.Cgroup}))
	if now := r.open().Containers[c.ID]; now.State != sandbox.StateRunning || now.Pid != pid {
		t.Errorf("recovered status = %+v, want running in process %d", now, pid)
	}
	if got := r.keeper.Current("node").Proc.Pid; got != pid {
		t.Errorf("PID of the recovered worker = %d, want %d", got, pid)
	}
	r.must(r.StopContainer(r.ctx(), p, c, time.Second))
}

// TestFaultN1Readopt checks that containers continue to run, with their sockets, while the daemon is dead, and that
// exits in the meantime are recovered with their exit codes.
func TestFaultN1Readopt(t *testing.T) {
	r := newRig(t)
	p, c := r.run("p", "world=grpc")
	q, ends := r.run("q", "world=command after=300ms code=3")
	made := r.pod("made")
	created := r.create(made, "world=grpc")
	before := r.status(p, c)
	pid := r.keeper.Current("node").Proc.Pid
	socket := filepath.Join(r.keeper.Current("node").Dir, launch.ControlSocket)
	r.killDaemon()
	conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: socket})
	r.must(err)
	worker, err := workerapi.NewClient(r.ctx(), conn)
	r.must(err)
	r.eventually("the command has ended", func() bool {
		list, err := worker.List(r.ctx())
		r.must(err)
		return slices.ContainsFunc(list, func(s workerapi.Status) bool { return s.ID == ends.ID && s.State == workerapi.StateExited })
	})
	r.must(worker.Close())
	if got := r.greeting(); got != "hello" {
		t.Errorf("greeting without a daemon = %q, want hello", got)
	}
	found := r.open()
	if now := found.Containers[c.ID]; now.State != sandbox.StateRunning || !now.StartedAt.Equal(before.StartedAt) || now.Pid != pid {
		t.Errorf("recovered status of the running container = %+v, want %+v", now, before)
	}
	if now := found.Containers[ends.ID]; now.State != sandbox.StateExited || now.ExitCode != 3 {
		t.Errorf("recovered status of the exited command = %+v, want exit code 3", now)
	}
	if now := found.Containers[created.ID]; now.State != sandbox.StateCreated || !found.Sandboxes[made.ID] {
		t.Errorf("recovered status of the created container = %+v", now)
	}
	r.must(r.StopContainer(r.ctx(), p, c, time.Second))
	r.must(r.StartContainer(r.ctx(), p, c))
	r.must(r.StartContainer(r.ctx(), made, created))
	r.must(r.StartContainer(r.ctx(), q, ends))
	if s := r.waitExit(ends); s.ExitCode != 3 {
		t.Errorf("exit status of the second run = %+v, want exit code 3", s)
	}
}

// TestFaultN2WorkerDiesUnseen checks recovery after a worker was killed while the daemon was dead.
func TestFaultN2WorkerDiesUnseen(t *testing.T) {
	r := newRig(t)
	p, c := r.run("p", "world=grpc")
	w := r.keeper.Current("node")
	r.killDaemon()
	r.must(unix.Kill(w.Proc.Pid, unix.SIGKILL))
	<-w.Proc.Dead
	found := r.open()
	if s := found.Containers[c.ID]; s.State != sandbox.StateExited || s.ExitCode != sandbox.ExitKilled || s.Reason != sandbox.ReasonError ||
		!strings.Contains(s.Message, w.Name) {
		t.Errorf("recovered status = %+v", s)
	}
	r.must(r.StartContainer(r.ctx(), p, c))
	r.wantState(p, c, sandbox.StateRunning)
}

// TestReboot checks that nothing is recovered after a reboot, which leaves only the compiled code.
func TestReboot(t *testing.T) {
	r := newRig(t)
	p, c := r.run("p", "world=grpc")
	w := r.keeper.Current("node")
	r.killDaemon()
	r.must(unix.Kill(w.Proc.Pid, unix.SIGKILL))
	<-w.Proc.Dead
	r.must(os.RemoveAll(r.config.RunDir))
	found := r.open()
	if found.Sandboxes[p.ID] || found.Containers[c.ID].State != sandbox.StateAbsent {
		t.Errorf("recovered after a reboot = %+v, want nothing", found)
	}
}

// TestOrphans checks that recovery removes pods that are not in the record, and nothing else.
func TestOrphans(t *testing.T) {
	r := newRig(t)
	p, c := r.run("p", "world=grpc")
	q, _ := r.run("q", "world=grpc")
	foreign := filepath.Join(r.config.podsDir(), "not-ours")
	r.must(os.WriteFile(foreign, nil, 0o600))
	delete(r.known, q.ID)
	r.restartDaemon()
	r.wantState(p, c, sandbox.StateRunning)
	list, err := r.keeper.Current("node").Conn().List(r.ctx())
	if err != nil || len(list) != 1 || list[0].ID != p.ID {
		t.Errorf("pods of the worker = %v, %v; want only %s", list, err, p.ID)
	}
	if _, err := os.Stat(r.config.podDir(q.ID)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("Stat of the orphan's directory = %v, want ErrNotExist", err)
	}
	r.must(os.Remove(foreign))
}

// TestUpgrade checks that after an upgrade of the program, retired workers continue to run their pods, and new starts
// go to a worker of the new program, with code of its engine.
func TestUpgrade(t *testing.T) {
	own := filepath.Join(filepath.Dir(workertest.Program), "upgrade")
	if err := errors.Join(os.MkdirAll(own, 0o755), workertest.Install(filepath.Join(own, ProgramName), "1")); err != nil {
		t.Fatal(err)
	}
	r := newRig(t, func(c *Config) { c.Program = filepath.Join(own, ProgramName) })
	p, c := r.run("p", "world=grpc")
	old := r.keeper.Current("node")
	r.killDaemon()
	r.must(workertest.Install(r.config.Program, "2"))
	r.open()
	r.wantState(p, c, sandbox.StateRunning)
	if got := r.greeting(); got != "hello" {
		t.Errorf("greeting of the retired worker = %q, want hello", got)
	}
	_, d := r.run("q", "world=grpc")
	h, err := r.ledger.Find(d.ID, d.ID)
	r.must(err)
	s, l := h.Snapshot()
	if s.Worker == old.Name || l.worker.Conn().Hello().Engine != "fake engine 2" {
		t.Errorf("the new pod runs in worker %s with engine %q, want a worker with fake engine 2", s.Worker, l.worker.Conn().Hello().Engine)
	}
	r.must(r.StopContainer(r.ctx(), p, c, time.Second))
	r.must(r.StartContainer(r.ctx(), p, c))
	h, err = r.ledger.Find(c.ID, c.ID)
	r.must(err)
	if s, _ := h.Snapshot(); s.Worker == old.Name {
		t.Errorf("after its restart, the container runs in the retired worker %s", s.Worker)
	}
}

// TestWorkerModes checks which pods share a worker in each mode.
func TestWorkerModes(t *testing.T) {
	for mode, want := range map[WorkerMode]int{WorkerPerNode: 1, WorkerPerNamespace: 2, WorkerPerPod: 3} {
		t.Run(string(mode), func(t *testing.T) {
			r := newRig(t, func(c *Config) { c.Workers = mode })
			r.run("a", "world=grpc")
			r.run("b", "world=grpc")
			p := r.pod("c", func(c *runtimeapi.PodSandboxConfig) { c.Metadata.Namespace = "other" })
			c := r.create(p, "world=grpc")
			r.must(r.StartContainer(r.ctx(), p, c))
			if pids := workertest.WorkerPids(r.config.Program); len(pids) != want {
				t.Errorf("worker processes = %v, want %d", pids, want)
			}
			r.must(r.StopContainer(r.ctx(), p, c, time.Second))
			r.must(r.StartContainer(r.ctx(), p, c))
			r.must(r.RemoveSandbox(r.ctx(), p))
			delete(r.known, p.ID)
			r.eventually("a worker without pods is ended",
				func() bool { return mode == WorkerPerNode || len(workertest.WorkerPids(r.config.Program)) == want-1 })
			r.restartDaemon()
			if got := r.greeting(); mode != WorkerPerNode && got == "" {
				t.Error("no greeting after a restart of the daemon")
			}
		})
	}
}

// TestSetApart checks that a component that must not share a worker gets its own in every mode, also after a restart of
// the daemon. The worker's death affects no other pod, and the worker ends with the container.
func TestSetApart(t *testing.T) {
	r := newRig(t)
	shared, sc := r.run("shared", "world=grpc")
	apart, ac := r.run("apart", "world=grpc apart=odd")
	workerOf := func(c *sandbox.Container) *workers.Worker {
		h, err := r.ledger.Find(c.ID, c.ID)
		r.must(err)
		_, l := h.Snapshot()
		return l.worker
	}
	if w := workerOf(sc); w.Scope != scopeNode {
		t.Errorf("worker of the sharing pod = %s, want the node's", w.Name)
	}
	if w := workerOf(ac); w.Scope != ownScope(apart.ID) || w.Cgroup == "" {
		t.Errorf("worker of the other pod = %s with cgroup %q, want its own worker and cgroup", w.Name, w.Cgroup)
	}
	if info, err := r.Inspect(r.ctx(), apart, ac); err != nil || info["apart"] != "odd" {
		t.Errorf("Inspect = %v, %v; want apart=odd", info, err)
	}
	for e := range r.events {
		if e.Fallback != "" {
			if e.PodID != apart.ID || e.ContainerID != ac.ID || !strings.Contains(e.Fallback, "component path, in a worker of its own: odd") {
				t.Errorf("event %+v; want the fallback of the other pod", e)
			}
			break
		}
	}
	r.restartDaemon()
	r.must(unix.Kill(workerOf(ac).Proc.Pid, unix.SIGKILL))
	if s := r.waitExit(ac); s.ExitCode != sandbox.ExitKilled {
		t.Errorf("exit status = %+v", s)
	}
	r.wantState(shared, sc, sandbox.StateRunning)
	r.must(r.StartContainer(r.ctx(), apart, ac))
	if w := workerOf(ac); w.Scope != ownScope(apart.ID) {
		t.Errorf("worker after a restart = %s, want the pod's own", w.Name)
	}
	r.must(r.RemoveContainer(r.ctx(), apart, ac))
	if pids := workertest.WorkerPids(r.config.Program); len(pids) != 1 {
		t.Errorf("worker processes after the container was removed = %v, want only the node's", pids)
	}
}

// TestModeChanges checks that pods keep their worker when the mode changes, and restart in a worker of the new mode.
func TestModeChanges(t *testing.T) {
	r := newRig(t, func(c *Config) { c.Workers = WorkerPerNamespace })
	p, c := r.run("p", "world=grpc")
	r.killDaemon()
	r.config.Workers = WorkerPerNode
	r.open()
	r.wantState(p, c, sandbox.StateRunning)
	r.must(r.StopContainer(r.ctx(), p, c, time.Second))
	r.must(r.StartContainer(r.ctx(), p, c))
	h, err := r.ledger.Find(c.ID, c.ID)
	r.must(err)
	if s, l := h.Snapshot(); l.worker.Scope != scopeNode || !r.busy(l.worker) {
		t.Errorf("the container runs in %s, busy %v; want the node's worker, busy", s.Worker, r.busy(l.worker))
	}
	r.must(r.Close()) // must not end the container's new worker
	r.open()
	r.wantState(p, c, sandbox.StateRunning)
}

// TestOwnWorkerIsLimited checks that a pod's own worker has a cgroup below the pod's, with the container's limits,
// which is removed with the worker.
func TestOwnWorkerIsLimited(t *testing.T) {
	r := newRig(t, func(c *Config) { c.Workers = WorkerPerPod })
	p := r.pod("p")
	c := r.container(p, "world=grpc")
	c.Config.Linux.Resources = &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 16 << 20, CpuShares: 512, CpusetCpus: "0"}
	r.must(r.Validate(p, c))
	_, err := r.CreateContainer(r.ctx(), p, c)
	r.must(err)
	r.must(r.StartContainer(r.ctx(), p, c))
	h, err := r.ledger.Find(c.ID, c.ID)
	r.must(err)
	_, l := h.Snapshot()
	read := func(controller, file string) string {
		raw, err := os.ReadFile(filepath.Join(r.cgroups.Roots[r.cgroups.Hierarchy(controller)], l.worker.Cgroup, file))
		r.must(err)
		return strings.TrimSpace(string(raw))
	}
	for _, controller := range []string{"memory", "cpu", "cpuset", "pids"} {
		if got := read(controller, "cgroup.procs"); got != fmt.Sprint(l.worker.Proc.Pid) {
			t.Errorf("processes in the %s cgroup = %q, want %d", controller, got, l.worker.Proc.Pid)
		}
	}
	limits := map[[2]string]string{
		{"memory", "memory.limit_in_bytes"}: fmt.Sprint(16<<20 + 64<<20), {"cpu", "cpu.shares"}: "512", {"cpuset", "cpuset.cpus"}: "0",
	}
	if r.cgroups.V2 {
		limits = map[[2]string]string{{"memory", "memory.max"}: fmt.Sprint(16<<20 + 64<<20), {"cpuset", "cpuset.cpus"}: "0"}
	}
	for file, want := range limits {
		if got := read(file[0], file[1]); got != want {
			t.Errorf("%s = %q, want %q", file[1], got, want)
		}
	}
	if s, err := r.PodStats(r.ctx(), p); err != nil || s.GetMemory().GetWorkingSetBytes().GetValue() == 0 ||
		s.GetProcess().GetProcessCount().GetValue() == 0 {
		t.Errorf("PodStats = %v, %v; want memory and processes", s, err)
	}
	c.Config.Linux.Resources.MemoryLimitInBytes = 32 << 20
	r.must(r.UpdateContainer(r.ctx(), p, c))
	r.restartDaemon()
	r.wantState(p, c, sandbox.StateRunning)
	dirs := r.cgroups.Dirs(l.worker.Cgroup)
	r.must(r.StopContainer(r.ctx(), p, c, 0))
	r.must(r.StopSandbox(r.ctx(), p)) // a kubelet then removes the pod's cgroup
	for _, dir := range dirs {
		if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("Stat(%s) = %v, want ErrNotExist", dir, err)
		}
	}
}

// TestWorkerCannotStart checks that a pod's error has the reason why its worker cannot start.
func TestWorkerCannotStart(t *testing.T) {
	broken := filepath.Join(filepath.Dir(workertest.Program), "broken")
	script := "#!/bin/sh\n[ $1 = fingerprint ] && echo e && exit 0\necho 'no such device' >&2\nexit 3\n"
	if err := os.WriteFile(broken, []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	r := newRig(t, func(c *Config) { c.Program = broken })
	p := r.pod("p")
	_, err := r.CreateContainer(r.ctx(), p, r.container(p, "world=grpc"))
	if !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), "no such device") {
		t.Errorf("CreateContainer = %v", err)
	}
}

// TestForeignWorker checks that recovery removes a directory that looks like a worker's but has another server.
func TestForeignWorker(t *testing.T) {
	r := newRig(t)
	r.killDaemon()
	dir := filepath.Join(r.config.workersDir(), "node.7")
	r.must(os.MkdirAll(dir, 0o700))
	l, err := net.Listen("unix", filepath.Join(dir, launch.ControlSocket))
	r.must(err)
	accept.Each(t, l, func(conn net.Conn) { fmt.Fprint(conn, "HTTP/1.1 400 Bad Request\r\n\r\n") })
	r.open()
	r.run("p", "world=grpc")
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("Stat of the foreign directory = %v, want ErrNotExist", err)
	}
}
