package worker

import (
	"context"
	"fmt"
	"net"

	"github.com/containerd/errdefs"
)

// Channels implements control.Handler. The connection stays the caller's when there is an error.
func (w *Worker) Channels(_ context.Context, id string, _ net.Conn) error {
	return fmt.Errorf("pod %s has no channels: %w", id, errdefs.ErrFailedPrecondition)
}
