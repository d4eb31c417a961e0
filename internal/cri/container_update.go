package cri

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/keys"
	"github.com/tripod-run/tripod/internal/sandbox"
)

// DiskReadOnly ends the value of the annotation keys.VMDisk if the guest cannot write to the disk. In UpdateContainerResources, the
// annotation attaches the disk with the name that follows the key to a running machine. The value is the path of a block device;
// the empty value detaches the disk.
const DiskReadOnly = ",ro"

// UpdateContainerResources changes the resources of a created or running container in place (KEP-1287), or attaches or
// detaches a disk of a running machine, if an annotation asks for that. It ignores the request's annotations for other
// runtimes.
func (s *Server) UpdateContainerResources(ctx context.Context,
	req *runtimeapi.UpdateContainerResourcesRequest) (*runtimeapi.UpdateContainerResourcesResponse, error) {
	if err := validateUpdate(req); err != nil {
		return nil, err
	}
	if err := s.update(ctx, req); err != nil {
		return nil, err
	}
	return &runtimeapi.UpdateContainerResourcesResponse{}, nil
}

func (s *Server) update(ctx context.Context, req *runtimeapi.UpdateContainerResourcesRequest) error {
	if ours := ownAnnotations(req.GetAnnotations()); len(ours) > 0 {
		name, value := strings.TrimPrefix(ours[0], keys.VMDisk), req.GetAnnotations()[ours[0]]
		if value == "" {
			return s.node.DetachDisk(ctx, req.GetContainerId(), name)
		}
		path, readOnly := strings.CutSuffix(value, DiskReadOnly)
		return s.node.AttachDisk(ctx, req.GetContainerId(), sandbox.Disk{Name: name, Path: path, ReadOnly: readOnly})
	}
	return s.node.UpdateContainer(ctx, req.GetContainerId(), req.GetLinux())
}

func validateUpdate(req *runtimeapi.UpdateContainerResourcesRequest) error {
	switch {
	case req.GetContainerId() == "":
		return required("container_id")
	case req.GetWindows() != nil:
		return invalid("windows", "this node runs Linux")
	}
	if ours := ownAnnotations(req.GetAnnotations()); len(ours) > 0 {
		return validateDisk(req, ours)
	}
	if req.GetLinux() == nil {
		return required("linux")
	}
	return cmp.Or(
		validateResources("linux", req.GetLinux()),
		validateKeyValues("annotations", req.GetAnnotations()),
	)
}

// ownAnnotations returns the keys of those annotations of an update that are meant for Tripod, sorted.
func ownAnnotations(annotations map[string]string) []string {
	names := slices.Sorted(maps.Keys(annotations))
	return slices.DeleteFunc(names, func(key string) bool { return !strings.HasPrefix(key, keys.Domain) })
}

// validateDisk checks an update with annotations for Tripod. It can have only one, and no resources, because they could
// not be changed together.
func validateDisk(req *runtimeapi.UpdateContainerResourcesRequest, ours []string) error {
	field := fmt.Sprintf("annotations[%q]", ours[0])
	path := strings.TrimSuffix(req.GetAnnotations()[ours[0]], DiskReadOnly)
	switch {
	case !strings.HasPrefix(ours[0], keys.VMDisk):
		return invalid(field, "cannot change while a container runs; an update understands only %s and a disk's name", keys.VMDisk)
	case len(ours) > 1:
		return invalid(field, "is one of %d disks; an update attaches or detaches only one", len(ours))
	case req.GetLinux() != nil:
		return invalid("linux", "an update cannot change resources and disks; make two of it")
	}
	return cmp.Or(validateAbsolute(field, path), validateKeyValues("annotations", req.GetAnnotations()))
}
