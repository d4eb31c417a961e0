package cli

import (
	"bytes"
	"context"
	"strings"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// diskRuntime is a CRI endpoint whose only pod is a machine with disks.
type diskRuntime struct {
	otherRuntime
	updates []*runtimeapi.UpdateContainerResourcesRequest
	names   []string // of the pod's containers
}

func (d *diskRuntime) ListContainers(context.Context, *runtimeapi.ListContainersRequest) (*runtimeapi.ListContainersResponse, error) {
	list := &runtimeapi.ListContainersResponse{}
	for i, name := range d.names {
		list.Containers = append(list.Containers, &runtimeapi.Container{
			Id: name + "-" + strings.Repeat("x", i), PodSandboxId: "p", Metadata: &runtimeapi.ContainerMetadata{Name: name, Attempt: uint32(i)},
		})
	}
	return list, nil
}

func (*diskRuntime) ContainerStatus(context.Context, *runtimeapi.ContainerStatusRequest) (*runtimeapi.ContainerStatusResponse, error) {
	return &runtimeapi.ContainerStatusResponse{Status: &runtimeapi.ContainerStatus{
		Id: "c", Metadata: &runtimeapi.ContainerMetadata{Name: "c"}, Image: &runtimeapi.ImageSpec{Image: "i"}, ImageRef: "i",
		State: runtimeapi.ContainerState_CONTAINER_RUNNING, CreatedAt: 1, StartedAt: 1,
	}, Info: map[string]string{"info": `{"disks": [
		{"name": "a", "path": "/dev/a", "phase": "attached", "lun": 0, "device": 7}, {"name": "b", "path": "/dev/b", "phase": "detaching", "readOnly": true, "lun": 1, "device": 8}
	]}`}}, nil
}

func (d *diskRuntime) UpdateContainerResources(_ context.Context,
	req *runtimeapi.UpdateContainerResourcesRequest) (*runtimeapi.UpdateContainerResourcesResponse, error) {
	d.updates = append(d.updates, req)
	return &runtimeapi.UpdateContainerResourcesResponse{}, nil
}

// TestDisk: the commands for a machine's disks find the newest attempt of the pod's container, and a pod with several
// containers is refused.
func TestDisk(t *testing.T) {
	d := &diskRuntime{names: []string{"c", "c"}}
	serveRuntime(t, d)
	disk := func(args ...string) (string, error) {
		var out bytes.Buffer
		c := (&App{Stdout: &out, Stderr: &out}).DiskCommand()
		c.SilenceErrors, c.SilenceUsage = true, true
		c.SetArgs(args)
		err := c.ExecuteContext(t.Context())
		return out.String(), err
	}
	for _, test := range []struct {
		args  []string
		value string
	}{
		{[]string{"attach", "web", "a", "/dev/a"}, "/dev/a"},
		{[]string{"attach", "web", "a", "/dev/x/../a", "--read-only"}, "/dev/a,ro"},
		{[]string{"detach", "web", "a"}, ""},
	} {
		d.updates = nil
		if out, err := disk(test.args...); err != nil || out != "" || len(d.updates) != 1 {
			t.Fatalf("%q: got output %q, error %v, %d updates", test.args, out, err, len(d.updates))
		}
		value, has := d.updates[0].GetAnnotations()["tripod.dev/vm.disk.a"]
		if d.updates[0].GetContainerId() != "c-x" || value != test.value || !has || d.updates[0].GetLinux() != nil {
			t.Errorf("%q: got the update %v, want container c-x and the value %q", test.args, d.updates[0], test.value)
		}
	}
	const want = "NAME   PATH     ACCESS       PHASE\na      /dev/a   read-write   attached\nb      /dev/b   read-only    detaching\n"
	if out, err := disk("ls", "web"); err != nil || out != want {
		t.Errorf("ls: got\n%s, error %v; want\n%s", out, err, want)
	}
	d.names = []string{"c", "sidecar"}
	if _, err := disk("detach", "web", "a"); err == nil || !strings.Contains(err.Error(), "2 containers") {
		t.Errorf("detach from a pod with two containers: got error %v", err)
	}
}
