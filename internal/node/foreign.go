package node

import (
	"fmt"
	"slices"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/image"
	"github.com/tripod-run/tripod/internal/sandbox"
)

// A container is foreign if another backend than its pod's runs it, because its image is a component. The pod's backend
// owns the sandbox and never hears of the container. The container's backend gets the orders for the container, with the
// pod that it belongs to. A foreign container has the states of the other containers in its pod (docs/adr/0059).

// handlerOf returns the handler whose backend runs a container of the pod.
func (p *Pod) handlerOf(c *Container) string {
	if c.Handler != "" {
		return c.Handler
	}
	return p.Handler
}

// handlers lists the handlers of the pod and its containers; the pod's is the first.
func (p *Pod) handlers() []string {
	all := []string{p.Handler}
	for _, c := range p.Containers {
		if handler := p.handlerOf(c); !slices.Contains(all, handler) {
			all = append(all, handler)
		}
	}
	return all
}

// backendOf returns the backend that runs a container of the pod.
func (p *livePod) backendOf(c *Container) sandbox.Backend {
	if c.Handler != "" {
		return p.node.Backends[c.Handler]
	}
	return p.backend
}

// checkTarget rejects a container that is to share the processes of a foreign container, because no container of the pod
// can see those.
func (p *Pod) checkTarget(config *runtimeapi.ContainerConfig) error {
	target := p.Container(config.GetLinux().GetSecurityContext().GetNamespaceOptions().GetTargetId())
	if target == nil || target.Handler == "" {
		return nil
	}
	return fmt.Errorf("linux.security_context.namespace_options.target_id: container %q is a component, which has no PID namespace to share; "+
		"without a target (`kubectl debug` without --target), the new container shares the pod's network: %w",
		target.Config.GetMetadata().GetName(), errdefs.ErrNotImplemented)
}

// componentHandler returns the handler that runs a new container if it claims the container, and "" if the pod's own backend
// runs the container. Errors: ErrNotImplemented if the node does not have the handler, ErrUnavailable if it is not ready.
func (n *Node) componentHandler(p *Pod, config *runtimeapi.ContainerConfig, img image.Image) (string, error) {
	if p.unit || n.Claims == nil || !n.Claims(config, img) {
		return "", nil
	}
	if n.Backends[n.ComponentHandler] == nil {
		return "", fmt.Errorf("image of container %q is a WebAssembly component, and this node runs none (`tripod check` shows what is missing): %w",
			config.GetMetadata().GetName(), errdefs.ErrNotImplemented)
	}
	if err := n.ready(n.ComponentHandler); err != nil {
		return "", notReady(n.ComponentHandler, err)
	}
	return n.ComponentHandler, nil
}
