package delegate

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/guard"
)

// listing is one list of the API, which has a unary and a streaming call.
type listing struct {
	unary, stream string
	// request returns a request for the whole list.
	request func() proto.Message
	// selects returns the IDs that the request selects by, and whether it selects by anything at all.
	selects func(req proto.Message) (ids []string, filtered bool)
	// keep is the filter of the request. It applies only to snapshots, because an endpoint filters its own answer.
	keep func(o *owners, req, item proto.Message) bool
	// merge joins the parts of an answer, this node's first. If it is nil, the endpoints' items follow this node's, which
	// may be encoded already.
	merge func(ctx context.Context, r *Router, parts []part) []proto.Message
}

// part is what one endpoint contributes to a list. The endpoint of this node's part is nil.
type part struct {
	endpoint *endpoint
	items    []proto.Message
}

// snapshot is an endpoint's last whole list.
type snapshot struct {
	items []proto.Message
	at    time.Time
	// began is the endpoint's clock when the list was requested.
	began uint64
}

var (
	podList = &listing{
		unary: runtimeapi.RuntimeService_ListPodSandbox_FullMethodName, stream: runtimeapi.RuntimeService_StreamPodSandboxes_FullMethodName,
		request: func() proto.Message { return &runtimeapi.ListPodSandboxRequest{} },
		selects: func(req proto.Message) ([]string, bool) {
			f := req.(interface {
				GetFilter() *runtimeapi.PodSandboxFilter
			}).GetFilter()
			return ids(f.GetId()), f.GetId() != "" || f.GetState() != nil || len(f.GetLabelSelector()) > 0
		},
		keep: func(_ *owners, req, item proto.Message) bool {
			f, p := req.(interface {
				GetFilter() *runtimeapi.PodSandboxFilter
			}).GetFilter(), item.(*runtimeapi.PodSandbox)
			return strings.HasPrefix(p.GetId(), f.GetId()) && (f.GetState() == nil || f.GetState().GetState() == p.GetState()) &&
				matches(f.GetLabelSelector(), p.GetLabels())
		},
	}
	containerList = &listing{
		unary: runtimeapi.RuntimeService_ListContainers_FullMethodName, stream: runtimeapi.RuntimeService_StreamContainers_FullMethodName,
		request: func() proto.Message { return &runtimeapi.ListContainersRequest{} },
		selects: func(req proto.Message) ([]string, bool) {
			f := req.(interface {
				GetFilter() *runtimeapi.ContainerFilter
			}).GetFilter()
			return ids(f.GetId(), f.GetPodSandboxId()), f.GetId()+f.GetPodSandboxId() != "" || f.GetState() != nil || len(f.GetLabelSelector()) > 0
		},
		keep: func(_ *owners, req, item proto.Message) bool {
			f, c := req.(interface {
				GetFilter() *runtimeapi.ContainerFilter
			}).GetFilter(), item.(*runtimeapi.Container)
			return strings.HasPrefix(c.GetId(), f.GetId()) && strings.HasPrefix(c.GetPodSandboxId(), f.GetPodSandboxId()) &&
				(f.GetState() == nil || f.GetState().GetState() == c.GetState()) && matches(f.GetLabelSelector(), c.GetLabels())
		},
	}
	imageList = &listing{
		unary: runtimeapi.ImageService_ListImages_FullMethodName, stream: runtimeapi.ImageService_StreamImages_FullMethodName,
		request: func() proto.Message { return &runtimeapi.ListImagesRequest{} },
		selects: func(req proto.Message) ([]string, bool) {
			return nil, imageOf(req) != ""
		},
		keep: func(_ *owners, req, item proto.Message) bool {
			return imageOf(req) == "" || isNamed(item.(*runtimeapi.Image), imageOf(req))
		},
		merge: mergeImages,
	}
	podStatsList = &listing{
		unary:   runtimeapi.RuntimeService_ListPodSandboxStats_FullMethodName,
		stream:  runtimeapi.RuntimeService_StreamPodSandboxStats_FullMethodName,
		request: func() proto.Message { return &runtimeapi.ListPodSandboxStatsRequest{} },
		selects: func(req proto.Message) ([]string, bool) {
			f := req.(interface {
				GetFilter() *runtimeapi.PodSandboxStatsFilter
			}).GetFilter()
			return ids(f.GetId()), f.GetId() != "" || len(f.GetLabelSelector()) > 0
		},
		keep: func(_ *owners, req, item proto.Message) bool {
			f, a := req.(interface {
				GetFilter() *runtimeapi.PodSandboxStatsFilter
			}).GetFilter(), item.(*runtimeapi.PodSandboxStats).GetAttributes()
			return strings.HasPrefix(a.GetId(), f.GetId()) && matches(f.GetLabelSelector(), a.GetLabels())
		},
	}
	containerStatsList = &listing{
		unary: runtimeapi.RuntimeService_ListContainerStats_FullMethodName, stream: runtimeapi.RuntimeService_StreamContainerStats_FullMethodName,
		request: func() proto.Message { return &runtimeapi.ListContainerStatsRequest{} },
		selects: func(req proto.Message) ([]string, bool) {
			f := req.(interface {
				GetFilter() *runtimeapi.ContainerStatsFilter
			}).GetFilter()
			return ids(f.GetId(), f.GetPodSandboxId()), f.GetId()+f.GetPodSandboxId() != "" || len(f.GetLabelSelector()) > 0
		},
		keep: func(o *owners, req, item proto.Message) bool {
			f, a := req.(interface {
				GetFilter() *runtimeapi.ContainerStatsFilter
			}).GetFilter(), item.(*runtimeapi.ContainerStats).GetAttributes()
			return strings.HasPrefix(a.GetId(), f.GetId()) && strings.HasPrefix(o.podOf(a.GetId()), f.GetPodSandboxId()) &&
				matches(f.GetLabelSelector(), a.GetLabels())
		},
	}
	podMetricsList = &listing{
		unary:   runtimeapi.RuntimeService_ListPodSandboxMetrics_FullMethodName,
		stream:  runtimeapi.RuntimeService_StreamPodSandboxMetrics_FullMethodName,
		request: func() proto.Message { return &runtimeapi.ListPodSandboxMetricsRequest{} },
		selects: func(proto.Message) ([]string, bool) { return nil, false },
		keep:    func(_ *owners, _, _ proto.Message) bool { return true },
		merge:   mergeMetrics,
	}
	listings = []*listing{podList, containerList, imageList, podStatsList, containerStatsList, podMetricsList}
)

