package image

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/guard"
)

// rootView is a temporary view of an unpacked image.
type rootView struct {
	id     string
	mounts []mount.Mount
}

// viewLease is how long the lease of a view lasts after a crash.
const viewLease = time.Hour

// withView calls fn with a view of an unpacked image and removes the view afterwards. fn's context has a lease, which
// keeps the view and the blobs that fn makes, and ends before the lease expires: without it, the image's files could go
// while fn reads them. After a crash the lease expires.
func (s *Store) withView(ctx context.Context, chainID string, fn func(context.Context, *rootView) error) (err error) {
	lease, err := s.leases.Create(ctx, leases.WithRandomID(), leases.WithExpiration(viewLease))
	if err != nil {
		return err
	}
	clean := context.WithoutCancel(ctx)
	defer func() { err = errors.Join(err, s.leases.Delete(clean, lease)) }()
	ctx, cancel := context.WithTimeoutCause(leases.WithLease(ctx, lease.ID), viewLease-time.Minute,
		fmt.Errorf("it takes longer than %v: %w", viewLease, context.DeadlineExceeded))
	defer cancel()
	view := &rootView{id: "extract-component-" + lease.ID}
	if view.mounts, err = s.snaps.View(ctx, view.id, chainID); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.snaps.Remove(clean, view.id)) }()
	return fn(ctx, view)
}

// imageRoot is the root of an unpacked image, valid only inside the callback of withRoot.
type imageRoot struct {
	fd   int
	path string
}

// withRoot calls fn with the root of an unpacked image. It mounts the image in the mount namespace of a thread that
// ends afterwards, so nothing needs to be unmounted, even after a crash. Files that fn opened stay open.
func (s *Store) withRoot(mounts []mount.Mount, fn func(*imageRoot) error) error {
	run, wait := guard.Part(func() error {
		runtime.LockOSThread() // never unlocked: the runtime ends the thread with the goroutine
		return s.inNamespace(mounts, fn)
	})
	go run()
	return wait()
}

func (s *Store) inNamespace(mounts []mount.Mount, fn func(*imageRoot) error) error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("create a mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	root, err := s.mountView(mounts)
	if err != nil {
		return err
	}
	dir, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(dir)
	return fn(&imageRoot{dir, root})
}

// open opens a file of the image. Symbolic links resolve inside the image (fault I3).
func (r *imageRoot) open(name string, flags uint64) (*os.File, error) {
	fd, err := unix.Openat2(r.fd, name, &unix.OpenHow{
		Flags:   flags | unix.O_RDONLY | unix.O_CLOEXEC | unix.O_NONBLOCK | unix.O_NOCTTY, // a FIFO must not block us
		Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
	})
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP), errors.Is(err, unix.ENXIO), errors.Is(err, unix.EACCES):
		return nil, fmt.Errorf("open it in the image's root: %w (%w)", err, errdefs.ErrInvalidArgument)
	case err != nil:
		return nil, err
	}
	return os.NewFile(uintptr(fd), name), nil
}

// openIn is like imageRoot.open, for a view's mounts.
func (s *Store) openIn(mounts []mount.Mount, name string) (file *os.File, err error) {
	err = s.withRoot(mounts, func(root *imageRoot) error {
		file, err = root.open(name, 0)
		return err
	})
	return file, err
}

// mountView mounts a view and returns its path. The calling thread must have its own mount namespace.
func (s *Store) mountView(mounts []mount.Mount) (string, error) {
	if len(mounts) != 1 {
		return "", fmt.Errorf("a view of %d mounts: %w", len(mounts), errdefs.ErrNotImplemented)
	}
	m := mounts[0]
	if m.Type == "bind" {
		return m.Source, nil
	}
	// mount(2) limits options to a page. With relative paths, 128 lower directories fit.
	base := filepath.Join(s.cfg.Root, "snapshots", "snapshots")
	if err := unix.Chdir(base); err != nil {
		return "", err
	}
	options := strings.ReplaceAll(strings.Join(m.Options, ","), base+"/", "")
	target := filepath.Join(s.cfg.Root, "content") // any directory works, because no other thread sees the mount
	if err := unix.Mount(m.Source, target, m.Type, unix.MS_RDONLY|unix.MS_NODEV|unix.MS_NOSUID|unix.MS_NOEXEC, options); err != nil {
		return "", fmt.Errorf("mount the image: %w", err)
	}
	return target, nil
}
