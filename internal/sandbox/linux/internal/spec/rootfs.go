package spec

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"

	securejoin "github.com/cyphar/filepath-securejoin"
	"golang.org/x/sys/unix"
)

// openInRoot opens name as if root were "/". Nothing outside root can be reached: symlinks, including the last one,
// resolve inside root, and magic links are not followed. openInRoot never blocks on a FIFO.
func openInRoot(root, name string, flags uint64) (*os.File, error) {
	dir, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: root, Err: err}
	}
	defer unix.Close(dir)
	if flags&unix.O_PATH == 0 {
		flags |= unix.O_NONBLOCK
	}
	how := unix.OpenHow{
		Flags:   flags | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
	}
	for {
		fd, err := unix.Openat2(dir, name, &how)
		switch {
		case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EINTR):
			// The path contains ".." and a directory was renamed during the call; the kernel asks for a retry.
			continue
		case err != nil:
			return nil, &fs.PathError{Op: "openat2", Path: name, Err: err}
		}
		return os.NewFile(uintptr(fd), name), nil
	}
}

// readInRoot reads a regular file below root. It returns fs.ErrNotExist for a missing file, and another error for a
// file that is not regular or is larger than the limit in bytes.
func readInRoot(root, name string, limit int64) ([]byte, error) {
	f, err := openInRoot(root, name, unix.O_RDONLY|unix.O_NOCTTY)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return readRegular(f, name, limit)
}

// readRegular reads an open file. It returns an error if the file is not regular or is larger than the limit in bytes.
func readRegular(f *os.File, name string, limit int64) ([]byte, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a regular file (%s)", name, info.Mode().Type())
	}
	text, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", name, err)
	}
	if int64(len(text)) > limit {
		return nil, fmt.Errorf("%s is larger than %d bytes", name, limit)
	}
	return text, nil
}

// ResolveSubPath returns the host path of an image volume's image_sub_path, which is relative to root. Symlinks resolve
// inside the tree at root. The path must exist; "" means root itself. If the path is bad, the error is
// errdefs.ErrInvalidArgument.
func ResolveSubPath(root, sub string) (string, error) {
	const field = "image_sub_path"
	if sub == "" {
		return root, nil
	}
	if path.IsAbs(sub) || !fs.ValidPath(path.Clean(sub)) {
		return "", invalid(field, "%q is not a relative path inside the image", sub)
	}
	f, err := openInRoot(root, sub, unix.O_PATH)
	if err != nil {
		return "", classifyFileError(field, fmt.Errorf("%q is not in the image: %w", sub, err))
	}
	defer f.Close()
	real, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", f.Fd()))
	if err != nil {
		return "", fmt.Errorf("%s: %w", field, err)
	}
	return real, nil
}

// insideRoot resolves the symlinks in a path of the container, as the container would. The result is also a path in the
// container. Parts of the path can be missing.
func insideRoot(root, name string) (string, error) {
	real, err := securejoin.SecureJoin(root, name)
	if err != nil {
		return "", err
	}
	return path.Join("/", strings.TrimPrefix(real, path.Clean(root))), nil
}

// below reports whether p is dir or a path below dir. Both must be clean and absolute.
func below(p, dir string) bool {
	return p == dir || strings.HasPrefix(p, strings.TrimSuffix(dir, "/")+"/")
}

// checkRootfs rejects a root file system in which /proc, /sys or /dev exists and is not a directory, because a symlink
// would redirect the runtime's mount (CVE-2025-31133 and similar).
func checkRootfs(root string) error {
	for _, name := range []string{"proc", "sys", "dev"} {
		info, err := os.Lstat(path.Join(root, name))
		switch {
		case errors.Is(err, fs.ErrNotExist):
		case err != nil:
			return fmt.Errorf("root file system: %w", err)
		case !info.IsDir():
			return invalid("image", "/%s of the root file system is not a directory (%s)", name, info.Mode().Type())
		}
	}
	return nil
}
