package selinux

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"

	"github.com/containerd/containerd/v2/core/mount"

	"github.com/tripod-run/tripod/internal/health"
)

// Open returns the pool of labels, or nil if pods cannot have labels, which it logs.
func Open(log *slog.Logger) *Pool {
	if !Enabled() {
		return nil
	}
	pool, err := NewPool(Kernel{})
	if err != nil {
		log.Warn("containers have no SELinux labels", "err", err)
		return nil
	}
	return pool
}

// Finding reports whether pods can have labels.
func Finding() health.Finding {
	f := health.Finding{Subject: "SELinux", OK: true, Detail: "the kernel has none: labels are refused"}
	if !Enabled() {
		return f
	}
	f.Detail = "pods get labels of their own"
	if _, err := NewPool(Kernel{}); err != nil {
		f.OK, f.Detail, f.Remedy = false, err.Error()+": labels are refused", "install the policy for containers (container-selinux)"
	}
	return f
}

// TmpfsOption returns a tmpfs's option for a label, after a comma.
func (p *Pool) TmpfsOption(label string) string {
	if option := p.MountOption(label); option != "" {
		return "," + option
	}
	return ""
}

// Layer returns the mounts of a writable layer with the option for a label. The layer of an image without layers
// is a directory, whose files get the label.
func (p *Pool) Layer(mounts []mount.Mount, label string) ([]mount.Mount, error) {
	option := p.MountOption(label)
	if option == "" {
		return mounts, nil
	}
	mounts = slices.Clone(mounts)
	for i, m := range mounts {
		if m.Type != "overlay" {
			if err := Relabel(m.Source, label); err != nil {
				return nil, err
			}
			continue
		}
		mounts[i].Options = append(slices.Clone(m.Options), option)
	}
	return mounts, nil
}

// View is like Layer for read-only mounts. The view of an image with one layer is the directory of all its
// containers, which must keep its label. An overlay of it and an empty directory, in the bundle, gets the label instead.
func (p *Pool) View(mounts []mount.Mount, label, bundle string) ([]mount.Mount, error) {
	if p.MountOption(label) == "" {
		return mounts, nil
	}
	mounts = slices.Clone(mounts)
	for i, m := range mounts {
		if m.Type == "overlay" {
			continue
		}
		empty := filepath.Join(bundle, "empty")
		if err := os.Mkdir(empty, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
			return nil, err
		}
		mounts[i] = mount.Mount{Type: "overlay", Source: "overlay", Options: []string{"lowerdir=" + m.Source + ":" + empty}}
	}
	return p.Layer(mounts, label)
}
