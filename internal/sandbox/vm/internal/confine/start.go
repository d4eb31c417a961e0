package confine

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/process"
)

// Place is the environment in which a process is started.
type Place struct {
	// Cgroup is the process's cgroup, a path in Tree; "" means the daemon's own cgroup.
	Tree   cgroup.Tree
	Cgroup string
	// Prepare, if not nil, is called on the thread that starts the process. It can change the thread, for example its
	// mount namespace. The thread ends after the start, so only the process inherits the change.
	Prepare func() error
}

// Start starts cmd, which must not have a context. A missing cgroup is errdefs.ErrFailedPrecondition.
func Start(cmd *exec.Cmd, at Place) error {
	cmd.SysProcAttr.Setsid = true
	if at.Cgroup != "" && at.Tree.V2 {
		dir, err := os.OpenFile(filepath.Join(at.Tree.Roots[""], at.Cgroup), unix.O_PATH|unix.O_DIRECTORY, 0)
		if err != nil {
			return fmt.Errorf("the machine's cgroup: %w (%w)", err, errdefs.ErrFailedPrecondition)
		}
		defer dir.Close()
		cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(dir.Fd())
	}
	done := make(chan error, 1)
	go process.OnOwnThread(func() { done <- at.onThread(cmd) })
	if err := <-done; err != nil {
		return fmt.Errorf("start %s: %w", cmd.Path, err)
	}
	// A core file would contain the guest's data, though not its RAM (dump-guest-core). Setting the limit of another
	// user's process needs CAP_SYS_RESOURCE.
	_ = unix.Prlimit(cmd.Process.Pid, unix.RLIMIT_CORE, &unix.Rlimit{}, nil)
	return nil
}

// onThread sets the calling thread's cgroup and no_new_privs, and starts cmd, which inherits them.
func (at Place) onThread(cmd *exec.Cmd) error {
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("set no_new_privs: %w", err)
	}
	if at.Cgroup != "" {
		if err := at.Tree.Enter(at.Cgroup); err != nil {
			return fmt.Errorf("the machine's cgroup: %w (%w)", err, errdefs.ErrFailedPrecondition)
		}
	}
	if at.Prepare != nil {
		if err := at.Prepare(); err != nil {
			return err
		}
	}
	return cmd.Start()
}

// Environment returns the environment variables for these processes.
func Environment() []string {
	return []string{"PATH=/usr/bin:/bin", "LANG=C.UTF-8", "HOME=/nonexistent"}
}

// Namespaces are the clone flags that give these processes new, empty namespaces.
const Namespaces = syscall.CLONE_NEWNET | syscall.CLONE_NEWIPC | syscall.CLONE_NEWUTS
