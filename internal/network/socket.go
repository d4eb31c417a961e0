package network

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/network/netthread"
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
	if err := netthread.Connect(ctx, file, target.AddrPort); err != nil {
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
		if err := unix.Bind(fd, netthread.Sockaddr(target.AddrPort)); err != nil {
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

// socket opens a non-blocking socket inside the namespace.
func socket(netnsPath string, target socketAddr) (file *os.File, err error) {
	err = inNetns(netnsPath, func() (err error) {
		file, err = netthread.Socket(target.kind, target.AddrPort)
		return err
	})
	return file, err
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
