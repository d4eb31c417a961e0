package machine

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

// Dial connects to one of a machine's unix sockets. The path can be longer than a socket address allows (107 bytes).
// Dial returns errdefs.ErrUnavailable if the socket does not exist or nothing listens on it.
func Dial(ctx context.Context, path string) (*net.UnixConn, error) {
	short, done, err := shortPath(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("connect to %s: %w (%w)", path, err, errdefs.ErrUnavailable)
	}
	if err != nil {
		return nil, err
	}
	defer done()
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", short)
	if err != nil {
		if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ECONNREFUSED) {
			return nil, fmt.Errorf("connect to %s: the machine is not running: %w (%w)", path, err, errdefs.ErrUnavailable)
		}
		return nil, fmt.Errorf("connect to %s: %w", path, err)
	}
	return c.(*net.UnixConn), nil
}

// Listen makes a listening unix socket of mode 0600 at path. It first removes an older socket at path. It returns the
// socket's descriptor, for the hypervisor to inherit. The path can be longer than a socket address allows.
func Listen(path string) (*os.File, error) {
	short, done, err := shortPath(path)
	if err != nil {
		return nil, err
	}
	defer done()
	if err := os.Remove(short); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: short, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	defer l.Close()
	l.SetUnlinkOnClose(false)
	if err := os.Chmod(short, 0o600); err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	return l.File()
}

// shortPath returns a short path to the file at path. The short path is valid until done is called.
func shortPath(path string) (short string, done func(), err error) {
	dir, err := os.OpenFile(filepath.Dir(path), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", nil, err
	}
	return fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), filepath.Base(path)), func() { dir.Close() }, nil
}
