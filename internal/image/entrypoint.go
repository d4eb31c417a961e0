package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/image/wasmbin"
)

// labelComponent, on a manifest, names the blob that was made of the image's entrypoint; the collector keeps the blob
// for as long as the manifest.
const labelComponent = "containerd.io/gc.ref.content.component"

// ComponentBlob tells which blob is the binary of an image's component; OpenBlob reads it. The entrypoint of a container
// image is made a blob when it is first asked for. An image without a component is errdefs.ErrInvalidArgument, and so
// is an entrypoint that is not a regular file of at most Limits.ComponentBytes below the image's root.
func (s *Store) ComponentBlob(ctx context.Context, imageID string) (ocispec.Descriptor, error) {
	e, err := s.index.find(imageID)
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	c := e.details.component
	if c == nil {
		return ocispec.Descriptor{}, invalidf("image %s is a %s without a component: its entrypoint does not end in .wasm", e.image.ID, e.details.kind)
	}
	e.touch()
	if c.Layout != LayoutRootfs {
		return c.Wasm, nil
	}
	desc, err := s.entrypoint(s.with(ctx), e.details)
	if err != nil {
		return desc, fmt.Errorf("entrypoint %s of image %s: %w", c.Entrypoint, e.image.ID, err)
	}
	return desc, nil
}

// entrypoint finds the blob of an earlier call, or makes it.
func (s *Store) entrypoint(ctx context.Context, d *details) (ocispec.Descriptor, error) {
	key := "component://" + d.manifest.Digest.String()
	if err := s.once.Lock(ctx, key); err != nil {
		return ocispec.Descriptor{}, err
	}
	defer s.once.Unlock(key)
	manifest, err := s.content.Info(ctx, d.manifest.Digest)
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	if dgst := digest.Digest(manifest.Labels[labelComponent]); dgst != "" {
		info, err := s.blobs.Info(ctx, dgst)
		if err == nil {
			return ocispec.Descriptor{MediaType: MediaTypeWasm, Digest: dgst, Size: info.Size}, nil
		} else if !errdefs.IsNotFound(err) {
			return ocispec.Descriptor{}, err
		}
	}
	return s.extract(ctx, d)
}

// extract copies the entrypoint out of the unpacked layers into a blob. A lease keeps the view and the blob until the
// manifest's label refers to the blob; after a crash it expires.
func (s *Store) extract(ctx context.Context, d *details) (_ ocispec.Descriptor, err error) {
	lease, err := s.leases.Create(ctx, leases.WithRandomID(), leases.WithExpiration(time.Hour))
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	clean := context.WithoutCancel(ctx)
	defer func() { err = errors.Join(err, s.leases.Delete(clean, lease)) }()
	ctx = leases.WithLease(ctx, lease.ID)
	view := "extract-component-" + lease.ID
	mounts, err := s.snaps.View(ctx, view, d.chainID())
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	defer func() { err = errors.Join(err, s.snaps.Remove(clean, view)) }()
	file, err := s.openBelow(mounts, d.component.Entrypoint)
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	defer file.Close()
	desc, err := s.describe(file)
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	if err := s.mend(ctx, desc); err != nil {
		return ocispec.Descriptor{}, err
	}
	if err := content.WriteBlob(ctx, s.content, view, file, desc); err != nil {
		return ocispec.Descriptor{}, err
	}
	_, err = s.content.Update(ctx, content.Info{Digest: d.manifest.Digest, Labels: map[string]string{labelComponent: desc.Digest.String()}},
		"labels."+labelComponent)
	return desc, err
}

// describe checks what was opened, digests it, and leaves it at its beginning.
func (s *Store) describe(file *os.File) (ocispec.Descriptor, error) {
	info, err := file.Stat()
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	if !info.Mode().IsRegular() {
		return ocispec.Descriptor{}, invalidf("it is not a regular file but %s", info.Mode())
	}
	desc := ocispec.Descriptor{MediaType: MediaTypeWasm, Size: info.Size()}
	if limit := s.cfg.Limits.ComponentBytes; desc.Size == 0 || desc.Size > limit {
		return ocispec.Descriptor{}, invalidf("it has %d bytes, where 1 to %d may be", desc.Size, limit)
	}
	if _, err := wasmbin.Read(file, desc.Size); err != nil {
		return ocispec.Descriptor{}, err
	}
	if desc.Digest, err = digest.FromReader(io.NewSectionReader(file, 0, desc.Size)); err != nil {
		return ocispec.Descriptor{}, err
	}
	return desc, nil
}

// openBelow opens a file of an unpacked image, whose symbolic links are followed as if the image were all there is.
// The image is mounted in a mount namespace of a thread that then ends: nothing is left to unmount, however this
// process ends. The file stays open without the mount.
func (s *Store) openBelow(mounts []mount.Mount, name string) (*os.File, error) {
	type opened struct {
		file *os.File
		err  error
	}
	result := make(chan opened)
	go func() {
		runtime.LockOSThread() // for good: the runtime ends the thread with the goroutine
		file, err := s.openInNamespace(mounts, name)
		result <- opened{file, err}
	}()
	r := <-result
	return r.file, r.err
}

func (s *Store) openInNamespace(mounts []mount.Mount, name string) (*os.File, error) {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return nil, fmt.Errorf("a mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return nil, fmt.Errorf("make / private: %w", err)
	}
	root, err := s.mountView(mounts)
	if err != nil {
		return nil, err
	}
	dir, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(dir)
	fd, err := unix.Openat2(dir, name, &unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_CLOEXEC | unix.O_NONBLOCK | unix.O_NOCTTY, // a FIFO must not hold us
		Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
	})
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP), errors.Is(err, unix.ENXIO), errors.Is(err, unix.EACCES):
		return nil, invalidf("open it below the image's root: %v", err)
	case err != nil:
		return nil, err
	}
	return os.NewFile(uintptr(fd), name), nil
}

// mountView shows what a view of the snapshotter's mounts to, and returns where. The thread has its own namespace.
func (s *Store) mountView(mounts []mount.Mount) (string, error) {
	if len(mounts) != 1 {
		return "", fmt.Errorf("a view of %d mounts: %w", len(mounts), errdefs.ErrNotImplemented)
	}
	m := mounts[0]
	if m.Type == "bind" {
		return m.Source, nil
	}
	// mount(2) takes a page of options. The names of 128 lower directories fit when they are relative.
	base := filepath.Join(s.cfg.Root, "snapshots", "snapshots")
	if err := unix.Chdir(base); err != nil {
		return "", err
	}
	options := strings.ReplaceAll(strings.Join(m.Options, ","), base+"/", "")
	target := filepath.Join(s.cfg.Root, "content") // any directory will do: nobody else sees the mount
	if err := unix.Mount(m.Source, target, m.Type, unix.MS_RDONLY|unix.MS_NODEV|unix.MS_NOSUID|unix.MS_NOEXEC, options); err != nil {
		return "", fmt.Errorf("mount the image: %w", err)
	}
	return target, nil
}
