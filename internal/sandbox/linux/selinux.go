package linux

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/health"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/selinux"
)

// A pod's SELinux labels are drawn when the pod is created and recorded in its directory, so that they stay the pod's own
// until it is removed: volumes keep the labels that they were given. See docs/adr/0053.

// openLabels returns the pool of labels, or nil if pods cannot have labels.
func openLabels(log *slog.Logger) *selinux.Pool {
	if !selinux.Enabled() {
		return nil
	}
	pool, err := selinux.NewPool(selinux.Kernel{})
	if err != nil {
		log.Warn("containers have no SELinux labels", "err", err)
		return nil
	}
	return pool
}

// selinuxFinding reports whether pods can have labels.
func selinuxFinding() health.Finding {
	f := health.Finding{Subject: "SELinux", OK: true, Detail: "the kernel has none: labels are refused"}
	if !selinux.Enabled() {
		return f
	}
	f.Detail = "pods get labels of their own"
	if _, err := selinux.NewPool(selinux.Kernel{}); err != nil {
		f.OK, f.Detail, f.Remedy = false, err.Error()+": labels are refused", "install the policy for containers (container-selinux)"
	}
	return f
}

func (c Config) labelsFile(pod string) string { return filepath.Join(c.podDir(pod), "selinux.json") }

// readLabels returns a pod's recorded labels. A pod that an earlier version created has none.
func (c Config) readLabels(podID string) (selinux.Labels, error) {
	var l selinux.Labels
	err := format.Read(c.labelsFile(podID), &l)
	if errdefs.IsNotFound(err) {
		return selinux.Labels{}, nil
	}
	return l, err
}

// labelPod assigns labels to a new pod and records them. It returns the recorded labels if there are any.
func (b *Backend) labelPod(p *sandbox.Pod) (selinux.Labels, error) {
	if b.labels == nil {
		return selinux.Labels{}, nil
	}
	if l, err := b.cfg.readLabels(p.ID); err != nil || l.Process != "" {
		return l, err
	}
	l, err := b.labels.Pod(p.ID, p.Config.GetLinux().GetSecurityContext().GetSelinuxOptions())
	if err != nil {
		return selinux.Labels{}, err
	}
	return l, format.Write(b.cfg.labelsFile(p.ID), l)
}

// labelContainer returns a container's labels, which depend on nothing but the pod's and the request.
func (b *Backend) labelContainer(p *sandbox.Pod, c *sandbox.Container) (selinux.Labels, error) {
	if b.labels == nil {
		return selinux.Labels{}, nil
	}
	pod, err := b.cfg.readLabels(p.ID)
	if err != nil {
		return selinux.Labels{}, fmt.Errorf("the pod's SELinux labels: %w", err)
	}
	return b.labels.Container(p.ID, pod, c.Config.GetLinux().GetSecurityContext().GetSelinuxOptions())
}

// recoverLabels reserves the levels of a pod and its containers.
func (b *Backend) recoverLabels(k sandbox.Known) {
	if b.labels == nil {
		return
	}
	l, err := b.cfg.readLabels(k.Pod.ID)
	if err != nil {
		b.log.Error("read a pod's SELinux labels", "pod", k.Pod.ID, "err", err)
	}
	b.labels.Hold(k.Pod.ID, l)
	for _, c := range k.Containers {
		if config, err := readConfig(b.cfg.bundle(k.Pod.ID, c.ID)); err == nil {
			b.labels.Hold(k.Pod.ID, selinux.Labels{Process: config.Process.SelinuxLabel})
		}
	}
}

// contextOption returns a tmpfs's option for a label, after a comma.
func (b *Backend) contextOption(label string) string {
	if option := b.labels.MountOption(label); option != "" {
		return "," + option
	}
	return ""
}

// labelledLayer returns the mounts of a writable layer with the option for a label. The layer of an image without layers
// is a directory, whose files get the label.
func (b *Backend) labelledLayer(mounts []mount.Mount, label string) ([]mount.Mount, error) {
	option := b.labels.MountOption(label)
	if option == "" {
		return mounts, nil
	}
	mounts = slices.Clone(mounts)
	for i, m := range mounts {
		if m.Type != "overlay" {
			if err := selinux.Relabel(m.Source, label); err != nil {
				return nil, err
			}
			continue
		}
		mounts[i].Options = append(slices.Clone(m.Options), option)
	}
	return mounts, nil
}

// labelledView is like labelledLayer for read-only mounts. The view of an image with one layer is the directory of all its
// containers, which must keep its label. An overlay of it and an empty directory gets the label instead.
func (b *Backend) labelledView(mounts []mount.Mount, label, bundle string) ([]mount.Mount, error) {
	if b.labels.MountOption(label) == "" {
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
	return b.labelledLayer(mounts, label)
}
