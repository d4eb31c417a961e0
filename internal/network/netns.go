package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/network/netthread"
)

// loopbackIndex is the index of lo in every network namespace (the kernel's LOOPBACK_IFINDEX).
const loopbackIndex = 1

// Netns returns the path of the pod's network namespace, even if the namespace does not exist.
func (m *Manager) Netns(id string) string { return m.netnsPath(keyOf(id)) }

func (m *Manager) netnsPath(key string) string { return filepath.Join(m.cfg.NetnsDir, key) }

// Present reports whether the pod's network namespace exists and is mounted. It costs one system call.
func (m *Manager) Present(id string) bool { return isNetns(m.Netns(id)) }

func isNetns(path string) bool {
	var fs unix.Statfs_t
	return unix.Statfs(path, &fs) == nil && fs.Type == unix.NSFS_MAGIC
}

// NewNetns makes a network namespace for a pod without a CNI network, and returns the path of the namespace. The
// namespace contains only lo, which is up. If the pod already has a namespace, NewNetns keeps it.
func (m *Manager) NewNetns(ctx context.Context, id string) (string, error) {
	key, unlock, err := m.lockPod(ctx, id)
	if err != nil {
		return "", err
	}
	defer unlock()
	path := m.netnsPath(key)
	if !isNetns(path) {
		if err := createNetns(path, nil); err != nil {
			return "", err
		}
	}
	m.claims.Store(key, true)
	return path, nil
}

// RemoveNetns unmounts the pod's network namespace. A missing namespace is not an error. When no process or socket
// holds the namespace any longer, the kernel deletes its virtual interfaces and returns physical interfaces to the
// host.
func (m *Manager) RemoveNetns(ctx context.Context, id string) error {
	key, unlock, err := m.lockPod(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	if err := removeNetns(m.netnsPath(key)); err != nil {
		return err
	}
	m.claims.Delete(key)
	return nil
}

// createNetns makes a network namespace, pins it at path and sets its loopback interface up. If makeNetns is not nil, it
// makes and pins the namespace. A crash leaves an empty file or the mounted namespace; removeNetns handles both.
func createNetns(path string, makeNetns func(pin string) error) error {
	if err := removeNetns(path); err != nil {
		return err
	}
	file, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDONLY, 0o444)
	if err != nil {
		return fmt.Errorf("make network namespace: %w", err)
	}
	_ = file.Close()

	if makeNetns == nil {
		netthread.Run(func() bool { // the thread ends inside the new namespace, which the mount keeps alive
			err = unshareAndPin(path)
			return false
		})
	} else if err = makeNetns(path); err == nil {
		err = loopbackUpIn(path)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("make network namespace %s: %w", path, err), removeNetns(path))
	}
	return nil
}

func unshareAndPin(path string) error {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("unshare: %w", err)
	}
	if err := loopbackUp(); err != nil {
		return err
	}
	if err := unix.Mount("/proc/thread-self/ns/net", path, "none", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("bind mount: %w", err)
	}
	return nil
}

func loopbackUpIn(path string) error {
	netns, err := netthread.Open(path)
	if err != nil {
		return err
	}
	defer unix.Close(netns)
	return netthread.In(netns, loopbackUp)
}

// loopbackUp sets lo up in the calling thread's network namespace.
func loopbackUp() error {
	handle, err := netthread.Handle()
	if err != nil {
		return err
	}
	defer handle.Close()
	lo := &netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: "lo", Index: loopbackIndex}}
	if err := handle.LinkSetUp(lo); err != nil {
		return fmt.Errorf("set lo up: %w", err)
	}
	return nil
}

// inNetns runs fn on a thread inside the network namespace at path; "" means the host's namespace. fn should only open
// sockets, because a socket stays in the namespace even after the thread has left it.
func inNetns(path string, fn func() error) error {
	if path == "" {
		return fn()
	}
	target, err := netthread.Open(path)
	if err != nil {
		return err
	}
	defer unix.Close(target)
	if err := netthread.In(target, fn); err != nil {
		return fmt.Errorf("in network namespace %s: %w", path, err)
	}
	return nil
}

// removeNetns unmounts whatever is mounted at path and removes the file.
func removeNetns(path string) error {
	for {
		err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		if err == nil {
			continue // another mount may be below
		}
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
			break
		}
		return fmt.Errorf("unmount network namespace %s: %w", path, err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove network namespace: %w", err)
	}
	return nil
}

// prepareNetnsDir makes dir a shared mount of its own, as `ip netns` does with /run/netns. Unmounting a network
// namespace then also unmounts it in all copies of our mount namespace. Otherwise the mounts in these copies would keep
// the network namespace alive.
func prepareNetnsDir(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("make the directory of network namespaces: %w", err)
	}
	err := unix.Mount("", dir, "none", unix.MS_SHARED|unix.MS_REC, "")
	if errors.Is(err, unix.EINVAL) { // not a mount point yet
		if err = unix.Mount(dir, dir, "none", unix.MS_BIND|unix.MS_REC, ""); err == nil {
			err = unix.Mount("", dir, "none", unix.MS_SHARED|unix.MS_REC, "")
		}
	}
	if err != nil {
		return fmt.Errorf("make %s a shared mount (tripod needs CAP_SYS_ADMIN): %w", dir, err)
	}
	return nil
}
