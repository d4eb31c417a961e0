package harness

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/pelletier/go-toml/v2"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/until"
)

const (
	startTimeout = 30 * time.Second
	stopTimeout  = 30 * time.Second
)

// Eventually polls a condition until it returns nil. After the timeout it fails the test with the last error.
var Eventually = until.NoError

// Daemon is a tripod daemon under test. Its directories exist until the test ends; its process can come and go.
type Daemon struct {
	// Dir is the directory of the daemon's files on disk: config.toml, daemon.log, root/.
	Dir string
	// Root and State are the daemon's root and state directories. Socket is its CRI socket.
	Root, State, Socket string
	// CgroupParent is the parent cgroup for pods whose configuration names no parent.
	CgroupParent string
	// Bridge is the bridge of the embedded default network.
	Bridge string

	t       testing.TB
	config  map[string]any
	env     []string
	program string
	fake    bool
	before  Resources
	// containerd runs the pods of the default handler, if EnvDelegate is set.
	containerd *Containerd
	// systemd keeps the daemon's socket, with the option Systemd.
	systemd *serviceManager

	cmd    *exec.Cmd
	exited chan struct{} // closed when cmd has ended
	clients
}

// Option changes a daemon's settings before its start.
type Option func(*Daemon)

// Set sets a key of the configuration file, such as "linux.runtime".
func Set(key string, value any) Option {
	return func(d *Daemon) { set(d.config, key, value) }
}

// Unset removes a table of the configuration file, for a daemon that does not know it.
func Unset(table string) Option {
	return func(d *Daemon) { delete(d.config, table) }
}

// Env adds variables (NAME=VALUE) to the daemon's environment at every start. If TRIPOD_FAILPOINTS is set, here or in
// an argument of Start, the daemon runs TestBinary. Binary, which is what users get, has no fail points.
func Env(vars ...string) Option {
	return func(d *Daemon) { d.env = append(d.env, vars...) }
}

// Fake configures the handler "fake" as the default. The daemon then runs TestBinary.
func Fake() Option {
	return func(d *Daemon) {
		d.fake = true
		set(d.config, "backends.fake", true)
		set(d.config, "node.default_handler", "fake")
	}
}

// Program sets the path of the program that later starts run instead of tripod; "" means tripod again.
func (d *Daemon) Program(path string) { d.program = path }

func set(m map[string]any, key string, value any) {
	table, rest, nested := strings.Cut(key, ".")
	if !nested {
		m[key] = value
		return
	}
	if m[table] == nil {
		m[table] = map[string]any{}
	}
	set(m[table].(map[string]any), rest, value)
}

var daemons atomic.Int32

// NewDaemon prepares a daemon without starting it. When the test ends, a cleanup function removes the pods, stops the
// daemon, and fails the test if anything is left behind.
func NewDaemon(t testing.TB, opts ...Option) *Daemon {
	t.Helper()
	n := int(daemons.Add(1))
	name := fmt.Sprintf("t%d", n)
	d := &Daemon{
		t: t, Dir: filepath.Join(Dir(), name), State: "/run/" + name,
		CgroupParent: CgroupParent() + "/" + name, Bridge: "br-" + name,
	}
	if Dir() == "" {
		t.Fatal("the package needs: func TestMain(m *testing.M) { harness.Main(m) }")
	}
	d.Root, d.Socket = filepath.Join(d.Dir, "root"), filepath.Join(d.State, "tripod.sock")
	d.config = map[string]any{"root": d.Root, "state": d.State}
	set(d.config, "log.level", "debug")
	set(d.config, "grpc.socket", d.Socket)
	set(d.config, "image.hosts_dirs", []string{Registry(t).HostsDir})
	set(d.config, "network.conf_dir", filepath.Join(d.Dir, "net.d")) // empty, so that the default network applies
	set(d.config, "network.bin_dirs", []string{"/usr/lib/cni"})
	set(d.config, "network.default.bridge", d.Bridge)
	set(d.config, "network.default.subnet_v4", fmt.Sprintf("10.%d.%d.0/24", 64+n/256%64, n%256))
	set(d.config, "linux.cgroup_parent", d.CgroupParent)
	set(d.config, "cdi.spec_dirs", []string{filepath.Join(d.Dir, "cdi")})
	set(d.config, "nri.socket", d.NRISocket())
	set(d.config, "nri.plugin_path", filepath.Join(d.Dir, "plugins"))
	set(d.config, "nri.plugin_config_path", filepath.Join(d.Dir, "plugins.d"))
	if DefaultHandler() == OCIHandler {
		VMOCI(t)(d)
		set(d.config, "node.default_handler", OCIHandler)
	}
	for _, o := range opts {
		o(d)
	}
	d.before = Snapshot(nil)
	if programs := os.Getenv(EnvDelegate); programs != "" && !d.fake {
		d.delegateDefault(programs)
	}
	if err := errors.Join(os.MkdirAll(filepath.Join(d.Dir, "net.d"), 0o755), d.writeConfig()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.cleanUp)
	return d
}

