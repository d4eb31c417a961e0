package sandboxtest

import (
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// nextAttempt: a kubelet restarts what has ended by creating its next attempt. A pod of many then has both, a unit pod
// the second in the place of the first; the same attempt is not made twice.
func (c client) nextAttempt() {
	pod, podConfig := c.pod()
	ip := c.podStatus(pod).GetNetwork().GetIp()
	first := c.create(pod, podConfig, c.container("c", Ends))
	c.must(c.start(first))
	c.waitState(first, runtimeapi.ContainerState_CONTAINER_EXITED)
	_, err := c.tryCreate(pod, podConfig, c.container("c", Ends))
	c.wantCode(err, codes.FailedPrecondition, "the attempt that has ended")
	next := c.container("c", Runs)
	next.Metadata.Attempt = 1
	second := c.create(pod, podConfig, next)
	if (second == first) != c.Unit {
		c.Errorf("the first attempt is %s, the second %s", first, second)
	}
	if s := c.status(second); s.State != runtimeapi.ContainerState_CONTAINER_CREATED || s.Metadata.Attempt != 1 || s.ExitCode != 0 {
		c.Errorf("the second attempt before its start: %v", s)
	}
	c.must(c.start(second))
	c.waitState(second, runtimeapi.ContainerState_CONTAINER_RUNNING)
	if now := c.podStatus(pod).GetNetwork().GetIp(); now != ip {
		c.Errorf("the restart took the pod from %s to %s", ip, now)
	}
}

// collected: a kubelet's garbage collection removes the containers of a stopped pod, and the pod when it sees none of
// them any more. Of a unit pod the table refuses the first; the container is then not listed, and the pod can go.
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
			c.Errorf("listed %d times by its ID and %d times among all", len(one.Containers), n)
		}
		return n
	}
	if listed() != 1 {
		c.Error("a container that was not removed is not listed")
	}
	err := c.remove(id)
	if c.Unit {
		c.wantCode(err, codes.FailedPrecondition, "removal of the container of a killed unit pod")
		if s := c.status(id); s.State != runtimeapi.ContainerState_CONTAINER_EXITED {
			c.Errorf("status after the refused removal: %v", s)
		}
	} else {
		c.must(err)
	}
	if listed() != 0 {
		c.Error("the container is still listed")
	}
	c.must(c.removePod(pod))
}
