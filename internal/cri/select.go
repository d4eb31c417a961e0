package cri

import (
	"context"
	"slices"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc/metadata"

	"github.com/tripod-run/tripod/internal/node"
	"github.com/tripod-run/tripod/internal/sandbox"
)

// A client that sends this header, with this value, is listed the pods of the edge front door's modules, too. To a kubelet
// they would be pods that nobody wants: it ends those that it does not know.
const (
	HeaderPods    = "tripod-pods"
	HeaderPodsAll = "all"
)

// listsAll tells whether a client is listed all pods.
func listsAll(ctx context.Context) bool {
	md, _ := metadata.FromIncomingContext(ctx)
	return slices.Contains(md.Get(HeaderPods), HeaderPodsAll)
}

// ofEdge tells whether a pod is a module's.
func ofEdge(p *node.Pod) bool {
	_, ok := p.Config.GetAnnotations()[sandbox.AnnotationRuntime]
	return ok
}

// visible leaves out the pods that a client is not listed. One that names a pod, or labels, is listed what it names.
func visible(ctx context.Context, pods []*node.Pod, id string, labels map[string]string) []*node.Pod {
	if id != "" || len(labels) > 0 || listsAll(ctx) {
		return pods
	}
	return filter(pods, func(p *node.Pod) bool { return !ofEdge(p) })
}

// selectPods returns the pods that a list's filter asks for, all conditions ANDed: id (an ID or an unambiguous prefix,
// "" for all), labels and keep. An unknown ID selects nothing; a prefix of several IDs is the caller's error.
func (s *Server) selectPods(ctx context.Context, id string, labels map[string]string, keep func(*node.Pod) bool) ([]*node.Pod, error) {
	pods, err := s.candidates(id)
	if err != nil {
		return nil, err
	}
	return filter(visible(ctx, pods, id, labels), func(p *node.Pod) bool { return matches(labels, p.Config.GetLabels()) && keep(p) }), nil
}

// selectContainers does the same for containers; podID is an ID or prefix of the pod, "" for all.
func (s *Server) selectContainers(ctx context.Context, id, podID string, labels map[string]string, keep func(*node.Container) bool) ([]*node.Container, error) {
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

// candidates is the pod that id names, all of them for "", none when there is no such pod.
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

// onlyContainer is the container that id names; nil for "" and when there is no such container.
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

// filter returns the items that keep is true for. The node's slice stays as it is.
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

// matches reports whether every pair of the selector is among the labels.
func matches(selector, labels map[string]string) bool {
	for k, v := range selector {
		if have, ok := labels[k]; !ok || have != v {
			return false
		}
	}
	return true
}
