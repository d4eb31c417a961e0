package virtiofsd

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/confine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/unixsocket"
)

// ProgramName is the file name of virtiofsd.
const ProgramName = "virtiofsd"

// programPaths are the paths at which distributions install virtiofsd, outside of PATH. They are, in this order, the
// paths of Debian 12 (in QEMU's package), Fedora, and later Debian releases.
var programPaths = []string{"/usr/lib/qemu/virtiofsd", "/usr/libexec/virtiofsd", "/usr/lib/virtiofsd"}

// Find returns the path of virtiofsd: the configured path if it is not empty, otherwise a distribution's path or one in
// PATH. It returns errdefs.ErrNotFound if there is no virtiofsd.
func Find(configured string) (string, error) {
	candidates := append(programPaths, ProgramName)
	if configured != "" {
		candidates = []string{configured}
	}
	for _, name := range candidates {
		if found, err := exec.LookPath(name); err == nil {
			return filepath.Abs(found)
		}
	}
	return "", fmt.Errorf("no virtiofsd at %v; install it (Debian 12: qemu-system-common), or set vm.virtiofsd: %w", candidates,
		errdefs.ErrNotFound)
}

// setpriv is the program of util-linux that sets the securebits of virtiofsd. They are those of the new user namespace, so the
// daemon cannot set them beforehand.
const setpriv = "setpriv"

// SocketName is the name of the socket in Options.Dir. The socket exists only while the connection between virtiofsd
// and QEMU is being made.
const SocketName = "virtiofs.sock"

const (
	// mountPoint is the mount point of a share in virtiofsd's own mount namespace. The directory exists on every host,
	// and virtiofsd needs nothing below it.
	mountPoint = "/tmp"
	// maxFiles bounds the descriptors of a virtiofsd, which holds one descriptor for each file that the guest's kernel
	// caches. The descriptors' memory is charged to the pod.
	maxFiles = 1_000_000
	// socketFD is the descriptor number of the listening socket in virtiofsd.
	socketFD = 3
)

// Options configures the virtiofsd processes of a machine.
type Options struct {
	// Program is the path that Find returned.
	Program string
	// Dir is the machine's directory for sockets. LogDir is the directory for logs.
	Dir, LogDir string
	// UID and GID are the pod's user and group, which are root in virtiofsd's user namespace.
	UID, GID int
	Tree     cgroup.Tree
	Cgroup   string
}

// server is one virtiofsd.
type server struct {
	tag  string
	log  string
	proc *process.Process
	// reaped is closed after the process was reaped. It is nil if the process is not a child of this daemon.
	reaped chan struct{}
	// conn is the hypervisor's end of the connection, or nil once Conn has returned it.
	conn *os.File
}

