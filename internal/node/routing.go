package node

import (
	"fmt"
	"strings"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Route selects a handler by something other than the RuntimeClass.
type Route struct {
	// Annotation and Value select pods that name no handler; empty for none.
	Annotation, Value string
	// ImagePrefix begins the names of images that only this handler can run; empty for none. A sandbox exists before its
	// image is known, so the prefix cannot select the handler; in a pod of another handler such an image is refused.
	ImagePrefix string
	Handler     string
}

// routed returns the handler that the request names, or that of the first matching route.
func (n *Node) routed(handler string, config *runtimeapi.PodSandboxConfig) string {
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
