package shared

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/mnt"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/spec"
)

// Pins are the paths of the files on which a pod's namespaces are bind-mounted. A pin keeps its namespace alive without
// a process. The path is "" for a namespace that the pod shares with the node.
type Pins struct{ Net, IPC, UTS, PID, User string }

// PinsOf derives the pins of a pod from its configuration.
func PinsOf(p *sandbox.Pod, runDir string) Pins {
	modes := spec.PodModes(p)
	dir := filepath.Join(runDir, "ns")
	at := Pins{Net: p.Netns}
	if modes.IPC != runtimeapi.NamespaceMode_NODE { // even if each container has its own IPC namespace, because the pod's init needs one too
		at.IPC = filepath.Join(dir, "ipc")
	}
	if modes.UTS() {
		at.UTS = filepath.Join(dir, "uts")
	}
	if modes.PID == runtimeapi.NamespaceMode_POD {
		at.PID = filepath.Join(dir, "pid")
	}
	if p.IDMap() != nil {
		at.User = filepath.Join(dir, "user")
	}
	return at
}

// SharesPID reports whether the pod has its own PID namespace, and therefore needs an init process.
func SharesPID(p *sandbox.Pod) bool { return spec.PodModes(p).PID == runtimeapi.NamespaceMode_POD }

// MakeNamespaces creates and pins the pod's ipc and uts namespaces, and sets the host name and kernel parameters in the
// pod's namespaces. It replaces existing pins.
func MakeNamespaces(p *sandbox.Pod, at Pins) error {
	sysctls, err := spec.Sysctls(p)
	if err != nil {
		return err
	}
	defaults := spec.DefaultSysctls(p, sysctls)
	if at.User != "" {
		if err := completeUserNamespace(p, at); err != nil {
			return err
		}
		return mnt.OnNewThread(func() error { return setUpNamespaces(p, at, sysctls, defaults) })
	}
	if at.IPC == "" && at.UTS == "" && len(sysctls)+len(defaults) == 0 {
		return nil
	}
	for _, pin := range []string{at.IPC, at.UTS} {
		if pin == "" {
			continue
		}
		if err := makePin(pin); err != nil {
			return err
		}
	}
	return mnt.OnNewThread(func() error { return setUpNamespaces(p, at, sysctls, defaults) })
}

