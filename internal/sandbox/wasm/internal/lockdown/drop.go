package lockdown

import (
	"fmt"
	"os"
	"syscall"

	"github.com/containerd/errdefs"
)

// Drop switches the process irrevocably to a user and group, without supplementary groups. The kernel removes all
// capabilities when a process leaves root (capabilities(7)). A process that is not root must already run as the given
// user.
func Drop(uid, gid int) error {
	if os.Geteuid() != 0 {
		if os.Getuid() != uid || os.Geteuid() != uid {
			return fmt.Errorf("drop: user %d cannot become user %d: %w", os.Geteuid(), uid, errdefs.ErrFailedPrecondition)
		}
		return nil
	}
	if uid <= 0 || gid <= 0 {
		return fmt.Errorf("drop: %d:%d is root: %w", uid, gid, errdefs.ErrInvalidArgument)
	}
	// These calls affect all threads: package syscall (with cgo, libc) repeats them on each thread.
	if err := syscall.Setgroups(nil); err != nil {
		return fmt.Errorf("drop: groups: %w", err)
	}
	if err := syscall.Setresgid(gid, gid, gid); err != nil {
		return fmt.Errorf("drop: group %d: %w", gid, err)
	}
	if err := syscall.Setresuid(uid, uid, uid); err != nil {
		return fmt.Errorf("drop: user %d: %w", uid, err)
	}
	if syscall.Setuid(0) == nil {
		return fmt.Errorf("drop: user %d could become root again", uid)
	}
	return nil
}
