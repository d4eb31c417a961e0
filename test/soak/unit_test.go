package soak

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/node"
	"github.com/tripod-run/tripod/test/harness"
)

const handler = "wasm"

// unit is a worker whose own pod is a component. Its model is the state table: every answer must be right for a state
// that the pod can be in.
type unit struct {
	*worker
	kind string
	ip   string
	// c is the container of the last order to create one; its number is the attempt.
	c *container
	// can lists the states in which the pod can be: one, or two if it may have ended by itself.
	can []node.State
	// deaths is deathCount before the last start, madeAt before the log began.
	deaths, madeAt int64
}

// outcome maps a call to the state after it, if the call is valid.
var outcome = map[node.Call]node.State{
	node.CreateContainer: node.Created, node.StartContainer: node.Running, node.StopContainer: node.Stopped,
	node.RemoveContainer: node.Removed, node.StopPodSandbox: node.Killed,
}

// cell is a cell of the state table.
type cell struct {
	state node.State
	call  node.Call
}

// appearance is the part of a state that a client sees.
type appearance struct {
	ready     bool
	container runtimeapi.ContainerState
}

const none = runtimeapi.ContainerState(-1)

var appearances = map[node.State]appearance{
	node.Initiated: {true, none}, node.Created: {true, created}, node.Running: {true, running}, node.Stopped: {true, exited},
	node.Removed: {true, none},
}

func newUnit(s *soak, seed uint64, i int) *unit {
	u := &unit{worker: newWorker(s, seed, 50+i)}
	u.name = fmt.Sprintf("unit-%d", i)
	u.own.name = u.name
	u.begin()
	return u
}

// begin replaces the pod with a new one that runs another component.
func (u *unit) begin() {
	u.own.config, u.own.id, u.own.stopped = harness.PodConfig(u.t, u.name), "", false
	u.own.config.Annotations = map[string]string{"vimana.host/reuse": fmt.Sprint(u.rng.IntN(2) == 0)}
	u.kind, u.ip, u.can = componentNames[u.rng.IntN(len(componentNames))], "", nil
	if err := os.MkdirAll(u.own.config.LogDirectory, 0o755); err != nil {
		u.t.Error(err)
	}
	u.attempt(0)
}

// attempt creates the model of the container with attempt number n.
func (u *unit) attempt(n uint32) {
	what := components[u.kind]
	config := harness.ContainerConfig("c", what.image)
	config.Metadata.Attempt, config.Args, config.LogPath = n, what.args, fmt.Sprintf("%d.log", n)
	config.Linux.Resources = &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 64 << 20}
	if u.kind == "spinner" {
		config.Linux.Resources.CpuQuota, config.Linux.Resources.CpuPeriod = 10000, 100000
	}
	u.c = &container{kind: u.kind, pod: u.own, config: config, log: u.own.config.LogDirectory + "/" + config.LogPath, ends: what.end != "",
		lines: what.lines}
	u.madeAt = u.deathCount.Load()
}

func (u *unit) work(stop <-chan struct{}) {
	for !u.t.Failed() {
		select {
		case <-stop:
			return
		default:
			u.step()
		}
	}
}

func (u *unit) step() {
	if u.own.id == "" {
		u.order(node.RunPodSandbox)
		return
	}
	switch n := u.rng.IntN(100); {
	case n < 3:
		u.order(node.RunPodSandbox)
	case n < 20:
		u.order(node.CreateContainer)
	case n < 40:
		u.order(node.StartContainer)
	case n < 46:
		u.order(node.StopContainer)
	case n < 52:
		u.order(node.RemoveContainer)
	case n < 54:
		u.order(node.StopPodSandbox)
	case n < 58:
		u.order(node.RemovePodSandbox)
	case n < 80:
		for range 1 + u.rng.IntN(4) {
			u.ask()
		}
	case n < 84:
		u.resize()
	case n < 89:
		u.stream(u.c)
	case n < 93:
		u.rotate(u.c)
	case n < 96:
		u.look(u.own)
	default:
		u.do("ContainerStats", gone, func(ctx context.Context) error {
			_, err := u.cri.ContainerStats(ctx, &runtimeapi.ContainerStatsRequest{ContainerId: u.own.id})
			return err
		})
	}
}