// makePin creates the empty file on which a namespace is mounted. It first removes the pin of an earlier attempt.
func makePin(pin string) error {
	if err := mnt.RemovePoint(pin); err != nil {
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

// setUpNamespaces creates, configures and pins the namespaces. Those of a pod with a user namespace exist already. It
// leaves the calling thread in them.
func setUpNamespaces(p *sandbox.Pod, at Pins, sysctls, defaults map[string]string) error {
	if err := enter(at.Net, unix.CLONE_NEWNET); err != nil {
		return err
	}
	if at.User != "" {
		if err := errors.Join(enter(at.IPC, unix.CLONE_NEWIPC), enter(at.UTS, unix.CLONE_NEWUTS)); err != nil {
			return err
		}
		return configureNamespaces(p, at, sysctls, defaults)
	}
	flags := 0
	if at.IPC != "" {
		flags |= unix.CLONE_NEWIPC
	}
	if at.UTS != "" {
		flags |= unix.CLONE_NEWUTS
	}
	if err := unix.Unshare(flags); err != nil {
		return fmt.Errorf("make ipc and uts namespaces: %w", err)
	}
	if err := configureNamespaces(p, at, sysctls, defaults); err != nil {
		return err
	}
	for kind, pin := range map[string]string{"ipc": at.IPC, "uts": at.UTS} {
		if pin == "" {
			continue
		}
		if err := pinNamespace("/proc/thread-self/ns/"+kind, pin); err != nil {
			return err
		}
	}
	return nil
}

// enter moves the calling thread to the namespace that is pinned on a file; "" means to stay.
func enter(pin string, kind int) error {
	if pin == "" {
		return nil
	}
	ns, err := unix.Open(pin, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("namespace %s: %w: %w", pin, err, errdefs.ErrFailedPrecondition)
	}
	defer unix.Close(ns)
	if err := unix.Setns(ns, kind); err != nil {
		return fmt.Errorf("enter namespace %s: %w: %w", pin, err, errdefs.ErrFailedPrecondition)
	}
	return nil
}

// configureNamespaces sets the host name and kernel parameters in the calling thread's namespaces.
func configureNamespaces(p *sandbox.Pod, at Pins, sysctls, defaults map[string]string) error {
	if name := p.Config.GetHostname(); at.UTS != "" && name != "" {
		if err := unix.Sethostname([]byte(name)); err != nil {
			return fmt.Errorf("set host name %q: %w: %w", name, err, errdefs.ErrInvalidArgument)
		}
	}
	if ids := p.IDMap(); ids != nil {
		for _, set := range []map[string]string{defaults, sysctls} {
			if value, ok := set[pingGroups]; ok {
				set[pingGroups] = groupsOfNode(value, ids.Groups)
			}
		}
	}
	for key, value := range defaults {
		if err := setSysctl(key, value, p.IDMap()); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	for key, value := range sysctls {
		if err := setSysctl(key, value, p.IDMap()); err != nil {
			return fmt.Errorf("%w: %w", err, errdefs.ErrInvalidArgument)
		}
	}
	return nil
}

// pingGroups is the only parameter of a pod's namespaces that contains IDs: the groups that can ping.
const pingGroups = "net/ipv4/ping_group_range"

// groupsOfNode translates the first and the last of a pod's groups to the node's, because the writer of a parameter
// determines the user namespace of its IDs. It leaves a bad value for the kernel to refuse.
func groupsOfNode(value string, r sandbox.IDRange) string {
	var first, last uint32
	if n, err := fmt.Sscan(value, &first, &last); n != 2 || err != nil || first >= r.Length {
		return value
	}
	return fmt.Sprintf("%d %d", r.First+first, r.First+min(last, r.Length-1))
}

// setSysctl sets a kernel parameter in the calling thread's namespaces. Since Linux 6.9, those of an IPC namespace belong
// to the root of its user namespace, and not even the node's root can set them.
func setSysctl(key, value string, ids *sandbox.IDMap) error {
	write := func() error { return os.WriteFile(filepath.Join("/proc/sys", key), []byte(value), 0) }
	err := write()
	if ids != nil && errors.Is(err, fs.ErrPermission) {
		err = asPodRoot(*ids, write)
	}
	if err != nil {
		return fmt.Errorf("set kernel parameter %s=%s: %w", key, value, err)
	}
	return nil
}

// asPodRoot runs fn with a pod's root as the effective user of the calling thread, which must be locked.
func asPodRoot(ids sandbox.IDMap, fn func() error) error {
	const same = ^uintptr(0)
	setEffective := func(uid uint32) error {
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, same, uintptr(uid), same); errno != 0 {
			return errno
		}
		return nil
	}
	if err := setEffective(ids.Users.First); err != nil {
		return err
	}
	err := fn()
	return errors.Join(err, setEffective(0))
}

// pinNamespace bind-mounts a namespace on the given file.
func pinNamespace(ns, pin string) error {
	if err := unix.Mount(ns, pin, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("pin %s at %s: %w", ns, pin, err)
	}
	return nil
}

// PinPID pins the PID namespace of an init process. It opens the namespace and then checks that the process is alive,
// which proves that its PID was not reused.
func PinPID(init *process.Process, pin string) error {
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

// IsPinned reports whether a namespace is mounted on the file.
func IsPinned(pin string) bool {
	var fs unix.Statfs_t
	return unix.Statfs(pin, &fs) == nil && fs.Type == unix.NSFS_MAGIC
}
