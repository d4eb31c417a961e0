package cri

import (
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// TestUpdateDisk: an update's annotations are checked if they are meant for Tripod, and ignored otherwise. The fakes have no
// disks to attach.
func TestUpdateDisk(t *testing.T) {
	d := open(t)
	id := d.container(t, d.pod(t, "p"), "c")
	limits := &runtimeapi.LinuxContainerResources{CpuShares: 512}
	for what, test := range map[string]struct {
		annotations map[string]string
		linux       *runtimeapi.LinuxContainerResources
		code        codes.Code
		words       string
	}{
		"of another project":  {map[string]string{"example.com/x": "1"}, limits, codes.OK, ""},
		"not even resources":  {map[string]string{"example.com/x": "1"}, nil, codes.InvalidArgument, "linux"},
		"another key of ours": {map[string]string{"tripod.dev/vm.vcpu-count": "1"}, nil, codes.InvalidArgument, "tripod.dev/vm.disk."},
		"two disks": {map[string]string{"tripod.dev/vm.disk.a": "", "tripod.dev/vm.disk.b": ""}, nil, codes.InvalidArgument,
			"only one"},
		"a disk and resources": {map[string]string{"tripod.dev/vm.disk.a": ""}, limits, codes.InvalidArgument, "linux"},
		"a relative path":      {map[string]string{"tripod.dev/vm.disk.a": "dev/sda"}, nil, codes.InvalidArgument, "absolute"},
		"attach":               {map[string]string{"tripod.dev/vm.disk.a": "/dev/sda,ro"}, nil, codes.Unimplemented, "handler vm"},
		"detach":               {map[string]string{"tripod.dev/vm.disk.a": ""}, nil, codes.Unimplemented, "handler vm"},
	} {
		_, err := d.UpdateContainerResources(t.Context(),
			&runtimeapi.UpdateContainerResourcesRequest{ContainerId: id, Linux: test.linux, Annotations: test.annotations})
		if test.code == codes.OK {
			must(t, err)
			continue
		}
		t.Log(what)
		wantCode(t, err, test.code, test.words)
	}
}