// order makes one of the calls in the table, compares the answer with the table, and checks the effect.
func (u *unit) order(call node.Call) {
	u.mayHaveEnded()
	next := false
	if call == node.CreateContainer && !slices.Contains(u.can, node.Running) && !slices.Contains(u.can, node.Killed) {
		if next = u.can[0] == node.Initiated || u.can[0] == node.Removed || u.rng.IntN(3) > 0; next {
			u.attempt(u.c.config.Metadata.Attempt + 1)
		}
	}
	if call == node.StartContainer && !slices.Contains(u.can, node.Running) {
		u.deaths, u.c.ordered = u.deathCount.Load(), false
	}
	err, answered := u.call(u.rng, fmt.Sprintf("%s %s of %s %s", u.name, call, u.kind, u.own.id),
		[]codes.Code{codes.FailedPrecondition, codes.AlreadyExists}, u.request(call))
	if !answered {
		return
	}
	switch {
	case call == node.RemovePodSandbox && err == nil:
		u.cycles.Add(1)
		u.begin()
		return
	case u.can == nil && err == nil:
		u.can = []node.State{node.Initiated}
	}
	u.mayHaveEnded()
	if len(u.can) == 1 {
		u.cells.Store(cell{u.can[0], call}, true)
	}
	var can []node.State
	for _, s := range u.can {
		verdict := node.Decide(true, s, call)
		replaces := next && s == node.Stopped
		switch refused := verdict == node.Refused && !replaces; {
		case (s == node.Removed || s == node.Killed) && u.c.config.Metadata.Attempt > 0 &&
			(call == node.StartContainer || call == node.StopContainer || call == node.RemoveContainer):
			can = append(can, s) // the pod's ID may have referred to a previous attempt
		case refused != (err != nil):
		case refused || verdict == node.Idempotent && !replaces:
			can = append(can, s)
		default:
			can = append(can, outcome[call])
		}
	}
	if len(can) == 0 {
		u.t.Errorf("%s %s of %s (%s): got error %v, which the table excludes for the states %v", clock(), call, u.own.id, u.kind, err, u.can)
		return
	}
	u.can = slices.Compact(can)
	if call == node.StopContainer || call == node.StopPodSandbox {
		u.c.ordered = true
	}
	u.observe()
}

func (u *unit) request(call node.Call) func(context.Context) error {
	id, grace := u.own.id, int64(u.rng.IntN(3))
	return func(ctx context.Context) (err error) {
		switch call {
		case node.RunPodSandbox:
			var resp *runtimeapi.RunPodSandboxResponse
			resp, err = u.cri.RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: u.own.config, RuntimeHandler: handler})
			if err == nil && id != "" && resp.PodSandboxId != id {
				u.t.Errorf("repeated RunPodSandbox: got %s, want %s", resp.PodSandboxId, id)
			} else if err == nil {
				u.own.id, u.c.id = resp.PodSandboxId, resp.PodSandboxId
			}
		case node.CreateContainer:
			u.c.id = id
			var resp *runtimeapi.CreateContainerResponse
			resp, err = u.cri.CreateContainer(ctx,
				&runtimeapi.CreateContainerRequest{PodSandboxId: id, Config: u.c.config, SandboxConfig: u.own.config})
			if err == nil {
				u.c.id = resp.ContainerId // because the pod's ID refers to a previous attempt once this one is removed
			}
		case node.StartContainer:
			_, err = u.cri.StartContainer(ctx, &runtimeapi.StartContainerRequest{ContainerId: id})
		case node.StopContainer:
			_, err = u.cri.StopContainer(ctx, &runtimeapi.StopContainerRequest{ContainerId: id, Timeout: grace})
		case node.RemoveContainer:
			_, err = u.cri.RemoveContainer(ctx, &runtimeapi.RemoveContainerRequest{ContainerId: id})
		case node.StopPodSandbox:
			_, err = u.cri.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: id})
		case node.RemovePodSandbox:
			_, err = u.cri.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: id})
		}
		return err
	}
}

// resize changes the resources of the container. From then on, a repeated CreateContainer must have the new resources.
func (u *unit) resize() {
	r := proto.CloneOf(u.c.config.Linux.Resources)
	r.MemoryLimitInBytes = 32 << 20 * (1 + u.rng.Int64N(3))
	if u.do("UpdateContainerResources "+u.own.id, gone, func(ctx context.Context) error {
		_, err := u.cri.UpdateContainerResources(ctx, &runtimeapi.UpdateContainerResourcesRequest{ContainerId: u.own.id, Linux: r})
		return err
	}) {
		u.c.config.Linux.Resources = r
	}
}

// workerDied reports whether the pod's worker may have been killed since the pod's start.
func (u *unit) workerDied() bool { return u.deathCount.Load() != u.deaths }

