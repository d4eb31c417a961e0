package delegate

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/guard"
)

// ConditionPrefix is the prefix of the type of an endpoint's own condition in Status; its name follows.
const ConditionPrefix = "DelegateReady/"

// reason and message of a condition that an endpoint makes false.
const reasonNotReady = "DelegateNotReady"

// askAll forwards a read to all endpoints in parallel.
func (r *Router) askAll(ctx context.Context, c *call) (replies []proto.Message, errs []error) {
	replies, errs = make([]proto.Message, len(r.endpoints)), make([]error, len(r.endpoints))
	var all guard.Group
	for i, e := range r.endpoints {
		all.Go(func() error { replies[i], errs[i] = e.read(ctx, c.method, c.req); return nil })
	}
	_ = all.Wait() // the parts return nil
	return replies, errs
}

// status joins the conditions: RuntimeReady and NetworkReady hold if they hold everywhere. Each endpoint also has a
// condition of its own.
func (r *Router) status(ctx context.Context, c *call) (proto.Message, error) {
	replies, errs := r.askAll(ctx, c)
	own, err := c.local(ctx)
	if err != nil {
		return nil, err
	}
	resp := own.(*runtimeapi.StatusResponse)
	for i, e := range r.endpoints {
		reply, _ := replies[i].(*runtimeapi.StatusResponse)
		joinConditions(resp.GetStatus(), e.Name, reply.GetStatus(), errs[i])
		r.joinHandlers(resp, e, reply)
		for key, value := range reply.GetInfo() {
			if resp.Info != nil {
				resp.Info[e.Name+"/"+key] = value
			}
		}
	}
	return resp, nil
}

// joinConditions adds an endpoint's conditions to this node's.
func joinConditions(own *runtimeapi.RuntimeStatus, name string, theirs *runtimeapi.RuntimeStatus, err error) {
	c := &runtimeapi.RuntimeCondition{Type: ConditionPrefix + name, Status: true}
	problem := func(condition, message string) {
		c.Status, c.Reason = false, reasonNotReady
		c.Message = strings.TrimPrefix(c.Message+"; "+message, "; ")
		for _, o := range own.GetConditions() {
			if o.GetType() == condition && o.GetStatus() {
				o.Status, o.Reason, o.Message = false, reasonNotReady, message
			}
		}
	}
	if err != nil {
		problem(runtimeapi.RuntimeReady, status.Convert(err).Message())
	}
	for _, t := range theirs.GetConditions() {
		required := t.GetType() == runtimeapi.RuntimeReady || t.GetType() == runtimeapi.NetworkReady
		if required && !t.GetStatus() {
			problem(t.GetType(), fmt.Sprintf("delegate %s: %s: %s", name, t.GetReason(), t.GetMessage()))
		}
	}
	own.Conditions = append(own.Conditions, c)
}

// joinHandlers adds the endpoint's handlers, with the features that it reports for them. The features of the runtime are
// those of the default handler's owner.
func (r *Router) joinHandlers(resp *runtimeapi.StatusResponse, e *endpoint, theirs *runtimeapi.StatusResponse) {
	for _, name := range e.Handlers {
		handler := &runtimeapi.RuntimeHandler{Name: name, Features: &runtimeapi.RuntimeHandlerFeatures{}}
		for _, h := range theirs.GetRuntimeHandlers() {
			if h.GetName() == name {
				handler = h
			}
		}
		if name == "" {
			resp.Features = theirs.GetFeatures()
		}
		resp.RuntimeHandlers = slices.DeleteFunc(resp.RuntimeHandlers, func(h *runtimeapi.RuntimeHandler) bool { return h.GetName() == name })
		resp.RuntimeHandlers = append(resp.RuntimeHandlers, handler)
	}
}

