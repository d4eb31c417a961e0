package mnt

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containerd/containerd/v2/core/mount"
	"golang.org/x/sys/unix"
)

// volatile is the overlayfs mount option that keeps the kernel from syncing the upper directory, where a container's
// writes go (Linux 5.10; Documentation/filesystems/overlayfs.rst). Those writes need not be durable. Without the
// option, an unmount writes out all dirty data of the underlying file system, including other programs' data. With the
// option, the kernel marks the layer and refuses to mount it again until the mark is removed, because a crash of the
// machine makes the layer's content unreliable. See docs/adr/0027.
const volatile = "volatile"

// volatileMark is the path of the kernel's mark below an overlay's work directory.
const volatileMark = "work/incompat/volatile"

// ProbeVolatile mounts an overlay with "volatile" in a temporary directory below dir, and returns the error.
func ProbeVolatile(dir string) (err error) {
	trial := filepath.Join(dir, "overlay-trial")
	if err := os.RemoveAll(trial); err != nil { // left by a probe that was killed
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(trial)) }()
	at := func(name string) string { return filepath.Join(trial, name) }
	for _, name := range []string{"lower", "upper", "work", "merged"} {
		if err := os.MkdirAll(at(name), 0o700); err != nil {
			return err
		}
	}
	options := fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s,%s", at("lower"), at("upper"), at("work"), volatile)
	return OnNewThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
			return err
		}
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			return err
		}
		if err := unix.Mount("overlay", at("merged"), "overlay", 0, options); err != nil {
			return err
		}
		return unix.Unmount(at("merged"), 0)
	})
}

// WithVolatile returns the mounts with the option "volatile" added to each overlay.
func WithVolatile(mounts []mount.Mount) []mount.Mount {
	mounts = slices.Clone(mounts)
	for i, m := range mounts {
		if m.Type == "overlay" && !slices.Contains(m.Options, volatile) {
			mounts[i].Options = append(slices.Clone(m.Options), volatile)
		}
	}
	return mounts
}

// VolatileMark returns the path of the kernel's mark for the overlay among the mounts, or "" if none of them is an overlay.
func VolatileMark(mounts []mount.Mount) string {
	for _, m := range mounts {
		for _, option := range m.Options {
			if work, ok := strings.CutPrefix(option, "workdir="); ok && m.Type == "overlay" {
				return filepath.Join(work, volatileMark)
			}
		}
	}
	return ""
}
