package cri

import (
	"context"
	"fmt"
	"io"
	"net/url"
	goruntime "runtime"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func TestExecSync(t *testing.T) {
	d := open(t)
	id := d.running(t, d.pod(t, "p"), "c")
	run := func(timeout int64, cmd ...string) (*runtimeapi.ExecSyncResponse, error) {
		return d.ExecSync(t.Context(), &runtimeapi.ExecSyncRequest{ContainerId: id, Cmd: cmd, Timeout: timeout})
	}
	r, err := run(0, "echo", "hello", "there")
	must(t, err)
	wantEqual(t, "output", string(r.GetStdout()), "hello there\n")
	r, err = run(10, "exit", "3")
	must(t, err)
	wantEqual(t, "exit code", r.GetExitCode(), 3)
	_, err = run(0)
	wantCode(t, err, codes.InvalidArgument, "cmd")
	_, err = run(0, "echo", "a\x00b")
	wantCode(t, err, codes.InvalidArgument, "cmd[1]")
	// The kubelet's probes recognise a timeout by this code.
	_, err = run(1, "hang")
	wantCode(t, err, codes.DeadlineExceeded, "timed out")
}

func TestStreamingURLs(t *testing.T) {
	d := open(t)
	ctx, pod := t.Context(), d.pod(t, "p")
	id := d.running(t, pod, "c")
	tty := d.running(t, pod, "tty", func(c *runtimeapi.ContainerConfig) { c.Tty = true })
	isURL := func(got string, err error) {
		t.Helper()
		must(t, err)
		if u, err := url.Parse(got); err != nil || u.Scheme != "http" || u.Hostname() != "127.0.0.1" {
			t.Errorf("got URL %q, want http://127.0.0.1", got)
		}
	}
	e, err := d.Exec(ctx, &runtimeapi.ExecRequest{ContainerId: id[:40], Cmd: []string{"echo"}, Stdout: true, Stderr: true})
	isURL(e.GetUrl(), err)
	a, err := d.Attach(ctx, &runtimeapi.AttachRequest{ContainerId: tty, Tty: true, Stdin: true, Stdout: true})
	isURL(a.GetUrl(), err)
	f, err := d.PortForward(ctx, &runtimeapi.PortForwardRequest{PodSandboxId: pod, Port: []int32{80, 443}})
	isURL(f.GetUrl(), err)

	_, err = d.Exec(ctx, &runtimeapi.ExecRequest{ContainerId: id, Cmd: []string{"echo"}})
	wantCode(t, err, codes.InvalidArgument, "stdin, stdout, stderr")
	_, err = d.Exec(ctx, &runtimeapi.ExecRequest{ContainerId: id, Stdout: true})
	wantCode(t, err, codes.InvalidArgument, "cmd")
	_, err = d.Exec(ctx, &runtimeapi.ExecRequest{ContainerId: id, Cmd: []string{"echo"}, Tty: true, Stdout: true, Stderr: true})
	wantCode(t, err, codes.InvalidArgument, "stderr")
	_, err = d.Attach(ctx, &runtimeapi.AttachRequest{ContainerId: id, Tty: true, Stdout: true})
	wantCode(t, err, codes.InvalidArgument, "tty", "without")
	for _, port := range []int32{0, -1, 65536} {
		_, err = d.PortForward(ctx, &runtimeapi.PortForwardRequest{PodSandboxId: pod, Port: []int32{80, port}})
		wantCode(t, err, codes.InvalidArgument, "port[1]")
	}
}

func TestStats(t *testing.T) {
	d := open(t)
	ctx := t.Context()
	a, b := d.pod(t, "a"), d.pod(t, "b")
	ca, cb := d.running(t, a, "ca"), d.running(t, b, "cb")
	d.container(t, b, "created")

	one, err := d.ContainerStats(ctx, &runtimeapi.ContainerStatsRequest{ContainerId: ca})
	must(t, err)
	wantEqual(t, "id", one.GetStats().GetAttributes().GetId(), ca)
	wantEqual(t, "name", one.GetStats().GetAttributes().GetMetadata().GetName(), "ca")
	list := func(f *runtimeapi.ContainerStatsFilter) []string {
		r, err := d.ListContainerStats(ctx, &runtimeapi.ListContainerStatsRequest{Filter: f})
		must(t, err)
		var ids []string
		for _, s := range r.GetStats() {
			ids = append(ids, s.GetAttributes().GetId())
		}
		return ids
	}
	wantIDs(t, list(nil), []string{ca, cb})
	wantIDs(t, list(&runtimeapi.ContainerStatsFilter{PodSandboxId: b}), []string{cb})
	wantIDs(t, list(&runtimeapi.ContainerStatsFilter{Id: ca}), []string{ca})
	wantIDs(t, list(&runtimeapi.ContainerStatsFilter{LabelSelector: map[string]string{"app": "cb"}}), []string{cb})

	p, err := d.PodSandboxStats(ctx, &runtimeapi.PodSandboxStatsRequest{PodSandboxId: a})
	must(t, err)
	wantEqual(t, "pod", p.GetStats().GetAttributes().GetId(), a)
	wantEqual(t, "its containers", len(p.GetStats().GetLinux().GetContainers()), 1)
	_, err = d.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: b})
	must(t, err)
	pods, err := d.ListPodSandboxStats(ctx, &runtimeapi.ListPodSandboxStatsRequest{})
	must(t, err)
	wantEqual(t, "ready pods with figures", len(pods.GetStats()), 1)
	pods, err = d.ListPodSandboxStats(ctx, &runtimeapi.ListPodSandboxStatsRequest{Filter: &runtimeapi.PodSandboxStatsFilter{Id: "nope"}})
	must(t, err)
	wantEqual(t, "figures of a pod that is not there", len(pods.GetStats()), 0)
}

