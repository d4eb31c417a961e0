package cri

import (
	"slices"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/node"
)

// selectPods returns the pods that a list's filter asks for, all conditions ANDed: id (an ID or an unambiguous prefix,
// "" for all), labels and keep. An unknown ID selects nothing; a prefix of several IDs is the caller's error.
func (s *Server) selectPods(id string, labels map[string]string, keep func(*node.Pod) bool) ([]*node.Pod, error) {
	pods, err := s.candidates(id)
	if err != nil {
		return nil, err
	}
	return filter(pods, func(p *node.Pod) bool { return matches(labels, p.Config.GetLabels()) && keep(p) }), nil
}

// selectContainers does the same for containers; podID is an ID or prefix of the pod, "" for all.
func (s *Server) selectContainers(id, podID string, labels map[string]string, keep func(*node.Container) bool) ([]*node.Container, error) {
	pods, err := s.candidates(podID)
	if err != nil {
		return nil, err
	}
	only, err := s.onlyContainer(id)
	if err != nil || (id != "" && only == nil) {
		return nil, err
	}
	selected := make([]*node.Container, 0, len(pods))
	for _, p := range pods {
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
