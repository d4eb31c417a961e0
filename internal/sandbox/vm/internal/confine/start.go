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

// Place is where a process is started.
type Place struct {
	// Tree has the hierarchies in which Cgroup is; "" is the daemon's own cgroup.
	Tree   cgroup.Tree
	Cgroup string
	// Prepare, where it is not nil, is run on the thread from which the process is started, and which ends afterwards: what
	// it changes of itself (a mount namespace) the process inherits, and nobody else.
	Prepare func() error
}

// Start starts cmd, which must not be bound to a context. A cgroup that is not there is errdefs.ErrFailedPrecondition.
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
	// A core file would hold what is the guest's; its RAM is left out anyway (dump-guest-core). Without CAP_SYS_RESOURCE
	// the limit of another user's process is not ours to set.
	_ = unix.Prlimit(cmd.Process.Pid, unix.RLIMIT_CORE, &unix.Rlimit{}, nil)
	return nil
}

// onThread starts the command from a thread whose cgroup and no_new_privs the child is born with.
func (at Place) onThread(cmd *exec.Cmd) error {
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("no_new_privs: %w", err)
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

// Environment is what such a process has.
func Environment() []string {
	return []string{"PATH=/usr/bin:/bin", "LANG=C.UTF-8", "HOME=/nonexistent"}
}

// Namespaces are those that every such process has empty ones of.
const Namespaces = syscall.CLONE_NEWNET | syscall.CLONE_NEWIPC | syscall.CLONE_NEWUTS