// One failing container does not hide the others (N8).
func TestStatsOmitFailures(t *testing.T) {
	d := open(t)
	pod := d.pod(t, "p")
	d.running(t, pod, "sick", func(c *runtimeapi.ContainerConfig) { c.Annotations["fake.tripod.dev/stats"] = "hang" })
	well := d.running(t, pod, "well")
	r, err := d.ListContainerStats(t.Context(), &runtimeapi.ListContainerStatsRequest{})
	must(t, err)
	wantEqual(t, "figures", len(r.GetStats()), 1)
	wantEqual(t, "of", r.GetStats()[0].GetAttributes().GetId(), well)
}

// A stuck backend does not delay lists and statuses (N8): they ask no backend.
func TestStuckBackendDoesNotDelayLists(t *testing.T) {
	d := open(t)
	stuck := podConfig("stuck")
	stuck.Annotations["fake.tripod.dev/create-sandbox"] = "delay(3s)"
	pod := d.pod(t, "p")
	d.running(t, pod, "c")
	done := make(chan error, 1)
	go func() {
		_, err := d.RunPodSandbox(t.Context(), &runtimeapi.RunPodSandboxRequest{Config: stuck})
		done <- err
	}()
	for lists := 0; ; lists++ {
		select {
		case err := <-done:
			must(t, err)
			if lists < 100 {
				t.Errorf("got %d rounds of lists while another pod was stuck for 3 s, want at least 100", lists)
			}
			return
		default:
		}
		_, err := d.ListPodSandbox(t.Context(), &runtimeapi.ListPodSandboxRequest{})
		must(t, err)
		_, err = d.ListContainers(t.Context(), &runtimeapi.ListContainersRequest{})
		must(t, err)
		_, err = d.PodSandboxStatus(t.Context(), &runtimeapi.PodSandboxStatusRequest{PodSandboxId: pod})
		must(t, err)
	}
}

// The caller's deadline yields DeadlineExceeded, and a retry finds the pod (N3).
func TestDeadlineOfTheCaller(t *testing.T) {
	d := open(t)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	config := podConfig("slow")
	config.Annotations["fake.tripod.dev/create-sandbox"] = "delay(500ms)"
	_, err := d.RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: config})
	wantCode(t, err, codes.DeadlineExceeded)
	r, err := d.RunPodSandbox(t.Context(), &runtimeapi.RunPodSandboxRequest{Config: config})
	must(t, err)
	list, err := d.ListPodSandbox(t.Context(), &runtimeapi.ListPodSandboxRequest{})
	must(t, err)
	wantIDs(t, ids(list.GetItems()), []string{r.GetPodSandboxId()})
}

