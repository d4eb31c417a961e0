package node

import (
	"fmt"
	"strings"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Route says which handler is for pods that show by something else than their RuntimeClass what they are.
type Route struct {
	// Annotation and Value are those of pods that name no handler; "" for none.
	Annotation, Value string
	// ImagePrefix begins the names of images that only pods of the handler can run; "" for none. A sandbox is made before
	// its container's image is known, so a pod cannot be sent by it: in another handler's pod such an image is refused.
	ImagePrefix string
	Handler     string
}

// routed is the handler that a pod is for: the one that its request names, or the one of the first route that it takes.
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

// checkImage refuses an image that only pods of another handler can run.
func (n *Node) checkImage(p *Pod, spec *runtimeapi.ImageSpec) error {
	for _, r := range n.Routes {
		if r.ImagePrefix == "" || r.Handler == p.Handler {
			continue
		}
		for _, name := range []string{spec.GetImage(), spec.GetUserSpecifiedImage()} {
			if strings.HasPrefix(name, r.ImagePrefix) {
				return fmt.Errorf("image %q is for pods of runtime handler %q, this one is of %q: name a RuntimeClass of that handler, or annotate the pod with %s: %s: %w",
					name, r.Handler, p.Handler, r.Annotation, r.Value, errdefs.ErrInvalidArgument)
			}
		}
	}
	return nil
}
