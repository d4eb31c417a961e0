package sandboxtest

import (
	"encoding/json"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/node"
)

// testTable brings a container (of a unit pod: the pod) into each state and makes each of the seven calls: the verdict
// is the table's, the state afterwards is the one that the table says. A unit pod is met in all seven states, 49
// cells; of a pod of many, the states in which there is a container that a client can name.
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

// cell is one cell of the table.
func (c client) cell(state node.State, call node.Call) {
	pod, podConfig, id, config := c.bring(state)
	verdict := node.Decide(c.Unit, state, call)
	err := map[node.Call]func() error{
		node.RunPodSandbox: func() error {
			resp, err := c.cri().RunPodSandbox(c.ctx(), &runtimeapi.RunPodSandboxRequest{Config: podConfig, RuntimeHandler: c.Handler})
			if err == nil && resp.PodSandboxId != pod {
				c.Errorf("a repeat made pod %s beside %s", resp.PodSandboxId, pod)
			}
			return err
		},
		node.CreateContainer: func() error {
			made, err := c.tryCreate(pod, podConfig, config)
			if err == nil && verdict == node.Idempotent && made != id {
				c.Errorf("a repeat made container %s beside %s", made, id)
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
			c.Fatalf("verdict %c: %v", verdict, err)
		}
	case call == node.RunPodSandbox:
		c.wantCode(err, codes.AlreadyExists, "a sandbox whose metadata a stopped one has")
	default:
		c.wantCode(err, codes.FailedPrecondition, "verdict ✘")
	}
	if state == node.Removed && call == node.CreateContainer {
		id = pod // the removed attempt is gone, the pod's ID means the new one
	}
	c.check(pod, id, state, call, verdict)
}

// bring makes a pod with its container in a state; for a unit pod the ID is the pod's also where there is none yet.
func (c client) bring(state node.State) (pod string, podConfig *runtimeapi.PodSandboxConfig, id string, config *runtimeapi.ContainerConfig) {
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
				return nil // a container that still can be named is the more telling one
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

// waitStarting waits for the state that the CRI shows as CREATED; the verbose status tells it.
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

// check looks at what is there after a call.
func (c client) check(pod, id string, before node.State, call node.Call, verdict node.Verdict) {
	c.Helper()
	if call == node.RemovePodSandbox {
		_, err := c.cri().PodSandboxStatus(c.ctx(), &runtimeapi.PodSandboxStatusRequest{PodSandboxId: pod})
		c.wantCode(err, codes.NotFound, "status of a removed pod")
		return
	}
	ready := c.podStatus(pod).State == runtimeapi.PodSandboxState_SANDBOX_READY
	if want := before != node.Killed && call != node.StopPodSandbox; ready != want {
		c.Errorf("the sandbox is ready: %v, want %v", ready, want)
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
		c.Errorf("the container is %s, want %s", got, state)
	}
}
