package guestapi

import (
	"encoding/json"
	"net/netip"
	"testing"

	nri "github.com/containerd/nri/pkg/api"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
)

// TestMessages: pods and containers arrive as they were sent, also with bytes that are not UTF-8.
func TestMessages(t *testing.T) {
	setup := Setup{Pod: Pod{Pod: sandbox.Pod{
		ID: "p", Handler: "vm-oci",
		Config: &runtimeapi.PodSandboxConfig{Hostname: "h", Linux: &runtimeapi.LinuxPodSandboxConfig{Sysctls: map[string]string{"a": "b"}}},
		Netns:  "/n", IPs: []netip.Addr{netip.MustParseAddr("10.0.0.1")},
	}, CPUs: 3}}
	create := Create{Container: Container{sandbox.Container{
		ID: "c", ImageID: "i", Config: &runtimeapi.ContainerConfig{Envs: []*runtimeapi.KeyValue{{Key: "RAW", Value: []byte{0xff, 0xfe}}}},
		Adjustment: &nri.ContainerAdjustment{Args: []string{"x"}},
	}}}
	var gotSetup Setup
	var gotCreate Create
	for sent, got := range map[any]any{&setup: &gotSetup, &create: &gotCreate} {
		raw, err := json.Marshal(sent)
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(raw, got); err != nil {
			t.Fatal(err)
		}
	}
	if p, want := gotSetup.Pod, setup.Pod; p.ID != want.ID || p.Handler != want.Handler || p.Netns != want.Netns || p.CPUs != want.CPUs ||
		len(p.IPs) != 1 || p.IPs[0] != want.IPs[0] || !proto.Equal(p.Config, want.Config) {
		t.Errorf("pod: got %+v, want %+v", p, want)
	}
	if c, want := gotCreate.Container, create.Container; c.ID != want.ID || c.ImageID != want.ImageID || !proto.Equal(c.Config, want.Config) ||
		!proto.Equal(c.Adjustment, want.Adjustment) {
		t.Errorf("container: got %+v, want %+v", c, want)
	}
}
