package harness

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Pod is a sandbox that a test runs. Its methods fail the test on error; for calls that are expected to fail, use
// Daemon.CRI or Daemon.Runtime.
type Pod struct {
	ID     string
	Config *runtimeapi.PodSandboxConfig

	t testing.TB
	d *Daemon
}

// Container is a container of a Pod.
type Container struct {
	ID     string
	Config *runtimeapi.ContainerConfig
	Pod    *Pod
}

// PodOption changes a pod's configuration.
type PodOption func(*runtimeapi.PodSandboxConfig)

// ContainerOption changes a container's configuration.
type ContainerOption func(*runtimeapi.ContainerConfig)

var uids atomic.Int64

// PodConfig returns the configuration of a pod in the namespace "test", with its own UID and log directory. As in the
// kubelet's pods, each container has its own PID namespace, and the containers share the other namespaces.
func PodConfig(t testing.TB, name string, opts ...PodOption) *runtimeapi.PodSandboxConfig {
	t.Helper()
	uid := fmt.Sprintf("%s-uid-%d", name, uids.Add(1))
	c := &runtimeapi.PodSandboxConfig{
		Metadata:     &runtimeapi.PodSandboxMetadata{Name: name, Uid: uid, Namespace: "test"},
		LogDirectory: filepath.Join(Dir(), "logs", uid),
		Labels:       map[string]string{"test": filepath.Base(t.Name())},
		Linux: &runtimeapi.LinuxPodSandboxConfig{SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{
			NamespaceOptions: &runtimeapi.NamespaceOption{Pid: runtimeapi.NamespaceMode_CONTAINER},
		}},
	}
	for _, o := range opts {
		o(c)
	}
	return c
}

// HostNetwork puts the pod into the node's network namespace.
func HostNetwork() PodOption {
	return Namespaces(func(n *runtimeapi.NamespaceOption) { n.Network = runtimeapi.NamespaceMode_NODE })
}

// Namespaces changes the pod's namespace options.
func Namespaces(change func(*runtimeapi.NamespaceOption)) PodOption {
	return func(c *runtimeapi.PodSandboxConfig) { change(c.Linux.SecurityContext.NamespaceOptions) }
}

// ContainerConfig returns the configuration of a container that logs to NAME.log in the pod's log directory.
func ContainerConfig(name, image string, opts ...ContainerOption) *runtimeapi.ContainerConfig {
	c := &runtimeapi.ContainerConfig{
		Metadata: &runtimeapi.ContainerMetadata{Name: name},
		Image:    &runtimeapi.ImageSpec{Image: image},
		LogPath:  name + ".log",
		Linux: &runtimeapi.LinuxContainerConfig{SecurityContext: &runtimeapi.LinuxContainerSecurityContext{
			NamespaceOptions: &runtimeapi.NamespaceOption{Pid: runtimeapi.NamespaceMode_CONTAINER},
		}},
	}
	for _, o := range opts {
		o(c)
	}
	return c
}

func Command(argv ...string) ContainerOption {
	return func(c *runtimeapi.ContainerConfig) { c.Command = argv }
}

// Shell makes the container run a script.
func Shell(script string) ContainerOption { return Command("sh", "-c", script) }

// Sleep makes the container run for an hour, or until SIGTERM.
func Sleep() ContainerOption { return Shell("trap 'exit 0' TERM; sleep 3600 & wait") }

// Security changes the container's security context.
func Security(change func(*runtimeapi.LinuxContainerSecurityContext)) ContainerOption {
	return func(c *runtimeapi.ContainerConfig) { change(c.Linux.SecurityContext) }
}

// RunPod runs a pod with the default handler.
func (d *Daemon) RunPod(t testing.TB, config *runtimeapi.PodSandboxConfig) *Pod {
	t.Helper()
	return d.RunPodWith(t, config, "")
}

// RunPodWith runs a pod with the named handler.
func (d *Daemon) RunPodWith(t testing.TB, config *runtimeapi.PodSandboxConfig, handler string) *Pod {
	t.Helper()
	if err := os.MkdirAll(config.LogDirectory, 0o755); err != nil {
		t.Fatal(err)
	}
	if d.containerd != nil && config.GetLinux().GetCgroupParent() == "" {
		config.Linux.CgroupParent = d.CgroupParent // containerd has no default below the test's cgroup
	}
	id, err := d.Runtime().RunPodSandbox(context.Background(), config, handler)
	if err != nil {
		t.Fatalf("RunPodSandbox %s: %v", config.GetMetadata().GetName(), err)
	}
	return &Pod{ID: id, Config: config, t: t, d: d}
}

