// Package unixsocket connects to unix sockets and listens on them, also where a path is longer than the 107 bytes of a
// socket address (unix(7)): the address then leads through a descriptor of the socket's directory. The package knows
// nothing about who listens.
package unixsocket

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// Dial connects to the stream socket at path. It returns errdefs.ErrUnavailable if there is no socket, or if nothing
// listens on it.
func Dial(ctx context.Context, path string) (*net.UnixConn, error) {
	return dial(ctx, "unix", path)
}

// DialPacket is like Dial, for a socket that keeps the boundaries of messages (SOCK_SEQPACKET).
func DialPacket(ctx context.Context, path string) (*net.UnixConn, error) {
	return dial(ctx, "unixpacket", path)
}

func dial(ctx context.Context, network, path string) (*net.UnixConn, error) {
	short, done, err := shorten(path)
	if err == nil {
		defer done()
		var conn net.Conn
		if conn, err = (&net.Dialer{}).DialContext(ctx, network, short); err == nil {
			return conn.(*net.UnixConn), nil
		}
	}
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ECONNREFUSED) {
		return nil, fmt.Errorf("connect to %s: nothing listens there: %w (%w)", path, err, errdefs.ErrUnavailable)
	}
	return nil, fmt.Errorf("connect to %s: %w", path, err)
}

// Listen makes a listening stream socket of mode 0600 at path, in place of an older one. It returns the socket's
// descriptor, for another process to inherit.
func Listen(path string) (*os.File, error) {
	file, err := listen(path)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	return file, nil
}

func listen(path string) (*os.File, error) {
	short, done, err := shorten(path)
	if err != nil {
		return nil, err
	}
	defer done()
	if err := os.Remove(short); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: short, Net: "unix"})
	if err != nil {
		return nil, err
	}
	defer l.Close()
	l.SetUnlinkOnClose(false)
	if err := os.Chmod(short, 0o600); err != nil {
		return nil, err
	}
	return l.File()
}

// shorten returns a short path to the file at path. The short path is valid until done is called.
func shorten(path string) (short string, done func(), err error) {
	dir, err := os.OpenFile(filepath.Dir(path), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", nil, err
	}
	return fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), filepath.Base(path)), func() { dir.Close() }, nil
}
