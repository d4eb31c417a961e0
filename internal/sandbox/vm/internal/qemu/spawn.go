package qemu

import (
	"os"
	"os/exec"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/confine"
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

// start starts QEMU as a user without any privilege and no way to one, with the inherited descriptors and no others, in empty
// namespaces but for files and PIDs.
func (s spawn) start() (*exec.Cmd, error) {
	cmd := exec.Command(s.Program, s.Args...) // not bound to a context: it outlives us
	cmd.ExtraFiles = s.Files
	cmd.Stdin, cmd.Stdout, cmd.Stderr = s.Stdin, s.Stdout, s.Log
	cmd.Env, cmd.Dir = confine.Environment(), "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Credential: &syscall.Credential{Uid: uint32(s.UID), Gid: uint32(s.GID), Groups: kvmGroup(s.KVM)},
		Cloneflags: confine.Namespaces,
	}
	return cmd, confine.Start(cmd, confine.Place{Tree: s.Tree, Cgroup: s.Cgroup})
}

// kvmGroup is the group that may use /dev/kvm, where there is one besides root's.
func kvmGroup(wanted bool) []uint32 {
	var st unix.Stat_t
	if !wanted || unix.Stat("/dev/kvm", &st) != nil || st.Mode&0o060 != 0o060 || st.Gid == 0 {
		return nil
	}
	return []uint32{st.Gid}
}
