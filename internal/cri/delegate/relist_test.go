package delegate

import (
	"slices"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// TestSteps: whatever happened between two lists, each container gets the events of its whole way, and its sandbox begins
// before and ends after it.
func TestSteps(t *testing.T) {
	const (
		made    = runtimeapi.ContainerEventType_CONTAINER_CREATED_EVENT
		started = runtimeapi.ContainerEventType_CONTAINER_STARTED_EVENT
		stopped = runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT
		deleted = runtimeapi.ContainerEventType_CONTAINER_DELETED_EVENT
	)
	see := func(pod, container phase) view {
		v := view{all: map[string]sight{}}
		if pod != absent {
			v.all["p"] = sight{phase: pod, pod: "p"}
		}
		if container != absent {
			v.all["c"] = sight{phase: container, pod: "p", container: &runtimeapi.Container{}}
		}
		return v
	}
	events := func(last, now view) (got []runtimeapi.ContainerEventType) {
		for _, s := range steps(last, now) {
			got = append(got, s.event)
		}
		return got
	}
	for _, c := range []struct {
		from, to phase
		want     []runtimeapi.ContainerEventType
	}{
		{absent, absent, nil},
		{absent, created, []runtimeapi.ContainerEventType{made}},
		{absent, running, []runtimeapi.ContainerEventType{made, started}},
		{absent, ended, []runtimeapi.ContainerEventType{made, started, stopped}},
		{created, running, []runtimeapi.ContainerEventType{started}},
		{created, ended, []runtimeapi.ContainerEventType{started, stopped}},
		{created, absent, []runtimeapi.ContainerEventType{deleted}},
		{running, running, nil},
		{running, ended, []runtimeapi.ContainerEventType{stopped}},
		{running, absent, []runtimeapi.ContainerEventType{stopped, deleted}},
		{ended, absent, []runtimeapi.ContainerEventType{deleted}},
	} {
		if got := events(see(running, c.from), see(running, c.to)); !slices.Equal(got, c.want) {
			t.Errorf("from %d to %d: %v, want %v", c.from, c.to, got, c.want)
		}
	}
	var ids []string
	for _, s := range append(steps(see(absent, absent), see(running, running)), steps(see(running, running), see(absent, absent))...) {
		ids = append(ids, s.id)
	}
	if want := []string{"p", "p", "c", "c", "c", "c", "p", "p"}; !slices.Equal(ids, want) {
		t.Errorf("events of %v, want %v", ids, want)
	}

	unknown := see(running, running)
	unknown.all["c"] = sight{pod: "p", container: &runtimeapi.Container{}}
	unknown.keepUnknown(see(running, running))
	if got := events(see(running, running), unknown); got != nil {
		t.Errorf("an unknown state gives the events %v", got)
	}
}