// start starts the virtiofsd of one share.
func (o Options) start(ctx context.Context, i int, s machine.Share) (_ *server, err error) {
	tree, mapped, err := o.open(s)
	if err != nil {
		return nil, err
	}
	defer tree.Close()
	listener, conn, err := o.connection(ctx)
	if err != nil {
		return nil, err
	}
	defer listener.Close()
	log, err := confine.OpenLog(o.logFile(i))
	if err != nil {
		conn.Close()
		return nil, err
	}
	defer log.Close()
	cmd := o.command(mapped)
	cmd.Stdout, cmd.Stderr, cmd.ExtraFiles = log, log, []*os.File{listener}
	if cmd.Stdin, err = closedPipe(); err == nil {
		defer cmd.Stdin.(*os.File).Close()
		err = confine.Start(cmd, confine.Place{Tree: o.Tree, Cgroup: o.Cgroup, Prepare: func() error { return mountPrivately(tree) }})
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	proc, err := process.Open(cmd.Process.Pid)
	if err != nil {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		conn.Close()
		return nil, err
	}
	started := &server{tag: s.Tag, log: o.logFile(i), proc: proc, conn: conn, reaped: make(chan struct{})}
	go func() {
		_ = cmd.Wait() // the exit status is not needed
		close(started.reaped)
	}()
	return started, nil
}

// open opens the clone of a share, and reports whether the clone maps owners.
func (o Options) open(s machine.Share) (tree *os.File, mapped bool, err error) {
	if s.Live {
		tree, err = OpenLive(s.Path, s.ReadOnly)
		return tree, false, err
	}
	return Open(s.Path, s.ReadOnly, o.UID, o.GID)
}

func (o Options) logFile(i int) string {
	return filepath.Join(o.LogDir, fmt.Sprintf("%s%d.log", ProgramName, i))
}

// command returns the command that runs virtiofsd. virtiofsd is the first process of a PID namespace, so that a kill
// leaves no child behind. virtiofsd itself creates further namespaces, where the share is the root directory.
//
// virtiofsd keeps the capabilities of its user namespace except mknod and setfcap. Extended attributes stay off,
// because virtiofsd cannot allow user.* without also allowing security.*.
//
// virtiofsd creates files as the guest's user, but does not know the user's supplementary groups (QEMU's virtiofsd). With
// no_setuid_fixup it keeps its capabilities meanwhile, so that only the guest's kernel, which knows the groups, checks the
// permissions. Otherwise a user could not create files in a volume of the pod's group (fsGroup).
func (o Options) command(mapped bool) *exec.Cmd {
	cmd := exec.Command(setpriv, "--securebits=+no_setuid_fixup", "--", o.Program, // no context, because virtiofsd outlives the daemon
		"-f", fmt.Sprintf("--fd=%d", socketFD), fmt.Sprintf("--rlimit-nofile=%d", fileLimit()),
		"-o", "source="+mountPoint+",sandbox=namespace,cache=auto,log_level=warn,modcaps=-mknod:-setfcap")
	cmd.Env, cmd.Dir = confine.Environment(), "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:                 confine.Namespaces | unix.CLONE_NEWUSER | unix.CLONE_NEWPID,
		UidMappings:                idMap(o.UID, mapped),
		GidMappings:                idMap(o.GID, mapped),
		GidMappingsEnableSetgroups: true,
		Credential:                 &syscall.Credential{Uid: 0, Gid: 0},
	}
	return cmd
}

// idMap returns the ID mapping of virtiofsd's user namespace. The namespace's root is the given ID of the node. The
// node's root does not exist in the namespace, and all other IDs are unchanged. If the share's owners are not mapped,
// all IDs are unchanged.
func idMap(id int, mapped bool) []syscall.SysProcIDMap {
	const all = 1<<32 - 1
	if !mapped {
		return []syscall.SysProcIDMap{{ContainerID: 0, HostID: 0, Size: all}}
	}
	list := []syscall.SysProcIDMap{{ContainerID: 0, HostID: id, Size: 1}}
	if id > 1 {
		list = append(list, syscall.SysProcIDMap{ContainerID: 1, HostID: 1, Size: id - 1})
	}
	return append(list, syscall.SysProcIDMap{ContainerID: id + 1, HostID: id + 1, Size: all - id - 1})
}

// fileLimit returns the descriptor limit of a virtiofsd: the daemon's hard limit, at most maxFiles. If the daemon's
// limit is unknown, fileLimit returns 0, which tells virtiofsd to keep its limit.
func fileLimit() uint64 {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return 0
	}
	return min(limit.Max, maxFiles)
}

// connection returns the socket on which virtiofsd listens, and the hypervisor's end of the connection that virtiofsd
// will accept.
func (o Options) connection(ctx context.Context) (listener, conn *os.File, err error) {
	path := filepath.Join(o.Dir, SocketName)
	if listener, err = unixsocket.Listen(path); err != nil {
		return nil, nil, err
	}
	var dialled *net.UnixConn
	if dialled, err = unixsocket.Dial(ctx, path); err == nil {
		conn, err = dialled.File()
		dialled.Close()
	}
	if err = errors.Join(err, os.Remove(path)); err != nil {
		listener.Close()
		return nil, nil, err
	}
	return listener, conn, nil
}

// closedPipe returns the read end of a pipe whose write end is closed.
func closedPipe() (*os.File, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	return r, w.Close()
}

// mountPrivately moves the calling thread to a new mount namespace and mounts the tree there.
func mountPrivately(tree *os.File) error {
	if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("create a mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make the mounts private: %w", err)
	}
	if err := unix.MoveMount(int(tree.Fd()), "", unix.AT_FDCWD, mountPoint, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("mount the share: %w", err)
	}
	return nil
}
