package wasm

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/annotations"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

// listen opens the pod's sockets in its network namespace, which can be the node's.
func (b *Backend) listen(ctx context.Context, p *sandbox.Pod, c *sandbox.Container,
	o annotations.Options) (ports []workerapi.Port, err error) {
	wanted := []struct {
		kind, network string
		port          uint16
	}{
		{workerapi.PortTLS, "tcp", o.Port}, {workerapi.PortQUIC, "udp", o.Port}, {workerapi.PortCleartext, "tcp", o.Cleartext},
	}
	for _, want := range wanted {
		if want.port == 0 {
			continue
		}
		socket, err := b.socket(ctx, p.Netns, want.network, want.port)
		if err != nil {
			for _, opened := range ports {
				opened.Socket.Close()
			}
			return nil, b.portError(p, c, want.network, want.port, err)
		}
		if want.network == "udp" {
			growBuffers(socket)
		}
		ports = append(ports, workerapi.Port{Kind: want.kind, Socket: workerapi.File{File: socket}})
	}
	return ports, nil
}

// udpBuffer is the buffer size that quic-go recommends, in bytes. With smaller buffers, bursts of requests lose
// packets. The kernel doubles the size, and allocates memory only as needed.
const udpBuffer = 7 << 20

// growBuffers raises a socket's buffer sizes, even above net.core.rmem_max and wmem_max. The daemon does this, because
// the worker is not permitted to. If the daemon lacks CAP_NET_ADMIN, the buffers keep their sizes.
func growBuffers(socket *os.File) {
	raw, err := socket.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) {
		_ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, udpBuffer)
		_ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, udpBuffer)
	})
}

// forkTime is how long a closed socket can stay open in a child process, because a child has copies of all descriptors
// until it executes its program.
const forkTime = 500 * time.Millisecond

// socket opens a socket on all addresses of a network namespace, both IPv4 and IPv6 if available.
func (b *Backend) socket(ctx context.Context, netns, network string, port uint16) (*os.File, error) {
	number := strconv.Itoa(int(port))
	socket, err := b.cfg.Network.Listen(ctx, netns, network, net.JoinHostPort("::", number))
	for began := time.Now(); errors.Is(err, unix.EADDRINUSE) && time.Since(began) < forkTime && ctx.Err() == nil; {
		time.Sleep(forkTime / 100) // pacing: no event reports that the copies are closed
		socket, err = b.cfg.Network.Listen(ctx, netns, network, net.JoinHostPort("::", number))
	}
	if errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EADDRNOTAVAIL) {
		return b.cfg.Network.Listen(ctx, netns, network, net.JoinHostPort("0.0.0.0", number))
	}
	return socket, err
}

// portError wraps the error of a port that cannot be opened. If the port is in use, the error says how to choose
// another.
func (b *Backend) portError(p *sandbox.Pod, c *sandbox.Container, network string, port uint16, err error) error {
	if !errors.Is(err, unix.EADDRINUSE) {
		return fmt.Errorf("open port %d/%s of the pod: %w", port, network, err)
	}
	where := "in the pod's network"
	if p.Netns == "" {
		where = "on the node, whose network this pod shares"
	}
	only := ""
	if sandbox.IsForeign(p, c) { // other components of the pod can have the same annotations
		only = "." + c.Config.GetMetadata().GetName()
	}
	return fmt.Errorf("port %d/%s is already in use %s; choose another with the annotations %s%s and %s%s: %w: %w", port, network, where,
		b.cfg.LabelPrefix, annotations.KeyPort+only, b.cfg.LabelPrefix, annotations.KeyCleartextPort+only, err, errdefs.ErrFailedPrecondition)
}
