package wasm

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/keys"
	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/annotations"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/certificates"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/egress"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
	"github.com/tripod-run/tripod/internal/stats"
)

const importsHTTP = "import=wasi:http/outgoing-handler@0.2.3#handle"

// TestCallsOut: which imports need a dialer. A component that only names the types of sockets does not.
func TestCallsOut(t *testing.T) {
	for name, want := range map[string]bool{
		"wasi:http/outgoing-handler@0.2.3": true, "wasi:sockets/tcp-create-socket@0.2.0": true, "wasi:sockets/udp-create-socket@0.2.12": true,
		"wasi:sockets/ip-name-lookup@0.2.1": true, "wasi:sockets/tcp@0.2.0": false, "wasi:sockets/instance-network@0.2.0": false,
		"wasi:http/types@0.2.3": false,
	} {
		if got := imports(workerapi.Loaded{Imports: []string{"wasi:io/poll@0.2.0", name}}, egressInterfaces...); got != want {
			t.Errorf("imports(%s, egressInterfaces) = %v, want %v", name, got, want)
		}
	}
}

// onHostNetwork puts a pod on the node's network, and gives it egress rules.
func onHostNetwork(r *rig, name, rules string) *sandbox.Pod {
	p := r.podConfig(name, func(c *runtimeapi.PodSandboxConfig) {
		if rules != "" {
			c.Annotations["vimana.host/egress"] = rules
		}
	})
	p.Netns = ""
	r.must(r.Validate(p, nil))
	r.known[p.ID] = sandbox.Known{Pod: p}
	r.must(r.CreateSandbox(r.ctx(), p))
	return p
}

// dialers returns the directories of the dialers.
func (r *rig) dialersLeft() []string {
	dirs, err := filepath.Glob(filepath.Join(r.config.dialersDir(), "*"))
	r.must(err)
	return dirs
}

// killDialer kills the dialer.
func (r *rig) killDialer() {
	r.Helper()
	r.killIn(r.dialersLeft()[0])
}

// workerRecord is the record in the directory of a worker or a dialer.
type workerRecord struct {
	Process process.ID `json:"process"`
	Cgroup  string     `json:"cgroup"`
}

func (r *rig) recordIn(dir string) (record workerRecord) {
	r.Helper()
	r.must(format.Read(filepath.Join(dir, "worker.json"), &record))
	return record
}

// killIn kills the process that is recorded in a directory.
func (r *rig) killIn(dir string) {
	r.Helper()
	proc, err := process.Adopt(r.recordIn(dir).Process)
	r.must(err)
	r.must(proc.Signal(unix.SIGKILL))
	<-proc.Dead
}

// connects lets a container call out and returns the result.
func (r *rig) connects(p *sandbox.Pod, c *sandbox.Container) string {
	r.Helper()
	log := filepath.Join(p.Config.GetLogDirectory(), c.Config.GetLogPath())
	r.must(os.Remove(log))
	r.must(r.ReopenLog(r.ctx(), p, c))
	raw, err := os.ReadFile(log)
	r.must(err)
	_, result, _ := strings.Cut(string(raw), "connect: ")
	return strings.TrimSpace(result)
}

// TestEgress: a pod that imports outgoing HTTP gets a connection to the dialer, which outlives the daemon. When the
// dialer dies, the pod gets another one, also if no daemon was running then.
func TestEgress(t *testing.T) {
	r := newRig(t)
	server, err := net.Listen("tcp", "127.0.0.1:0")
	r.must(err)
	defer server.Close()
	words := importsHTTP + " connect=" + server.Addr().String()

	p := onHostNetwork(r, "caller", "127.0.0.1")
	c := r.create(p, words)
	r.must(r.StartContainer(r.ctx(), p, c))
	if got := r.connects(p, c); got != "<nil>" {
		t.Fatalf("connect = %s", got)
	}
	byDefault := onHostNetwork(r, "default", "")
	c2 := r.create(byDefault, words)
	r.must(r.StartContainer(r.ctx(), byDefault, c2))
	if got := r.connects(byDefault, c2); !strings.Contains(got, "do not allow") {
		t.Errorf("connect to the node's loopback without an annotation = %s", got)
	}
	if dirs := r.dialersLeft(); len(dirs) != 1 {
		t.Fatalf("dialers: %v, want one for all pods", dirs)
	}
	r.restartDaemon()
	if got := r.connects(p, c); got != "<nil>" {
		t.Errorf("connect after a restart of the daemon = %s", got)
	}
	r.killDialer()
	r.eventually("the pod gets another dialer", func() bool { return r.connects(p, c) == "<nil>" })
	r.killDaemon()
	r.killDialer()
	r.open()
	r.eventually("the pod gets another dialer from the next daemon", func() bool { return r.connects(p, c) == "<nil>" })
}

// TestNoDialerForAWhile: when no dialer can start, upkeep connects the pod later.
func TestNoDialerForAWhile(t *testing.T) {
	r := newRig(t)
	server, err := net.Listen("tcp", "127.0.0.1:0")
	r.must(err)
	defer server.Close()
	p := onHostNetwork(r, "caller", "127.0.0.1")
	c := r.create(p, importsHTTP+" connect="+server.Addr().String())
	r.must(r.StartContainer(r.ctx(), p, c))
	dir, name := r.config.dialersDir(), filepath.Base(r.dialersLeft()[0])
	r.must(os.Rename(dir, dir+".away"))
	r.must(os.WriteFile(dir, nil, 0o600)) // no dialer can have a directory in it
	r.killIn(filepath.Join(dir+".away", name))
	r.eventually("the dialer's end is noticed", func() bool { return !r.dialers.Alive(name) })
	r.reconnectAll(r.ctx())
	if got := r.connects(p, c); !strings.Contains(got, "ended") {
		t.Errorf("connect without a dialer = %s", got)
	}
	r.must(os.Remove(dir))
	r.must(os.RemoveAll(dir + ".away"))
	r.must(os.MkdirAll(dir, 0o700))
	r.maintain(r.ctx())
	r.eventually("the pod gets another dialer", func() bool { return r.connects(p, c) == "<nil>" })
}