// Pull pulls an image and returns its ID.
func (d *Daemon) Pull(t testing.TB, image string) string {
	t.Helper()
	ref, err := d.Images().PullImage(context.Background(), &runtimeapi.ImageSpec{Image: image}, nil, nil)
	if err != nil {
		t.Fatalf("PullImage %s: %v", image, err)
	}
	return ref
}

// ensureImage pulls an image unless the daemon has it.
func (d *Daemon) ensureImage(t testing.TB, spec *runtimeapi.ImageSpec) {
	t.Helper()
	resp, err := d.Images().ImageStatus(context.Background(), spec, false)
	if err != nil {
		t.Fatalf("ImageStatus %s: %v", spec.GetImage(), err)
	}
	if resp.Image == nil {
		d.Pull(t, spec.GetImage())
	}
}

// Create creates a container and pulls its image if necessary.
func (p *Pod) Create(config *runtimeapi.ContainerConfig) *Container {
	p.t.Helper()
	p.d.ensureImage(p.t, config.Image)
	id, err := p.d.Runtime().CreateContainer(context.Background(), p.ID, config, p.Config)
	if err != nil {
		p.t.Fatalf("CreateContainer %s: %v", config.GetMetadata().GetName(), err)
	}
	return &Container{ID: id, Config: config, Pod: p}
}

// Run creates and starts a container.
func (p *Pod) Run(config *runtimeapi.ContainerConfig) *Container {
	p.t.Helper()
	c := p.Create(config)
	c.Start()
	return c
}

func (p *Pod) Status() *runtimeapi.PodSandboxStatus {
	p.t.Helper()
	resp, err := p.d.Runtime().PodSandboxStatus(context.Background(), p.ID, false)
	if err != nil {
		p.t.Fatalf("PodSandboxStatus: %v", err)
	}
	return resp.Status
}

// MachinePid returns the PID of the pod's machine.
func (p *Pod) MachinePid() int {
	p.t.Helper()
	resp, err := p.d.CRI().PodSandboxStatus(context.Background(), &runtimeapi.PodSandboxStatusRequest{PodSandboxId: p.ID, Verbose: true})
	if err != nil {
		p.t.Fatal(err)
	}
	var info struct{ Pid int }
	if err := json.Unmarshal([]byte(resp.Info["info"]), &info); err != nil || info.Pid == 0 {
		p.t.Fatalf("verbose status: got %q, error %v; want a PID", resp.Info["info"], err)
	}
	return info.Pid
}

// IP returns the pod's primary address.
func (p *Pod) IP() string {
	p.t.Helper()
	ip := p.Status().GetNetwork().GetIp()
	if ip == "" {
		p.t.Fatal("the pod has no IP")
	}
	return ip
}

func (p *Pod) Stop() {
	p.t.Helper()
	if err := p.d.Runtime().StopPodSandbox(context.Background(), p.ID); err != nil {
		p.t.Fatalf("StopPodSandbox: %v", err)
	}
}

// Remove stops and removes the pod.
func (p *Pod) Remove() {
	p.t.Helper()
	p.Stop()
	if err := p.d.Runtime().RemovePodSandbox(context.Background(), p.ID); err != nil {
		p.t.Fatalf("RemovePodSandbox: %v", err)
	}
}

func (c *Container) Start() {
	c.Pod.t.Helper()
	if err := c.Pod.d.Runtime().StartContainer(context.Background(), c.ID); err != nil {
		c.Pod.t.Fatalf("StartContainer %s: %v", c.name(), err)
	}
}

// Stop stops the container. The grace period is rounded down to whole seconds.
func (c *Container) Stop(grace time.Duration) {
	c.Pod.t.Helper()
	if err := c.Pod.d.Runtime().StopContainer(context.Background(), c.ID, int64(grace/time.Second)); err != nil {
		c.Pod.t.Fatalf("StopContainer %s: %v", c.name(), err)
	}
}

func (c *Container) Remove() {
	c.Pod.t.Helper()
	if err := c.Pod.d.Runtime().RemoveContainer(context.Background(), c.ID); err != nil {
		c.Pod.t.Fatalf("RemoveContainer %s: %v", c.name(), err)
	}
}