func listingOf(method string) *listing {
	for _, l := range listings {
		if l.unary == method || l.stream == method {
			return l
		}
	}
	return nil
}

func ids(all ...string) []string {
	var set []string
	for _, id := range all {
		if id != "" {
			set = append(set, id)
		}
	}
	return set
}

// matches reports whether the labels contain every pair of the selector.
func matches(selector, labels map[string]string) bool {
	for k, v := range selector {
		if have, ok := labels[k]; !ok || have != v {
			return false
		}
	}
	return true
}

// list adds the endpoints' items to this node's answer. The endpoints are asked in parallel, at the same time as this
// node.
func (r *Router) list(ctx context.Context, l *listing, c *call) (proto.Message, error) {
	wait := r.fanOut(ctx, l, c.req)
	resp, err := c.local(ctx)
	parts, delegateErr := wait()
	if err := firstError(err, delegateErr); err != nil {
		return nil, err
	}
	if l.merge != nil {
		merged := l.merge(ctx, r, append([]part{{items: itemsOf(resp)}}, parts...))
		if resp, err = newReply(l.unary); err != nil {
			return nil, err
		}
		parts = []part{{items: merged}}
	}
	appendItems(resp, itemsOfAll(parts))
	return r.fitting(resp, l)
}

// fitting rejects a list that does not fit into one message.
func (r *Router) fitting(resp proto.Message, l *listing) (proto.Message, error) {
	if size := proto.Size(resp); size > r.maxSize {
		return nil, fmt.Errorf("the list has %d bytes, and a message holds %d: call %s or set a filter: %w",
			size, r.maxSize, l.stream[strings.LastIndexByte(l.stream, '/')+1:], errdefs.ErrResourceExhausted)
	}
	return resp, nil
}

