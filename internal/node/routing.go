package node

import (
	"fmt"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Route assigns pods to a handler by an annotation instead of a RuntimeClass, and reserves images for that handler.
type Route struct {
	// Annotation and Value select pods that name no handler; an empty Annotation selects none.
	Annotation, Value string
	// ImagePrefix is the prefix of the names of images that only this handler can run. It is empty if there are no such
	// images. The prefix cannot select the handler, because a sandbox exists before its image is known. Instead, pods
	// of other handlers refuse these images.
	ImagePrefix string
	Handler     string
}

// selectHandler returns the handler that the request names. If the request names none, it returns the handler of the
// first matching route.
func (n *Node) selectHandler(handler string, config *runtimeapi.PodSandboxConfig) string {
	if handler != "" {
		return handler
	}
	for _, r := range n.Routes {
		if r.Annotation != "" && config.GetAnnotations()[r.Annotation] == r.Value {
			return r.Handler
		}
	}
	return ""
}

// RoutesPod reports whether an annotation assigns a pod to a handler of this node.
func (n *Node) RoutesPod(annotations map[string]string) bool {
	return n.selectHandler("", &runtimeapi.PodSandboxConfig{Annotations: annotations}) != ""
}

// RoutesImage reports whether an image is reserved for a handler of this node.
func (n *Node) RoutesImage(name string) bool {
	return slices.ContainsFunc(n.Routes, func(r Route) bool { return r.ImagePrefix != "" && strings.HasPrefix(name, r.ImagePrefix) })
}

// checkImage rejects an image that only another handler can run.
func (n *Node) checkImage(p *Pod, spec *runtimeapi.ImageSpec) error {
	for _, r := range n.Routes {
		if r.ImagePrefix == "" || r.Handler == p.Handler {
			continue
		}
		for _, name := range []string{spec.GetImage(), spec.GetUserSpecifiedImage()} {
			if strings.HasPrefix(name, r.ImagePrefix) {
				return fmt.Errorf("image %q needs runtime handler %q, and the pod has %q: use a RuntimeClass of that handler or annotate the pod with %s: %s: %w",
					name, r.Handler, p.Handler, r.Annotation, r.Value, errdefs.ErrInvalidArgument)
			}
		}
	}
	return nil
}
