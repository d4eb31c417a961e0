package guestnode

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/continuity/fs"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/image"
	"github.com/tripod-run/tripod/internal/sandbox/vm/guestinit"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/guestapi"
)

const (
	// diskTime limits the wait for a disk that the daemon has plugged in.
	diskTime = 10 * time.Second
	// diskPoll is the interval between two looks for a disk. sysfs has no inotify events.
	diskPoll = 2 * time.Millisecond
	// usageAge is how old the measured usage of a layer can be.
	usageAge = 10 * time.Second
)

// Images is the store of a guest: it has the images that the daemon has plugged in as disks, and the containers' writable
// layers on the scratch disk. It implements the linux backend's ImageStore.
type Images struct {
	root string

	mu     sync.Mutex
	images map[string]guestapi.Image // by ID
	usage  map[string]image.Usage    // by snapshot
}

func newImages(root string) *Images {
	return &Images{root: root, images: map[string]guestapi.Image{}, usage: map[string]image.Usage{}}
}

func (s *Images) add(images []guestapi.Image) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, i := range images {
		s.images[i.ID] = i
	}
}

// mount mounts the disks of images.
func (s *Images) mount(ctx context.Context, images []guestapi.Image) error {
	for _, i := range images {
		if err := mountDisk(ctx, i.LUN); err != nil {
			return fmt.Errorf("the disk of image %s: %w", i.ID, err)
		}
	}
	s.add(images)
	return nil
}

func diskDir(lun int) string { return fmt.Sprintf("%s/images/%d", runDir, lun) }

// mountDisk waits for a disk and mounts it, unless it is mounted.
func mountDisk(ctx context.Context, lun int) error {
	dir := diskDir(lun)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	var st unix.Statfs_t
	if unix.Statfs(dir, &st) == nil && st.Type == erofsMagic {
		return nil
	}
	return withDisk(ctx, lun, func(device string) error {
		return os.NewSyscallError("mount", unix.Mount(device, dir, "erofs", unix.MS_RDONLY|unix.MS_NODEV, ""))
	})
}

// withDisk waits for a disk and calls use with its device, which may not be there yet.
func withDisk(ctx context.Context, lun int, use func(device string) error) error {
	ctx, cancel := context.WithTimeout(ctx, diskTime)
	defer cancel()
	for {
		found, _ := filepath.Glob(fmt.Sprintf("/sys/class/scsi_device/*:0:0:%d/device/block/*", lun))
		if len(found) > 0 {
			err := use("/dev/" + filepath.Base(found[0]))
			if !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ENXIO) {
				return err
			}
		}
		select {
		case <-time.After(diskPoll):
		case <-ctx.Done():
			return fmt.Errorf("did not appear: %w (%w)", ctx.Err(), errdefs.ErrUnavailable)
		}
	}
}

// findDevices gives the container's block devices the names that they have in the guest. It loads the module of another device
// that is missing, such as /dev/net/tun.
func findDevices(ctx context.Context, c guestapi.Create) error {
	devices := c.Container.Config.GetDevices()
	for i, d := range devices {
		isDisk := slices.ContainsFunc(c.Devices, func(d guestapi.Device) bool { return d.Index == i })
		if _, err := os.Stat(d.GetHostPath()); !isDisk && errors.Is(err, os.ErrNotExist) {
			_ = guestinit.LoadModule("devname:" + strings.TrimPrefix(d.GetHostPath(), "/dev/")) // without it, there is no such device
		}
	}
	for _, d := range c.Devices {
		err := withDisk(ctx, d.LUN, func(device string) error {
			_, err := os.Stat(device)
			devices[d.Index].HostPath = device
			return err
		})
		if err != nil {
			return fmt.Errorf("devices[%d]: the disk: %w", d.Index, err)
		}
	}
	return nil
}

// erofsMagic is EROFS_SUPER_MAGIC_V1 in linux/magic.h.
const erofsMagic = 0xE0F5E1E2

// Get implements linux.ImageStore.
func (s *Images) Get(_ context.Context, refOrID string) (image.Image, error) {
	i, err := s.get(refOrID)
	return i.Image, err
}

