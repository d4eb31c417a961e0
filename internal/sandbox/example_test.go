package sandbox_test

import (
	"context"
	"fmt"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
)

// processes is a backend that runs each container as a plain process on the host. It isolates nothing and recovers
// nothing; it only shows the contract. Real backends read a container's state from a file after the daemon restarts
// (internal/sandbox/linux/state.go).
type processes struct {
	mu         sync.Mutex
	containers map[string]*process
	sink       sandbox.Sink
}

// process is one container.
type process struct {
	cmd    *exec.Cmd
	done   chan struct{} // closed when it has ended; nil if it never ran
	status sandbox.Status
}

var _ sandbox.Backend = (*processes)(nil)

// Capabilities says that a pod has one container, whose ID is the pod's.
func (b *processes) Capabilities() sandbox.Capabilities {
	return sandbox.Capabilities{MaxContainers: 1, HostNetwork: true}
}

// Validate refuses fields that a plain process does not support, and names the field. The node calls it before it
// records anything.
func (b *processes) Validate(_ *sandbox.Pod, c *sandbox.Container) error {
	switch {
	case c == nil:
		return nil
	case len(c.Config.GetCommand()) == 0:
		return fmt.Errorf("command: is empty: %w", errdefs.ErrInvalidArgument)
	case c.Config.GetTty():
		return fmt.Errorf("tty: a plain process has no terminal: %w", errdefs.ErrNotImplemented)
	}
	return nil
}

// The containers of a pod share nothing.
func (b *processes) CreateSandbox(context.Context, *sandbox.Pod) error { return nil }
func (b *processes) StopSandbox(context.Context, *sandbox.Pod) error   { return nil }
func (b *processes) RemoveSandbox(context.Context, *sandbox.Pod) error { return nil }

// CreateContainer can be called again after a crash, for a container that was not completely made.
func (b *processes) CreateContainer(_ context.Context, _ *sandbox.Pod, c *sandbox.Container) (sandbox.Resolved, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.containers[c.ID] = &process{status: sandbox.Status{State: sandbox.StateCreated}}
	return sandbox.Resolved{}, nil
}

// StartContainer starts the process. If the program cannot be started, the container's status says so.
func (b *processes) StartContainer(_ context.Context, p *sandbox.Pod, c *sandbox.Container) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	current := b.containers[c.ID]
	if current == nil {
		return fmt.Errorf("container %s is not created: %w", c.ID, errdefs.ErrFailedPrecondition)
	}
	if current.status.State == sandbox.StateRunning {
		return nil
	}
	argv := c.Config.GetCommand()
	run := &process{cmd: exec.Command(argv[0], argv[1:]...)}
	b.containers[c.ID] = run
	if err := run.cmd.Start(); err != nil {
		run.status = sandbox.Status{State: sandbox.StateExited, ExitCode: sandbox.ExitStartError, Reason: sandbox.ReasonStartError,
			Message: err.Error()}
		return fmt.Errorf("start container %s: %w: %w", c.ID, err, errdefs.ErrFailedPrecondition)
	}
	run.done = make(chan struct{})
	run.status = sandbox.Status{State: sandbox.StateRunning, Pid: run.cmd.Process.Pid, StartedAt: time.Now()}
	go b.wait(p.ID, c.ID, run)
	return nil
}

// wait reports the end of a process, even if it was ordered. The node decides what the end means for the pod.
func (b *processes) wait(podID, id string, run *process) {
	_ = run.cmd.Wait()
	b.mu.Lock()
	run.status.State, run.status.FinishedAt = sandbox.StateExited, time.Now()
	run.status.ExitCode, run.status.Reason = int32(run.cmd.ProcessState.ExitCode()), sandbox.ReasonCompleted
	if run.status.ExitCode != 0 { // -1: a signal ended it
		run.status.Reason = sandbox.ReasonError
	}
	status := run.status
	b.mu.Unlock()
	close(run.done)
	b.sink(sandbox.Event{PodID: podID, ContainerID: id, Status: status})
}

