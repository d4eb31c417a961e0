package sandbox_test

import (
	"maps"
	"testing"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
)

func TestAllowList(t *testing.T) {
	list := sandbox.AllowList{"tripod.dev/vm.*", "Virtlet*", "example.com/exact"}
	annotations := map[string]string{
		"tripod.dev/vm.vnc": "1", "VirtletVCPUCount": "2", "example.com/exact": "3", "example.com/exactly": "4", "vnc": "5",
		"tripod.dev/edge.module": "6",
	}
	want := map[string]string{"tripod.dev/vm.vnc": "1", "VirtletVCPUCount": "2", "example.com/exact": "3"}
	if got := list.Pick(annotations); !maps.Equal(got, want) || len(annotations) != 6 {
		t.Errorf("Pick = %v, want %v", got, want)
	}
	for key, refused := range map[string]bool{
		"tripod.dev/vm.vnc": false, "tripod.dev/linux.x": true, "tripod.dev/edge.module": false, "example.com/other": false,
		"vimana.host/port": true, "Virtlet": false,
	} {
		with, without := map[string]string{key: ""}, &runtimeapi.PodSandboxConfig{}
		pod := &sandbox.Pod{Config: &runtimeapi.PodSandboxConfig{Annotations: with}}
		container := &sandbox.Container{Config: &runtimeapi.ContainerConfig{Annotations: with}}
		for what, err := range map[string]error{
			"pod": list.Check(pod, nil, "vimana.host/"), "container": list.Check(&sandbox.Pod{Config: without}, container, "vimana.host/"),
		} {
			if errdefs.IsPermissionDenied(err) != refused {
				t.Errorf("Check of a %s with %s = %v, refused %v", what, key, err, refused)
			}
		}
	}
	if got := (sandbox.AllowList{"*"}).Pick(annotations); len(got) != len(annotations) {
		t.Errorf("Pick of everything = %v", got)
	}
	if got := (sandbox.AllowList)(nil).Pick(annotations); len(got) != 0 {
		t.Errorf("Pick of nothing = %v", got)
	}
}