func (s *Images) get(id string) (guestapi.Image, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if i, ok := s.images[id]; ok {
		return i, nil
	}
	return guestapi.Image{}, fmt.Errorf("the guest has no image %s: %w", id, errdefs.ErrNotFound)
}

// layer is the directory of a snapshot. The file image in it has the ID of the snapshot's image; a read-only snapshot has
// nothing else.
func (s *Images) layer(key string) string { return filepath.Join(s.root, key) }

// Prepare implements linux.ImageStore.
func (s *Images) Prepare(ctx context.Context, key, imageID string, _ map[string]string) ([]mount.Mount, error) {
	if err := os.MkdirAll(filepath.Join(s.layer(key), "work"), 0o700); err != nil {
		return nil, err
	}
	img, err := s.get(imageID)
	if err != nil {
		return nil, err
	}
	if err := makeUpper(filepath.Join(s.layer(key), "fs"), diskDir(img.LUN)); err != nil {
		return nil, err
	}
	return s.keep(ctx, key, imageID)
}

// makeUpper makes the upper directory of an overlay. The mode and the owners of the overlay's root are those of the upper
// directory, so makeUpper copies them.
func makeUpper(dir, lower string) error {
	var st unix.Stat_t
	if err := unix.Stat(lower, &st); err != nil {
		return os.NewSyscallError("stat", err)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	if err := os.Chown(dir, int(st.Uid), int(st.Gid)); err != nil {
		return err
	}
	return unix.Chmod(dir, st.Mode&0o7777)
}

// View implements linux.ImageStore.
func (s *Images) View(ctx context.Context, key, imageID string) ([]mount.Mount, error) {
	if err := os.MkdirAll(s.layer(key), 0o700); err != nil {
		return nil, err
	}
	return s.keep(ctx, key, imageID)
}

// keep records the image of a snapshot and returns the snapshot's mounts.
func (s *Images) keep(ctx context.Context, key, imageID string) ([]mount.Mount, error) {
	if err := os.WriteFile(filepath.Join(s.layer(key), "image"), []byte(imageID), 0o600); err != nil {
		return nil, err
	}
	return s.Mounts(ctx, key)
}

// Mounts implements linux.ImageStore.
func (s *Images) Mounts(_ context.Context, key string) ([]mount.Mount, error) {
	id, err := os.ReadFile(filepath.Join(s.layer(key), "image"))
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("snapshot %s: %w", key, errdefs.ErrNotFound)
	}
	if err != nil {
		return nil, err
	}
	img, err := s.get(string(id))
	if err != nil {
		return nil, err
	}
	lower, upper, work := diskDir(img.LUN), filepath.Join(s.layer(key), "fs"), filepath.Join(s.layer(key), "work")
	if _, err := os.Stat(upper); err != nil {
		return []mount.Mount{{Type: "bind", Source: lower, Options: []string{"rbind", "ro"}}}, nil
	}
	return []mount.Mount{{Type: "overlay", Source: "overlay", Options: []string{"workdir=" + work, "upperdir=" + upper, "lowerdir=" + lower}}},
		nil
}

// Release implements linux.ImageStore.
func (s *Images) Release(_ context.Context, key string) error {
	s.mu.Lock()
	delete(s.usage, key)
	s.mu.Unlock()
	return os.RemoveAll(s.layer(key))
}

// Snapshots implements linux.ImageStore.
func (s *Images) Snapshots(context.Context) ([]string, error) {
	entries, err := os.ReadDir(s.root)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	var keys []string
	for _, e := range entries {
		keys = append(keys, e.Name())
	}
	return keys, err
}

// Usage implements linux.ImageStore.
func (s *Images) Usage(ctx context.Context, key string) (image.Usage, error) {
	s.mu.Lock()
	u := s.usage[key]
	s.mu.Unlock()
	if time.Since(u.Timestamp) < usageAge {
		return u, nil
	}
	now := time.Now()
	measured, err := fs.DiskUsage(ctx, filepath.Join(s.layer(key), "fs"))
	if err != nil {
		return image.Usage{}, err
	}
	u = image.Usage{Bytes: uint64(measured.Size), Inodes: uint64(measured.Inodes), Timestamp: now}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.usage[key] = u
	return u, nil
}
