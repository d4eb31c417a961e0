package sandboxtest

import (
	"context"
	"maps"
	"path/filepath"
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

// Run runs the whole suite with the subject.
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
		{"Resize", client.resize},
	} {
		t.Run(test.name, func(t *testing.T) { test.run(client{t, s}) })
	}
	t.Run("Table", func(t *testing.T) { testTable(t, s) })
}

// attributes: status and list return the attributes of the request.
func (c client) attributes() {
	pod, podConfig := c.pod()
	config := c.container("c", Runs)
	config.Annotations["suite.example/note"] = "ünïcode"
	id := c.create(pod, podConfig, config)
	p, s := c.podStatus(pod), c.status(id)
	if !proto.Equal(p.Metadata, podConfig.Metadata) || !maps.Equal(p.Labels, podConfig.Labels) ||
		!maps.Equal(p.Annotations, podConfig.Annotations) || p.CreatedAt == 0 || p.RuntimeHandler != c.Handler {
		c.Errorf("pod status: got %v, want the attributes of %v", p, podConfig)
	}
	if !proto.Equal(s.Metadata, config.Metadata) || !maps.Equal(s.Labels, config.Labels) || !maps.Equal(s.Annotations, config.Annotations) ||
		s.CreatedAt == 0 || s.ImageId == "" {
		c.Errorf("container status: got %v, want the attributes of %v", s, config)
	}
	list, err := c.cri().ListContainers(c.ctx(),
		&runtimeapi.ListContainersRequest{Filter: &runtimeapi.ContainerFilter{PodSandboxId: pod, LabelSelector: config.Labels}})
	c.must(err)
	if len(list.Containers) != 1 || list.Containers[0].Id != id || list.Containers[0].PodSandboxId != pod ||
		list.Containers[0].ImageId != s.ImageId {
		c.Errorf("list of containers: got %v, want only %s in pod %s", list.Containers, id, pod)
	}
	pods, err := c.cri().ListPodSandbox(c.ctx(),
		&runtimeapi.ListPodSandboxRequest{Filter: &runtimeapi.PodSandboxFilter{LabelSelector: podConfig.Labels}})
	c.must(err)
	if len(pods.Items) != 1 || pods.Items[0].Id != pod {
		c.Errorf("list of pods: got %v, want only %s", pods.Items, pod)
	}
}

// ids: no container has the ID of a sandbox, and a unit pod has one container at a time.
func (c client) ids() {
	pod, podConfig := c.pod()
	id := c.create(pod, podConfig, c.container("c", Runs))
	if id == pod {
		c.Errorf("ID of the container: got the pod's ID %s, want another", id)
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

// exits: a container that ends by itself keeps its code, reason and times.
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
		c.Errorf("end of the container: got exit code %d, reason %q; want %d, %q", s.ExitCode, s.Reason, code, reason)
	}
	if s.CreatedAt > s.StartedAt || s.StartedAt > s.FinishedAt || s.FinishedAt > time.Now().UnixNano() ||
		s.StartedAt < before.Add(-time.Second).UnixNano() {
		c.Errorf("times: got created %d, started %d, finished %d; want them in this order and not in the future", s.CreatedAt, s.StartedAt,
			s.FinishedAt)
	}
	c.must(c.stop(id, 1))
	if again := c.status(id); again.ExitCode != code || again.FinishedAt != s.FinishedAt {
		c.Errorf("status after StopContainer: got %v, want the end of %v", again, s)
	}
}

// startFails: StartContainer returns the error of a failed start, and the container has exited with a reason.
func (c client) startFails() {
	pod, podConfig := c.pod()
	id, err := c.tryCreate(pod, podConfig, c.container("c", Fails))
	if err != nil {
		return // the backend refused the container at its creation
	}
	if err := c.start(id); err == nil {
		c.Fatal("StartContainer with a missing program succeeded, want an error")
	}
	s := c.status(id)
	if s.State != runtimeapi.ContainerState_CONTAINER_EXITED || s.Reason != sandbox.ReasonStartError || s.ExitCode != sandbox.ExitStartError ||
		s.Message == "" {
		c.Errorf("status: got %v, want exited with StartError and a message", s)
	}
}

// graceThenForce: a container that ignores its stop signal is killed after the grace period.
func (c client) graceThenForce() {
	pod, podConfig := c.pod()
	config := c.container("c", Deaf)
	id := c.create(pod, podConfig, config)
	c.must(c.start(id))
	if c.Deafened != nil {
		c.Deafened(c, filepath.Join(podConfig.LogDirectory, config.LogPath))
	}
	begin := time.Now()
	c.must(c.stop(id, 1))
	if took := time.Since(begin); took < time.Second {
		c.Errorf("the container was killed after %s, want at least 1 s", took)
	}
	if s := c.status(id); s.State != runtimeapi.ContainerState_CONTAINER_EXITED || s.ExitCode != 137 {
		c.Errorf("status: got %v, want exit code 137", s)
	}
}

