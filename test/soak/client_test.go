package soak

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// patience is how long a client waits that is not in a hurry. Nothing here may take as long, on a busy machine neither.
const patience = time.Minute

// slow is what is worth a line in the test's log.
const slow = 5 * time.Second

// transient are the codes after which a client asks again: it went away itself, the daemon did, or another client's
// order came in between.
var transient = []codes.Code{codes.DeadlineExceeded, codes.Canceled, codes.Unavailable, codes.Aborted}

// call makes a call as an impatient client does: sometimes with hardly any time, and again until there is an answer.
// The answer is success, one of the codes in allowed, or the test fails. It is nil, false when there is none.
func (s *soak) call(rng *rand.Rand, name string, allowed []codes.Code, do func(context.Context) error) (err error, answered bool) {
	for start := time.Now(); time.Since(start) < 2*patience; {
		limit := patience
		if rng.IntN(4) == 0 {
			limit = time.Duration(1+rng.IntN(200)) * time.Millisecond
		}
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		began := time.Now()
		err := do(ctx)
		cancel()
		s.calls.Add(1)
		if took := time.Since(began); took > slow {
			s.t.Logf("%s %s took %v: %v", clock(), name, took, err)
		}
		code := status.Code(err)
		switch {
		case code == codes.OK || slices.Contains(allowed, code):
			return err, true
		case code == codes.DeadlineExceeded && limit == patience && time.Since(began) >= patience:
			s.t.Errorf("%s has no answer after %v: %v", name, patience, err)
			return err, false
		case slices.Contains(transient, code) || s.soaked(err):
			time.Sleep(time.Duration(rng.IntN(30)) * time.Millisecond) // as a client that tries again
		default:
			s.t.Errorf("%s %s: %s: %v", clock(), name, code, err)
			return err, false
		}
	}
	s.t.Errorf("%s: no answer after many tries", name)
	return nil, false
}

// soaked tells an error that this test has ordered.
func (s *soak) soaked(err error) bool {
	return s.armed.Load() != nil && strings.Contains(err.Error(), "fail point")
}

// watchLists lists all the time: lists do not wait for anything.
func (s *soak) watchLists(stop <-chan struct{}) {
	const limit = 2 * time.Second
	for {
		select {
		case <-stop:
			return
		case <-time.After(50 * time.Millisecond):
		}
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		_, err := s.cri.ListContainers(ctx, &runtimeapi.ListContainersRequest{})
		if err == nil {
			_, err = s.cri.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{})
		}
		cancel()
		if code := status.Code(err); code != codes.OK && code != codes.Unavailable {
			s.t.Errorf("two lists within %v: %v", limit, err)
		}
	}
}

// listener hears the events of the lives of the daemon in one phase.
type listener struct {
	cancel context.CancelFunc
	done   sync.WaitGroup
}

// listen follows the events, again after every restart, and a second time without reading them.
func (s *soak) listen() *listener {
	ctx, cancel := context.WithCancel(context.Background())
	l := &listener{cancel: cancel}
	l.done.Go(func() {
		for ctx.Err() == nil {
			stream, err := s.cri.GetContainerEvents(ctx, &runtimeapi.GetEventsRequest{})
			if err == nil {
				s.follow(stream)
			}
			select {
			case <-ctx.Done():
			case <-time.After(20 * time.Millisecond):
			}
		}
	})
	_, _ = s.cri.GetContainerEvents(ctx, &runtimeapi.GetEventsRequest{}) // ends with ctx
	return l
}

func (l *listener) close() {
	l.cancel()
	l.done.Wait()
}

// follow checks the order of the events of each container and pod, and that each tells the state that it leads to.
func (s *soak) follow(stream runtimeapi.RuntimeService_GetContainerEventsClient) {
	last := map[string]runtimeapi.ContainerEventType{}
	for {
		e, err := stream.Recv()
		if err != nil {
			if code := status.Code(err); !slices.Contains(transient, code) {
				s.t.Errorf("the events end with %v", err)
			}
			return
		}
		if e.PodSandboxStatus.GetRuntimeHandler() == handler {
			continue // a pod and its container have one ID here, and their events are told apart by nothing
		}
		before, known := last[e.ContainerId]
		if err := legal(before, known, e.ContainerEventType); err != nil {
			s.t.Errorf("events of %s: %v", e.ContainerId, err)
		}
		if err := truthful(e); err != nil {
			s.t.Errorf("event %s of %s: %v", e.ContainerEventType, e.ContainerId, err)
		}
		last[e.ContainerId] = e.ContainerEventType
	}
}

// legal says whether an event may follow another of the same container or pod.
func legal(before runtimeapi.ContainerEventType, known bool, now runtimeapi.ContainerEventType) error {
	const (
		created = runtimeapi.ContainerEventType_CONTAINER_CREATED_EVENT
		started = runtimeapi.ContainerEventType_CONTAINER_STARTED_EVENT
		deleted = runtimeapi.ContainerEventType_CONTAINER_DELETED_EVENT
	)
	if known && (before == deleted || now == created || before == started && now == started) {
		return fmt.Errorf("%s after %s", now, before)
	}
	return nil
}

// truthful holds an event against the statuses that come with it.
func truthful(e *runtimeapi.ContainerEventResponse) error {
	if e.ContainerId == e.PodSandboxStatus.GetId() {
		ready := e.PodSandboxStatus.State == runtimeapi.PodSandboxState_SANDBOX_READY
		if want := e.ContainerEventType <= runtimeapi.ContainerEventType_CONTAINER_STARTED_EVENT; ready != want {
			return fmt.Errorf("the pod is %s", e.PodSandboxStatus.State)
		}
		return nil
	}
	want := map[runtimeapi.ContainerEventType]runtimeapi.ContainerState{
		runtimeapi.ContainerEventType_CONTAINER_CREATED_EVENT: runtimeapi.ContainerState_CONTAINER_CREATED,
		runtimeapi.ContainerEventType_CONTAINER_STARTED_EVENT: runtimeapi.ContainerState_CONTAINER_RUNNING,
		runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT: runtimeapi.ContainerState_CONTAINER_EXITED,
	}
	for _, c := range e.ContainersStatuses {
		// With the end of its pod, a deleted container comes with its last status.
		if state, ok := want[e.ContainerEventType]; ok && c.Id == e.ContainerId && c.State != state {
			return fmt.Errorf("the container is %s", c.State)
		}
	}
	return nil
}
