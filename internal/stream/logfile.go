package stream

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// LogPath returns the path of a container's log: the pod's log directory joined with the given name (CRI
// ContainerConfig.log_path). It returns "" if the directory or the name is empty. If the name leads out of the
// directory, the error is errdefs.ErrInvalidArgument.
func LogPath(directory, name string) (string, error) {
	if directory == "" || name == "" {
		return "", nil
	}
	switch {
	case !filepath.IsAbs(directory):
		return "", fmt.Errorf("log_directory %q is not an absolute path: %w", directory, errdefs.ErrInvalidArgument)
	case !filepath.IsLocal(name) || filepath.Clean(name) == ".":
		return "", fmt.Errorf("log_path %q leads out of log_directory: %w", name, errdefs.ErrInvalidArgument)
	}
	return filepath.Join(directory, name), nil
}

// OpenLogFile opens a container's log for appending. It creates the file and missing directories. If the path leads
// through a symlink below the log directory, or out of that directory, the error is errdefs.ErrInvalidArgument. If
// LogPath returns "", the file is nil.
func OpenLogFile(directory, name string) (*os.File, error) {
	full, err := LogPath(directory, name)
	if err != nil || full == "" {
		return nil, err
	}
	if err := os.MkdirAll(directory, 0o755); err != nil {
		return nil, fmt.Errorf("log_directory: %w", err)
	}
	dir, err := unix.Open(directory, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("log_directory %s: %w", directory, err)
	}
	defer func() { unix.Close(dir) }()
	parent, base := filepath.Split(filepath.Clean(name))
	for part := range strings.SplitSeq(strings.Trim(parent, "/"), "/") {
		if part == "" {
			continue
		}
		if err := unix.Mkdirat(dir, part, 0o755); err != nil && !errors.Is(err, unix.EEXIST) {
			return nil, fmt.Errorf("log file %s: %w", full, err)
		}
		next, err := openBeneath(dir, part, unix.O_PATH|unix.O_DIRECTORY)
		if err != nil {
			return nil, badLogFile(full, err)
		}
		unix.Close(dir)
		dir = next
	}
	fd, err := openBeneath(dir, base, unix.O_WRONLY|unix.O_CREAT|unix.O_APPEND|unix.O_NONBLOCK)
	if err != nil {
		return nil, badLogFile(full, err)
	}
	return regular(fd, full)
}

// regular returns the descriptor as a file. If it is not the descriptor of a regular file, regular closes it and
// returns an error.
func regular(fd int, full string) (*os.File, error) {
	var st unix.Stat_t
	err := unix.Fstat(fd, &st)
	if err == nil && st.Mode&unix.S_IFMT != unix.S_IFREG {
		err = fmt.Errorf("log file %s is not a regular file: %w", full, errdefs.ErrInvalidArgument)
	}
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	return os.NewFile(uintptr(fd), full), nil
}

// openBeneath opens a name in a directory. It does not follow symlinks.
func openBeneath(dir int, name string, flags uint64) (int, error) {
	how := unix.OpenHow{Flags: flags | unix.O_CLOEXEC, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS}
	if flags&unix.O_CREAT != 0 {
		how.Mode = 0o640
	}
	return unix.Openat2(dir, name, &how)
}

func badLogFile(full string, err error) error {
	if errors.Is(err, unix.ELOOP) || errors.Is(err, unix.EXDEV) || errors.Is(err, unix.ENOTDIR) {
		return fmt.Errorf("log file %s leads through a symlink or out of log_directory: %w: %w", full, err, errdefs.ErrInvalidArgument)
	}
	return fmt.Errorf("log file %s: %w", full, err)
}
