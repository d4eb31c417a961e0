package testns

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Nested is a set of namespaces inside a world, such as another node's.
type Nested struct {
	init *exec.Cmd
}

// namespaces are the kinds of namespaces that a world has, in the order in which a thread can join them: the mount
// namespace last, because the others are found by paths.
var namespaces = []struct {
	name string
	flag int
}{{"net", unix.CLONE_NEWNET}, {"uts", unix.CLONE_NEWUTS}, {"ipc", unix.CLONE_NEWIPC}, {"pid", unix.CLONE_NEWPID}, {"mnt", unix.CLONE_NEWNS}}

// nested is the mode of a PID 1 that Nest starts.
const nested = "nested"

// Nest makes new namespaces inside this world, set up like a world's. They use the world's directory and cgroup, but have
// none of the mounts that programs of the world have made there and in /run.
// Like Run, it starts this program as PID 1 (see Reenter).
func Nest() (*Nested, error) {
	c := exec.Command("/proc/self/exe", "sh", "-c", "echo; exec sleep infinity")
	c.Stderr = os.Stderr
	c.Env = append(os.Environ(), envInit+"="+nested)
	c.SysProcAttr = &syscall.SysProcAttr{}
	for _, ns := range namespaces {
		c.SysProcAttr.Cloneflags |= uintptr(ns.flag)
	}
	up, err := c.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := c.Start(); err != nil {
		return nil, fmt.Errorf("make nested namespaces: %w", err)
	}
	n := &Nested{init: c}
	if _, err := bufio.NewReader(up).ReadByte(); err != nil { // the setup failed, and has printed why
		return nil, errors.Join(fmt.Errorf("set up nested namespaces: %w", err), n.Kill())
	}
	return n, nil
}

// Pid returns the process ID of the namespaces' PID 1.
func (n *Nested) Pid() int { return n.init.Process.Pid }

// Kill kills every process in the namespaces at once, as a loss of power would, and waits until they have ended.
func (n *Nested) Kill() error {
	err := n.init.Process.Kill()
	_ = n.init.Wait() // returns after the kernel has reaped the other processes
	if errors.Is(err, os.ErrProcessDone) {
		return nil
	}
	return err
}

// Do calls a function on a thread in the namespaces. Processes that the function starts, paths that it opens and
// sockets that it makes belong to them. The function must not start goroutines that do the same.
func (n *Nested) Do(call func() error) error {
	result := make(chan error)
	go func() {
		// The thread cannot leave the namespaces, so it ends with this goroutine. The process's first thread cannot end:
		// occupy it until another one has made the call.
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			defer runtime.UnlockOSThread()
			result <- n.Do(call)
			return
		}
		err := n.join()
		if err == nil {
			err = call()
		}
		result <- err
	}()
	return <-result
}

// join moves the calling thread into the namespaces.
func (n *Nested) join() error {
	files := make([]*os.File, len(namespaces))
	for i, ns := range namespaces {
		f, err := os.Open(filepath.Join("/proc", strconv.Itoa(n.Pid()), "ns", ns.name))
		if err != nil {
			return err
		}
		defer f.Close()
		files[i] = f
	}
	// A thread that shares its root directory with others cannot join a mount namespace.
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("unshare the root directory: %w", err)
	}
	for i, ns := range namespaces {
		if err := unix.Setns(int(files[i].Fd()), ns.flag); err != nil {
			return fmt.Errorf("join the %s namespace: %w", ns.name, err)
		}
	}
	return nil
}

// detachWorld unmounts what programs of the world have mounted in its directory and in /run. Otherwise these namespaces
// would keep the mounts in use after the programs have unmounted them.
func detachWorld() error {
	data, err := os.ReadFile("/proc/1/mountinfo")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(data)) {
		path := strings.Fields(line)[4]
		if strings.HasPrefix(path, "/run/") || strings.HasPrefix(path, os.Getenv(EnvDir)+"/") {
			// A mount below one that is already detached is gone.
			if err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil && !errors.Is(err, unix.EINVAL) &&
				!errors.Is(err, unix.ENOENT) {
				return fmt.Errorf("unmount %s: %w", path, err)
			}
		}
	}
	return nil
}
