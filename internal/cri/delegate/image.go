package delegate

import (
	"context"
	"errors"
	"slices"
	"sync"

	"github.com/containerd/errdefs"
	"github.com/distribution/reference"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/guard"
)

// imageOf returns the image that a list's filter names, or "".
func imageOf(req proto.Message) string {
	return req.(interface {
		GetFilter() *runtimeapi.ImageFilter
	}).GetFilter().GetImage().GetImage()
}

// fullName returns the full form of an image's name. IDs and unusual names stay as they are.
func fullName(name string) string {
	if named, err := reference.ParseDockerRef(name); err == nil {
		return named.String()
	}
	return name
}

func isNamed(i *runtimeapi.Image, name string) bool {
	full := fullName(name)
	return i.GetId() == name || "sha256:"+name == i.GetId() || slices.Contains(i.GetRepoTags(), full) ||
		slices.Contains(i.GetRepoDigests(), full)
}

// mergeImages merges this node's images with those of the endpoints. An image that several have is one image.
func mergeImages(_ context.Context, _ *Router, parts []part) []proto.Message {
	var merged []proto.Message
	at := map[string]int{}
	for _, m := range itemsOfAll(parts) {
		image := m.(*runtimeapi.Image)
		i, known := at[image.GetId()]
		if !known {
			at[image.GetId()] = len(merged)
			merged = append(merged, image)
			continue
		}
		both := proto.CloneOf(merged[i].(*runtimeapi.Image))
		both.RepoTags = union(both.RepoTags, image.GetRepoTags())
		both.RepoDigests = union(both.RepoDigests, image.GetRepoDigests())
		both.Pinned = both.Pinned || image.GetPinned()
		merged[i] = both
	}
	return merged
}

func union(a, b []string) []string {
	for _, s := range b {
		if !slices.Contains(a, s) {
			a = append(a, s)
		}
	}
	return a
}

// pullImage pulls an image where its pod will run. A pull that says nothing about that is for the default handler.
func (r *Router) pullImage(ctx context.Context, c *call, req *runtimeapi.PullImageRequest) (proto.Message, error) {
	e, decided := r.endpointOfImage(req.GetImage(), req.GetSandboxConfig())
	if !decided {
		e = r.handlerOf("")
	}
	if e == nil {
		resp, err := c.local(ctx)
		if err == nil {
			r.missing.found(nil, req.GetImage().GetImage())
		}
		return resp, err
	}
	resp, err := e.order(ctx, c.method, c.req)
	if err != nil {
		return nil, err
	}
	r.missing.found(e, req.GetImage().GetImage())
	e.mu.Lock()
	e.createdLocked(imageList)
	e.mu.Unlock()
	e.kick()
	return resp, nil
}

// imageStatus describes an image. A request that does not say where the image will be used is answered by whoever has
// it, the owner of the default handler first, unless a container could not be created for lack of the image.
func (r *Router) imageStatus(ctx context.Context, c *call, req *runtimeapi.ImageStatusRequest) (proto.Message, error) {
	e, decided := r.endpointOfImage(req.GetImage(), nil)
	if !decided {
		e, decided = r.missing.at(req.GetImage().GetImage())
	}
	if decided {
		return r.imageStatusAt(ctx, e, c)
	}
	candidates := []*endpoint{r.handlerOf("")}
	for _, e := range append([]*endpoint{nil}, r.endpoints...) {
		if e != candidates[0] {
			candidates = append(candidates, e)
		}
	}
	replies, errs := make([]proto.Message, len(candidates)), make([]error, len(candidates))
	var all guard.Group
	for i, e := range candidates {
		all.Go(func() error { replies[i], errs[i] = r.imageStatusAt(ctx, e, c); return nil })
	}
	_ = all.Wait() // the parts return nil
	for _, reply := range replies {
		if reply != nil && reply.(*runtimeapi.ImageStatusResponse).GetImage() != nil {
			return reply, nil
		}
	}
	if err := firstError(errs...); err != nil {
		return nil, err
	}
	return &runtimeapi.ImageStatusResponse{}, nil
}