// StopContainer sends SIGTERM, and SIGKILL after the grace period. It succeeds if the process does not run.
func (b *processes) StopContainer(ctx context.Context, _ *sandbox.Pod, c *sandbox.Container, grace time.Duration) error {
	b.mu.Lock()
	run := b.containers[c.ID]
	b.mu.Unlock()
	if run == nil || run.done == nil {
		return nil
	}
	_ = run.cmd.Process.Signal(syscall.SIGTERM)
	forced := time.AfterFunc(grace, func() { _ = run.cmd.Process.Kill() })
	defer forced.Stop()
	select {
	case <-run.done:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// RemoveContainer kills the process if it still runs. It succeeds if the container is missing.
func (b *processes) RemoveContainer(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) error {
	if err := b.StopContainer(ctx, p, c, 0); err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.containers, c.ID)
	return nil
}

// Status returns StateAbsent, not an error, for a missing container.
func (b *processes) Status(_ context.Context, _ *sandbox.Pod, c *sandbox.Container) (sandbox.Status, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if current := b.containers[c.ID]; current != nil {
		return current.status, nil
	}
	return sandbox.Status{}, nil
}

// Recover finds nothing, because these processes do not outlive their daemon. From here on, events go to the sink.
func (b *processes) Recover(_ context.Context, _ []sandbox.Known, sink sandbox.Sink) (sandbox.Found, error) {
	b.sink = sink
	return sandbox.Found{}, nil
}

// A backend recovers the pods of an earlier daemon before it takes orders. The node gives the orders in this sequence,
// and may repeat any of them.
func Example() {
	ctx := context.Background()
	var b sandbox.Backend = &processes{containers: map[string]*process{}}
	events := make(chan sandbox.Event, 1)
	if _, err := b.Recover(ctx, nil, func(e sandbox.Event) { events <- e }); err != nil {
		fmt.Println(err)
	}

	pod := &sandbox.Pod{ID: "pod", Handler: "process", Config: &runtimeapi.PodSandboxConfig{}}
	container := &sandbox.Container{ID: pod.ID, Config: &runtimeapi.ContainerConfig{Command: []string{"sleep", "60"}}}
	state := func(after string, err error) {
		status, statusErr := b.Status(ctx, pod, container)
		if err != nil || statusErr != nil {
			fmt.Println(after, err, statusErr)
		}
		fmt.Println(after, names[status.State])
	}

	refused := &sandbox.Container{ID: pod.ID, Config: &runtimeapi.ContainerConfig{Command: []string{"sh"}, Tty: true}}
	fmt.Println(b.Validate(pod, refused))

	state("CreateSandbox", b.CreateSandbox(ctx, pod))
	_, err := b.CreateContainer(ctx, pod, container)
	state("CreateContainer", err)
	state("StartContainer", b.StartContainer(ctx, pod, container))
	state("StartContainer, repeated", b.StartContainer(ctx, pod, container))
	state("StopContainer", b.StopContainer(ctx, pod, container, 10*time.Second))
	fmt.Println("event:", (<-events).Status.Reason)
	state("RemoveContainer", b.RemoveContainer(ctx, pod, container))
	state("RemoveContainer, repeated", b.RemoveContainer(ctx, pod, container))
	state("StopSandbox", b.StopSandbox(ctx, pod))
	state("RemoveSandbox", b.RemoveSandbox(ctx, pod))

	// Output:
	// tty: a plain process has no terminal: not implemented
	// CreateSandbox absent
	// CreateContainer created
	// StartContainer running
	// StartContainer, repeated running
	// StopContainer exited
	// event: Error
	// RemoveContainer absent
	// RemoveContainer, repeated absent
	// StopSandbox absent
	// RemoveSandbox absent
}

var names = map[sandbox.State]string{
	sandbox.StateAbsent: "absent", sandbox.StateCreated: "created", sandbox.StateRunning: "running", sandbox.StateExited: "exited",
}