// StartDaemon prepares a daemon and starts it.
func StartDaemon(t testing.TB, opts ...Option) *Daemon {
	t.Helper()
	d := NewDaemon(t, opts...)
	d.Start()
	return d
}

// Reconfigure changes the settings for later starts.
func (d *Daemon) Reconfigure(opts ...Option) {
	d.t.Helper()
	for _, o := range opts {
		o(d)
	}
	if err := d.writeConfig(); err != nil {
		d.t.Fatal(err)
	}
}

// ConfigPath returns the path of the daemon's configuration file.
func (d *Daemon) ConfigPath() string { return filepath.Join(d.Dir, "config.toml") }

// NRISocket returns the path of the socket to which plugins of the node connect.
func (d *Daemon) NRISocket() string { return filepath.Join(d.State, "nri.sock") }

// LogPath returns the path of the daemon's log, to which every start appends its standard error.
func (d *Daemon) LogPath() string { return filepath.Join(d.Dir, "daemon.log") }

func (d *Daemon) writeConfig() error {
	text, err := toml.Marshal(d.config)
	if err != nil {
		return err
	}
	return os.WriteFile(d.ConfigPath(), text, 0o600)
}

// Start starts the daemon, with additional environment variables for this start, and waits until its runtime is ready.
func (d *Daemon) Start(env ...string) {
	d.t.Helper()
	if err := d.TryStart(env...); err != nil {
		d.t.Fatal(err)
	}
}

// TryStart is like Start, for a start that can fail, for example at a fail point.
func (d *Daemon) TryStart(env ...string) error {
	return errors.Join(d.spawn(env), d.waitFor(d.Ready))
}

// StartNotReady starts the daemon and waits until it reports that its runtime is not ready.
func (d *Daemon) StartNotReady(env ...string) {
	d.t.Helper()
	answers := func() error { _, err := d.Conditions(); return err }
	if err := errors.Join(d.spawn(env), d.waitFor(answers)); err != nil {
		d.t.Fatal(err)
	}
	if err := d.Ready(); err == nil {
		d.t.Fatal("the daemon reports that its runtime is ready, want not ready")
	}
}

// binary returns the program to start with the given environment variables.
func (d *Daemon) binary(env []string) (string, error) {
	arms := func(variable string) bool { return strings.HasPrefix(variable, "TRIPOD_FAILPOINTS=") }
	switch {
	case d.program != "":
		return d.program, nil
	case d.fake || slices.ContainsFunc(d.env, arms) || slices.ContainsFunc(env, arms):
		return TestBinary()
	default:
		return Binary()
	}
}