// imageStatusAt asks one endpoint; nil is this node. For an endpoint that is away, its last list answers.
func (r *Router) imageStatusAt(ctx context.Context, e *endpoint, c *call) (proto.Message, error) {
	if e == nil {
		return c.local(ctx)
	}
	reply, err := e.read(ctx, c.method, c.req)
	if !errdefs.IsUnavailable(err) {
		return reply, err
	}
	spec := c.req.(*runtimeapi.ImageStatusRequest).GetImage()
	filter := &runtimeapi.ListImagesRequest{Filter: &runtimeapi.ImageFilter{Image: spec}}
	images, err := r.remembered(e, imageList, filter, err)
	if err != nil || len(images) == 0 {
		return &runtimeapi.ImageStatusResponse{}, err
	}
	return &runtimeapi.ImageStatusResponse{Image: images[0].(*runtimeapi.Image)}, nil
}

// removeImage removes an image from this node and from all endpoints. An endpoint that is away matters only if it may
// have the image.
func (r *Router) removeImage(ctx context.Context, c *call) (proto.Message, error) {
	errs := make([]error, len(r.endpoints))
	var all guard.Group
	for i, e := range r.endpoints {
		all.Go(func() error { errs[i] = r.removeImageAt(ctx, e, c); return nil })
	}
	resp, err := c.local(ctx)
	_ = all.Wait() // the parts return nil
	if err := firstError(append([]error{err}, errs...)...); err != nil {
		return nil, err
	}
	return resp, nil
}

func (r *Router) removeImageAt(ctx context.Context, e *endpoint, c *call) error {
	_, err := e.order(ctx, c.method, c.req)
	if isMissing(err) {
		return nil
	}
	if !errdefs.IsUnavailable(err) {
		return err
	}
	spec := c.req.(*runtimeapi.RemoveImageRequest).GetImage()
	images, snapshotErr := r.remembered(e, imageList, &runtimeapi.ListImagesRequest{Filter: &runtimeapi.ImageFilter{Image: spec}}, err)
	if snapshotErr == nil && len(images) == 0 {
		return nil
	}
	return errors.Join(err, snapshotErr)
}

// missingImages remembers the images that containers could not be created with, because their pod's endpoint does not
// have them. The kubelet asks whether an image is present without saying for which handler. If another endpoint has the
// image, the kubelet would never pull it. So the next ImageStatus asks only the endpoint that needs it.
type missingImages struct {
	mu     sync.Mutex
	needed map[string]*endpoint // by full name; nil is this node
}

// note examines why a container was not created by an endpoint (nil: this node).
func (m *missingImages) note(ctx context.Context, r *Router, e *endpoint, spec *runtimeapi.ImageSpec, err error) {
	if !isMissing(err) || r.hasImage(ctx, e, spec) {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.needed == nil || len(m.needed) >= maxMissing {
		m.needed = map[string]*endpoint{}
	}
	for _, name := range []string{spec.GetImage(), spec.GetUserSpecifiedImage()} {
		if name != "" {
			m.needed[fullName(name)] = e
		}
	}
}

// maxMissing bounds the memory of missing images. Without an entry, an image may have to be pulled by hand.
const maxMissing = 1024

// at returns the endpoint that needs an image.
func (m *missingImages) at(name string) (*endpoint, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	e, ok := m.needed[fullName(name)]
	return e, ok
}

// found forgets that an endpoint needs an image.
func (m *missingImages) found(e *endpoint, name string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if needed, ok := m.needed[fullName(name)]; ok && needed == e {
		delete(m.needed, fullName(name))
	}
}

// hasImage reports whether an endpoint (nil: this node) has an image. If it does not answer, it counts as having it.
func (r *Router) hasImage(ctx context.Context, e *endpoint, spec *runtimeapi.ImageSpec) bool {
	if e == nil {
		_, err := r.images.Get(ctx, spec.GetImage())
		return !errdefs.IsNotFound(err)
	}
	reply, err := e.read(ctx, runtimeapi.ImageService_ImageStatus_FullMethodName, &runtimeapi.ImageStatusRequest{Image: spec})
	return err != nil || reply.(*runtimeapi.ImageStatusResponse).GetImage() != nil
}
