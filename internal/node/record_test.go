package node

import (
	"encoding/json"
	"net/netip"
	"reflect"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
)

func fullPod() *Pod {
	at := time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)
	ended := &Container{ID: newID(), Config: &runtimeapi.ContainerConfig{}, State: Stopped, CreatedAt: at, FinishedAt: at, ExitCode: 4,
		unit: true}
	return &Pod{
		ID: newID(), Handler: "linux", Alias: "runc", Component: "example.com:a@1.0.0", unit: true, State: Initiated, Intent: StopPodSandbox,
		Config: &runtimeapi.PodSandboxConfig{Metadata: &runtimeapi.PodSandboxMetadata{Name: "p", Uid: "u"}},
		Netns:  "/run/netns/x", IPs: []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}, CreatedAt: at,
		Previous: []*Container{ended}, Attempts: 2,
		Containers: []*Container{{
			unit: true,
			ID:   newID(), Config: &runtimeapi.ContainerConfig{Metadata: &runtimeapi.ContainerMetadata{Name: "c"},
				Envs: []*runtimeapi.KeyValue{{Key: "A", Value: []byte{0xff}}}},
			ImageID: "sha256:1", ImageRef: "a@sha256:2", State: Stopped, CreatedAt: at, StartedAt: at, FinishedAt: at, ExitCode: 3, Reason: "Error",
			Message: "m", Pid: 7, Intent: RemoveContainer,
			Resolved: sandbox.Resolved{
				User:       &runtimeapi.ContainerUser{Linux: &runtimeapi.LinuxContainerUser{Uid: 1}},
				Mounts:     []*runtimeapi.Mount{{ContainerPath: "/a"}, {ContainerPath: "/b"}},
				StopSignal: runtimeapi.Signal_SIGNAL_SIGTERM,
			},
		}},
	}
}

// TestRecordsRoundTrip encodes and decodes a pod that uses every field.
func TestRecordsRoundTrip(t *testing.T) {
	want := fullPod()
	raw, err := encodePod(want)
	if err != nil {
		t.Fatal(err)
	}
	got, err := decodePod(raw)
	if err != nil {
		t.Fatal(err)
	}
	sameMessage := func(what string, a, b proto.Message) {
		if !proto.Equal(a, b) {
			t.Errorf("%s: got %v, want %v", what, a, b)
		}
	}
	g, w := got.Containers[0], want.Containers[0]
	sameMessage("pod", got.Config, want.Config)
	sameMessage("container", g.Config, w.Config)
	sameMessage("user", g.Resolved.User, w.Resolved.User)
	for i, m := range w.Resolved.Mounts {
		sameMessage("mount", g.Resolved.Mounts[i], m)
	}
	if g.PodID != want.ID || g.Resolved.StopSignal != w.Resolved.StopSignal {
		t.Errorf("decoded container: got %+v, want %+v", g, w)
	}
	g.Config, g.PodID, g.Resolved, got.Config = w.Config, w.PodID, w.Resolved, want.Config
	if got.Previous[0].PodID != want.ID {
		t.Errorf("decoded previous attempt: got %+v, want the pod %s", got.Previous[0], want.ID)
	}
	got.Previous[0].Config, got.Previous[0].PodID = want.Previous[0].Config, ""
	if !reflect.DeepEqual(got, want) {
		t.Errorf("decoded pod: got %+v\nwant %+v", got, want)
	}
}

// TestRecordsOfForeignContainers: only a pod with a foreign container has the version that earlier releases refuse.
func TestRecordsOfForeignContainers(t *testing.T) {
	for handler, want := range map[string]int{"": 2, "wasm": 3} {
		p := &Pod{ID: newID(), Handler: "linux", Config: &runtimeapi.PodSandboxConfig{}}
		p.Containers = []*Container{{ID: newID(), Config: &runtimeapi.ContainerConfig{}},
			{ID: newID(), Config: &runtimeapi.ContainerConfig{}, Handler: handler}}
		raw, err := encodePod(p)
		if err != nil {
			t.Fatal(err)
		}
		var head struct{ Version int }
		if err := json.Unmarshal(raw, &head); err != nil || head.Version != want {
			t.Errorf("version of a record with a container of handler %q: got %d, error %v; want %d", handler, head.Version, err, want)
		}
		if got, err := decodePod(raw); err != nil || got.Containers[1].Handler != handler {
			t.Errorf("decoded pod: got %+v, error %v; want a container of handler %q", got, err, handler)
		}
	}
}

// TestUnitPodOfVersion1GetsAnAttemptID: its container had the pod's ID, which remains its ID in the backend.
func TestUnitPodOfVersion1GetsAnAttemptID(t *testing.T) {
	for _, unit := range []bool{true, false} {
		raw, err := json.Marshal(podRecord{Version: 1, ID: newID(), Unit: unit, State: Initiated,
			Containers: []containerRecord{{ID: "c", State: Running}}})
		if err != nil {
			t.Fatal(err)
		}
		p, err := decodePod(raw)
		if err != nil {
			t.Fatal(err)
		}
		c := p.Containers[0]
		if unit && (c.ID != p.attemptID(1) || c.ID == p.ID || c.sandboxContainer().ID != p.ID || p.attemptID(p.Attempts+1) == c.ID) {
			t.Errorf("container of unit pod %s: got ID %s and backend ID %s, want an attempt's ID and the pod's", p.ID, c.ID,
				c.sandboxContainer().ID)
		}
		if !unit && (c.ID != "c" || c.sandboxContainer().ID != "c") {
			t.Errorf("container of a pod of many: got ID %s and backend ID %s, want c", c.ID, c.sandboxContainer().ID)
		}
	}
}

// FuzzDecodePod: decoding any bytes yields an error or a pod.
func FuzzDecodePod(f *testing.F) {
	raw, err := encodePod(fullPod())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(raw)
	f.Add([]byte(`{"version":1,"containers":[{"config":"AA=="}]}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		if p, err := decodePod(raw); err == nil && p.Config == nil {
			t.Error("decodePod returned a pod without a configuration")
		}
	})
}

func BenchmarkEncodePod(b *testing.B) {
	p := fullPod()
	for b.Loop() {
		if _, err := encodePod(p); err != nil {
			b.Fatal(err)
		}
	}
}
