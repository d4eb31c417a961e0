package cli

import (
	"bytes"
	"strings"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func TestEventPrinter(t *testing.T) {
	event := func(at int64, kind runtimeapi.ContainerEventType, container string,
		statuses ...*runtimeapi.ContainerStatus) *runtimeapi.ContainerEventResponse {
		return &runtimeapi.ContainerEventResponse{
			ContainerId: container, ContainerEventType: kind, CreatedAt: at, ContainersStatuses: statuses,
			PodSandboxStatus: &runtimeapi.PodSandboxStatus{Id: "pod-1",
				Metadata: &runtimeapi.PodSandboxMetadata{Name: "web\x1b", Namespace: "shop"}},
		}
	}
	const started, deleted = runtimeapi.ContainerEventType_CONTAINER_STARTED_EVENT, runtimeapi.ContainerEventType_CONTAINER_DELETED_EVENT
	named := &runtimeapi.ContainerStatus{Id: "c-1", Metadata: &runtimeapi.ContainerMetadata{Name: "nginx"}}
	events := []*runtimeapi.ContainerEventResponse{
		event(1, started, "pod-1"), event(2, started, "c-1", named), event(3, deleted, "c-1"), event(4, deleted, "c-2"),
	}
	printed := func(format string, skip int64) string {
		t.Helper()
		var out bytes.Buffer
		p := &eventPrinter{app: &App{Stdout: &out, format: format}, names: map[string]string{}, skip: skip}
		for _, e := range events {
			if err := p.print(e); err != nil {
				t.Fatal(err)
			}
		}
		if p.last != 4 {
			t.Errorf("time of the last event: got %d, want 4", p.last)
		}
		return out.String()
	}
	lines := strings.Split(strings.TrimSpace(printed("", 0)), "\n")
	at := time.Unix(0, 1).Format("2006-01-02T15:04:05.000Z07:00")
	want := [][]string{{"TIME", "TYPE", "POD", "CONTAINER"}, {at, "started", "shop/web?", "-"}, {at, "started", "shop/web?", "nginx"},
		{at, "deleted", "shop/web?", "nginx"}, {at, "deleted", "shop/web?", "c-2"}}
	if len(lines) != len(want) {
		t.Fatalf("table: got %q, want %d lines", lines, len(want))
	}
	for i := range want {
		if got := strings.Join(strings.Fields(lines[i]), " "); got != strings.Join(want[i], " ") {
			t.Errorf("line %d: got %q, want %q", i, got, want[i])
		}
	}
	// A stream after the first one repeats events, which are not printed again.
	if out := printed("wide", 2); strings.Count(out, "\n") != 3 || !strings.Contains(out, "pod-1") || !strings.Contains(out, "nginx") {
		t.Errorf("wide table of the events after 2: got\n%s\nwant a header and two events with IDs", out)
	}
	if out := printed("json", 0); strings.Count(out, "\n") != 4 || !strings.Contains(out, `"containerEventType":"CONTAINER_DELETED_EVENT"`) {
		t.Errorf("JSON: got\n%s\nwant four lines", out)
	}
	if out := printed("yaml", 0); strings.Count(out, "---\n") != 4 || !strings.Contains(out, "containerId: c-2") {
		t.Errorf("YAML: got\n%s\nwant four documents", out)
	}
}