func TestContainerEvents(t *testing.T) {
	d := open(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	events, err := d.GetContainerEvents(ctx, &runtimeapi.GetEventsRequest{})
	must(t, err)
	_, err = events.Header() // from now on no event is missed
	must(t, err)
	pod := d.pod(t, "p")
	c := d.running(t, pod, "c")
	_, err = d.StopContainer(ctx, &runtimeapi.StopContainerRequest{ContainerId: c})
	must(t, err)
	_, err = d.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: pod})
	must(t, err)
	const (
		created = runtimeapi.ContainerEventType_CONTAINER_CREATED_EVENT
		started = runtimeapi.ContainerEventType_CONTAINER_STARTED_EVENT
		stopped = runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT
		deleted = runtimeapi.ContainerEventType_CONTAINER_DELETED_EVENT
	)
	last := int64(0)
	for i, want := range []struct {
		id    string
		kind  runtimeapi.ContainerEventType
		state runtimeapi.ContainerState
	}{
		{pod, created, 0}, {pod, started, 0},
		{c, created, runtimeapi.ContainerState_CONTAINER_CREATED}, {c, started, runtimeapi.ContainerState_CONTAINER_RUNNING},
		{c, stopped, runtimeapi.ContainerState_CONTAINER_EXITED}, {c, deleted, 0}, {pod, stopped, 0}, {pod, deleted, 0},
	} {
		e, err := events.Recv()
		must(t, err)
		if i >= 5 { // the node decides the order of a pod's last events
			if e.GetContainerEventType() != stopped && e.GetContainerEventType() != deleted {
				t.Errorf("event %d: got %v, want stopped or deleted", i, e.GetContainerEventType())
			}
			continue
		}
		if e.GetContainerId() != want.id || e.GetContainerEventType() != want.kind {
			t.Errorf("event %d: got %s of %s, want %s of %s", i, e.GetContainerEventType(), e.GetContainerId(), want.kind, want.id)
		}
		if e.GetPodSandboxStatus().GetId() != pod || e.GetCreatedAt() < last {
			t.Errorf("event %d: got %v, want one of pod %s in order of time", i, e, pod)
		}
		if want.id == c && (len(e.GetContainersStatuses()) != 1 || e.GetContainersStatuses()[0].GetState() != want.state) {
			t.Errorf("event %d: got statuses %v, want one %s", i, e.GetContainersStatuses(), want.state)
		}
		last = e.GetCreatedAt()
	}
	cancel()
	for err == nil {
		_, err = events.Recv()
	}
	wantCode(t, err, codes.Canceled)
}

// Clients that disappear, and a client that never reads, leave no goroutines behind and do not delay others (N10).
func TestVanishedEventListenersLeaveNothing(t *testing.T) {
	d := open(t)
	pod := d.pod(t, "p")
	before := goruntime.NumGoroutine()
	ctx, cancel := context.WithCancel(t.Context())
	for range 100 {
		events, err := d.GetContainerEvents(ctx, &runtimeapi.GetEventsRequest{})
		must(t, err)
		_, err = events.Header()
		must(t, err)
	}
	if n := goruntime.NumGoroutine(); n < before+100 {
		t.Fatalf("got %d goroutines for 100 listeners, want at least 100", n-before)
	}
	for range 20 { // nobody reads these
		_, err := d.RemoveContainer(t.Context(), &runtimeapi.RemoveContainerRequest{ContainerId: d.running(t, pod, "c")})
		must(t, err)
	}
	cancel()
	for deadline := time.Now().Add(20 * time.Second); goruntime.NumGoroutine() > before; {
		if time.Now().After(deadline) {
			t.Fatalf("got %d goroutines, want %d", goruntime.NumGoroutine(), before)
		}
		time.Sleep(10 * time.Millisecond) // pacing of a poll
	}
}

