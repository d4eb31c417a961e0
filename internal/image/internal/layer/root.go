package layer

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/image/internal/failure"
)

// Root is the root of an unpacked image, valid only inside the callback of WithRoot.
type Root struct {
	fd int
	// Path is the root's path in the mount namespace of the callback's thread.
	Path string
}

// WithRoot calls fn with the root of an unpacked image, given the mounts of a view of it in the image store below dir. It
// mounts the image in the mount namespace of a thread that ends afterwards, so nothing needs to be unmounted, even after a
// crash. Files that fn opened stay open.
func WithRoot(dir string, mounts []mount.Mount, fn func(*Root) error) error {
	run, wait := guard.Part(func() error {
		runtime.LockOSThread() // never unlocked: the runtime ends the thread with the goroutine
		return inNamespace(dir, mounts, fn)
	})
	go run()
	return wait()
}

func inNamespace(dir string, mounts []mount.Mount, fn func(*Root) error) error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("create a mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	root, err := mountView(dir, mounts)
	if err != nil {
		return err
	}
	r, err := openRoot(root)
	if err != nil {
		return err
	}
	defer r.close()
	return fn(r)
}

// openRoot opens a directory as a root. The caller closes it.
func openRoot(path string) (*Root, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return &Root{fd, path}, nil
}

func (r *Root) close() { unix.Close(r.fd) }

// Open opens a file of the image. Symbolic links resolve inside the image (fault I3).
func (r *Root) Open(name string, flags uint64) (*os.File, error) {
	fd, err := unix.Openat2(r.fd, name, &unix.OpenHow{
		Flags:   flags | unix.O_RDONLY | unix.O_CLOEXEC | unix.O_NONBLOCK | unix.O_NOCTTY, // a FIFO must not block us
		Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
	})
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP), errors.Is(err, unix.ENXIO),
		errors.Is(err, unix.EACCES):
		return nil, fmt.Errorf("open it in the image's root: %w (%w)", err, errdefs.ErrInvalidArgument)
	case err != nil:
		return nil, err
	}
	return os.NewFile(uintptr(fd), name), nil
}

// Optional opens a regular file. It returns nil if the file is missing.
func (r *Root) Optional(name string) (*os.File, error) {
	file, err := r.Open(name, 0)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("/%s: %w", name, err)
	}
	if info, err := file.Stat(); err != nil || !info.Mode().IsRegular() {
		file.Close()
		if err == nil {
			err = failure.Invalidf("/%s is not a regular file but %s", name, info.Mode())
		}
		return nil, err
	}
	return file, nil
}

// OpenInLayer opens a file a second time, directly in the layer that contains it. shown is the same file, opened
// through the overlay; openInLayer closes shown. The returned path needs no mount and exists as long as the layer.
func (r *Root) OpenInLayer(shown *os.File, layers []string) (_ *os.File, _ string, err error) {
	defer shown.Close()
	target, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", shown.Fd()))
	if err != nil {
		return nil, "", err
	}
	name, ok := strings.CutPrefix(target, r.Path+"/")
	if !ok {
		return nil, "", fmt.Errorf("%q is not below %q", target, r.Path)
	}
	var want unix.Stat_t
	if err := unix.Fstat(int(shown.Fd()), &want); err != nil {
		return nil, "", err
	}
	for _, layer := range layers {
		dir, err := unix.Open(layer, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return nil, "", &os.PathError{Op: "open", Path: layer, Err: err}
		}
		fd, err := unix.Openat2(dir, name, &unix.OpenHow{
			Flags:   unix.O_RDONLY | unix.O_CLOEXEC | unix.O_NONBLOCK | unix.O_NOCTTY,
			Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV,
		})
		unix.Close(dir)
		if err != nil {
			continue // the file is in another layer, or the error below reports that none has it
		}
		file := os.NewFile(uintptr(fd), filepath.Join(layer, name))
		var is unix.Stat_t
		if err := unix.Fstat(fd, &is); err == nil && is.Ino == want.Ino && is.Size == want.Size && is.Mode == want.Mode {
			return file, file.Name(), nil
		}
		file.Close()
	}
	return nil, "", fmt.Errorf("no layer has the image's file %q", name)
}

// mountView mounts a view and returns its path. The calling thread must have its own mount namespace.
func mountView(dir string, mounts []mount.Mount) (string, error) {
	if len(mounts) != 1 {
		return "", fmt.Errorf("a view of %d mounts: %w", len(mounts), errdefs.ErrNotImplemented)
	}
	m := mounts[0]
	if m.Type == "bind" {
		return m.Source, nil
	}
	// mount(2) limits options to a page. With relative paths, 128 lower directories fit.
	base := filepath.Join(dir, "snapshots", "snapshots")
	if err := unix.Chdir(base); err != nil {
		return "", err
	}
	options := strings.ReplaceAll(strings.Join(m.Options, ","), base+"/", "")
	target := filepath.Join(dir, "content") // any directory works, because no other thread sees the mount
	if err := unix.Mount(m.Source, target, m.Type, unix.MS_RDONLY|unix.MS_NODEV|unix.MS_NOSUID|unix.MS_NOEXEC, options); err != nil {
		return "", fmt.Errorf("mount the image: %w", err)
	}
	return target, nil
}

// ViewDirs returns the directories of a view's layers, highest first.
func ViewDirs(mounts []mount.Mount) ([]string, error) {
	if len(mounts) == 1 && mounts[0].Type == "bind" {
		return []string{mounts[0].Source}, nil
	}
	if len(mounts) == 1 && mounts[0].Type == "overlay" {
		if _, lower := OverlayDirs(mounts[0]); lower != nil {
			return lower, nil
		}
	}
	return nil, fmt.Errorf("a view of %d mounts is neither a directory nor an overlay", len(mounts))
}
