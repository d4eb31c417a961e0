package delegate

import (
	"context"
	"fmt"
	"slices"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/guard"
)

var (
	failRunIntent       = failpoint.New("delegate.run-sandbox.intent")
	failRunForwarded    = failpoint.New("delegate.run-sandbox.forwarded")
	failCreateForwarded = failpoint.New("delegate.create-container.forwarded")
	failRemoveForwarded = failpoint.New("delegate.remove.forwarded")
)

// reads are the calls with an ID that change nothing. They have the endpoint's timeout; all others have the caller's.
// The calls that return a URL are reads, because the session begins later.
var reads = []string{
	runtimeapi.RuntimeService_PodSandboxStatus_FullMethodName,
	runtimeapi.RuntimeService_ContainerStatus_FullMethodName,
	runtimeapi.RuntimeService_PodSandboxStats_FullMethodName,
	runtimeapi.RuntimeService_ContainerStats_FullMethodName,
	runtimeapi.RuntimeService_Exec_FullMethodName,
	runtimeapi.RuntimeService_Attach_FullMethodName,
	runtimeapi.RuntimeService_PortForward_FullMethodName,
}

// byID answers a call about one pod or container.
func (r *Router) byID(ctx context.Context, c *call, id string) (proto.Message, error) {
	e, full, err := r.ownerOf(ctx, id)
	if err != nil {
		return nil, err
	}
	if e == nil {
		return c.local(ctx)
	}
	if slices.Contains(reads, c.method) {
		return e.read(ctx, c.method, c.req)
	}
	resp, err := e.order(ctx, c.method, c.req)
	if err != nil {
		return nil, err
	}
	switch c.req.(type) {
	case *runtimeapi.RemovePodSandboxRequest, *runtimeapi.RemoveContainerRequest:
		if err := failRemoveForwarded.Hit(ctx); err != nil {
			return nil, err
		}
		r.owners.remove(full)
	}
	return resp, nil
}

// isOurs reports whether an ID, or its beginning, belongs to a pod or container of this node.
func (r *Router) isOurs(id string) bool {
	if _, err := r.node.Pod(id); !errdefs.IsNotFound(err) {
		return true
	}
	_, _, err := r.node.Container(id)
	return !errdefs.IsNotFound(err)
}

// ownerOf returns the endpoint that has the pod or container with the given ID or prefix, and the full ID; nil means this
// node. This node's own pods come first. The endpoints are asked about an ID without a known owner. For an endpoint that
// is away the record suffices, once all of its pods have been listed.
func (r *Router) ownerOf(ctx context.Context, id string) (*endpoint, string, error) {
	if id == "" || r.isOurs(id) {
		return nil, id, nil
	}
	full, entry, err := r.owners.find(id)
	if err != nil {
		return nil, "", err
	}
	if entry != nil {
		return entry.endpoint, full, nil
	}
	found, errs := make([]string, len(r.endpoints)), make([]error, len(r.endpoints))
	var all guard.Group
	for i, e := range r.endpoints {
		all.Go(func() error { found[i], errs[i] = r.search(ctx, e, id); return nil })
	}
	_ = all.Wait() // the parts return nil
	for i, e := range r.endpoints {
		if found[i] != "" {
			return e, found[i], nil
		}
	}
	return nil, id, firstError(errs...)
}

// search asks an endpoint for a pod or container, and returns its full ID; "" if the endpoint does not have it.
func (r *Router) search(ctx context.Context, e *endpoint, id string) (string, error) {
	requests := map[string]proto.Message{
		runtimeapi.RuntimeService_PodSandboxStatus_FullMethodName: &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id},
		runtimeapi.RuntimeService_ContainerStatus_FullMethodName:  &runtimeapi.ContainerStatusRequest{ContainerId: id},
	}
	for method, req := range requests {
		reply, err := e.read(ctx, method, req)
		switch {
		case errdefs.IsUnavailable(err) && r.owners.isListed(e):
			return "", nil
		case errdefs.IsUnavailable(err) || ctx.Err() != nil:
			return "", err
		case err != nil:
			continue
		}
		entry, full := entryOf(e, reply)
		r.owners.add(map[string]*owner{full: entry})
		return full, nil
	}
	return "", nil
}

