package delegate

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// An endpoint without events, such as containerd 1.6, is listed once per relistInterval while somebody reads events. The
// differences become events, as a kubelet finds them in the same interval without events (its generic PLEG). A container
// that began and ended between two lists gets the events of both.
const relistInterval = time.Second

// phase is the progress of a container, or of a pod's sandbox.
type phase int

const (
	absent phase = iota
	created
	running
	ended
)

// sight is a pod or container in a list. The container of a sandbox is nil.
type sight struct {
	phase     phase
	pod       string
	container *runtimeapi.Container
}

// view is what one round of lists shows.
type view struct {
	pods map[string]*runtimeapi.PodSandbox
	all  map[string]sight // of pods and containers, by ID
}

// eventsByLists sends an endpoint's events until it is away.
func (r *Router) eventsByLists(ctx context.Context, e *endpoint, to *mergedEvents) error {
	last, err := r.look(ctx, e)
	for err == nil {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(relistInterval):
		}
		var now view
		if now, err = r.look(ctx, e); err == nil {
			now.keepUnknown(last)
			err = r.sendChanges(ctx, e, to, last, now)
			last = now
		}
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return e.unavailable(errors.Join(errors.New("its pods cannot be listed"), err))
}

// look lists an endpoint's pods and containers. It lists the containers first, so that each has its pod.
func (r *Router) look(ctx context.Context, e *endpoint) (view, error) {
	v := view{pods: map[string]*runtimeapi.PodSandbox{}, all: map[string]sight{}}
	lists := map[*listing][]proto.Message{}
	for _, l := range []*listing{containerList, podList} {
		err := e.ask(ctx, func(ctx context.Context) (err error) {
			lists[l], err = r.fetch(ctx, e, l, l.request(), false)
			return err
		})
		if err != nil {
			return v, err
		}
	}
	for _, m := range lists[podList] {
		p := m.(*runtimeapi.PodSandbox)
		v.pods[p.GetId()], v.all[p.GetId()] = p, sight{phase: podPhase(p.GetState()), pod: p.GetId()}
	}
	for _, m := range lists[containerList] {
		c := m.(*runtimeapi.Container)
		if v.pods[c.GetPodSandboxId()] != nil {
			v.all[c.GetId()] = sight{phase: containerPhase(c.GetState()), pod: c.GetPodSandboxId(), container: c}
		}
	}
	return v, nil
}

func podPhase(s runtimeapi.PodSandboxState) phase {
	if s == runtimeapi.PodSandboxState_SANDBOX_READY {
		return running
	}
	return ended
}

// containerPhase returns absent for a container whose state is unknown.
func containerPhase(s runtimeapi.ContainerState) phase {
	switch s {
	case runtimeapi.ContainerState_CONTAINER_CREATED:
		return created
	case runtimeapi.ContainerState_CONTAINER_RUNNING:
		return running
	case runtimeapi.ContainerState_CONTAINER_EXITED:
		return ended
	}
	return absent
}

// keepUnknown lets containers whose state is unknown keep their last phase.
func (v view) keepUnknown(last view) {
	for id, s := range v.all {
		if s.phase == absent {
			s.phase = last.all[id].phase
			v.all[id] = s
		}
	}
}

// step is a change from one phase to the next.
type step struct {
	id, pod string
	event   runtimeapi.ContainerEventType
	rank    int
}

// steps lists the changes between two views: sandboxes begin before and end after their containers.
func steps(last, now view) []step {
	var all []step
	for id, s := range now.all {
		all = appendSteps(all, id, s, last.all[id].phase, s.phase)
	}
	for id, s := range last.all {
		if _, present := now.all[id]; !present {
			all = appendSteps(all, id, s, s.phase, absent)
		}
	}
	slices.SortStableFunc(all, func(a, b step) int { return a.rank - b.rank })
	return all
}

// appendSteps appends the steps of one pod or container, in order.
func appendSteps(all []step, id string, s sight, from, to phase) []step {
	add := func(event runtimeapi.ContainerEventType, rank int) {
		if s.container != nil {
			rank = 1
		}
		all = append(all, step{id: id, pod: s.pod, event: event, rank: rank})
	}
	until := to
	if to == absent && from != absent && from != created {
		until = ended
	}
	if from < created && until >= created {
		add(runtimeapi.ContainerEventType_CONTAINER_CREATED_EVENT, 0)
	}
	if from < running && until >= running {
		add(runtimeapi.ContainerEventType_CONTAINER_STARTED_EVENT, 0)
	}
	if from < ended && until >= ended {
		add(runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT, 2)
	}
	if from != absent && to == absent {
		add(runtimeapi.ContainerEventType_CONTAINER_DELETED_EVENT, 2)
	}
	return all
}

// sendChanges sends the events of all changes between two views. The statuses are those after the last change.
func (r *Router) sendChanges(ctx context.Context, e *endpoint, to *mergedEvents, last, now view) error {
	statuses := map[string]*runtimeapi.ContainerEventResponse{}
	for _, s := range steps(last, now) {
		status := statuses[s.pod]
		if status == nil {
			pod := now.pods[s.pod]
			if pod == nil {
				pod = last.pods[s.pod]
			}
			var err error
			if status, err = e.describe(ctx, pod, now); err != nil {
				return err
			}
			statuses[s.pod] = status
		}
		err := to.SendMsg(&runtimeapi.ContainerEventResponse{
			ContainerId: s.id, ContainerEventType: s.event, CreatedAt: time.Now().UnixNano(),
			PodSandboxStatus: status.GetPodSandboxStatus(), ContainersStatuses: status.GetContainersStatuses(),
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// describe asks for the statuses of a pod and its containers. Those that have gone since are left out, except the pod:
// a kubelet needs to know whose event it is.
func (e *endpoint) describe(ctx context.Context, p *runtimeapi.PodSandbox, now view) (*runtimeapi.ContainerEventResponse, error) {
	d := &runtimeapi.ContainerEventResponse{PodSandboxStatus: &runtimeapi.PodSandboxStatus{
		Id: p.GetId(), Metadata: p.GetMetadata(), State: runtimeapi.PodSandboxState_SANDBOX_NOTREADY, CreatedAt: p.GetCreatedAt(),
		Labels: p.GetLabels(), Annotations: p.GetAnnotations(), RuntimeHandler: p.GetRuntimeHandler(),
	}}
	if now.pods[p.GetId()] == nil {
		return d, nil
	}
	reply, err := e.read(ctx, runtimeapi.RuntimeService_PodSandboxStatus_FullMethodName,
		&runtimeapi.PodSandboxStatusRequest{PodSandboxId: p.GetId()})
	if err == nil {
		d.PodSandboxStatus = reply.(*runtimeapi.PodSandboxStatusResponse).GetStatus()
	}
	for id, s := range now.all {
		if err != nil && !isMissing(err) {
			break
		}
		if s.container == nil || s.pod != p.GetId() {
			continue
		}
		reply, err = e.read(ctx, runtimeapi.RuntimeService_ContainerStatus_FullMethodName, &runtimeapi.ContainerStatusRequest{ContainerId: id})
		if err == nil {
			d.ContainersStatuses = append(d.ContainersStatuses, reply.(*runtimeapi.ContainerStatusResponse).GetStatus())
		}
	}
	if errdefs.IsUnavailable(err) || ctx.Err() != nil {
		return nil, err
	}
	return d, nil
}
