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

// halfOpenTime limits how long a client can send after the pod has closed its side. A pod that closes its side nearly
// always closes both directions, but TCP shows that only when the client sends something.
const halfOpenTime = 30 * time.Second

// Dial opens a connection in the network of a pod, like net.Dialer.DialContext.
type Dial func(ctx context.Context, network, addr string) (net.Conn, error)

// PortForwardTCP connects to a TCP port on the pod's localhost, first over IPv4, then over IPv6. It copies between
// stream and the connection in both directions until both sides have closed the connection or ctx ends. When one side
// stops sending, the other side sees the end of its input. After an error, the caller must close stream.
//
// It returns an error if it cannot connect (errdefs.ErrUnavailable if nothing listens) or if ctx ends. The failure of
// an established connection only closes stream, because kubectl reacts to an error by dropping all its forwarded
// connections.
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

// join waits until both directions have ended. It ends both directions itself when ctx ends, or halfOpenTime after the
// pod's side has ended.
func join(ctx context.Context, conn net.Conn, stream io.ReadWriteCloser, fromClient <-chan error, fromPod <-chan struct{}) error {
	var halfOpen <-chan time.Time
	var result error
	for podDone := fromPod; fromClient != nil || podDone != nil; {
		select {
		case err := <-fromClient:
			fromClient = nil
			if err != nil { // the pod accepts no more data
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

// abort closes a stream in both directions. The Close method of an SPDY stream closes only one direction.
func abort(stream io.Closer) {
	if both, ok := stream.(interface{ Reset() error }); ok {
		_ = both.Reset()
		return
	}
	stream.Close()
}
