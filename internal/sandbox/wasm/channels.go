package wasm

import (
	"context"
	"fmt"
	"net"
	"strings"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/component/wit"
	"github.com/tripod-run/tripod/internal/sandbox"
)

// Channels implements sandbox.Channeler. The group is the worker: it delivers by itself among its pods.
func (b *Backend) Channels(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) (net.Conn, string, error) {
	_, l, err := b.ledger.GetRun(p.ID, c.ID)
	if err != nil {
		return nil, "", err
	}
	conn, err := l.worker.conn().Channels(ctx, c.ID)
	if err != nil {
		return nil, "", gone(err, c.ID)
	}
	return conn, l.worker.name, nil
}

// isModule tells whether a container is a module of the edge front door, which alone may set such annotations.
func isModule(config *runtimeapi.ContainerConfig) bool {
	for name := range config.GetAnnotations() {
		if strings.HasPrefix(name, sandbox.AnnotationEdge) {
			return true
		}
	}
	return false
}

// checkModule refuses a module that is a server: it would open the ports of the node's own network.
func checkModule(config *runtimeapi.ContainerConfig, world wit.World) error {
	if world == wit.WorldCommand || !isModule(config) {
		return nil
	}
	return fmt.Errorf("the component serves the %s world, and a module must be a command (wasi:cli/run, or _start): run it as a pod: %w", world, errdefs.ErrInvalidArgument)
}
