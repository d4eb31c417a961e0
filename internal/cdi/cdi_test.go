package cdi

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

const file = `{"cdiVersion": "0.6.0", "kind": "vendor.com/class", "devices": [
  {"name": "char", "containerEdits": {"deviceNodes": [{"path": "/dev/new", "hostPath": "/dev/null", "type": "c", "major": 1, "minor": 3}], "env": ["A=b"]}},
  {"name": "block", "containerEdits": {"deviceNodes": [{"path": "/dev/disk", "hostPath": "/dev/host", "type": "b", "major": 7, "minor": 1, "permissions": "r"}]}},
  {"name": "plain", "containerEdits": {"deviceNodes": [{"path": "/dev/new", "type": "c", "major": 1, "minor": 3}]}}
]}`

func devices(t *testing.T) *Devices {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "vendor.json"), []byte(file), 0o644); err != nil {
		t.Fatal(err)
	}
	return New([]string{filepath.Join(dir, "missing"), dir})
}

func TestNames(t *testing.T) {
	got, err := Names(&runtimeapi.ContainerConfig{
		CDIDevices:  []*runtimeapi.CDIDevice{{Name: "vendor.com/class=a"}},
		Annotations: map[string]string{"cdi.k8s.io/plugin": "vendor.com/class=a,vendor.com/class=b", "other": "x"},
	})
	if want := []string{"vendor.com/class=a", "vendor.com/class=b"}; err != nil || !slices.Equal(got, want) {
		t.Errorf("Names: got %v, error %v; want %v", got, err, want)
	}
	if _, err := Names(&runtimeapi.ContainerConfig{Annotations: map[string]string{"cdi.k8s.io/plugin": "nonsense"}}); !errdefs.IsInvalidArgument(err) {
		t.Errorf("Names: got error %v, want ErrInvalidArgument", err)
	}
}

func TestInject(t *testing.T) {
	s := &specs.Spec{Process: &specs.Process{}, Linux: &specs.Linux{}}
	if err := devices(t).Inject(s, []string{"vendor.com/class=char"}); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(s.Process.Env, []string{"A=b"}) || len(s.Linux.Devices) != 1 || s.Linux.Devices[0].Path != "/dev/new" {
		t.Errorf("Inject: got %+v and %+v, want the device and its variable", s.Process, s.Linux)
	}
	if r := s.Linux.Resources.Devices; len(r) != 1 || !r[0].Allow || *r[0].Minor != 3 {
		t.Errorf("Inject: got rules %+v, want that the device is allowed", r)
	}
	if err := devices(t).Inject(s, []string{"vendor.com/class=moon"}); !errdefs.IsInvalidArgument(err) ||
		!strings.Contains(err.Error(), `"vendor.com/class=moon"`) {
		t.Errorf("Inject of an unknown device: got error %v, want ErrInvalidArgument with its name", err)
	}
}

func TestBlocks(t *testing.T) {
	got, err := devices(t).blocks([]string{"vendor.com/class=block"})
	if err != nil || len(got) != 1 || got[0].HostPath != "/dev/host" || got[0].ContainerPath != "/dev/disk" || got[0].Permissions != "r" {
		t.Errorf("Blocks: got %v, error %v; want the block device", got, err)
	}
	config := &runtimeapi.ContainerConfig{
		CDIDevices: []*runtimeapi.CDIDevice{{Name: "vendor.com/class=block"}}, Devices: []*runtimeapi.Device{{HostPath: "/dev/other"}},
		Annotations: map[string]string{"cdi.k8s.io/plugin": "vendor.com/class=block", "other": "x"},
	}
	had := proto.CloneOf(config)
	as, err := devices(t).AsBlocks(config)
	if err != nil || len(as.Devices) != 2 || as.Devices[1].HostPath != "/dev/host" || len(as.CDIDevices) != 0 || len(as.Annotations) != 1 ||
		as.Annotations["other"] != "x" {
		t.Errorf("AsBlocks: got %v, error %v; want the block device in the place of its names", as, err)
	}
	if !proto.Equal(config, had) {
		t.Errorf("AsBlocks has changed the configuration: got %v, want %v", config, had)
	}
	for _, name := range []string{"char", "plain"} {
		if _, err := devices(t).blocks([]string{"vendor.com/class=" + name}); !errdefs.IsNotImplemented(err) ||
			!strings.Contains(err.Error(), name) {
			t.Errorf("Blocks of %s: got error %v, want ErrNotImplemented with its name", name, err)
		}
	}
}
