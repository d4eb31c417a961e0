package wasm

import (
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workers"
)

// host returns a pod of another backend.
func (r *rig) host(name string, change ...func(*runtimeapi.PodSandboxConfig)) *sandbox.Pod {
	p := r.podConfig(name, change...)
	p.Handler = "linux"
	return p
}

// foreign returns a container of the pod, with an ID of its own.
func (r *rig) foreign(p *sandbox.Pod, name, words string) *sandbox.Container {
	r.Helper()
	c := r.container(p, words)
	c.ID, c.Config.Metadata.Name, c.Config.LogPath = hashOf(p.ID+name), name, name+".log"
	return c
}

// createForeign creates a foreign container and makes it known.
func (r *rig) createForeign(p *sandbox.Pod, name, words string) *sandbox.Container {
	r.Helper()
	c := r.foreign(p, name, words)
	r.must(r.Validate(p, c))
	_, err := r.CreateContainer(r.ctx(), p, c)
	r.must(err)
	k := r.known[p.ID]
	k.Pod, k.Containers = p, append(k.Containers, c)
	r.known[p.ID] = k
	r.Cleanup(func() { r.must(r.RemoveContainer(r.ctx(), p, c)) })
	return c
}

// hasWorker reports whether a foreign container has a worker.
func (r *rig) hasWorker(c *sandbox.Container) bool {
	for _, w := range r.keeper.All() {
		if w.Scope == ownScope(c.ID) {
			return true
		}
	}
	return false
}

// listed is a node's map of running containers.
type listed map[string][]string

func (l listed) Running(component string) []string { return l[component] }
func (l listed) All() map[string][]string          { return l }

// TestForeignContainers runs two containers in a pod of another backend: each has a worker of its own, which ends with the
// container and outlives the daemon.
func TestForeignContainers(t *testing.T) {
	r := newRig(t)
	p := r.host("host")
	server, job := r.createForeign(p, "server", "world=grpc life"), r.createForeign(p, "job", "world=command after=10ms code=7")
	r.must(r.StartContainer(r.ctx(), p, server))
	r.must(r.StartContainer(r.ctx(), p, job))
	if s := r.waitExit(job); s.ExitCode != 7 {
		t.Errorf("exit of the job: got %+v, want code 7", s)
	}
	r.eventually("the worker of a foreign container that has ended is gone", func() bool { return !r.hasWorker(job) })
	if got := r.greeting(); got != "hello" {
		t.Errorf("greeting = %q, want hello", got)
	}
	const name = "registry.example:greeter@1.2.0"
	if got := r.running(listed{name: {"unit"}}); !slices.Equal(got[name], []string{"unit", server.ID}) {
		t.Errorf("running containers: got %v, want that of the node's map and %s", got, server.ID)
	}
	before := r.wantState(p, server, sandbox.StateRunning)
	found := r.restartDaemon()
	if s := found.Containers[server.ID]; s.State != sandbox.StateRunning || s.Pid != before.Pid || found.Containers[job.ID].ExitCode != 7 {
		t.Errorf("after a restart of the daemon: found %+v, want the server with pid %d and the job's exit", found.Containers, before.Pid)
	}
	r.must(r.StopContainer(r.ctx(), p, server, time.Second))
	if r.hasWorker(server) {
		t.Error("the worker of a stopped guest still runs")
	}
	r.waitExit(server)
	r.must(r.StartContainer(r.ctx(), p, server)) // again, in a new worker
	w := r.keeper.Current(ownScope(server.ID))
	r.must(w.Proc.Signal(unix.SIGKILL))
	if s := r.waitExit(server); s.ExitCode != sandbox.ExitKilled {
		t.Errorf("exit after the worker was killed: got %+v", s)
	}
	r.must(r.RemoveContainer(r.ctx(), p, server))
	r.wantState(p, server, sandbox.StateAbsent)
	if _, err := os.Stat(r.config.podDir(server.ID)); !os.IsNotExist(err) {
		t.Errorf("files of a removed guest: got error %v, want none", err)
	}
}