// runtimeConfig returns the cgroup driver. It must be the same everywhere, because the kubelet uses one for all pods. An
// endpoint that does not report its driver is left out.
func (r *Router) runtimeConfig(ctx context.Context, c *call) (proto.Message, error) {
	replies, errs := r.askAll(ctx, c)
	own, err := c.local(ctx)
	if err != nil {
		return nil, err
	}
	driver := own.(*runtimeapi.RuntimeConfigResponse).GetLinux().GetCgroupDriver()
	for i, e := range r.endpoints {
		if errs[i] != nil {
			continue
		}
		theirs := replies[i].(*runtimeapi.RuntimeConfigResponse).GetLinux()
		if theirs != nil && theirs.GetCgroupDriver() != driver {
			return nil, fmt.Errorf("the cgroup driver of delegate %s is %s and this node's is %s: set linux.cgroup_driver, or change the delegate's: %w",
				e.Name, theirs.GetCgroupDriver(), driver, errdefs.ErrFailedPrecondition)
		}
	}
	return own, nil
}

// updateRuntimeConfig passes the kubelet's settings to all endpoints. The kubelet repeats a call that fails.
func (r *Router) updateRuntimeConfig(ctx context.Context, c *call) (proto.Message, error) {
	own, err := c.local(ctx)
	if err != nil {
		return nil, err
	}
	_, errs := r.askAll(ctx, c)
	for _, err := range errs {
		if err != nil && status.Code(err) != codes.Unimplemented {
			return nil, err
		}
	}
	return own, nil
}

// imageFsInfo joins the usage of images and of writable layers. Directories on one file system become one entry with the
// sum of their usage, because the kubelet reads only the first entry, and compares it with the file system's capacity. A
// directory that several report counts once.
func (r *Router) imageFsInfo(ctx context.Context, c *call) (proto.Message, error) {
	replies, errs := r.askAll(ctx, c)
	own, err := c.local(ctx)
	if err != nil {
		return nil, err
	}
	resp := own.(*runtimeapi.ImageFsInfoResponse)
	images, containers := resp.GetImageFilesystems(), resp.GetContainerFilesystems()
	for i, e := range r.endpoints {
		if errdefs.IsUnavailable(errs[i]) {
			errs[i] = nil // usage without this endpoint's is better for garbage collection than no usage
			e.log.Debug("the usage of images is incomplete")
		}
		theirs, _ := replies[i].(*runtimeapi.ImageFsInfoResponse)
		images, containers = append(images, theirs.GetImageFilesystems()...), append(containers, theirs.GetContainerFilesystems()...)
	}
	if err := firstError(errs...); err != nil {
		return nil, err
	}
	return &runtimeapi.ImageFsInfoResponse{ImageFilesystems: joinUsage(images), ContainerFilesystems: joinUsage(containers)}, nil
}

func joinUsage(all []*runtimeapi.FilesystemUsage) []*runtimeapi.FilesystemUsage {
	var joined []*runtimeapi.FilesystemUsage
	counted, at := map[string]bool{}, map[string]*runtimeapi.FilesystemUsage{}
	for _, u := range all {
		path := u.GetFsId().GetMountpoint()
		if counted[path] {
			continue
		}
		counted[path] = true
		sum := at[fileSystem(path)]
		if sum == nil {
			sum = proto.CloneOf(u)
			at[fileSystem(path)] = sum
			joined = append(joined, sum)
			continue
		}
		sum.Timestamp = min(sum.GetTimestamp(), u.GetTimestamp())
		sum.UsedBytes = &runtimeapi.UInt64Value{Value: sum.GetUsedBytes().GetValue() + u.GetUsedBytes().GetValue()}
		sum.InodesUsed = &runtimeapi.UInt64Value{Value: sum.GetInodesUsed().GetValue() + u.GetInodesUsed().GetValue()}
	}
	return joined
}

// fileSystem identifies the file system of a directory: by its device, or by the path itself if it cannot be examined.
func fileSystem(path string) string {
	var s unix.Stat_t
	if err := unix.Stat(path, &s); err != nil {
		return path
	}
	return fmt.Sprintf("device %d", s.Dev)
}