func firstError(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// fanOut asks the endpoints that the request concerns, and returns a function that waits for their parts.
func (r *Router) fanOut(ctx context.Context, l *listing, req proto.Message) (wait func() ([]part, error)) {
	selected, filtered := l.selects(req)
	asked := r.holders(selected)
	parts, errs := make([]part, len(asked)), make([]error, len(asked))
	var all guard.Group
	for i, e := range asked {
		all.Go(func() error {
			parts[i].endpoint = e
			parts[i].items, errs[i] = r.listOf(ctx, e, l, req, filtered)
			return nil
		})
	}
	return func() ([]part, error) {
		_ = all.Wait() // the parts return nil
		return parts, firstError(errs...)
	}
}

// holders returns the endpoints that can have all of the given pods and containers.
func (r *Router) holders(selected []string) []*endpoint {
	for _, id := range selected {
		if r.isOurs(id) {
			return nil
		}
		if _, entry, err := r.owners.find(id); err == nil && entry != nil {
			return []*endpoint{entry.endpoint}
		}
	}
	return r.endpoints
}

// listOf returns the items of one endpoint. If the endpoint is away, they come from its last snapshot.
func (r *Router) listOf(ctx context.Context, e *endpoint, l *listing, req proto.Message, filtered bool) ([]proto.Message, error) {
	var items []proto.Message
	err := e.ask(ctx, func(ctx context.Context) (err error) {
		items, err = r.fetch(ctx, e, l, req, filtered)
		return err
	})
	switch {
	case err == nil:
		return items, nil
	case status.Code(err) == codes.Unimplemented:
		return nil, nil // an older version of the CRI, which does not have this list
	case errdefs.IsUnavailable(err):
		return r.remembered(e, l, req, err)
	}
	return nil, err
}

// remembered returns the items of the last snapshot. It fails if items could be missing. An endpoint without pods has
// none.
func (r *Router) remembered(e *endpoint, l *listing, req proto.Message, reason error) ([]proto.Message, error) {
	if r.owners.isEmpty(e) {
		return nil, nil
	}
	e.mu.Lock()
	s, known := e.snapshots[l]
	complete := known && s.began >= e.created[l]
	e.mu.Unlock()
	switch age := time.Since(s.at); {
	case !known:
		return nil, fmt.Errorf("%w; no earlier list is known", reason)
	case !complete:
		return nil, fmt.Errorf("%w; its last list does not contain everything that was made since", reason)
	case age > e.SnapshotMaxAge:
		return nil, fmt.Errorf("%w; its last list is %s old, older than snapshot_max_age (%s)", reason, age.Round(time.Second), e.SnapshotMaxAge)
	}
	var kept []proto.Message
	for _, item := range s.items {
		if l.keep(r.owners, req, item) {
			kept = append(kept, item)
		}
	}
	return kept, nil
}

// fetch gets a list from the endpoint, and remembers what it says about owners. It uses the streaming call, which has
// no size limit, unless the endpoint does not have it.
func (r *Router) fetch(ctx context.Context, e *endpoint, l *listing, req proto.Message, filtered bool) ([]proto.Message, error) {
	e.mu.Lock()
	began, unary := e.clock, e.unary[l]
	e.mu.Unlock()
	var items []proto.Message
	var err error
	if !unary {
		items, err = e.receive(ctx, l.stream, convert(req, l.stream))
	}
	if unary || status.Code(err) == codes.Unimplemented {
		var reply proto.Message
		if reply, err = e.invoke(ctx, l.unary, convert(req, l.unary)); err == nil {
			items = itemsOf(reply)
			e.mu.Lock()
			e.unary[l] = true
			e.mu.Unlock()
		}
	}
	if err != nil {
		return nil, err
	}
	r.owners.learn(e, l, items, began, !filtered)
	if !filtered {
		e.mu.Lock()
		e.snapshots[l] = snapshot{items: items, at: time.Now(), began: began}
		e.mu.Unlock()
	}
	return items, nil
}

// refresh gets the lists that are old, or older than the last creation, so that there are snapshots when the endpoint
// goes away.
func (r *Router) refresh(ctx context.Context, e *endpoint) {
	for _, l := range []*listing{podList, containerList, imageList} {
		e.mu.Lock()
		s := e.snapshots[l]
		due := time.Since(s.at) >= upInterval || s.began < e.created[l]
		e.mu.Unlock()
		if !due {
			continue
		}
		err := e.ask(ctx, func(ctx context.Context) error {
			_, err := r.fetch(ctx, e, l, l.request(), false)
			return err
		})
		if err != nil && ctx.Err() == nil {
			e.log.Warn("no new list", "method", l.unary, "err", err)
			return
		}
	}
}

// receive collects the items of a streaming call.
func (e *endpoint) receive(ctx context.Context, method string, req proto.Message) ([]proto.Message, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := e.open(ctx, method, req)
	if err != nil {
		return nil, err
	}
	var items []proto.Message
	for {
		reply, err := newReply(method)
		if err != nil {
			return nil, err
		}
		if err := stream.RecvMsg(reply); errors.Is(err, io.EOF) {
			return items, nil
		} else if err != nil {
			return nil, err
		}
		items = append(items, itemsOf(reply)...)
	}
}

// open begins a streaming call.
func (e *endpoint) open(ctx context.Context, method string, req proto.Message) (grpc.ClientStream, error) {
	stream, err := e.conn(method).NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, method)
	if err != nil {
		return nil, err
	}
	if err := errors.Join(stream.SendMsg(req), stream.CloseSend()); err != nil && !errors.Is(err, io.EOF) { // the reason of EOF is in RecvMsg
		return nil, err
	}
	return stream, nil
}

