package delegate

import (
	"maps"
	"slices"
	"strings"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// endpointFor returns the endpoint of a new pod; nil means this node. A handler that the request names decides. Without
// one, an annotation decides, then whoever has the default handler.
func (r *Router) endpointFor(handler string, annotations map[string]string) *endpoint {
	if handler == "" {
		if e, decided := r.annotated(annotations); decided {
			return e
		}
	}
	return r.handlerOf(handler)
}

// handlerOf returns the endpoint of a handler; "" is the default handler.
func (r *Router) handlerOf(handler string) *endpoint {
	for _, e := range r.endpoints {
		if slices.Contains(e.Handlers, handler) {
			return e
		}
	}
	return nil
}

// annotated returns the endpoint that the annotations select, and whether they select one or this node.
func (r *Router) annotated(annotations map[string]string) (*endpoint, bool) {
	for _, e := range r.endpoints {
		for _, a := range e.Annotations {
			key, want, valued := strings.Cut(a, "=")
			if have, ok := annotations[key]; ok && (!valued || have == want) {
				return e, true
			}
		}
	}
	return nil, r.node.RoutesPod(annotations)
}

// endpointOfImage returns the endpoint that an image call concerns, and whether the call says so: by a handler, by its
// pod, by annotations or by the image's prefix.
func (r *Router) endpointOfImage(spec *runtimeapi.ImageSpec, pod *runtimeapi.PodSandboxConfig) (*endpoint, bool) {
	if spec.GetRuntimeHandler() != "" {
		return r.handlerOf(spec.GetRuntimeHandler()), true
	}
	if uid := pod.GetMetadata().GetUid(); uid != "" {
		if e := r.owners.ofUID(uid); e != nil {
			return e, true
		}
		for _, p := range r.node.Pods() {
			if p.Config.GetMetadata().GetUid() == uid {
				return nil, true
			}
		}
	}
	annotations := maps.Clone(spec.GetAnnotations())
	if annotations == nil {
		annotations = map[string]string{}
	}
	maps.Copy(annotations, pod.GetAnnotations())
	if e, decided := r.annotated(annotations); decided {
		return e, true
	}
	for _, e := range r.endpoints {
		for _, prefix := range e.ImagePrefixes {
			if strings.HasPrefix(spec.GetImage(), prefix) {
				return e, true
			}
		}
	}
	return nil, r.node.RoutesImage(spec.GetImage())
}