// TestDialerDiesDuringTheStart: a pod whose dialer dies before the worker has the pod gets another one.
func TestDialerDiesDuringTheStart(t *testing.T) {
	r := newRig(t)
	server, err := net.Listen("tcp", "127.0.0.1:0")
	r.must(err)
	defer server.Close()
	other := onHostNetwork(r, "other", "127.0.0.1") // keeps the next dialer from ending as idle
	r.must(r.StartContainer(r.ctx(), other, r.create(other, importsHTTP)))
	p := onHostNetwork(r, "caller", "127.0.0.1")
	c := r.create(p, importsHTTP+" slowstart connect="+server.Addr().String())
	started := make(chan error, 1)
	go func() { started <- r.StartContainer(r.ctx(), p, c) }()
	r.eventually("the start has a dialer", func() bool {
		h, err := r.ledger.Find(p.ID, c.ID)
		r.must(err)
		s, _ := h.Snapshot()
		return s.Dialer != ""
	})
	r.killDialer()
	r.must(<-started)
	r.eventually("the pod gets another dialer", func() bool { return r.connects(p, c) == "<nil>" })
}

// TestDialerIsLimited: the dialer's cgroup has a memory limit.
func TestDialerIsLimited(t *testing.T) {
	r := newRig(t)
	p := onHostNetwork(r, "caller", "*")
	r.must(r.StartContainer(r.ctx(), p, r.create(p, importsHTTP)))
	const share = 4 // one part in so many
	limit, err := r.cgroups.MemoryLimit(r.recordIn(r.dialersLeft()[0]).Cgroup)
	r.must(err)
	if all := stats.NodeMemory(); limit == 0 || limit > all/share || limit < all/share/2 {
		t.Errorf("limit = %d bytes of %d, want a part in %d", limit, all, share)
	}
}

// TestEgressNeedsAnImportAndRules: no dialer runs for pods that cannot use it.
func TestEgressNeedsAnImportAndRules(t *testing.T) {
	r := newRig(t)
	for name, rules := range map[string]string{"no import": "*", "no rules": egress.None} {
		p := onHostNetwork(r, name, rules)
		words := importsHTTP
		if name == "no import" {
			words = "world=grpc"
		}
		r.must(r.StartContainer(r.ctx(), p, r.create(p, words)))
	}
	module := onHostNetwork(r, "module", "")
	c := r.container(module, importsHTTP+" world=command")
	c.Config.Annotations = map[string]string{keys.EdgeChannels: `[]`}
	r.must(r.Validate(module, c))
	_, err := r.CreateContainer(r.ctx(), module, c)
	r.must(err)
	r.known[module.ID] = sandbox.Known{Pod: module, Containers: []*sandbox.Container{c}}
	r.must(r.StartContainer(r.ctx(), module, c))
	if dirs := r.dialersLeft(); len(dirs) > 0 {
		t.Errorf("dialers: %v, want none", dirs)
	}
}

func TestEgressAnnotations(t *testing.T) {
	r := newRig(t)
	for _, c := range []struct{ key, value, want string }{
		{"egress", "10.0.0.0/33", `annotation vimana.host/egress: "10.0.0.0/33": `},
		{"egress", "", `annotation vimana.host/egress: "": `},
		{"egress-ca", "ca.pem", "annotation vimana.host/egress-ca: "},
		{"egress-ca", "/etc/ca.pem", "the container has no mount with the file"},
	} {
		p := r.podConfig("invalid", func(config *runtimeapi.PodSandboxConfig) { config.Annotations["vimana.host/"+c.key] = c.value })
		err := r.Validate(p, r.container(p, "x"))
		if !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %q: Validate = %v, want %q", c.key, c.value, err, c.want)
		}
	}
}

// TestEgressCA: the file is opened below its mount, and checked.
func TestEgressCA(t *testing.T) {
	dir := t.TempDir()
	mounts := []*runtimeapi.Mount{{ContainerPath: "/a", HostPath: "/nonexistent"}, {ContainerPath: "/a/b/", HostPath: dir}}
	o := annotations.Options{EgressCA: "/a/b/ca.pem"}
	if _, err := openRoots(o, mounts); err == nil {
		t.Error("openRoots opened a missing file")
	}
	if err := os.WriteFile(filepath.Join(dir, "ca.pem"), []byte("junk"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := openRoots(o, mounts); err == nil || !strings.Contains(err.Error(), "no certificate") {
		t.Errorf("openRoots(junk) = %v", err)
	}
	a := certificates.NewAuthority(dir)
	if _, _, _, err := a.Issue(t.Context(), nil, []string{"x"}); err != nil {
		t.Fatal(err)
	}
	o.EgressCA = "/a/b/ca.crt"
	file, err := openRoots(o, mounts)
	if err != nil || file == nil {
		t.Fatalf("openRoots = %v", err)
	}
	file.Close()
}