// convert returns the request for the other call of a list. Both requests have the same fields.
func convert(req proto.Message, method string) proto.Message {
	to, err := newRequest(method)
	if err != nil || to.ProtoReflect().Descriptor() == req.ProtoReflect().Descriptor() {
		return req
	}
	from := req.ProtoReflect()
	from.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		to.ProtoReflect().Set(to.ProtoReflect().Descriptor().Fields().ByNumber(f.Number()), v)
		return true
	})
	return to
}

// itemsField is the number of the field that holds the items. It is the same in every list response, unary or streamed.
const itemsField = 1

func itemsOf(reply proto.Message) []proto.Message {
	m := reply.ProtoReflect()
	list := m.Get(m.Descriptor().Fields().ByNumber(itemsField)).List()
	items := make([]proto.Message, list.Len())
	for i := range items {
		items[i] = list.Get(i).Message().Interface()
	}
	return items
}

func itemsOfAll(parts []part) []proto.Message {
	var all []proto.Message
	for _, p := range parts {
		all = append(all, p.items...)
	}
	return all
}

// appendItems adds items to a response. It leaves the response's own slice unchanged, which others may share.
func appendItems(reply proto.Message, items []proto.Message) {
	m := reply.ProtoReflect()
	field := m.Descriptor().Fields().ByNumber(itemsField)
	list := m.NewField(field).List()
	for _, item := range append(itemsOf(reply), items...) {
		list.Append(protoreflect.ValueOfMessage(item.ProtoReflect()))
	}
	m.Set(field, protoreflect.ValueOfList(list))
}

// chunkSize limits the size of the items in one message of a streamed list, in bytes, unless one item is larger.
const chunkSize = 256 << 10

// streamList answers a streaming list: first this node's items, then those of the endpoints.
func (r *Router) streamList(l *listing, stream grpc.ServerStream, local func(grpc.ServerStream) error) error {
	req, err := newRequest(l.stream)
	if err != nil {
		return err
	}
	if err := stream.RecvMsg(req); err != nil {
		return err
	}
	wait := r.fanOut(stream.Context(), l, req)
	collected := &collector{ServerStream: stream, req: req}
	err = local(collected)
	parts, delegateErr := wait()
	if err := firstError(err, delegateErr); err != nil {
		return err
	}
	if l.merge != nil {
		return sendChunks(stream, l, l.merge(stream.Context(), r, append([]part{{items: collected.items()}}, parts...)))
	}
	for _, m := range collected.sent {
		if err := stream.SendMsg(m); err != nil {
			return err
		}
	}
	return sendChunks(stream, l, itemsOfAll(parts))
}

func sendChunks(stream grpc.ServerStream, l *listing, items []proto.Message) error {
	for len(items) > 0 {
		n, size := 1, proto.Size(items[0])
		for ; n < len(items) && size+proto.Size(items[n]) <= chunkSize; n++ {
			size += proto.Size(items[n])
		}
		reply, err := newReply(l.stream)
		if err != nil {
			return err
		}
		appendItems(reply, items[:n])
		if err := stream.SendMsg(reply); err != nil {
			return err
		}
		items = items[n:]
	}
	return nil
}

// collector gives a handler the request, which has been received already, and keeps the messages that it sends.
type collector struct {
	grpc.ServerStream
	req  proto.Message
	sent []proto.Message
}

func (c *collector) RecvMsg(m any) error {
	proto.Merge(m.(proto.Message), c.req)
	return nil
}

func (c *collector) SendMsg(m any) error {
	c.sent = append(c.sent, m.(proto.Message))
	return nil
}

// items returns the items of the messages.
func (c *collector) items() []proto.Message {
	var all []proto.Message
	for _, m := range c.sent {
		all = append(all, itemsOf(m)...)
	}
	return all
}
