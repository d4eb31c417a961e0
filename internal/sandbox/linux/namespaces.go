package linux

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/spec"
)

// pins are the paths of the files on which a pod's namespaces are bind-mounted. A pin keeps its namespace alive without
// a process. The path is "" for a namespace that the pod shares with the node.
type pins struct{ net, ipc, uts, pid string }

// podPins derives the pins of a pod from its configuration.
func podPins(p *sandbox.Pod, runDir string) pins {
	modes := spec.PodModes(p)
	dir := filepath.Join(runDir, "ns")
	at := pins{net: p.Netns}
	if modes.IPC != runtimeapi.NamespaceMode_NODE { // even if each container has its own IPC namespace, because the pod's init needs one too
		at.ipc = filepath.Join(dir, "ipc")
	}
	if modes.UTS() {
		at.uts = filepath.Join(dir, "uts")
	}
	if modes.PID == runtimeapi.NamespaceMode_POD {
		at.pid = filepath.Join(dir, "pid")
	}
	return at
}

// sharesPID reports whether the pod has its own PID namespace, and therefore needs an init process.
func sharesPID(p *sandbox.Pod) bool { return spec.PodModes(p).PID == runtimeapi.NamespaceMode_POD }

// makeNamespaces creates and pins the pod's ipc and uts namespaces, and sets the host name and kernel parameters in the
// pod's namespaces. It replaces existing pins.
func makeNamespaces(p *sandbox.Pod, at pins) error {
	sysctls, err := spec.Sysctls(p)
	if err != nil {
		return err
	}
	defaults := spec.DefaultSysctls(p, sysctls)
	if at.ipc == "" && at.uts == "" && len(sysctls)+len(defaults) == 0 {
		return nil
	}
	for _, pin := range []string{at.ipc, at.uts} {
		if pin == "" {
			continue
		}
		if err := makePin(pin); err != nil {
			return err
		}
	}
	return onNewThread(func() error { return setUpNamespaces(p, at, sysctls, defaults) })
}

// makePin creates the empty file on which a namespace is mounted. It first removes the pin of an earlier attempt.
func makePin(pin string) error {
	if err := removeMountPoint(pin); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(pin), 0o700); err != nil {
		return err
	}
	f, err := os.OpenFile(pin, os.O_CREATE|os.O_RDONLY, 0o444)
	if err != nil {
		return err
	}
	return f.Close()
}

// setUpNamespaces creates, configures and pins the namespaces. It leaves the calling thread in them.
func setUpNamespaces(p *sandbox.Pod, at pins, sysctls, defaults map[string]string) error {
	if at.net != "" {
		netns, err := unix.Open(at.net, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("network namespace %s: %w: %w", at.net, err, errdefs.ErrFailedPrecondition)
		}
		err = unix.Setns(netns, unix.CLONE_NEWNET)
		unix.Close(netns)
		if err != nil {
			return fmt.Errorf("enter network namespace %s: %w: %w", at.net, err, errdefs.ErrFailedPrecondition)
		}
	}
	flags := 0
	if at.ipc != "" {
		flags |= unix.CLONE_NEWIPC
	}
	if at.uts != "" {
		flags |= unix.CLONE_NEWUTS
	}
	if err := unix.Unshare(flags); err != nil {
		return fmt.Errorf("make ipc and uts namespaces: %w", err)
	}
	if name := p.Config.GetHostname(); at.uts != "" && name != "" {
		if err := unix.Sethostname([]byte(name)); err != nil {
			return fmt.Errorf("set host name %q: %w: %w", name, err, errdefs.ErrInvalidArgument)
		}
	}
	for key, value := range defaults {
		if err := setSysctl(key, value); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	for key, value := range sysctls {
		if err := setSysctl(key, value); err != nil {
			return fmt.Errorf("%w: %w", err, errdefs.ErrInvalidArgument)
		}
	}
	for kind, pin := range map[string]string{"ipc": at.ipc, "uts": at.uts} {
		if pin == "" {
			continue
		}
		if err := pinNamespace("/proc/thread-self/ns/"+kind, pin); err != nil {
			return err
		}
	}
	return nil
}

// setSysctl sets a kernel parameter in the calling thread's namespaces.
func setSysctl(key, value string) error {
	if err := os.WriteFile(filepath.Join("/proc/sys", key), []byte(value), 0); err != nil {
		return fmt.Errorf("set kernel parameter %s=%s: %w", key, value, err)
	}
	return nil
}

// pinNamespace bind-mounts a namespace on the given file.
func pinNamespace(ns, pin string) error {
	if err := unix.Mount(ns, pin, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("pin %s at %s: %w", ns, pin, err)
	}
	return nil
}

// pinPID pins the PID namespace of an init process. It opens the namespace and then checks that the process is alive,
// which proves that its PID was not reused.
func pinPID(init *process.Process, pin string) error {
	if err := makePin(pin); err != nil {
		return err
	}
	ns, err := unix.Open(fmt.Sprintf("/proc/%d/ns/pid", init.Pid), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("PID namespace of process %d: %w: %w", init.Pid, err, errdefs.ErrFailedPrecondition)
	}
	defer unix.Close(ns)
	if !init.Alive() {
		return fmt.Errorf("process %d has ended: %w", init.Pid, errdefs.ErrFailedPrecondition)
	}
	return pinNamespace(fmt.Sprintf("/proc/self/fd/%d", ns), pin)
}

// pinned reports whether a namespace is mounted on the file.
func pinned(pin string) bool {
	var fs unix.Statfs_t
	return unix.Statfs(pin, &fs) == nil && fs.Type == unix.NSFS_MAGIC
}

// onNewThread runs fn on a new thread. The thread then ends, because fn leaves it in other namespaces.
func onNewThread(fn func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			// The main thread cannot end. While this goroutine occupies the main thread, the next goroutine gets
			// another thread.
			done <- onNewThread(fn)
			runtime.UnlockOSThread()
			return
		}
		done <- fn() // no unlock: the thread ends with the goroutine
	}()
	return <-done
}

// unmount removes all mounts on a path. It detaches mounts that are busy. It succeeds if the path has no mount or is
// missing.
func unmount(target string) error {
	for {
		err := unix.Unmount(target, unix.UMOUNT_NOFOLLOW)
		if errors.Is(err, unix.EBUSY) {
			err = unix.Unmount(target, unix.UMOUNT_NOFOLLOW|unix.MNT_DETACH)
		}
		switch {
		case err == nil:
		case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR):
			return nil
		default:
			return fmt.Errorf("unmount %s: %w", target, err)
		}
	}
}