// spawn starts the daemon's process and connects to it.
func (d *Daemon) spawn(env []string) error {
	bin, err := d.binary(env)
	if err != nil {
		return err
	}
	log, err := os.OpenFile(d.LogPath(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	c := exec.Command(bin, "daemon", "--config", d.ConfigPath())
	c.Env = append(append(os.Environ(), d.env...), env...)
	c.Stdout, c.Stderr = log, log
	c.Dir = "/"
	if d.systemd != nil {
		d.systemd.prepare(c)
	}
	if err := c.Start(); err != nil {
		return err
	}
	exited := make(chan struct{})
	d.cmd, d.exited = c, exited
	go func() {
		_ = c.Wait() // ProcessState has the result
		close(exited)
	}()
	return d.connect()
}

// waitFor waits until cond returns nil or the daemon has ended.
func (d *Daemon) waitFor(cond func() error) error {
	if d.conn == nil {
		return nil // the start failed
	}
	err := until.Poll(startTimeout, func() error {
		if !d.Running() {
			return nil
		}
		return cond()
	})
	if !d.Running() {
		return fmt.Errorf("the daemon ended before it was ready: %v\n%s", d.cmd.ProcessState, tail(d.LogPath(), 20))
	}
	return err
}

// Conditions returns the conditions in the daemon's status, by type.
func (d *Daemon) Conditions() (map[string]*runtimeapi.RuntimeCondition, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	resp, err := d.raw.Status(ctx, &runtimeapi.StatusRequest{})
	if err != nil {
		return nil, fmt.Errorf("the daemon does not answer Status: %w", err)
	}
	conditions := map[string]*runtimeapi.RuntimeCondition{}
	for _, c := range resp.GetStatus().GetConditions() {
		conditions[c.Type] = c
	}
	return conditions, nil
}

// Ready returns nil if the daemon reports that its runtime is ready.
func (d *Daemon) Ready() error {
	conditions, err := d.Conditions()
	if err == nil && !conditions[runtimeapi.RuntimeReady].GetStatus() {
		err = fmt.Errorf("the daemon is not ready: %v", conditions)
	}
	return err
}

// Running reports whether the daemon's process is running.
func (d *Daemon) Running() bool {
	if d.cmd == nil {
		return false
	}
	select {
	case <-d.exited:
		return false
	default:
		return true
	}
}

// Pid returns the daemon's process ID.
func (d *Daemon) Pid() int { return d.cmd.Process.Pid }

// Kill sends SIGKILL and waits until the process has ended.
func (d *Daemon) Kill() {
	d.t.Helper()
	d.end(syscall.SIGKILL)
}

// Stop sends SIGTERM and waits until the process has ended. It fails the test if the exit code is not 0.
func (d *Daemon) Stop() {
	d.t.Helper()
	if !d.Running() {
		return
	}
	if d.end(syscall.SIGTERM); d.cmd.ProcessState.ExitCode() != 0 {
		d.t.Errorf("the daemon ended with %v after SIGTERM, want exit code 0", d.cmd.ProcessState)
	}
}

// Restart stops the daemon, if it is running, and starts it again, with additional environment variables for this start
// only.
func (d *Daemon) Restart(env ...string) {
	d.t.Helper()
	d.Stop()
	d.Start(env...)
}

// WaitExit waits until the daemon ends by itself, for example at a fail point, and returns the state of the ended
// process.
func (d *Daemon) WaitExit(timeout time.Duration) *os.ProcessState {
	d.t.Helper()
	select {
	case <-d.exited:
	case <-time.After(timeout):
		d.t.Fatalf("the daemon is still running after %v", timeout)
	}
	return d.cmd.ProcessState
}

func (d *Daemon) end(sig syscall.Signal) {
	d.t.Helper()
	d.disconnect()
	if d.cmd == nil {
		return
	}
	_ = d.cmd.Process.Signal(sig)
	select {
	case <-d.exited:
	case <-time.After(stopTimeout):
		_ = d.cmd.Process.Signal(syscall.SIGQUIT) // makes the daemon dump its goroutines to the log
		d.t.Errorf("the daemon did not end within %v of signal %v", stopTimeout, sig)
		select {
		case <-d.exited:
		case <-time.After(time.Second):
			_ = d.cmd.Process.Kill()
			<-d.exited
		}
	}
}

// AwaitRemovals waits until the daemon has removed the files of removed containers, which it does in the background. A
// daemon that stops earlier leaves the rest to the next one.
func (d *Daemon) AwaitRemovals() {
	d.t.Helper()
	err := until.Poll(10*time.Second, func() error {
		left, err := filepath.Glob(filepath.Join(d.Root, "image", "containers", ".gone-*"))
		if err == nil && len(left) > 0 {
			err = fmt.Errorf("not yet removed: %s", strings.Join(left, ", "))
		}
		return err
	})
	if err != nil {
		d.t.Error(err)
	}
}

// cleanUp removes the pods, stops the daemon, checks for leaks and, if the test failed, prints the daemon's log.
func (d *Daemon) cleanUp() {
	if d.Running() {
		if err := d.RemoveAllPods(); err != nil {
			d.t.Errorf("removing the test's pods: %v", err)
		}
		d.AwaitRemovals()
	}
	d.Stop()
	d.EndCarriers()
	removeBridge(d.Bridge)
	if d.containerd != nil {
		d.containerd.cleanUp()
	}
	if err := until.Poll(5*time.Second, func() error { return d.before.Leaks(Snapshot(d)) }); err != nil {
		d.t.Errorf("left behind:\n%v", err)
	}
	d.before.killNew() // so that the next test starts clean
	if d.t.Failed() {
		d.t.Logf("log of the daemon (%s):\n%s", d.Dir, tail(d.LogPath(), 200))
	}
	os.RemoveAll(d.Dir)
	os.RemoveAll(d.State)
}

// tail returns the last n lines of a file.
func tail(path string, n int) string {
	data, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	lines := bytes.SplitAfter(data, []byte("\n"))
	if len(lines) > n {
		return fmt.Sprintf("… %d lines before\n%s", len(lines)-n, bytes.Join(lines[len(lines)-n:], nil))
	}
	return string(data)
}

// DaemonLog returns the daemon's log so far.
func (d *Daemon) DaemonLog() string {
	data, err := os.ReadFile(d.LogPath())
	if err != nil {
		return err.Error()
	}
	return string(data)
}
