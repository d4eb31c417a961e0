package unitpods

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// openBeneath opens a path below one of the roots. Symbolic links must not lead out of the root. A relative path is
// looked up in each root in turn.
func openBeneath(roots []string, name string, flags uint64) (*os.File, error) {
	if name == "" || strings.ContainsRune(name, 0) {
		return nil, fmt.Errorf("%q is not a path: %w", name, errdefs.ErrInvalidArgument)
	}
	var missing error
	for _, root := range roots {
		rest := name
		if filepath.IsAbs(name) {
			var err error
			if rest, err = filepath.Rel(root, name); err != nil || rest == ".." || strings.HasPrefix(rest, "../") {
				continue
			}
		}
		file, err := openIn(root, rest, name, flags)
		if err == nil || !errdefs.IsNotFound(err) {
			return file, err
		}
		missing = err
	}
	if missing != nil {
		return nil, missing
	}
	return nil, fmt.Errorf("%s is not below a directory that modules can use (%s): %w", name, strings.Join(roots, ", "),
		errdefs.ErrPermissionDenied)
}

func openIn(root, rest, name string, flags uint64) (*os.File, error) {
	dir, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("%s: %w: %w", root, err, errdefs.ErrNotFound)
	}
	defer unix.Close(dir)
	fd, err := unix.Openat2(dir, rest, &unix.OpenHow{
		Flags:   flags | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_MAGICLINKS,
	})
	switch {
	case errors.Is(err, unix.ENOENT):
		return nil, fmt.Errorf("%s: %w: %w", name, err, errdefs.ErrNotFound)
	case errors.Is(err, unix.EXDEV), errors.Is(err, unix.ELOOP):
		return nil, fmt.Errorf("%s leads out of %s: %w: %w", name, root, err, errdefs.ErrPermissionDenied)
	case errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ENAMETOOLONG):
		return nil, fmt.Errorf("%s: %w: %w", name, err, errdefs.ErrInvalidArgument)
	case errors.Is(err, unix.EACCES):
		return nil, fmt.Errorf("%s: %w: %w", name, err, errdefs.ErrPermissionDenied)
	case err != nil:
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return os.NewFile(uintptr(fd), name), nil
}

// openFile opens a file for reading, without blocking on a FIFO.
func openFile(roots []string, name string) (*os.File, error) {
	return openBeneath(roots, name, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY)
}

// realDir returns the path of a directory with all links resolved. The caller must not follow links when it opens that
// path, because the directory may have been replaced meanwhile.
func realDir(roots []string, name string) (string, error) {
	dir, err := openBeneath(roots, name, unix.O_PATH|unix.O_DIRECTORY)
	if err != nil {
		return "", err
	}
	defer dir.Close()
	real, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", dir.Fd()))
	if err != nil {
		return "", fmt.Errorf("%s: %w", name, err)
	}
	return real, nil
}
