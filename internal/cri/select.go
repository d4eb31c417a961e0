package cri

import (
	"context"
	"slices"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc/metadata"

	"github.com/tripod-run/tripod/internal/keys"
	"github.com/tripod-run/tripod/internal/node"
)

// A client that sends the header HeaderPods with HeaderPodsAll also sees the pods of edge modules in lists. A kubelet
// must not see these pods, because a kubelet ends all pods that are unknown to it.
const (
	HeaderPods    = "tripod-pods"
	HeaderPodsAll = "all"
)

// listsAll reports whether the client asked to see all pods.
func listsAll(ctx context.Context) bool {
	md, _ := metadata.FromIncomingContext(ctx)
	return slices.Contains(md.Get(HeaderPods), HeaderPodsAll)
}

// isModule reports whether a pod belongs to an edge module.
func isModule(p *node.Pod) bool {
	_, ok := p.Config.GetAnnotations()[keys.EdgeRuntime]
	return ok
}

// visible returns the pods without those of edge modules. If the client asked to see all pods, or the request selects
// by ID or labels, visible returns all of the given pods.
func visible(ctx context.Context, pods []*node.Pod, id string, labels map[string]string) []*node.Pod {
	if id != "" || len(labels) > 0 || listsAll(ctx) {
		return pods
	}
	return filter(pods, func(p *node.Pod) bool { return !isModule(p) })
}

// selectPods returns the pods that match all conditions: id (an ID or unique prefix; "" for all), labels and keep. An
// unknown ID matches no pod; an ambiguous prefix is an error.
func (s *Server) selectPods(ctx context.Context, id string, labels map[string]string, keep func(*node.Pod) bool) ([]*node.Pod, error) {
	pods, err := s.candidates(id)
	if err != nil {
		return nil, err
	}
	return filter(visible(ctx, pods, id, labels), func(p *node.Pod) bool { return matches(labels, p.Config.GetLabels()) && keep(p) }), nil
}

// selectContainers is like selectPods, for containers. The podID is a pod's ID or a unique prefix; "" means all pods.
func (s *Server) selectContainers(ctx context.Context, id, podID string, labels map[string]string,
	keep func(*node.Container) bool) ([]*node.Container, error) {
	pods, err := s.candidates(podID)
	if err != nil {
		return nil, err
	}
	only, err := s.onlyContainer(id)
	if err != nil || (id != "" && only == nil) {
		return nil, err
	}
	selected := make([]*node.Container, 0, len(pods))
	for _, p := range visible(ctx, pods, id+podID, labels) {
		for _, c := range p.Visible() {
			if !c.Unlisted && (only == nil || only.ID == c.ID) && matches(labels, c.Config.GetLabels()) && keep(c) {
				selected = append(selected, c)
			}
		}
	}
	return selected, nil
}

// candidates returns the pod with the given ID, if it exists, or all pods for "".
func (s *Server) candidates(id string) ([]*node.Pod, error) {
	if id == "" {
		return s.node.Pods(), nil
	}
	pod, err := s.node.Pod(id)
	if errdefs.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return []*node.Pod{pod}, nil
}

// onlyContainer returns the container with the given ID; nil for "" and for an unknown ID.
func (s *Server) onlyContainer(id string) (*node.Container, error) {
	if id == "" {
		return nil, nil
	}
	c, _, err := s.node.Container(id)
	if errdefs.IsNotFound(err) {
		return nil, nil
	}
	return c, err
}

// filter returns the items that keep accepts. It leaves the original slice unchanged.
func filter[T any](items []T, keep func(T) bool) []T {
	if !slices.ContainsFunc(items, func(t T) bool { return !keep(t) }) {
		return items
	}
	kept := make([]T, 0, len(items))
	for _, item := range items {
		if keep(item) {
			kept = append(kept, item)
		}
	}
	return kept
}

// matches reports whether the labels contain every pair in the selector.
func matches(selector, labels map[string]string) bool {
	for k, v := range selector {
		if have, ok := labels[k]; !ok || have != v {
			return false
		}
	}
	return true
}
