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

// patience is the deadline of a patient client. No call may take this long, even on a busy machine.
const patience = time.Minute

// slow is the duration from which the test logs a call.
const slow = 5 * time.Second

// transient are the codes after which a client tries again: its deadline passed, the daemon ended, or another client's
// order interfered.
var transient = []codes.Code{codes.DeadlineExceeded, codes.Canceled, codes.Unavailable, codes.Aborted}

// call makes a call as an impatient client does: sometimes with a very short deadline, and repeatedly until it is
// answered. The answer must be a success or one of the codes in allowed, otherwise the test fails. answered is false if
// there is none.
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
			s.t.Errorf("%s: no answer after %v: %v", name, patience, err)
			return err, false
		case slices.Contains(transient, code) || s.injected(err):
			time.Sleep(time.Duration(rng.IntN(30)) * time.Millisecond) // pacing of the retries
		default:
			s.t.Errorf("%s %s: got error %v (code %s), want success or one of the codes %v", clock(), name, err, code, allowed)
			return err, false
		}
	}
	s.t.Errorf("%s: no answer within %v", name, 2*patience)
	return nil, false
}

// injected reports whether err comes from the fail point that the test has armed.
func (s *soak) injected(err error) bool {
	return s.armed.Load() != nil && strings.Contains(err.Error(), "fail point")
}

// watchLists lists containers and pods continuously, and checks that no list waits for another call.
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
			s.t.Errorf("two lists: got error %v, want both within %v", err, limit)
		}
	}
}

// listener receives the daemon's events during one phase.
type listener struct {
	cancel context.CancelFunc
	done   sync.WaitGroup
}

// listen receives events, and subscribes again after each restart. A second subscription never reads its events.
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

// follow checks the order of the events of each container and pod, and that each event matches the status in it.
func (s *soak) follow(stream runtimeapi.RuntimeService_GetContainerEventsClient) {
	last := map[string]runtimeapi.ContainerEventType{}
	for {
		e, err := stream.Recv()
		if err != nil {
			if code := status.Code(err); !slices.Contains(transient, code) {
				s.t.Errorf("end of the events: got error %v, want one of the codes %v", err, transient)
			}
			return
		}
		if e.PodSandboxStatus.GetRuntimeHandler() == handler {
			continue // a unit pod and its container have the same ID, so their events cannot be distinguished
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

// legal returns an error if an event must not follow another of the same container or pod.
func legal(before runtimeapi.ContainerEventType, known bool, now runtimeapi.ContainerEventType) error {
	const (
		created = runtimeapi.ContainerEventType_CONTAINER_CREATED_EVENT
		started = runtimeapi.ContainerEventType_CONTAINER_STARTED_EVENT
		deleted = runtimeapi.ContainerEventType_CONTAINER_DELETED_EVENT
	)
	if known && (before == deleted || now == created || before == started && now == started) {
		return fmt.Errorf("got %s after %s", now, before)
	}
	return nil
}

// truthful returns an error if an event contradicts the statuses in it.
func truthful(e *runtimeapi.ContainerEventResponse) error {
	if e.ContainerId == e.PodSandboxStatus.GetId() {
		ready := e.PodSandboxStatus.State == runtimeapi.PodSandboxState_SANDBOX_READY
		if want := e.ContainerEventType <= runtimeapi.ContainerEventType_CONTAINER_STARTED_EVENT; ready != want {
			return fmt.Errorf("state of the pod in the event: got %s, want ready: %v", e.PodSandboxStatus.State, want)
		}
		return nil
	}
	want := map[runtimeapi.ContainerEventType]runtimeapi.ContainerState{
		runtimeapi.ContainerEventType_CONTAINER_CREATED_EVENT: runtimeapi.ContainerState_CONTAINER_CREATED,
		runtimeapi.ContainerEventType_CONTAINER_STARTED_EVENT: runtimeapi.ContainerState_CONTAINER_RUNNING,
		runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT: runtimeapi.ContainerState_CONTAINER_EXITED,
	}
	for _, c := range e.ContainersStatuses {
		// A deletion has no expected state, because it can contain the container's last status.
		if state, ok := want[e.ContainerEventType]; ok && c.Id == e.ContainerId && c.State != state {
			return fmt.Errorf("state of the container in the event: got %s, want %s", c.State, state)
		}
	}
	return nil
}
