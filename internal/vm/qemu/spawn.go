package qemu

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/cgroup"
)

// spawn is how QEMU is started.
type spawn struct {
	Program  string
	Args     []string
	Stdin    *os.File
	Stdout   *os.File
	Log      *os.File   // its standard error
	Files    []*os.File // from descriptor firstFD on
	UID, GID int
	KVM      bool // the group that /dev/kvm belongs to comes along
	Tree     cgroup.Tree
	Cgroup   string // "" is the daemon's own
}

// start starts QEMU: in a session of its own, so that nothing that ends us ends it, as a user without any privilege and
// no way to one, with the inherited descriptors and no others, in empty namespaces but for files and PIDs.
func (s spawn) start() (*exec.Cmd, error) {
	cmd := exec.Command(s.Program, s.Args...) // not bound to a context: it outlives us
	cmd.ExtraFiles = s.Files
	cmd.Stdin, cmd.Stdout, cmd.Stderr = s.Stdin, s.Stdout, s.Log
	cmd.Env, cmd.Dir = []string{"PATH=/usr/bin:/bin", "LANG=C.UTF-8", "HOME=/nonexistent"}, "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Setsid:     true,
		Credential: &syscall.Credential{Uid: uint32(s.UID), Gid: uint32(s.GID), Groups: kvmGroup(s.KVM)},
		Cloneflags: unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS,
	}
	if s.Cgroup != "" && s.Tree.V2 {
		at, err := os.OpenFile(filepath.Join(s.Tree.Roots[""], s.Cgroup), unix.O_PATH|unix.O_DIRECTORY, 0)
		if err != nil {
			return nil, fmt.Errorf("the machine's cgroup: %w (%w)", err, errdefs.ErrFailedPrecondition)
		}
		defer at.Close()
		cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(at.Fd())
	}
	done := make(chan error, 1)
	go onOwnThread(func() { done <- s.onThread(cmd) })
	if err := <-done; err != nil {
		return nil, fmt.Errorf("start %s: %w", s.Program, err)
	}
	// A core file would hold what is the guest's; its RAM is left out anyway (dump-guest-core). Without CAP_SYS_RESOURCE
	// the limit of another user's process is not ours to set.
	_ = unix.Prlimit(cmd.Process.Pid, unix.RLIMIT_CORE, &unix.Rlimit{}, nil)
	return cmd, nil
}

// onThread starts the command from a thread whose cgroup and no_new_privs the child is born with.
func (s spawn) onThread(cmd *exec.Cmd) error {
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("no_new_privs: %w", err)
	}
	if s.Cgroup != "" {
		if err := s.Tree.Enter(s.Cgroup); err != nil {
			return fmt.Errorf("the machine's cgroup: %w (%w)", err, errdefs.ErrFailedPrecondition)
		}
	}
	return cmd.Start()
}

// onOwnThread runs do on a thread that ends with it, and that is not the main one: that one cannot end, and shows the
// process's cgroup to others.
func onOwnThread(do func()) {
	runtime.LockOSThread()
	if unix.Gettid() != unix.Getpid() {
		do()
		return
	}
	done := make(chan struct{})
	go func() { defer close(done); onOwnThread(do) }()
	<-done // the main thread is ours until another one has done it
	runtime.UnlockOSThread()
}

// kvmGroup is the group that may use /dev/kvm, where there is one besides root's.
func kvmGroup(wanted bool) []uint32 {
	var st unix.Stat_t
	if !wanted || unix.Stat("/dev/kvm", &st) != nil || st.Mode&0o060 != 0o060 || st.Gid == 0 {
		return nil
	}
	return []uint32{st.Gid}
}
