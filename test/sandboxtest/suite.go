package sandboxtest

import (
	"context"
	"maps"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
)

// unknown is an ID that no pod and no container has.
const unknown = "0000000000000000000000000000000000000000000000000000000000000000"

// Run runs the whole suite over the subject.
func Run(t *testing.T, s Subject) {
	for _, test := range []struct {
		name string
		run  func(client)
	}{
		{"Attributes", client.attributes},
		{"IDs", client.ids},
		{"Exits", client.exits},
		{"StartFails", client.startFails},
		{"GraceThenForce", client.graceThenForce},
		{"StopCutShort", client.stopCutShort},
		{"Restart", client.restart},
		{"CreateRepeats", client.createRepeats},
		{"NextAttempt", client.nextAttempt},
		{"Collected", client.collected},
		{"PreviousAttempts", client.previousAttempts},
		{"EitherID", client.eitherID},
		{"ManyContainers", client.manyContainers},
		{"C2StopAndRemove", client.stopAndRemoveAtOnce},
		{"N3Retry", client.retry},
		{"Events", client.events},
		{"Readopt", client.readopt},
	} {
		t.Run(test.name, func(t *testing.T) { test.run(client{t, s}) })
	}
	t.Run("Table", func(t *testing.T) { testTable(t, s) })
}

// attributes: what the request said comes back from status and list.
func (c client) attributes() {
	pod, podConfig := c.pod()
	config := c.container("c", Runs)
	config.Annotations["suite.example/note"] = "ünïcode"
	id := c.create(pod, podConfig, config)
	p, s := c.podStatus(pod), c.status(id)
	if !proto.Equal(p.Metadata, podConfig.Metadata) || !maps.Equal(p.Labels, podConfig.Labels) || !maps.Equal(p.Annotations, podConfig.Annotations) || p.CreatedAt == 0 || p.RuntimeHandler != c.Handler {
		c.Errorf("pod status %v", p)
	}
	if !proto.Equal(s.Metadata, config.Metadata) || !maps.Equal(s.Labels, config.Labels) || !maps.Equal(s.Annotations, config.Annotations) || s.CreatedAt == 0 || s.ImageId == "" {
		c.Errorf("container status %v", s)
	}
	list, err := c.cri().ListContainers(c.ctx(), &runtimeapi.ListContainersRequest{Filter: &runtimeapi.ContainerFilter{PodSandboxId: pod, LabelSelector: config.Labels}})
	c.must(err)
	if len(list.Containers) != 1 || list.Containers[0].Id != id || list.Containers[0].PodSandboxId != pod || list.Containers[0].ImageId != s.ImageId {
		c.Errorf("list %v", list.Containers)
	}
	pods, err := c.cri().ListPodSandbox(c.ctx(), &runtimeapi.ListPodSandboxRequest{Filter: &runtimeapi.PodSandboxFilter{LabelSelector: podConfig.Labels}})
	c.must(err)
	if len(pods.Items) != 1 || pods.Items[0].Id != pod {
		c.Errorf("list %v", pods.Items)
	}
}

// ids: no container has the ID of a sandbox, and a unit pod has one container at a time.
func (c client) ids() {
	pod, podConfig := c.pod()
	id := c.create(pod, podConfig, c.container("c", Runs))
	if id == pod {
		c.Errorf("the container has the pod's ID %s", id)
	}
	if c.Unit {
		_, err := c.tryCreate(pod, podConfig, c.container("another", Runs))
		c.wantCode(err, codes.Unimplemented, "a second container of a unit pod")
	}
	_, err := c.tryCreate(unknown, podConfig, c.container("c", Runs))
	c.wantCode(err, codes.NotFound, "a container in an unknown pod")
	c.wantCode(c.start(unknown), codes.NotFound, "start of an unknown container")
	c.must(c.stop(unknown, 0))
	c.must(c.remove(unknown))
	c.must(c.stopPod(unknown))
	c.must(c.removePod(unknown))
}

// exits: a container that ends by itself has its code, reason and times, and stays so.
func (c client) exits() {
	pod, podConfig := c.pod()
	id := c.create(pod, podConfig, c.container("c", Ends))
	before := time.Now()
	c.must(c.start(id))
	s := c.waitState(id, runtimeapi.ContainerState_CONTAINER_EXITED)
	code, reason := int32(7), sandbox.ReasonError
	if c.Machines {
		code, reason = 0, sandbox.ReasonCompleted
	}
	if s.ExitCode != code || s.Reason != reason {
		c.Errorf("exit code %d, reason %q", s.ExitCode, s.Reason)
	}
	if s.CreatedAt > s.StartedAt || s.StartedAt > s.FinishedAt || s.FinishedAt > time.Now().UnixNano() || s.StartedAt < before.Add(-time.Second).UnixNano() {
		c.Errorf("created %d, started %d, finished %d", s.CreatedAt, s.StartedAt, s.FinishedAt)
	}
	c.must(c.stop(id, 1))
	if again := c.status(id); again.ExitCode != code || again.FinishedAt != s.FinishedAt {
		c.Errorf("a stop changed the end to %v", again)
	}
}

