package linux

import (
	"fmt"
	"path/filepath"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/selinux"
)

// A pod's SELinux labels are drawn when the pod is created and recorded in its directory, so that they stay the pod's own
// until it is removed: volumes keep the labels that they were given. See docs/adr/0053.

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
