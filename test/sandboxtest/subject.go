package sandboxtest

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/until"
)

// Workload is the behaviour of a container in the suite.
type Workload int

// The workloads that a Subject can configure.
const (
	// Runs runs until it is stopped, and exits immediately on its stop signal.
	Runs Workload = iota
	// Ends exits by itself with code 7 soon after its start; a machine turns itself off.
	Ends
	// Fails has a program that cannot be started.
	Fails
	// Deaf runs and ignores its stop signal.
	Deaf
	// Slow stays in Starting for a while before it runs. Only unit pods need this workload.
	Slow
)

// Subject is a backend behind a CRI endpoint.
type Subject struct {
	// Conn returns the connection to the endpoint. After Restart, it returns a new connection.
	Conn func() *grpc.ClientConn
	// Handler is the RuntimeClass handler of the backend.
	Handler string
	// Unit means that the backend's pods are unit pods.
	Unit bool
	// Machines means that the backend's containers are machines, whose exit code is 0 whenever they end by themselves.
	Machines bool
	// Pod completes the configuration of a pod, for example with a log directory and a cgroup parent. It may be nil.
	Pod func(*runtimeapi.PodSandboxConfig)
	// Container completes a container's configuration: it adds the image, the command and the annotations.
	Container func(*runtimeapi.ContainerConfig, Workload)
	// Deafened waits until a workload Deaf, whose log has the given path, ignores its stop signal; nil if it does so from its
	// start.
	Deafened func(t testing.TB, log string)
	// Restart kills the daemon with SIGKILL and starts it again; nil if the endpoint cannot be restarted.
	Restart func(testing.TB)
}

// timeout limits every call of the suite.
const timeout = 30 * time.Second

// names counts the pods of the process, so that each has a different name and uid.
var names atomic.Int64

// client is a Subject in one test.
type client struct {
	*testing.T
	Subject
}

func (c client) cri() runtimeapi.RuntimeServiceClient {
	return runtimeapi.NewRuntimeServiceClient(c.Conn())
}

func (c client) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(c.Context()), timeout)
	c.Cleanup(cancel)
	return ctx
}

// podConfig returns the configuration of a new pod.
func (c client) podConfig() *runtimeapi.PodSandboxConfig {
	n := names.Add(1)
	config := &runtimeapi.PodSandboxConfig{
		Metadata:    &runtimeapi.PodSandboxMetadata{Name: fmt.Sprintf("suite-%d", n), Namespace: "suite", Uid: fmt.Sprintf("suite-uid-%d", n)},
		Hostname:    "suite",
		Labels:      map[string]string{"suite": "pod", "number": fmt.Sprint(n)},
		Annotations: map[string]string{"suite.example/why": "kept as it is"},
		Linux:       &runtimeapi.LinuxPodSandboxConfig{},
	}
	if c.Pod != nil {
		c.Pod(config)
	}
	return config
}

// pod runs a pod, which is removed at the end of the test.
func (c client) pod() (id string, config *runtimeapi.PodSandboxConfig) {
	c.Helper()
	config = c.podConfig()
	resp, err := c.cri().RunPodSandbox(c.ctx(), &runtimeapi.RunPodSandboxRequest{Config: config, RuntimeHandler: c.Handler})
	c.must(err)
	c.Cleanup(func() {
		if _, err := c.cri().RemovePodSandbox(c.ctx(), &runtimeapi.RemovePodSandboxRequest{PodSandboxId: resp.PodSandboxId}); err != nil {
			c.Errorf("remove the pod: %v", err)
		}
	})
	return resp.PodSandboxId, config
}

// container returns the configuration of a container with the given name.
func (c client) container(name string, w Workload) *runtimeapi.ContainerConfig {
	config := &runtimeapi.ContainerConfig{
		Metadata: &runtimeapi.ContainerMetadata{Name: name}, Image: &runtimeapi.ImageSpec{},
		Labels: map[string]string{"suite": "container"}, Annotations: map[string]string{"suite.example/by": "the suite"}, LogPath: name + ".log",
		Linux: &runtimeapi.LinuxContainerConfig{},
	}
	c.Container(config, w)
	return config
}

func (c client) tryCreate(pod string, podConfig *runtimeapi.PodSandboxConfig, config *runtimeapi.ContainerConfig) (string, error) {
	resp, err := c.cri().CreateContainer(c.ctx(),
		&runtimeapi.CreateContainerRequest{PodSandboxId: pod, Config: config, SandboxConfig: podConfig})
	return resp.GetContainerId(), err
}

func (c client) create(pod string, podConfig *runtimeapi.PodSandboxConfig, config *runtimeapi.ContainerConfig) string {
	c.Helper()
	id, err := c.tryCreate(pod, podConfig, config)
	c.must(err)
	return id
}

func (c client) start(id string) error {
	_, err := c.cri().StartContainer(c.ctx(), &runtimeapi.StartContainerRequest{ContainerId: id})
	return err
}

func (c client) stop(id string, graceSeconds int64) error {
	_, err := c.cri().StopContainer(c.ctx(), &runtimeapi.StopContainerRequest{ContainerId: id, Timeout: graceSeconds})
	return err
}

func (c client) remove(id string) error {
	_, err := c.cri().RemoveContainer(c.ctx(), &runtimeapi.RemoveContainerRequest{ContainerId: id})
	return err
}

func (c client) stopPod(id string) error {
	_, err := c.cri().StopPodSandbox(c.ctx(), &runtimeapi.StopPodSandboxRequest{PodSandboxId: id})
	return err
}

func (c client) removePod(id string) error {
	_, err := c.cri().RemovePodSandbox(c.ctx(), &runtimeapi.RemovePodSandboxRequest{PodSandboxId: id})
	return err
}

func (c client) status(id string) *runtimeapi.ContainerStatus {
	c.Helper()
	resp, err := c.cri().ContainerStatus(c.ctx(), &runtimeapi.ContainerStatusRequest{ContainerId: id})
	c.must(err)
	return resp.Status
}

func (c client) podStatus(id string) *runtimeapi.PodSandboxStatus {
	c.Helper()
	resp, err := c.cri().PodSandboxStatus(c.ctx(), &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id})
	c.must(err)
	return resp.Status
}

// waitState waits until the container is in the wanted state, and returns the container's status.
func (c client) waitState(id string, want runtimeapi.ContainerState) *runtimeapi.ContainerStatus {
	c.Helper()
	var s *runtimeapi.ContainerStatus
	c.poll("container is "+want.String(), func() bool { s = c.status(id); return s.State == want })
	return s
}

// poll waits for a condition.
func (c client) poll(what string, holds func() bool) {
	c.Helper()
	until.Within(c, timeout, what, holds)
}

func (c client) must(err error) {
	c.Helper()
	if err != nil {
		c.Fatal(err)
	}
}

// wantCode checks the gRPC code of an error.
func (c client) wantCode(err error, want codes.Code, what string) {
	c.Helper()
	if got := status.Code(err); got != want {
		c.Errorf("%s: got code %s (error %v), want %s", what, got, err, want)
	}
}
