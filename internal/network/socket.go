package network

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// Dial connects to addr from inside the namespace at netnsPath; "" means the host's namespace. The network is tcp or
// udp. The address is "host:port", where host is an IP address or "localhost". For "localhost", Dial tries 127.0.0.1
// and then ::1. Dial resolves no other names, because this process does not use the pod's resolver. Dial needs a thread
// inside the namespace only to make the socket, so a slow peer does not occupy a thread.
func Dial(ctx context.Context, netnsPath, network, addr string) (net.Conn, error) {
	targets, err := socketAddrs(network, addr)
	if err != nil {
		return nil, err
	}
	var failures []error
	for _, target := range targets {
		conn, err := dial(ctx, netnsPath, target)
		if err == nil {
			return conn, nil
		}
		failures = append(failures, fmt.Errorf("dial %s %s: %w", network, target, err))
		if ctx.Err() != nil {
			break
		}
	}
	return nil, errors.Join(failures...)
}

// Dial calls the function Dial.
func (m *Manager) Dial(ctx context.Context, netnsPath, network, addr string) (net.Conn, error) {
	return Dial(ctx, netnsPath, network, addr)
}

func dial(ctx context.Context, netnsPath string, target socketAddr) (net.Conn, error) {
	file, err := socket(netnsPath, target)
	if err != nil {
		return nil, err
	}
	defer file.Close() // net.FileConn makes a copy
	if err := connect(ctx, file, target.sockaddr()); err != nil {
		return nil, err
	}
	return net.FileConn(file)
}

// Listen binds a socket to addr inside the namespace at netnsPath. If the network is tcp, the socket also listens. The
// caller owns the returned file, and can use it for net.FileListener or net.FilePacketConn, or pass it to another
// process.
func (m *Manager) Listen(_ context.Context, netnsPath, network, addr string) (*os.File, error) {
	targets, err := socketAddrs(network, addr)
	if err != nil {
		return nil, err
	}
	target := targets[0]
	file, err := socket(netnsPath, target)
	if err != nil {
		return nil, err
	}
	err = control(file, func(fd int) error {
		if target.kind == unix.SOCK_STREAM {
			if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
				return err
			}
		}
		if err := unix.Bind(fd, target.sockaddr()); err != nil {
			return err
		}
		if target.kind != unix.SOCK_STREAM {
			return nil
		}
		return unix.Listen(fd, unix.SOMAXCONN)
	})
	if err != nil {
		_ = file.Close()
		return nil, fmt.Errorf("listen on %s %s: %w", network, target, err)
	}
	return file, nil
}

// socketAddr is an address to connect to or listen on.
type socketAddr struct {
	netip.AddrPort
	kind int // unix.SOCK_STREAM or SOCK_DGRAM
}

func (a socketAddr) family() int {
	if a.Addr().Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

func (a socketAddr) sockaddr() unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}

func socketAddrs(network, addr string) ([]socketAddr, error) {
	kind, ok := map[string]int{"tcp": unix.SOCK_STREAM, "udp": unix.SOCK_DGRAM}[network]
	if !ok {
		return nil, invalidf("network %q is not tcp or udp", network)
	}
	hosts := []string{addr}
	if port, ok := strings.CutPrefix(addr, "localhost:"); ok {
		hosts = []string{"127.0.0.1:" + port, "[::1]:" + port}
	}
	var all []socketAddr
	for _, host := range hosts {
		ap, err := netip.ParseAddrPort(host)
		if err != nil {
			return nil, invalidf("address %q is not IP:port or localhost:port: %v", addr, err)
		}
		all = append(all, socketAddr{AddrPort: netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port()), kind: kind})
	}
	return all, nil
}

// socket opens a non-blocking socket inside the namespace. The returned file uses the Go runtime's poller.
func socket(netnsPath string, target socketAddr) (*os.File, error) {
	var fd int
	err := inNetns(netnsPath, func() (err error) {
		fd, err = unix.Socket(target.family(), target.kind|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		return err
	})
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), target.String()), nil
}

// connect connects the socket to an address. It waits in the poller until the socket is connected or ctx ends.
func connect(ctx context.Context, file *os.File, to unix.Sockaddr) error {
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
			outcome = unix.Connect(int(fd), to)
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
	if errors.Is(err, syscall.ECONNREFUSED) {
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

func control(file *os.File, fn func(fd int) error) error {
	raw, err := file.SyscallConn()
	if err != nil {
		return err
	}
	var outcome error
	if err := raw.Control(func(fd uintptr) { outcome = fn(int(fd)) }); err != nil {
		return err
	}
	return outcome
}
