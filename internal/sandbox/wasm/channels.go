package wasm

import (
	"context"
	"fmt"
	"net"
	"strings"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/component/wasi"
	"github.com/tripod-run/tripod/internal/component/wit"
	"github.com/tripod-run/tripod/internal/keys"
	"github.com/tripod-run/tripod/internal/sandbox"
)

// Channels implements sandbox.Channeler. The second result, the group, is the worker's name, because a worker itself
// delivers the messages between its pods.
func (b *Backend) Channels(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) (net.Conn, string, error) {
	_, l, err := b.ledger.GetRun(p.ID, c.ID)
	if err != nil {
		return nil, "", err
	}
	conn, err := l.worker.Conn().Channels(ctx, c.ID)
	if err != nil {
		return nil, "", asNotRunning(err, c.ID)
	}
	return conn, l.worker.Name, nil
}

// isModule reports whether a container is a module of the MQTT front door, judging by annotations that only the front
// door can set.
func isModule(config *runtimeapi.ContainerConfig) bool {
	for name := range config.GetAnnotations() {
		if strings.HasPrefix(name, keys.Edge) {
			return true
		}
	}
	return false
}

// checkModule refuses a module that is a server, because a server would open ports in the node's network, and a component
// that handles messages, but has no channels because it is not a module.
func checkModule(config *runtimeapi.ContainerConfig, world wit.World) error {
	switch module := isModule(config); {
	case world == wit.WorldMessages && !module:
		return fmt.Errorf("the component handles messages (%s), which pods do not get; run it as a module of the edge: %w",
			wasi.MessageHandler().Name, errdefs.ErrInvalidArgument)
	case !module || !world.Serves():
		return nil
	}
	return fmt.Errorf("a module must be a command (wasi:cli/run or _start) or handle messages, but this component's world is %s; run it as a pod: %w", world, errdefs.ErrInvalidArgument)
}