// Every item is in exactly one message, and a message stays far below the limit.
func TestStreamsHaveEveryItemOnce(t *testing.T) {
	d := open(t)
	const n = 20
	for i := range n {
		pod := d.pod(t, fmt.Sprintf("p%d", i), func(c *runtimeapi.PodSandboxConfig) { c.Annotations["big"] = strings.Repeat("x", 100<<10) })
		d.running(t, pod, "c", func(c *runtimeapi.ContainerConfig) { c.Annotations["big"] = strings.Repeat("x", 100<<10) })
		d.images.add(fmt.Sprintf("img%d", i), "")
	}
	ctx := t.Context()
	pods, err := d.StreamPodSandboxes(ctx, &runtimeapi.StreamPodSandboxesRequest{})
	must(t, err)
	checkStream(t, n, pods.Recv, (*runtimeapi.StreamPodSandboxesResponse).GetPodSandboxes, (*runtimeapi.PodSandbox).GetId)
	containers, err := d.StreamContainers(ctx, &runtimeapi.StreamContainersRequest{})
	must(t, err)
	checkStream(t, n, containers.Recv, (*runtimeapi.StreamContainersResponse).GetContainers, (*runtimeapi.Container).GetId)
	containerStats, err := d.StreamContainerStats(ctx, &runtimeapi.StreamContainerStatsRequest{})
	must(t, err)
	checkStream(t, n, containerStats.Recv, (*runtimeapi.StreamContainerStatsResponse).GetContainerStats,
		func(s *runtimeapi.ContainerStats) string { return s.GetAttributes().GetId() })
	podStats, err := d.StreamPodSandboxStats(ctx, &runtimeapi.StreamPodSandboxStatsRequest{})
	must(t, err)
	checkStream(t, n, podStats.Recv, (*runtimeapi.StreamPodSandboxStatsResponse).GetPodSandboxStats,
		func(s *runtimeapi.PodSandboxStats) string { return s.GetAttributes().GetId() })
	images, err := d.StreamImages(ctx, &runtimeapi.StreamImagesRequest{})
	must(t, err)
	checkStream(t, n+1, images.Recv, (*runtimeapi.StreamImagesResponse).GetImages, (*runtimeapi.Image).GetId)

	none, err := d.StreamPodSandboxes(ctx, &runtimeapi.StreamPodSandboxesRequest{Filter: &runtimeapi.PodSandboxFilter{Id: "nope"}})
	must(t, err)
	if m, err := none.Recv(); err != io.EOF {
		t.Errorf("empty stream: got %v, %v; want io.EOF", m, err)
	}
}

func checkStream[R, M any](t *testing.T, want int, recv func() (R, error), items func(R) []M, id func(M) string) {
	t.Helper()
	seen, messages := map[string]bool{}, 0
	for {
		r, err := recv()
		if err == io.EOF {
			break
		}
		must(t, err)
		messages++
		if len(items(r)) == 0 {
			t.Error("the stream sent a message without items")
		}
		for _, m := range items(r) {
			if seen[id(m)] {
				t.Errorf("item %s was sent twice", id(m))
			}
			seen[id(m)] = true
		}
	}
	wantEqual(t, fmt.Sprintf("items in %d messages", messages), len(seen), want)
}

func TestChunks(t *testing.T) {
	item := func(size int) *runtimeapi.PodSandbox { return &runtimeapi.PodSandbox{Id: strings.Repeat("x", size)} }
	for name, c := range map[string]struct {
		sizes []int
		want  []int
	}{
		"none":              {nil, nil},
		"one":               {[]int{1}, []int{1}},
		"one that is large": {[]int{3 * chunkSize}, []int{1}},
		"large in between":  {[]int{1, 3 * chunkSize, 1}, []int{1, 1, 1}},
		"small":             {[]int{1, 2, 3}, []int{3}},
		"halves":            {[]int{chunkSize / 2, chunkSize / 2, 1}, []int{1, 2}},
	} {
		t.Run(name, func(t *testing.T) {
			var items []*runtimeapi.PodSandbox
			for _, size := range c.sizes {
				items = append(items, item(size))
			}
			var got []int
			must(t, sendMessages(items, func(chunk []*runtimeapi.PodSandbox) error { got = append(got, len(chunk)); return nil }))
			if fmt.Sprint(got) != fmt.Sprint(c.want) {
				t.Errorf("chunks: got %v, want %v", got, c.want)
			}
		})
	}
	sent := 0
	err := sendMessages([]*runtimeapi.PodSandbox{item(chunkSize), item(chunkSize), item(1)},
		func([]*runtimeapi.PodSandbox) error { sent++; return io.ErrClosedPipe })
	if err != io.ErrClosedPipe || sent != 1 {
		t.Errorf("got %d messages and error %v, want 1 and io.ErrClosedPipe", sent, err)
	}
}
