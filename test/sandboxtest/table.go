package sandboxtest

import (
	"encoding/json"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/node"
)

// testTable brings a container (for a unit pod: the pod) into each state and makes each of the seven calls. The verdict
// and the state afterwards must be those in the table. A unit pod is tested in all seven states (49 cells). Other pods
// are tested only in states where a client can name a container.
func testTable(t *testing.T, s Subject) {
	states := node.States[:]
	if !s.Unit {
		states = []node.State{node.Created, node.Running, node.Stopped, node.Killed}
	}
	for _, state := range states {
		for _, call := range node.Calls {
			t.Run(string(state)+"/"+string(call), func(t *testing.T) {
				t.Parallel()
				client{t, s}.cell(state, call)
			})
		}
	}
}

// cell tests one cell of the table.
func (c client) cell(state node.State, call node.Call) {
	pod, podConfig, id, config := c.bring(state)
	verdict := node.Decide(c.Unit, state, call)
	err := map[node.Call]func() error{
		node.RunPodSandbox: func() error {
			resp, err := c.cri().RunPodSandbox(c.ctx(), &runtimeapi.RunPodSandboxRequest{Config: podConfig, RuntimeHandler: c.Handler})
			if err == nil && resp.PodSandboxId != pod {
				c.Errorf("repeated RunPodSandbox: got pod %s, want %s", resp.PodSandboxId, pod)
			}
			return err
		},
		node.CreateContainer: func() error {
			created, err := c.tryCreate(pod, podConfig, config)
			if err == nil && verdict == node.Idempotent && created != id {
				c.Errorf("repeated CreateContainer: got container %s, want %s", created, id)
			}
			return err
		},
		node.StartContainer:   func() error { return c.start(id) },
		node.StopContainer:    func() error { return c.stop(id, 1) },
		node.RemoveContainer:  func() error { return c.remove(id) },
		node.StopPodSandbox:   func() error { return c.stopPod(pod) },
		node.RemovePodSandbox: func() error { return c.removePod(pod) },
	}[call]()
	switch {
	case verdict != node.Refused:
		if err != nil {
			c.Fatalf("call with the verdict %c: got error %v, want success", verdict, err)
		}
	case call == node.RunPodSandbox:
		c.wantCode(err, codes.AlreadyExists, "a sandbox with the metadata of a stopped one")
	default:
		c.wantCode(err, codes.FailedPrecondition, "call with the verdict ✘")
	}
	if state == node.Removed && call == node.CreateContainer {
		id = pod // the pod's ID refers to the new attempt
	}
	c.check(pod, id, state, call, verdict)
}

// bring creates a pod, and brings its container into the given state. If a unit pod has no container yet, the third
// result is the pod's ID.
func (c client) bring(state node.State) (pod string, podConfig *runtimeapi.PodSandboxConfig, id string,
	config *runtimeapi.ContainerConfig) {
	c.Helper()
	pod, podConfig = c.pod()
	workload := Runs
	if state == node.Starting {
		workload = Slow
	}
	config = c.container("c", workload)
	if state == node.Initiated {
		return pod, podConfig, pod, config
	}
	id = c.create(pod, podConfig, config)
	if state == node.Starting {
		go func() { _ = c.start(id) }()
		c.waitStarting(id)
		return pod, podConfig, id, config
	}
	for _, step := range []struct {
		until node.State
		do    func() error
	}{
		{node.Created, func() error { return nil }},
		{node.Running, func() error { return c.start(id) }},
		{node.Stopped, func() error { return c.stop(id, 5) }},
		{node.Removed, func() error {
			if state == node.Killed {
				return nil // Killed is tested with a container that can still be named
			}
			return c.remove(id)
		}},
		{node.Killed, func() error { return c.stopPod(pod) }},
	} {
		c.must(step.do())
		if step.until == state {
			break
		}
	}
	return pod, podConfig, id, config
}

// waitStarting waits for the state Starting. The CRI shows this state as CREATED, but the verbose status names it.
func (c client) waitStarting(id string) {
	c.Helper()
	c.poll("the container is Starting", func() bool {
		resp, err := c.cri().ContainerStatus(c.ctx(), &runtimeapi.ContainerStatusRequest{ContainerId: id, Verbose: true})
		c.must(err)
		var info struct{ State node.State }
		c.must(json.Unmarshal([]byte(resp.Info["info"]), &info))
		return info.State == node.Starting
	})
}

// check checks the states of the pod and the container after a call.
func (c client) check(pod, id string, before node.State, call node.Call, verdict node.Verdict) {
	c.Helper()
	if call == node.RemovePodSandbox {
		_, err := c.cri().PodSandboxStatus(c.ctx(), &runtimeapi.PodSandboxStatusRequest{PodSandboxId: pod})
		c.wantCode(err, codes.NotFound, "status of a removed pod")
		return
	}
	ready := c.podStatus(pod).State == runtimeapi.PodSandboxState_SANDBOX_READY
	if want := before != node.Killed && call != node.StopPodSandbox; ready != want {
		c.Errorf("ready state of the sandbox: got %v, want %v", ready, want)
	}
	state, moves := map[node.Call]runtimeapi.ContainerState{
		node.CreateContainer: runtimeapi.ContainerState_CONTAINER_CREATED,
		node.StartContainer:  runtimeapi.ContainerState_CONTAINER_RUNNING,
		node.StopContainer:   runtimeapi.ContainerState_CONTAINER_EXITED,
	}[call]
	if !moves || verdict != node.Valid {
		return
	}
	if got := c.status(id).State; got != state {
		c.Errorf("state of the container: got %s, want %s", got, state)
	}
}