func (c *Container) name() string { return c.Config.GetMetadata().GetName() }

func (c *Container) Status() *runtimeapi.ContainerStatus {
	c.Pod.t.Helper()
	resp, err := c.Pod.d.Runtime().ContainerStatus(context.Background(), c.ID, false)
	if err != nil {
		c.Pod.t.Fatalf("ContainerStatus %s: %v", c.name(), err)
	}
	return resp.Status
}

// WaitState waits until the container is in a state and returns its status.
func (c *Container) WaitState(state runtimeapi.ContainerState) *runtimeapi.ContainerStatus {
	c.Pod.t.Helper()
	var s *runtimeapi.ContainerStatus
	Eventually(c.Pod.t, 30*time.Second, func() error {
		if s = c.Status(); s.State != state {
			return fmt.Errorf("container %s is %v, want %v", c.name(), s.State, state)
		}
		return nil
	})
	return s
}

// WaitExit waits until the container has exited and returns its status. It fails the test unless the exit code is the
// given one.
func (c *Container) WaitExit(code int32) *runtimeapi.ContainerStatus {
	c.Pod.t.Helper()
	s := c.WaitState(runtimeapi.ContainerState_CONTAINER_EXITED)
	if s.ExitCode != code {
		c.Pod.t.Fatalf("container %s: exit code %d (%s: %s), want %d\n%s", c.name(), s.ExitCode, s.Reason, s.Message, code, tail(c.LogFile(), 20))
	}
	return s
}

// LogFile returns the path of the container's log file.
func (c *Container) LogFile() string {
	return filepath.Join(c.Pod.Config.LogDirectory, c.Config.LogPath)
}

// Logs returns the container's log so far.
func (c *Container) Logs() []LogLine {
	c.Pod.t.Helper()
	return ReadLog(c.Pod.t, c.LogFile())
}

// WaitLog waits until the container's log contains text, and returns the whole log.
func (c *Container) WaitLog(text string) string {
	c.Pod.t.Helper()
	return c.waitContains(30*time.Second, text)
}

func (c *Container) waitContains(timeout time.Duration, text string) string {
	c.Pod.t.Helper()
	var all string
	c.waitText(timeout, func(log string) error {
		if all = log; !strings.Contains(log, text) {
			return fmt.Errorf("no %q in the log of %s:\n%s", text, c.name(), log)
		}
		return nil
	})
	return all
}

// waitText waits for a condition on the container's log. It ignores an incomplete last line.
func (c *Container) waitText(timeout time.Duration, cond func(text string) error) {
	c.Pod.t.Helper()
	Eventually(c.Pod.t, timeout, func() error {
		data, err := os.ReadFile(c.LogFile())
		if err != nil {
			return err
		}
		lines, err := ParseLog(string(data[:bytes.LastIndexByte(data, '\n')+1]))
		if err != nil {
			return err
		}
		return cond(Text(lines, ""))
	})
}

// ExecSync runs a command in the container and returns its output and exit code.
func (c *Container) ExecSync(argv ...string) (stdout, stderr string, code int32) {
	c.Pod.t.Helper()
	resp, err := c.Pod.d.CRI().ExecSync(context.Background(), &runtimeapi.ExecSyncRequest{ContainerId: c.ID, Cmd: argv, Timeout: 60})
	if err != nil {
		c.Pod.t.Fatalf("ExecSync %q: %v", argv, err)
	}
	return string(resp.Stdout), string(resp.Stderr), resp.ExitCode
}

// Must runs a command in the container and returns its standard output. It fails the test if the exit code is not 0.
func (c *Container) Must(argv ...string) string {
	c.Pod.t.Helper()
	stdout, stderr, code := c.ExecSync(argv...)
	if code != 0 {
		c.Pod.t.Fatalf("%q: %v", argv, errors.Join(fmt.Errorf("exit code %d", code), errors.New(stdout), errors.New(stderr)))
	}
	return stdout
}

// NodeAddress returns the node's address in the network of a pod.
func NodeAddress(t testing.TB, podIP string) string {
	t.Helper()
	all, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, addr := range all {
		if ipnet, ok := addr.(*net.IPNet); ok && ipnet.Contains(net.ParseIP(podIP)) {
			return ipnet.IP.String()
		}
	}
	t.Fatalf("the node has no address in the network of %s", podIP)
	return ""
}