// startFails: the error comes with the call, and the container is stopped with the reason.
func (c client) startFails() {
	pod, podConfig := c.pod()
	id, err := c.tryCreate(pod, podConfig, c.container("c", Fails))
	if err != nil {
		return // found out already when it was created
	}
	if err := c.start(id); err == nil {
		c.Fatal("a program that is not there was started")
	}
	s := c.status(id)
	if s.State != runtimeapi.ContainerState_CONTAINER_EXITED || s.Reason != sandbox.ReasonStartError || s.ExitCode != sandbox.ExitStartError || s.Message == "" {
		c.Errorf("status %v", s)
	}
}

// graceThenForce: a container that does not listen is killed when its grace is over.
func (c client) graceThenForce() {
	pod, podConfig := c.pod()
	id := c.create(pod, podConfig, c.container("c", Deaf))
	c.must(c.start(id))
	begin := time.Now()
	c.must(c.stop(id, 1))
	if took := time.Since(begin); took < time.Second {
		c.Errorf("it was killed after %s, its grace was 1 s", took)
	}
	if s := c.status(id); s.State != runtimeapi.ContainerState_CONTAINER_EXITED || s.ExitCode != 137 {
		c.Errorf("status %v", s)
	}
}

// stopCutShort: a stop with less grace does not wait for one with more.
func (c client) stopCutShort() {
	pod, podConfig := c.pod()
	id := c.create(pod, podConfig, c.container("c", Deaf))
	c.must(c.start(id))
	patient := make(chan error, 1)
	go func() { patient <- c.stop(id, 600) }()
	c.must(c.stop(id, 0))
	if err := <-patient; err != nil {
		c.Errorf("the patient stop: %v", err)
	}
}

// restart: a stopped container starts again, in the same pod with the same address.
func (c client) restart() {
	pod, podConfig := c.pod()
	ip := c.podStatus(pod).GetNetwork().GetIp()
	id := c.create(pod, podConfig, c.container("c", Runs))
	for range 3 {
		c.must(c.start(id))
		if s := c.status(id); s.State != runtimeapi.ContainerState_CONTAINER_RUNNING || s.FinishedAt != 0 || s.ExitCode != 0 {
			c.Errorf("status %v", s)
		}
		c.must(c.stop(id, 5))
	}
	if now := c.podStatus(pod).GetNetwork().GetIp(); now != ip {
		c.Errorf("the address went from %s to %s", ip, now)
	}
}

// createRepeats: the kubelet's counters are no parameters, everything else is.
func (c client) createRepeats() {
	pod, podConfig := c.pod()
	config := c.container("c", Runs)
	id := c.create(pod, podConfig, config)
	counted := proto.CloneOf(config)
	counted.Annotations["io.kubernetes.container.restartCount"] = "3"
	if again := c.create(pod, podConfig, counted); again != id {
		c.Errorf("a repeat made %s beside %s", again, id)
	}
	for what, change := range map[string]func(*runtimeapi.ContainerConfig){
		"labels":      func(x *runtimeapi.ContainerConfig) { x.Labels["more"] = "x" },
		"annotations": func(x *runtimeapi.ContainerConfig) { x.Annotations["more"] = "x" },
		"environment": func(x *runtimeapi.ContainerConfig) {
			x.Envs = append(x.Envs, &runtimeapi.KeyValue{Key: "A", Value: []byte("1")})
		},
		"args": func(x *runtimeapi.ContainerConfig) { x.Args = append(x.Args, "more") },
	} {
		changed := proto.CloneOf(config)
		change(changed)
		_, err := c.tryCreate(pod, podConfig, changed)
		c.wantCode(err, codes.AlreadyExists, "changed "+what)
	}
}

// manyContainers: the containers of a pod of many live and die on their own.
func (c client) manyContainers() {
	if c.Unit {
		return // ids shows that there is one at a time
	}
	pod, podConfig := c.pod()
	var ids []string
	for _, name := range []string{"a", "b", "c"} {
		id := c.create(pod, podConfig, c.container(name, Runs))
		c.must(c.start(id))
		ids = append(ids, id)
	}
	c.must(c.stop(ids[0], 5))
	c.must(c.remove(ids[1])) // while it runs
	if s := c.status(ids[2]); s.State != runtimeapi.ContainerState_CONTAINER_RUNNING {
		c.Errorf("the third is %s", s.State)
	}
	next := c.container("a", Runs)
	next.Metadata.Attempt = 1
	if id := c.create(pod, podConfig, next); slices.Contains(ids, id) {
		c.Errorf("the next attempt has the ID of the previous one, %s", id)
	}
	c.must(c.stopPod(pod))
	if s := c.status(ids[2]); s.State != runtimeapi.ContainerState_CONTAINER_EXITED {
		c.Errorf("after StopPodSandbox the third is %s", s.State)
	}
}

