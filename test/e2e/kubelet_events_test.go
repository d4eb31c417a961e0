package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// kubeEvents tests evented PLEG: each event has the status of the pod and all its containers right after the event.
func kubeEvents(t *testing.T, k *kubelet) {
	ctx, cancel := context.WithTimeout(context.Background(), waitLimit)
	defer cancel()
	stream, err := k.d.CRI().GetContainerEvents(ctx, &runtimeapi.GetEventsRequest{})
	k.must(err)
	_, err = stream.Header()
	k.must(err)
	c := &kubeContainer{name: "c", image: harness.Busybox, command: shell("exit 0")}
	p := k.newPod("events", c)
	p.restart = restartNever
	s := k.wait(p, func(s *podStatus) error {
		if s.state(c) != "exited" || s.sandbox() != nil {
			return fmt.Errorf("want container c exited and no running sandbox, got %v", s)
		}
		return nil
	})
	sandbox, container := s.sandboxes[0].Id, s.of(c).Id
	k.remove(p)
	var got []string
	last := int64(0)
	for !slices.Contains(got, "pod DELETED") {
		e, err := stream.Recv()
		if err != nil {
			t.Fatalf("end of the events after %v: got error %v, want the event pod DELETED", got, err)
		}
		if e.PodSandboxStatus.GetMetadata().GetUid() != p.uid {
			continue
		}
		kind := strings.TrimSuffix(strings.TrimPrefix(e.ContainerEventType.String(), "CONTAINER_"), "_EVENT")
		who := map[string]string{sandbox: "pod ", container: "c "}[e.ContainerId]
		got = append(got, who+kind)
		if e.CreatedAt < last || e.PodSandboxStatus.GetId() != sandbox || len(e.PodSandboxStatus.Labels) == 0 {
			t.Errorf("event %s: got %v, want the pod's status and ascending times", who+kind, e)
		}
		last = e.CreatedAt
		states := map[string]runtimeapi.ContainerState{"c CREATED": created, "c STARTED": running, "c STOPPED": exited}
		if want, ok := states[who+kind]; ok && (len(e.ContainersStatuses) != 1 || e.ContainersStatuses[0].State != want) {
			t.Errorf("event %s: got container statuses %v, want one that is %v", who+kind, e.ContainersStatuses, want)
		}
		if who+kind == "c DELETED" && len(e.ContainersStatuses) != 0 {
			t.Errorf("event %s: got container statuses %v, want none", who+kind, e.ContainersStatuses)
		}
	}
	if want := "pod CREATED, pod STARTED, c CREATED, c STARTED, c STOPPED, pod STOPPED, c DELETED, pod DELETED"; strings.Join(got,
		", ") != want {
		t.Errorf("events: got %s, want %s", strings.Join(got, ", "), want)
	}
}

// kubeNotFound: for a removed pod or container, queries return NotFound and removals succeed.
func kubeNotFound(t *testing.T, k *kubelet) {
	ctx := context.Background()
	c := &kubeContainer{name: "c", image: harness.Busybox, command: sleeps("")}
	p := k.newPod("gone", c)
	p.grace = 2
	s := k.states(p, "c running")
	k.remove(p)
	sandbox, container := s.sandboxes[0].Id, s.of(c).Id
	_, sandboxErr := k.runtime.PodSandboxStatus(ctx, sandbox, false)
	_, containerErr := k.runtime.ContainerStatus(ctx, container, false)
	_, _, execErr := k.runtime.ExecSync(ctx, container, []string{"true"}, time.Second)
	_, createErr := k.runtime.CreateContainer(ctx, sandbox, k.containerConfig(p, c, k.ensureImage(c.image), 1), k.sandboxConfig(p, 0))
	for what, err := range map[string]error{"PodSandboxStatus": sandboxErr, "ContainerStatus": containerErr, "ExecSync": execErr,
		"CreateContainer": createErr} {
		if status.Code(err) != codes.NotFound {
			t.Errorf("%s: got error %v, want NotFound", what, err)
		}
	}
	k.must(errors.Join(k.runtime.StopPodSandbox(ctx, sandbox), k.runtime.RemovePodSandbox(ctx, sandbox),
		k.runtime.RemoveContainer(ctx, container)))
	if err := k.runtime.StopContainer(ctx, container, 1); err != nil && status.Code(err) != codes.NotFound {
		t.Error(err)
	}
	k.must(os.RemoveAll(k.dir(p)))
	k.must(os.RemoveAll(k.logDir(p)))
}
