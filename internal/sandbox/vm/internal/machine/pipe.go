package machine

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// MakePipe makes a named pipe of mode 0600 at path. It first removes an older pipe at path. It returns the pipe's read
// end, for the hypervisor to inherit. Reads never return EOF, because the descriptor is also open for writing.
func MakePipe(path string) (*os.File, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("replace the pipe %s: %w", path, err)
	}
	if err := unix.Mkfifo(path, 0o600); err != nil {
		return nil, fmt.Errorf("make the pipe %s: %w", path, err)
	}
	return os.OpenFile(path, os.O_RDWR|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0)
}

// OpenPipe opens a machine's named pipe for writing. The file supports deadlines. OpenPipe returns
// errdefs.ErrUnavailable if the pipe does not exist or has no reader.
func OpenPipe(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_WRONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0)
	if errors.Is(err, unix.ENXIO) || errors.Is(err, unix.ENOENT) {
		return nil, fmt.Errorf("the machine is not running: %w (%w)", err, errdefs.ErrUnavailable)
	}
	return f, err
}
