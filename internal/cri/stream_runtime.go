package cri

import (
	"context"
	"io"
	"net"

	"github.com/tripod-run/tripod/internal/node"
	"github.com/tripod-run/tripod/internal/stream"
)

// StreamRuntime is the node as the streaming server needs it: sessions of Exec, Attach and PortForward end there.
func StreamRuntime(n *node.Node) stream.Runtime { return streamRuntime{n} }

// streamRuntime adds to the node's Exec and Attach the way to a port of a pod.
type streamRuntime struct{ *node.Node }

// PortForward joins s with a port on the pod's localhost.
func (r streamRuntime) PortForward(ctx context.Context, podID string, port int32, s io.ReadWriteCloser) error {
	dial := func(ctx context.Context, network, address string) (net.Conn, error) {
		return r.DialPod(ctx, podID, network, address)
	}
	return stream.PortForwardTCP(ctx, dial, port, s)
}
