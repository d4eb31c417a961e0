package harness

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/until"
)

// EnvDelegate names a containerd. If it is set, each daemon delegates the default handler to a containerd of its own, so
// that the pods of the tests run there (make test-delegate). The programs of a containerd are in one directory.
const EnvDelegate = "TRIPOD_TEST_DELEGATE"

// Containerd is a containerd for tests. Its pods have a bridge and a cgroup of their own.
type Containerd struct {
	// Socket is its CRI socket.
	Socket string

	t      testing.TB
	dir    string
	bridge string
	cmd    *exec.Cmd
	exited chan struct{}
}

// containerdConfig is the configuration of a containerd 1.6 and later: directory, run directory, socket, pause image,
// registry hosts, CNI directory.
const containerdConfig = `version = 2
root = "%[1]s/root"
state = "%[2]s"
oom_score = 0
disabled_plugins = ["io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.aufs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.tracing.processor.v1.otlp", "io.containerd.internal.v1.tracing"]
[grpc]
address = "%[3]s"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "%[4]s"
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".registry]
config_path = "%[5]s"
[plugins."io.containerd.grpc.v1.cri".cni]
conf_dir = "%[1]s/net.d"
bin_dir = "/usr/lib/cni"
`

const containerdNetwork = `{"cniVersion": "1.0.0", "name": "%[1]s", "plugins": [
  {"type": "bridge", "bridge": "%[1]s", "isGateway": true, "ipMasq": true, "hairpinMode": true,
   "ipam": {"type": "host-local", "ranges": [[{"subnet": "%[2]s"}]], "routes": [{"dst": "0.0.0.0/0"}], "dataDir": "%[3]s/leases"}},
  {"type": "portmap", "capabilities": {"portMappings": true}}]}
`

// StartContainerd starts a containerd with the programs in a directory. Its pods are at a bridge, with addresses from a
// subnet.
func StartContainerd(t testing.TB, programs, name, bridge, subnet string) *Containerd {
	t.Helper()
	c := &Containerd{t: t, dir: filepath.Join(Dir(), name), Socket: "/run/" + name + "/containerd.sock", bridge: bridge}
	config := fmt.Sprintf(containerdConfig, c.dir, "/run/"+name, c.Socket, Pause, Registry(t).HostsDir)
	network := fmt.Sprintf(containerdNetwork, c.bridge, subnet, c.dir)
	for path, text := range map[string]string{"config.toml": config, "net.d/10-test.conflist": network} {
		path = filepath.Join(c.dir, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	c.Start(programs)
	return c
}

// Start starts the process with the programs in a directory, and waits until it answers.
func (c *Containerd) Start(programs string) {
	c.t.Helper()
	log, err := os.OpenFile(filepath.Join(c.dir, "containerd.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		c.t.Fatal(err)
	}
	defer log.Close()
	c.cmd = exec.Command(filepath.Join(programs, "containerd"), "--config", filepath.Join(c.dir, "config.toml"), "--log-level", "warn")
	c.cmd.Env = append(os.Environ(), "PATH="+programs+":"+os.Getenv("PATH"))
	c.cmd.Stdout, c.cmd.Stderr = log, log
	if err := c.cmd.Start(); err != nil {
		c.t.Fatal(err)
	}
	exited := make(chan struct{})
	c.exited = exited
	go func() {
		_ = c.cmd.Wait()
		close(exited)
	}()
	conn, err := Dial(c.Socket)
	if err != nil {
		c.t.Fatal(err)
	}
	defer conn.Close()
	Eventually(c.t, startTimeout, func() error {
		_, err := runtimeapi.NewRuntimeServiceClient(conn).Version(c.t.Context(), &runtimeapi.VersionRequest{})
		return err
	})
}

// Signal sends a signal to the process.
func (c *Containerd) Signal(s syscall.Signal) {
	c.t.Helper()
	if err := c.cmd.Process.Signal(s); err != nil {
		c.t.Fatal(err)
	}
}

// Stop ends the process. Its pods run on.
func (c *Containerd) Stop() {
	c.t.Helper()
	_ = c.cmd.Process.Signal(syscall.SIGCONT)
	_ = c.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-c.exited:
	case <-time.After(stopTimeout):
		c.t.Errorf("containerd did not end within %v of SIGTERM", stopTimeout)
		_ = c.cmd.Process.Kill()
		<-c.exited
	}
}

// cleanUp stops containerd and removes its files. Its pods must have been removed.
func (c *Containerd) cleanUp() {
	c.Stop()
	removeBridge(c.bridge)
	if c.t.Failed() {
		c.t.Logf("log of containerd:\n%s", tail(filepath.Join(c.dir, "containerd.log"), 50))
	}
	for path := range mounts() {
		if path, _, _ := strings.Cut(path, " "); strings.HasPrefix(path, c.dir) || strings.HasPrefix(path, filepath.Dir(c.Socket)) {
			_ = syscall.Unmount(path, syscall.MNT_DETACH)
		}
	}
	_ = until.Poll(time.Second, func() error { return os.RemoveAll(c.dir) })
	_ = os.RemoveAll(filepath.Dir(c.Socket))
}

// delegateDefault makes the daemon delegate the default handler to a containerd of its own. Its pods are at the daemon's
// bridge, where tests look for them.
func (d *Daemon) delegateDefault(programs string) {
	d.t.Helper()
	d.containerd = StartContainerd(d.t, programs, filepath.Base(d.Dir)+"-containerd", d.Bridge,
		d.config["network"].(map[string]any)["default"].(map[string]any)["subnet_v4"].(string))
	Delegate(d.containerd.Socket, "")(d)
}

// Delegate configures one CRI endpoint with handlers.
func Delegate(socket string, handlers ...string) Option {
	return Set("delegate", []map[string]any{{"name": "containerd", "endpoint": socket, "handlers": handlers}})
}

// Containerd returns the daemon's containerd; nil unless EnvDelegate is set.
func (d *Daemon) Containerd() *Containerd { return d.containerd }
