package qemu

import (
	"os"
	"os/exec"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/confine"
)

// spawn describes a QEMU process to start.
type spawn struct {
	Program  string
	Args     []string
	Stdin    *os.File
	Stdout   *os.File
	Log      *os.File   // standard error
	Files    []*os.File // as descriptors firstFD, firstFD+1, …
	UID, GID int
	KVM      bool // add the group of /dev/kvm
	Tree     cgroup.Tree
	Cgroup   string // "" means the daemon's own
}

// start starts QEMU as an unprivileged user that cannot gain privileges. QEMU inherits the given descriptors only, and
// runs in empty namespaces except for mounts and PIDs.
func (s spawn) start() (*exec.Cmd, error) {
	cmd := exec.Command(s.Program, s.Args...) // no context, because QEMU outlives the daemon
	cmd.ExtraFiles = s.Files
	cmd.Stdin, cmd.Stdout, cmd.Stderr = s.Stdin, s.Stdout, s.Log
	cmd.Env, cmd.Dir = confine.Environment(), "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Credential: &syscall.Credential{Uid: uint32(s.UID), Gid: uint32(s.GID), Groups: kvmGroup(s.KVM)},
		Cloneflags: confine.Namespaces,
	}
	return cmd, confine.Start(cmd, confine.Place{Tree: s.Tree, Cgroup: s.Cgroup})
}

// kvmGroup returns the group of /dev/kvm, if wanted and if the group has access and is not root's.
func kvmGroup(wanted bool) []uint32 {
	var st unix.Stat_t
	if !wanted || unix.Stat("/dev/kvm", &st) != nil || st.Mode&0o060 != 0o060 || st.Gid == 0 {
		return nil
	}
	return []uint32{st.Gid}
}
