package sandboxtest

import (
	"fmt"
	"slices"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// nextAttempt: to restart a container that has ended, a kubelet creates the next attempt, which has a new ID. The first
// attempt does not change, and cannot be created again.
func (c client) nextAttempt() {
	pod, podConfig := c.pod()
	ip := c.podStatus(pod).GetNetwork().GetIp()
	first := c.create(pod, podConfig, c.container("c", Ends))
	c.must(c.start(first))
	ended := c.waitState(first, runtimeapi.ContainerState_CONTAINER_EXITED)
	_, err := c.tryCreate(pod, podConfig, c.container("c", Ends))
	c.wantCode(err, codes.FailedPrecondition, "the attempt that has ended")
	next := c.container("c", Runs)
	next.Metadata.Attempt = 1
	second := c.create(pod, podConfig, next)
	if second == first {
		c.Errorf("both attempts have the ID %s, want two IDs", first)
	}
	if s := c.status(first); !proto.Equal(s, ended) {
		c.Errorf("status of the first attempt after the second was created: got %v, want %v", s, ended)
	}
	if s := c.status(second); s.State != runtimeapi.ContainerState_CONTAINER_CREATED || s.Metadata.Attempt != 1 || s.ExitCode != 0 {
		c.Errorf("status of the second attempt before its start: got %v, want created", s)
	}
	c.must(c.start(second))
	c.waitState(second, runtimeapi.ContainerState_CONTAINER_RUNNING)
	if now := c.podStatus(pod).GetNetwork().GetIp(); now != ip {
		c.Errorf("address of the pod after the restart: got %s, want %s", now, ip)
	}
}

// previousAttempts: each attempt that has ended stays listed with its end, even after a restart of the daemon, until
// the attempt is removed by its own ID or together with the pod. Removing an ended attempt does not affect the running
// one.
func (c client) previousAttempts() {
	pod, podConfig := c.pod()
	var ids []string
	ends := map[string]*runtimeapi.ContainerStatus{}
	for attempt := range uint32(3) {
		workload := Ends
		if attempt == 2 {
			workload = Runs
		}
		config := c.container("c", workload)
		config.Metadata.Attempt = attempt
		config.LogPath = fmt.Sprintf("c_%d.log", attempt)
		id := c.create(pod, podConfig, config)
		c.must(c.start(id))
		if workload == Ends {
			ends[id] = c.waitState(id, runtimeapi.ContainerState_CONTAINER_EXITED)
		}
		ids = append(ids, id)
	}
	if c.Restart != nil {
		c.Restart(c.T)
	}
	listed := func() (all []string) {
		list, err := c.cri().ListContainers(c.ctx(), &runtimeapi.ListContainersRequest{Filter: &runtimeapi.ContainerFilter{PodSandboxId: pod}})
		c.must(err)
		for _, item := range list.Containers {
			all = append(all, item.Id)
		}
		return all
	}
	if got := listed(); !slices.Equal(got, ids) {
		c.Errorf("listed containers: got %q, want %q", got, ids)
	}
	for id, want := range ends {
		if got := c.status(id); !proto.Equal(got, want) {
			c.Errorf("status of a previous attempt: got %v, want %v", got, want)
		}
	}
	running := c.status(ids[2])
	c.must(c.stop(ids[0], 5))
	c.must(c.remove(ids[0]))
	c.must(c.remove(ids[0]))
	if got := listed(); !slices.Equal(got, ids[1:]) {
		c.Errorf("listed containers after a removal: got %q, want %q", got, ids[1:])
	}
	if !c.Unit {
		return
	}
	c.wantCode(c.start(ids[1]), codes.FailedPrecondition, "start of a previous attempt")
	if now := c.status(ids[2]); !proto.Equal(now, running) {
		c.Errorf("status of the newest attempt: got %v, want %v", now, running)
	}
	c.must(c.stopPod(pod))
	c.must(c.remove(ids[1]))
}

// eitherID: in a unit pod, every call can name the newest attempt by the sandbox's ID, and the sandbox by an attempt's
// ID.
func (c client) eitherID() {
	if !c.Unit {
		return
	}
	pod, podConfig := c.pod()
	id := c.create(pod, podConfig, c.container("c", Runs))
	for _, name := range []string{pod, id} {
		c.must(c.start(name))
		if again := c.create(name, podConfig, c.container("c", Runs)); again != id {
			c.Errorf("repeated CreateContainer with the ID %s: got %s, want %s", name, again, id)
		}
		if s := c.status(name); s.Id != id || s.State != runtimeapi.ContainerState_CONTAINER_RUNNING {
			c.Errorf("status of container %s: got %v, want running with the ID %s", name, s, id)
		}
		if s := c.podStatus(name); s.Id != pod {
			c.Errorf("status of sandbox %s: got %v, want the ID %s", name, s, pod)
		}
		list, err := c.cri().ListContainers(c.ctx(),
			&runtimeapi.ListContainersRequest{Filter: &runtimeapi.ContainerFilter{Id: name, PodSandboxId: name}})
		c.must(err)
		if len(list.Containers) != 1 || list.Containers[0].Id != id || list.Containers[0].PodSandboxId != pod {
			c.Errorf("containers of %s: got %v, want only %s", name, list.Containers, id)
		}
		stats, err := c.cri().ContainerStats(c.ctx(), &runtimeapi.ContainerStatsRequest{ContainerId: name})
		c.must(err)
		if stats.Stats.Attributes.Id != id {
			c.Errorf("stats of %s: got %v, want the ID %s", name, stats.Stats, id)
		}
		c.must(c.stop(name, 5))
	}
	c.must(c.remove(pod))
	c.must(c.stopPod(id))
	c.must(c.removePod(id))
	_, err := c.cri().PodSandboxStatus(c.ctx(), &runtimeapi.PodSandboxStatusRequest{PodSandboxId: pod})
	c.wantCode(err, codes.NotFound, "status of the removed pod")
}

// collected: a kubelet's garbage collection removes the containers of a stopped pod, more than once, and then the pod once no
// container is listed.
func (c client) collected() {
	pod, podConfig := c.pod()
	id := c.create(pod, podConfig, c.container("c", Runs))
	c.must(c.start(id))
	c.must(c.stop(id, 5))
	c.must(c.stopPod(pod))
	listed := func() int {
		all, err := c.cri().ListContainers(c.ctx(), &runtimeapi.ListContainersRequest{})
		c.must(err)
		n := 0
		for _, item := range all.Containers {
			if item.Id == id {
				n++
			}
		}
		one, err := c.cri().ListContainers(c.ctx(), &runtimeapi.ListContainersRequest{Filter: &runtimeapi.ContainerFilter{Id: id}})
		c.must(err)
		if len(one.Containers) != n {
			c.Errorf("the container is listed %d times by its ID and %d times among all, want the same number", len(one.Containers), n)
		}
		return n
	}
	if listed() != 1 {
		c.Error("the stopped container is not listed")
	}
	for range 2 {
		c.must(c.remove(id))
		if listed() != 0 {
			c.Error("the container is still listed after its removal")
		}
		_, err := c.cri().ContainerStatus(c.ctx(), &runtimeapi.ContainerStatusRequest{ContainerId: id})
		c.wantCode(err, codes.NotFound, "status of a removed container")
	}
	c.must(c.removePod(pod))
}