// TestForeignContainersEndWithoutTheDaemon: containers that end, or whose worker is killed, while no daemon runs are found
// as exited, and containers that nobody knows are removed.
func TestForeignContainersEndWithoutTheDaemon(t *testing.T) {
	r := newRig(t)
	p := r.host("host")
	ends, killed, unknown := r.createForeign(p, "ends", "world=command after=300ms code=3"), r.createForeign(p, "killed", "world=grpc life"),
		r.createForeign(p, "unknown", "world=grpc life")
	for _, c := range []*sandbox.Container{ends, killed, unknown} {
		r.must(r.StartContainer(r.ctx(), p, c))
	}
	w := r.keeper.Current(ownScope(killed.ID))
	r.killDaemon()
	r.must(w.Proc.Signal(unix.SIGKILL))
	time.Sleep(500 * time.Millisecond) // pacing: no daemon is there to report the end of the command
	k := r.known[p.ID]
	k.Containers = k.Containers[:2]
	r.known[p.ID] = k
	found := r.open()
	if s := found.Containers[ends.ID]; s.State != sandbox.StateExited || s.ExitCode != 3 {
		t.Errorf("command that ended: found %+v, want exit code 3", s)
	}
	if s := found.Containers[killed.ID]; s.State != sandbox.StateExited || s.ExitCode != sandbox.ExitKilled {
		t.Errorf("server whose worker was killed: found %+v, want exit code %d", s, sandbox.ExitKilled)
	}
	r.eventually("no worker is left", func() bool { return !r.hasWorker(ends) && !r.hasWorker(killed) && !r.hasWorker(unknown) })
	r.wantState(p, unknown, sandbox.StateAbsent)
}

// TestForeignOptions: annotations with a container's name are for that container, and the pod's labels name no foreign container.
func TestForeignOptions(t *testing.T) {
	r := newRig(t)
	p := r.host("host", func(c *runtimeapi.PodSandboxConfig) {
		c.Annotations = map[string]string{"vimana.host/cleartext-port": "8080", "vimana.host/cleartext-port.b": "9090",
			"vimana.host/port.b": "9443"}
		c.Labels = map[string]string{"vimana.host/domain": "example.com", "vimana.host/server": "other.Server", "vimana.host/version": "1.0.0"}
	})
	for name, want := range map[string][2]uint16{"a": {443, 8080}, "b": {9443, 9090}} {
		o, err := r.optionsOf(p, r.foreign(p, name, "world=grpc life"))
		if err != nil || o.Port != want[0] || o.Cleartext != want[1] {
			t.Errorf("ports of %s: got %d and %d, error %v; want %v", name, o.Port, o.Cleartext, err, want)
		}
	}
	c := r.createForeign(p, "b", "world=grpc life")
	r.ports.fail = unix.EADDRINUSE
	err := r.StartContainer(r.ctx(), p, c)
	if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "9443/tcp") ||
		!strings.Contains(err.Error(), "vimana.host/port.b") {
		t.Errorf("start with a port in use: got error %v, want one with the port and the annotation", err)
	}
	if s := r.wantState(p, c, sandbox.StateExited); s.Reason != sandbox.ReasonStartError {
		t.Errorf("status: got %+v, want %s", s, sandbox.ReasonStartError)
	}
	r.eventually("the worker of a failed start is gone", func() bool { return !r.hasWorker(c) })
}

// TestForeignMemory: a foreign container's memory limit is its cgroup's, and what its worker needs is not the component's.
func TestForeignMemory(t *testing.T) {
	r := newRig(t)
	p := r.host("host", func(c *runtimeapi.PodSandboxConfig) {
		c.Linux.Resources = &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 1 << 30} // of all containers
	})
	c := r.foreign(p, "a", "world=grpc life")
	for limit, want := range map[int64]int64{0: 0, -1: -1, workers.ForeignMinimum: 8 << 20, 64 << 20: 48 << 20} {
		c.Config.Linux.Resources = &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: limit}
		if err := r.Validate(p, c); err != nil {
			t.Errorf("limit %d: %v", limit, err)
		}
		if got := workers.MemoryLimit(p, c); got != want {
			t.Errorf("memory of the component with the limit %d: got %d, want %d", limit, got, want)
		}
	}
	c.Config.Linux.Resources = &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: workers.ForeignMinimum - 1}
	if err := r.Validate(p, c); !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), "memory_limit_in_bytes") {
		t.Errorf("a limit below the minimum: got error %v, want invalid argument with the field", err)
	}
}
