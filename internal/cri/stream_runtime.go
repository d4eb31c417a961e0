package cri

import (
	"context"
	"io"
	"net"

	"github.com/tripod-run/tripod/internal/node"
	"github.com/tripod-run/tripod/internal/stream"
)

// StreamRuntime adapts the node to the streaming server, for Exec, Attach and PortForward sessions.
func StreamRuntime(n *node.Node) stream.Runtime { return streamRuntime{n} }

type streamRuntime struct{ *node.Node }

// PortForward connects s to a port on the pod's localhost.
func (r streamRuntime) PortForward(ctx context.Context, podID string, port int32, s io.ReadWriteCloser) error {
	dial := func(ctx context.Context, network, address string) (net.Conn, error) {
		return r.DialPod(ctx, podID, network, address)
	}
	return stream.PortForwardTCP(ctx, dial, port, s)
}
