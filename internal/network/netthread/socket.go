package netthread

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// Socket opens a non-blocking socket in the network namespace of the calling thread. The kind is unix.SOCK_STREAM or
// SOCK_DGRAM, and the address says which family. The returned file uses the Go runtime's poller.
func Socket(kind int, addr netip.AddrPort) (*os.File, error) {
	family := unix.AF_INET6
	if addr.Addr().Is4() {
		family = unix.AF_INET
	}
	fd, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), addr.String()), nil
}

// Sockaddr returns an address for the socket calls of package unix.
func Sockaddr(addr netip.AddrPort) unix.Sockaddr {
	if addr.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(addr.Port()), Addr: addr.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(addr.Port()), Addr: addr.Addr().As16()}
}

// Connect connects a socket of Socket to an address. It waits in the poller until the socket is connected or ctx ends.
// If nothing listens at the address, the error is errdefs.ErrUnavailable.
func Connect(ctx context.Context, file *os.File, to netip.AddrPort) error {
	stop := context.AfterFunc(ctx, func() { _ = file.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	raw, err := file.SyscallConn()
	if err != nil {
		return err
	}
	started := false
	var outcome error
	err = raw.Write(func(fd uintptr) (done bool) {
		if !started {
			started = true
			outcome = unix.Connect(int(fd), Sockaddr(to))
			return !errors.Is(outcome, unix.EINPROGRESS)
		}
		outcome = connected(int(fd))
		return !errors.Is(outcome, unix.EINPROGRESS)
	})
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err == nil {
		err = outcome
	}
	if errors.Is(err, unix.ECONNREFUSED) {
		return fmt.Errorf("%w (nothing listens there): %w", err, errdefs.ErrUnavailable)
	}
	return err
}

// connected returns the result of a connection attempt, or EINPROGRESS while the attempt is in progress.
func connected(fd int) error {
	code, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
	if err != nil {
		return err
	}
	if code != 0 {
		return unix.Errno(code)
	}
	if _, err := unix.Getpeername(fd); errors.Is(err, unix.ENOTCONN) {
		return unix.EINPROGRESS // the poller woke up too early
	}
	return nil
}
