package cri

import (
	"fmt"
	"sync"
	"testing"

	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// The client decodes the snapshots' messages, whatever is cached, without unknown fields.
func TestListsAreCurrentAfterEveryChange(t *testing.T) {
	d := open(t)
	ctx := t.Context()
	check := func(when string) {
		t.Helper()
		for range 2 { // the second list comes from the cache
			pods, err := d.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{})
			must(t, err)
			containers, err := d.ListContainers(ctx, &runtimeapi.ListContainersRequest{})
			must(t, err)
			if len(pods.ProtoReflect().GetUnknown())+len(containers.ProtoReflect().GetUnknown()) > 0 {
				t.Errorf("%s: the client's messages have unknown fields", when)
			}
			var wantPods, wantContainers []proto.Message
			for _, p := range d.node.Pods() {
				wantPods = append(wantPods, sandboxItem(p))
				for _, c := range p.Visible() {
					wantContainers = append(wantContainers, containerItem(c))
				}
			}
			wantMessages(t, when+": pods", pods.GetItems(), wantPods)
			wantMessages(t, when+": containers", containers.GetContainers(), wantContainers)
		}
	}
	check("empty")
	a := d.pod(t, "a")
	check("one pod")
	b := d.pod(t, "b")
	c := d.container(t, a, "c")
	check("a container is created")
	_, err := d.StartContainer(ctx, &runtimeapi.StartContainerRequest{ContainerId: c})
	must(t, err)
	check("it runs")
	_, err = d.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: a})
	must(t, err)
	check("its pod is stopped")
	_, err = d.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: a})
	must(t, err)
	check("its pod is removed")
	wantEqual(t, "pods remembered", len(d.server.podWire.last.Load().items), 1)
	_, err = d.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: b})
	must(t, err)
	check("all is removed")
	wantEqual(t, "pods remembered", len(d.server.podWire.last.Load().items), 0)
	wantEqual(t, "containers remembered", len(d.server.containerWire.last.Load().items), 0)
}

func wantMessages[M proto.Message](t *testing.T, what string, got []M, want []proto.Message) {
	t.Helper()
	if len(got) != len(want) {
		t.Errorf("%s: got %d messages, want %d", what, len(got), len(want))
		return
	}
	for i := range got {
		if !proto.Equal(got[i], want[i]) {
			t.Errorf("%s: got %v, want %v", what, got[i], want[i])
		}
	}
}

// A filtered list does not evict other pods from the cache.
func TestFilteredListsDoNotChangeTheCache(t *testing.T) {
	d := open(t)
	pod := d.pod(t, "a")
	d.pod(t, "b")
	list := func(f *runtimeapi.PodSandboxFilter) {
		_, err := d.ListPodSandbox(t.Context(), &runtimeapi.ListPodSandboxRequest{Filter: f})
		must(t, err)
	}
	list(nil)
	list(&runtimeapi.PodSandboxFilter{Id: pod})
	list(&runtimeapi.PodSandboxFilter{LabelSelector: map[string]string{"app": "a"}})
	list(&runtimeapi.PodSandboxFilter{State: &runtimeapi.PodSandboxStateValue{}})
	wantEqual(t, "pods remembered", len(d.server.podWire.last.Load().items), 2)
}

// Concurrent lists while pods change (go test -race).
func TestListsWhilePodsChange(t *testing.T) {
	d := open(t)
	stop := make(chan struct{})
	var lists, changes sync.WaitGroup
	for range 4 {
		lists.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if _, err := d.ListPodSandbox(t.Context(), &runtimeapi.ListPodSandboxRequest{}); err != nil {
					t.Error(err)
				}
				if _, err := d.ListContainers(t.Context(), &runtimeapi.ListContainersRequest{}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	for i := range 4 {
		changes.Go(func() {
			for n := range 10 {
				pod, err := d.node.RunSandbox(t.Context(), podConfig(fmt.Sprintf("p%d-%d", i, n)), "")
				if err == nil {
					_, err = d.node.CreateContainer(t.Context(), pod, containerConfig("c"))
				}
				if err == nil && n%2 == 0 {
					err = d.node.RemoveSandbox(t.Context(), pod)
				}
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	changes.Wait()
	close(stop)
	lists.Wait()
	pods, err := d.ListPodSandbox(t.Context(), &runtimeapi.ListPodSandboxRequest{})
	must(t, err)
	wantEqual(t, "pods in the end", len(pods.GetItems()), 20)
}
