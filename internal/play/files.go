package play

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
)

// hostPathTypes are the types of hostPath volumes, each with what must be there.
var hostPathTypes = map[corev1.HostPathType]func(fs.FileMode) bool{
	corev1.HostPathUnset:             func(fs.FileMode) bool { return true },
	corev1.HostPathDirectoryOrCreate: fs.FileMode.IsDir,
	corev1.HostPathDirectory:         fs.FileMode.IsDir,
	corev1.HostPathFileOrCreate:      fs.FileMode.IsRegular,
	corev1.HostPathFile:              fs.FileMode.IsRegular,
	corev1.HostPathSocket:            func(m fs.FileMode) bool { return m&fs.ModeSocket != 0 },
	corev1.HostPathCharDev:           func(m fs.FileMode) bool { return m&fs.ModeCharDevice != 0 },
	corev1.HostPathBlockDev:          func(m fs.FileMode) bool { return m&fs.ModeDevice != 0 && m&fs.ModeCharDevice == 0 },
}

// MakeVolumes checks the node's paths that the pod mounts, makes those that it asks for, and makes the pod's own volumes.
// The caller holds the lock of LockVolumes until the node has the pod. After an error it calls RemoveVolumes.
func (p *Pod) MakeVolumes() error {
	for _, h := range p.hostPaths {
		if err := h.prepare(); err != nil {
			return err
		}
	}
	if len(p.volumes) == 0 && p.hosts == nil {
		return nil
	}
	if err := os.Mkdir(p.dir, 0o750); err != nil {
		return err
	}
	for _, v := range p.volumes {
		if err := v.make(); err != nil {
			return err
		}
	}
	return nil
}

// prepare checks a path of the node, and makes it if its type asks for that.
func (h hostPath) prepare() error {
	info, err := os.Stat(h.path)
	if errors.Is(err, fs.ErrNotExist) {
		switch h.kind {
		case corev1.HostPathUnset:
			return nil // the node decides
		case corev1.HostPathDirectoryOrCreate:
			return os.MkdirAll(h.path, 0o755)
		case corev1.HostPathFileOrCreate:
			return os.WriteFile(h.path, nil, 0o644)
		}
	}
	if err != nil {
		return fmt.Errorf("%s: %w", h.at, err)
	}
	if !hostPathTypes[h.kind](info.Mode()) {
		return fmt.Errorf("%s: %s is not of type %s: %w", h.at, h.path, h.kind, errdefs.ErrInvalidArgument)
	}
	return nil
}

func (v *volume) make() error {
	if err := os.MkdirAll(v.path, 0o755); err != nil {
		return err
	}
	for _, f := range v.files {
		name := filepath.Join(v.path, f.name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(name, f.data, f.mode); err != nil {
			return err
		}
		if err := v.own(name, f.mode); err != nil {
			return err
		}
	}
	mode := v.mode
	if v.group != nil {
		mode |= fs.ModeSetgid
	}
	return v.own(v.path, mode)
}

// own sets the owner and the mode, whatever the umask is. The group of the volume can read every file.
func (v *volume) own(name string, mode fs.FileMode) error {
	if v.group != nil {
		mode |= 0o040
		if err := os.Chown(name, 0, int(*v.group)); err != nil {
			return err
		}
	}
	return os.Chmod(name, mode)
}

// WriteHosts writes the pod's /etc/hosts, if it has one of its own, once its addresses are known.
func (p *Pod) WriteHosts(ips []string) error {
	if p.hosts == nil {
		return nil
	}
	node, err := os.ReadFile("/etc/hosts")
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return os.WriteFile(p.hosts.path, p.hosts.content(node, ips), 0o644)
}

// LockVolumes makes the parent directory of all pods' volumes and locks it: SweepVolumes then removes nothing. The lock
// ends with release or with the process.
func LockVolumes(parent string) (release func(), err error) {
	if err := os.MkdirAll(parent, 0o750); err != nil {
		return nil, err
	}
	return lock(parent, unix.LOCK_SH)
}

func lock(parent string, how int) (release func(), err error) {
	dir, err := os.Open(parent)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(dir.Fd()), how); err != nil {
		dir.Close()
		return nil, fmt.Errorf("lock %s: %w", parent, err)
	}
	return func() { dir.Close() }, nil
}

// RemoveVolumes removes the volumes of the pod with this UID, if it has any. The UID can come from any pod of the node.
func RemoveVolumes(parent, uid string) error {
	if uid == "" || uid == "." || !filepath.IsLocal(uid) || filepath.Base(uid) != uid {
		return nil
	}
	return os.RemoveAll(filepath.Join(parent, uid))
}

// SweepVolumes removes the volumes of pods that the node no longer has, for example because crictl removed them. It does
// nothing while another process makes a pod.
func SweepVolumes(parent string, exists func(uid string) bool) error {
	release, err := lock(parent, unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.EWOULDBLOCK) {
		return nil
	}
	if err != nil {
		return err
	}
	defer release()
	entries, err := os.ReadDir(parent)
	for _, e := range entries {
		if !exists(e.Name()) {
			err = errors.Join(err, RemoveVolumes(parent, e.Name()))
		}
	}
	return err
}
