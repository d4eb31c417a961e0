package egress

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/fdpass"
)

// Send passes an order to the dialer at the other end of conn, and closes conn. The netns and the pod's connection stay
// the caller's. If the dialer does not answer, the error is errdefs.ErrUnavailable.
func (o Order) Send(ctx context.Context, conn *net.UnixConn, netns, pod *os.File) error {
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	payload, err := json.Marshal(o)
	if err != nil {
		return err
	}
	if err := fdpass.Write(conn, MaxOrder, payload, []*os.File{netns, pod}); errors.Is(err, fdpass.ErrFrame) {
		return fmt.Errorf("the order for pod %s: %w: %w", o.Pod, err, errdefs.ErrInvalidArgument)
	} else if err != nil {
		return fmt.Errorf("the dialer does not take orders: %w: %w", err, errdefs.ErrUnavailable)
	}
	r := fdpass.NewReader(conn, MaxOrder)
	defer r.Close()
	f, err := r.Next()
	if err != nil {
		return fmt.Errorf("the dialer did not answer: %w: %w", errors.Join(context.Cause(ctx), err), errdefs.ErrUnavailable)
	}
	defer f.Close()
	var reply OrderReply
	if err := json.Unmarshal(f.Payload, &reply); err != nil {
		return fmt.Errorf("the dialer's answer: %w", err)
	}
	if reply.Error != nil {
		return reply.Error
	}
	return nil
}