func entryOf(e *endpoint, reply proto.Message) (entry *owner, id string) {
	entry = &owner{endpoint: e}
	switch reply := reply.(type) {
	case *runtimeapi.PodSandboxStatusResponse:
		entry.UID, id = reply.GetStatus().GetMetadata().GetUid(), reply.GetStatus().GetId()
	case *runtimeapi.ContainerStatusResponse:
		id = reply.GetStatus().GetId()
	}
	return entry, id
}

// runSandbox makes a pod at the endpoint to which its handler or its annotations lead.
func (r *Router) runSandbox(ctx context.Context, c *call, handler string, config *runtimeapi.PodSandboxConfig) (proto.Message, error) {
	e := r.endpointFor(handler, config.GetAnnotations())
	if e == nil {
		return c.local(ctx)
	}
	if err := r.beginSandbox(e); err != nil {
		return nil, err
	}
	resp, err := r.forwardRun(ctx, e, c)
	var since uint64
	e.mu.Lock()
	e.running--
	if err == nil {
		since = e.createdLocked(podList)
	}
	e.mu.Unlock()
	if err != nil {
		return nil, err
	}
	id := resp.(interface{ GetPodSandboxId() string }).GetPodSandboxId()
	r.owners.add(map[string]*owner{id: {endpoint: e, UID: config.GetMetadata().GetUid(), since: since}})
	e.kick()
	return resp, nil
}

func (r *Router) forwardRun(ctx context.Context, e *endpoint, c *call) (proto.Message, error) {
	if err := failRunIntent.Hit(ctx); err != nil {
		return nil, err
	}
	resp, err := e.order(ctx, c.method, c.req)
	if err != nil {
		return nil, err
	}
	return resp, failRunForwarded.Hit(ctx)
}

// beginSandbox records that the endpoint has pods before it gets one. So a daemon that is killed meanwhile knows that a
// list without the endpoint's answer can be incomplete.
func (r *Router) beginSandbox(e *endpoint) error {
	if err := e.reason(); err != nil {
		return err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if err := r.owners.setState(e, endpointRecord{Listed: r.owners.isListed(e)}); err != nil {
		return fmt.Errorf("delegate %s: record that it has pods: %w", e.Name, err)
	}
	e.running++
	return nil
}

// createdLocked makes the list's earlier snapshots incomplete. The caller holds the lock.
func (e *endpoint) createdLocked(l *listing) uint64 {
	e.clock++
	e.created[l] = e.clock
	return e.clock
}

func (r *Router) createContainer(ctx context.Context, c *call, req *runtimeapi.CreateContainerRequest) (proto.Message, error) {
	e, pod, err := r.ownerOf(ctx, req.GetPodSandboxId())
	if err != nil {
		return nil, err
	}
	if e == nil {
		resp, err := c.local(ctx)
		r.missing.note(ctx, r, nil, req.GetConfig().GetImage(), err)
		return resp, err
	}
	resp, err := e.order(ctx, c.method, c.req)
	if err != nil {
		r.missing.note(ctx, r, e, req.GetConfig().GetImage(), err)
		return nil, err
	}
	if err := failCreateForwarded.Hit(ctx); err != nil {
		return nil, err
	}
	e.mu.Lock()
	since := e.createdLocked(containerList)
	e.mu.Unlock()
	r.owners.add(map[string]*owner{resp.(*runtimeapi.CreateContainerResponse).GetContainerId(): {endpoint: e, Pod: pod, since: since}})
	e.kick()
	return resp, nil
}

// isMissing reports whether an error says that something does not exist, on this node or at an endpoint.
func isMissing(err error) bool {
	return errdefs.IsNotFound(err) || status.Code(err) == codes.NotFound
}