// stopCutShort: a stop with a shorter grace period ends an earlier stop with a longer one.
func (c client) stopCutShort() {
	pod, podConfig := c.pod()
	id := c.create(pod, podConfig, c.container("c", Deaf))
	c.must(c.start(id))
	patient := make(chan error, 1)
	go func() { patient <- c.stop(id, 600) }()
	c.must(c.stop(id, 0))
	if err := <-patient; err != nil {
		c.Errorf("the stop with the longer grace period: %v", err)
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
			c.Errorf("status: got %v, want running without an end", s)
		}
		c.must(c.stop(id, 5))
	}
	if now := c.podStatus(pod).GetNetwork().GetIp(); now != ip {
		c.Errorf("address of the pod: got %s, want %s", now, ip)
	}
}

// createRepeats: a CreateContainer call counts as repeated even if the kubelet's counters in the configuration differ.
// The call does not count as repeated if anything else differs.
func (c client) createRepeats() {
	pod, podConfig := c.pod()
	config := c.container("c", Runs)
	id := c.create(pod, podConfig, config)
	counted := proto.CloneOf(config)
	counted.Annotations["io.kubernetes.container.restartCount"] = "3"
	if again := c.create(pod, podConfig, counted); again != id {
		c.Errorf("repeated CreateContainer: got %s, want %s", again, id)
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

// manyContainers: the containers of a pod are independent of each other.
func (c client) manyContainers() {
	if c.Unit {
		return // ids tests that a unit pod has one container at a time
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
		c.Errorf("state of the third container: got %s, want running", s.State)
	}
	next := c.container("a", Runs)
	next.Metadata.Attempt = 1
	if id := c.create(pod, podConfig, next); slices.Contains(ids, id) {
		c.Errorf("ID of the next attempt: got %s, want a new ID", id)
	}
	c.must(c.stopPod(pod))
	if s := c.status(ids[2]); s.State != runtimeapi.ContainerState_CONTAINER_EXITED {
		c.Errorf("state of the third container after StopPodSandbox: got %s, want exited", s.State)
	}
}

// stopAndRemoveAtOnce: if many callers stop and remove one pod at the same time, all calls succeed.
func (c client) stopAndRemoveAtOnce() {
	pod, podConfig := c.pod()
	id := c.create(pod, podConfig, c.container("c", Runs))
	c.must(c.start(id))
	calls := []func() error{
		func() error { return c.stopPod(pod) },
		func() error { return c.removePod(pod) },
	}
	if !c.Unit { // for a unit pod, the table refuses these calls in some of the states
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
			c.Errorf("concurrent call: %v", err)
		}
	}
	_, err := c.cri().PodSandboxStatus(c.ctx(), &runtimeapi.PodSandboxStatusRequest{PodSandboxId: pod})
	c.wantCode(err, codes.NotFound, "status of the removed pod")
}

// retry: a client whose deadline passes during RunPodSandbox repeats the call and gets one pod.
func (c client) retry() {
	config := c.podConfig()
	req := &runtimeapi.RunPodSandboxRequest{Config: config, RuntimeHandler: c.Handler}
	ctx, cancel := context.WithTimeout(c.ctx(), time.Millisecond)
	defer cancel()
	_, _ = c.cri().RunPodSandbox(ctx, req)
	resp, err := c.cri().RunPodSandbox(c.ctx(), req)
	c.must(err)
	defer func() { c.must(c.removePod(resp.PodSandboxId)) }()
	list, err := c.cri().ListPodSandbox(c.ctx(),
		&runtimeapi.ListPodSandboxRequest{Filter: &runtimeapi.PodSandboxFilter{LabelSelector: config.Labels}})
	c.must(err)
	if len(list.Items) != 1 {
		c.Errorf("pods after the repeated call: got %d, want 1", len(list.Items))
	}
}

// events: GetContainerEvents reports the transitions in order.
func (c client) events() {
	ctx, cancel := context.WithCancel(c.ctx())
	defer cancel()
	stream, err := c.cri().GetContainerEvents(ctx, &runtimeapi.GetEventsRequest{})
	c.must(err)
	_, err = stream.Header() // returns once the subscription is active
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
			c.Errorf("event: got %v, want a time and the pod's status", e)
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
		c.Errorf("events of the container: got %v, want %v", got, want)
	}
}

// readopt: after a SIGKILL of the daemon, the container still runs, and can be stopped and started.
func (c client) readopt() {
	if c.Restart == nil {
		return // an endpoint in the test's own process; test/e2e kills a real daemon
	}
	pod, podConfig := c.pod()
	id := c.create(pod, podConfig, c.container("c", Runs))
	c.must(c.start(id))
	before, ip := c.status(id), c.podStatus(pod).GetNetwork().GetIp()
	c.Restart(c.T)
	after := c.status(id)
	if after.State != runtimeapi.ContainerState_CONTAINER_RUNNING || after.StartedAt != before.StartedAt {
		c.Errorf("status after the restart: got %v, want %v", after, before)
	}
	if p := c.podStatus(pod); p.State != runtimeapi.PodSandboxState_SANDBOX_READY || p.GetNetwork().GetIp() != ip {
		c.Errorf("pod status after the restart: got %v, want ready with the address %s", p, ip)
	}
	c.must(c.stop(id, 5))
	c.must(c.start(id))
	c.must(c.stop(id, 5))
}