// stopAndRemoveAtOnce: stops and removals of one pod from many callers all succeed.
func (c client) stopAndRemoveAtOnce() {
	pod, podConfig := c.pod()
	id := c.create(pod, podConfig, c.container("c", Runs))
	c.must(c.start(id))
	calls := []func() error{
		func() error { return c.stopPod(pod) },
		func() error { return c.removePod(pod) },
	}
	if !c.Unit { // of a unit pod the table refuses these in some of the states on the way
		calls = append(calls, func() error { return c.stop(id, 0) }, func() error { return c.remove(id) })
	}
	done := make(chan error)
	for range 5 {
		for _, call := range calls {
			go func() { done <- call() }()
		}
	}
	for range 5 * len(calls) {
		if err := <-done; err != nil {
			c.Error(err)
		}
	}
	_, err := c.cri().PodSandboxStatus(c.ctx(), &runtimeapi.PodSandboxStatusRequest{PodSandboxId: pod})
	c.wantCode(err, codes.NotFound, "status of the removed pod")
}

// retry: a client whose deadline passes during RunPodSandbox asks again and gets one pod.
func (c client) retry() {
	config := c.podConfig()
	req := &runtimeapi.RunPodSandboxRequest{Config: config, RuntimeHandler: c.Handler}
	ctx, cancel := context.WithTimeout(c.ctx(), time.Millisecond)
	defer cancel()
	_, _ = c.cri().RunPodSandbox(ctx, req)
	resp, err := c.cri().RunPodSandbox(c.ctx(), req)
	c.must(err)
	defer func() { c.must(c.removePod(resp.PodSandboxId)) }()
	list, err := c.cri().ListPodSandbox(c.ctx(), &runtimeapi.ListPodSandboxRequest{Filter: &runtimeapi.PodSandboxFilter{LabelSelector: config.Labels}})
	c.must(err)
	if len(list.Items) != 1 {
		c.Errorf("%d pods came of it", len(list.Items))
	}
}

// events: GetContainerEvents tells the transitions in their order.
func (c client) events() {
	ctx, cancel := context.WithCancel(c.ctx())
	defer cancel()
	stream, err := c.cri().GetContainerEvents(ctx, &runtimeapi.GetEventsRequest{})
	c.must(err)
	_, err = stream.Header() // the subscription stands
	c.must(err)
	pod, podConfig := c.pod()
	id := c.create(pod, podConfig, c.container("c", Runs))
	c.must(c.start(id))
	c.must(c.stop(id, 5))
	c.must(c.removePod(pod))
	var got []runtimeapi.ContainerEventType
	for {
		e, err := stream.Recv()
		c.must(err)
		if e.ContainerId != id && e.ContainerId != pod {
			continue
		}
		if e.CreatedAt == 0 || e.PodSandboxStatus.GetId() != pod {
			c.Errorf("event %v", e)
		}
		if e.ContainerId == id {
			got = append(got, e.ContainerEventType)
		}
		if e.ContainerId == pod && e.ContainerEventType == runtimeapi.ContainerEventType_CONTAINER_DELETED_EVENT {
			break
		}
	}
	want := []runtimeapi.ContainerEventType{
		runtimeapi.ContainerEventType_CONTAINER_CREATED_EVENT, runtimeapi.ContainerEventType_CONTAINER_STARTED_EVENT,
		runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT, runtimeapi.ContainerEventType_CONTAINER_DELETED_EVENT,
	}
	if !slices.Equal(got, want) {
		c.Errorf("events of the container %v, want %v", got, want)
	}
}

// readopt: after a SIGKILL of the daemon what ran runs, what ended meanwhile has its code, what was made can be started.
func (c client) readopt() {
	if c.Restart == nil {
		return // an endpoint in the test's own process; test/e2e kills a real one
	}
	pod, podConfig := c.pod()
	id := c.create(pod, podConfig, c.container("c", Runs))
	c.must(c.start(id))
	before, ip := c.status(id), c.podStatus(pod).GetNetwork().GetIp()
	c.Restart(c.T)
	after := c.status(id)
	if after.State != runtimeapi.ContainerState_CONTAINER_RUNNING || after.StartedAt != before.StartedAt {
		c.Errorf("before %v, after %v", before, after)
	}
	if p := c.podStatus(pod); p.State != runtimeapi.PodSandboxState_SANDBOX_READY || p.GetNetwork().GetIp() != ip {
		c.Errorf("pod after the restart %v", p)
	}
	c.must(c.stop(id, 5))
	c.must(c.start(id))
	c.must(c.stop(id, 5))
}
