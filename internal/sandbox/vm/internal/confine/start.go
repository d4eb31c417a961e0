package confine

import (
	"fmt"
	"os/exec"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/cgroup"
)

// Place describes where a process is started.
type Place struct {
	// Cgroup is the process's cgroup, a path in Tree; "" means the daemon's own cgroup.
	Tree   cgroup.Tree
	Cgroup string
	// Prepare, if not nil, is called on the thread that starts the process. It can change the thread, for example its
	// mount namespace. The thread ends after the start, so only the process inherits the change.
	Prepare func() error
}

// Start starts the command, which must not have been made by exec.CommandContext. It returns
// errdefs.ErrFailedPrecondition if the cgroup is missing.
func Start(cmd *exec.Cmd, at Place) error {
	cmd.SysProcAttr.Setsid = true
	err := at.Tree.Start(cmd, at.Cgroup, func() error {
		if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
			return fmt.Errorf("set no_new_privs: %w", err)
		}
		if at.Prepare != nil {
			return at.Prepare()
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("start %s: %w", cmd.Path, err)
	}
	// A core file would contain the guest's data, though not its RAM (dump-guest-core). Setting the limit of another
	// user's process needs CAP_SYS_RESOURCE, so an error is ignored.
	_ = unix.Prlimit(cmd.Process.Pid, unix.RLIMIT_CORE, &unix.Rlimit{}, nil)
	return nil
}

// Environment returns the environment variables for these processes.
func Environment() []string {
	return []string{"PATH=/usr/bin:/bin", "LANG=C.UTF-8", "HOME=/nonexistent"}
}

// Namespaces are the clone flags that give these processes new, empty namespaces.
const Namespaces = syscall.CLONE_NEWNET | syscall.CLONE_NEWIPC | syscall.CLONE_NEWUTS