// mayHaveEnded adds the state Stopped to the possible states of a running pod that may have ended.
func (u *unit) mayHaveEnded() {
	if slices.Contains(u.can, node.Running) && !slices.Contains(u.can, node.Stopped) && (u.c.ends || u.workerDied()) {
		u.can = append(u.can, node.Stopped)
	}
}

// observe gets the pod's status. The pod must be in a possible state, have its previous address and a correct end.
func (u *unit) observe() {
	if u.own.id == "" {
		return
	}
	var pod *runtimeapi.PodSandboxStatus
	if !u.do("PodSandboxStatus "+u.own.id, nil, func(ctx context.Context) error {
		resp, err := u.cri.PodSandboxStatus(ctx, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: u.own.id})
		pod = resp.GetStatus()
		return err
	}) {
		return
	}
	st, err, answered := u.status(u.c)
	if !answered {
		return
	}
	seen := appearance{pod.State == runtimeapi.PodSandboxState_SANDBOX_READY, none}
	// Until the container is created, the pod's ID refers to the newest previous attempt.
	if err == nil && st.Metadata.Attempt == u.c.config.Metadata.Attempt {
		seen.container = st.State
	}
	u.mayHaveEnded()
	was := u.can
	u.can = slices.DeleteFunc(slices.Clone(was), func(s node.State) bool {
		return s == node.Killed && seen.ready || s != node.Killed && appearances[s] != seen
	})
	if len(u.can) == 0 {
		u.t.Errorf("%s pod %s (%s): got %v (status %v, error %v), want one of the states %v", clock(), u.own.id, u.kind, seen, st, err, was)
		u.can = was
		return
	}
	u.c.state = seen.container
	if ip := pod.GetNetwork().GetIp(); seen.ready && (ip == "" || u.ip != "" && ip != u.ip) {
		u.t.Errorf("address of pod %s: got %q, want %q", u.own.id, ip, u.ip)
	} else if seen.ready {
		u.ip = ip
	}
	if u.is(node.Stopped) {
		u.checkEnded(st)
	}
}

func (u *unit) is(s node.State) bool { return len(u.can) == 1 && u.can[0] == s }

// checkEnded checks that the end of the container is its program's, or a possible result of a stop or of its worker's
// death.
func (u *unit) checkEnded(st *runtimeapi.ContainerStatus) {
	got := fmt.Sprintf("%d %s", st.ExitCode, st.Reason)
	allowed := []string{components[u.kind].end}
	if u.c.ordered {
		allowed = append(allowed, "0 Completed", "137 Error")
	}
	if u.workerDied() {
		allowed = append(allowed, "137 Error")
	}
	if !slices.Contains(allowed, got) || got == "137 Error" && !u.c.ordered && !strings.Contains(st.Message, "worker") {
		u.t.Errorf("%s end of pod %s (%s): got %s (%s), want one of %q", clock(), u.own.id, u.kind, got, st.Message, allowed)
	}
}

// ask calls a running pod, which must answer whatever the daemon does.
func (u *unit) ask() {
	ask := components[u.kind].ask
	if u.mayHaveEnded(); ask == nil || !u.is(node.Running) {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience/4)
	defer cancel()
	began := time.Now()
	err := ask(u, ctx)
	u.answers.Add(1)
	if took := time.Since(began); took > slow {
		u.t.Logf("%s %s: call to %s took %v, error %v", clock(), u.name, u.kind, took, err)
	}
	if err != nil && !u.workerDied() {
		u.t.Errorf("%s call to pod %s (%s) at %s (daemon running: %v): %v", clock(), u.own.id, u.kind, u.ip, u.d.Running(), err)
	}
}

// check compares the pod with the model while no other client makes calls.
func (u *unit) check() {
	u.observe()
	if u.is(node.Running) && u.workerDied() {
		harness.Eventually(u.t, settleTime, func() error { // an answer shows that the pod still runs
			if u.observe(); u.is(node.Running) && components[u.kind].ask != nil {
				ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
				defer cancel()
				return components[u.kind].ask(u, ctx)
			}
			return nil
		})
	}
	u.ask()
	if u.madeAt == u.deathCount.Load() && u.own.id != "" && !slices.Contains([]string{"greeter", "hello"}, u.kind) { // both log requests
		u.checkLog(u.c)
	}
}

// wantStatus returns an error unless err has the code want.
func wantStatus(err error, want codes.Code) error {
	if got := status.Code(err); got != want {
		return fmt.Errorf("got code %s, want %s: %w", got, want, err)
	}
	return nil
}

func pick[T any](rng *rand.Rand, of []T) T { return of[rng.IntN(len(of))] }
