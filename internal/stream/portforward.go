package stream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"time"

	"github.com/containerd/errdefs"
)

// halfOpenTime is how long a client may go on sending after the pod has closed its side. Nearly always the pod has
// closed both, which TCP does not tell before something is sent.
const halfOpenTime = 30 * time.Second

// Dial opens a connection in the network of a pod; it has the form of net.Dialer.DialContext.
type Dial func(ctx context.Context, network, addr string) (net.Conn, error)

// PortForwardTCP joins stream with a TCP port on the pod's localhost, IPv4 first, then IPv6, and copies both ways until
// both sides have closed, or ctx ends. An end of one direction is passed on as such. After an error stream is still the
// caller's to close.
//
// The error is about the connection's coming up (an errdefs.ErrUnavailable when nobody listens) or the end of ctx. What
// happens to a connection that was up is passed on as its end: kubectl gives up all its forwarded connections at an error.
func PortForwardTCP(ctx context.Context, dial Dial, port int32, stream io.ReadWriteCloser) error {
	if !validPort(port) {
		return invalid("port-forward: port %d is not between 1 and 65535", port)
	}
	conn, err := dialLocalhost(ctx, dial, port)
	if err != nil {
		return err
	}
	defer conn.Close()

	fromClient := make(chan error, 1)
	go func() {
		_, err := io.Copy(conn, stream)
		closeWrite(conn)
		fromClient <- err
	}()
	fromPod := make(chan struct{})
	go func() {
		defer close(fromPod)
		_, _ = io.Copy(stream, conn)
		stream.Close()
	}()
	return join(ctx, conn, stream, fromClient, fromPod)
}

// join waits for both directions and makes them end when they must. When it returns, neither is under way.
func join(ctx context.Context, conn net.Conn, stream io.ReadWriteCloser, fromClient <-chan error, fromPod <-chan struct{}) error {
	var halfOpen <-chan time.Time
	var result error
	for podDone := fromPod; fromClient != nil || podDone != nil; {
		select {
		case err := <-fromClient:
			fromClient = nil
			if err != nil { // the pod takes no more
				abort(stream)
			}
			continue
		case <-podDone:
			podDone = nil
			timer := time.NewTimer(halfOpenTime)
			defer timer.Stop()
			halfOpen = timer.C
			continue
		case <-halfOpen:
		case <-ctx.Done():
			result = context.Cause(ctx)
		}
		conn.Close()
		abort(stream)
		if fromClient != nil {
			<-fromClient
		}
		<-fromPod
		return result
	}
	return nil
}

func dialLocalhost(ctx context.Context, dial Dial, port int32) (net.Conn, error) {
	var failures []error
	for _, host := range []string{"127.0.0.1", "::1"} {
		conn, err := dial(ctx, "tcp", net.JoinHostPort(host, strconv.Itoa(int(port))))
		if err == nil {
			return conn, nil
		}
		failures = append(failures, err)
	}
	return nil, fmt.Errorf("nothing answers on port %d of the pod's localhost: %w: %w", port, errors.Join(failures...), errdefs.ErrUnavailable)
}

func closeWrite(conn net.Conn) {
	if half, ok := conn.(interface{ CloseWrite() error }); ok {
		_ = half.CloseWrite()
		return
	}
	conn.Close()
}

// abort ends a stream in both directions. An SPDY stream's Close ends one only.
func abort(stream io.Closer) {
	if both, ok := stream.(interface{ Reset() error }); ok {
		_ = both.Reset()
		return
	}
	stream.Close()
}
