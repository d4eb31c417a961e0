package machine

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// MakePipe makes a named pipe of mode 0600 at path, in place of what was there, and gives its reading end, to be inherited
// by the hypervisor. It reads no end of input, whoever comes and goes, for it could write as well.
func MakePipe(path string) (*os.File, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("make a pipe: %w", err)
	}
	if err := unix.Mkfifo(path, 0o600); err != nil {
		return nil, fmt.Errorf("make the pipe %s: %w", path, err)
	}
	return os.OpenFile(path, os.O_RDWR|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0)
}

// OpenPipe opens a named pipe of a machine for writing; deadlines work. A pipe that is not there, or that nobody reads any
// more, is errdefs.ErrUnavailable.
func OpenPipe(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_WRONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0)
	if errors.Is(err, unix.ENXIO) || errors.Is(err, unix.ENOENT) {
		return nil, fmt.Errorf("the machine does not run: %w (%w)", err, errdefs.ErrUnavailable)
	}
	return f, err
}
