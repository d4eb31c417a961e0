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
)

// ProgramName is virtiofsd.
const ProgramName = "virtiofsd"

// programPaths are where distributions have it, which is not in PATH: Debian 12 (of QEMU), Fedora and later Debian.
var programPaths = []string{"/usr/lib/qemu/virtiofsd", "/usr/libexec/virtiofsd", "/usr/lib/virtiofsd"}

// Find returns the path of virtiofsd: configured if that is not empty, or where distributions install it, or in PATH.
// errdefs.ErrNotFound.
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
	return "", fmt.Errorf("no virtiofsd at %v; install it (Debian 12: qemu-system-common), or set vm.virtiofsd: %w", candidates, errdefs.ErrNotFound)
}

// SocketName is the socket in Options.Dir, for the moment in which the two ends are joined.
const SocketName = "virtiofs.sock"

const (
	// mountPoint is where a share is mounted for its virtiofsd, in a mount namespace of its own. It is there on every host,
	// and nothing that virtiofsd needs is below it.
	mountPoint = "/tmp"
	// maxFiles bounds the descriptors of a virtiofsd, which holds one for each file that the guest's kernel remembers. What
	// they take of memory is charged to the pod.
	maxFiles = 1_000_000
	// socketFD is the listening socket's number in virtiofsd.
	socketFD = 3
)

// Options is how the virtiofsd of a machine are run.
type Options struct {
	// Program is what Find has found.
	Program string
	// Dir is the machine's directory for sockets, LogDir has their logs.
	Dir, LogDir string
	// UID and GID are the pod's: root in virtiofsd's user namespace.
	UID, GID int
	Tree     cgroup.Tree
	Cgroup   string
}

// server is one virtiofsd.
type server struct {
	tag  string
	log  string
	proc *process.Process
	// reaped is closed when it has ended and is no zombie; nil when it is not our child.
	reaped chan struct{}
	// conn is the hypervisor's end of the connection, until it is taken.
	conn *os.File
}

// start starts the virtiofsd of one share.
func (o Options) start(ctx context.Context, i int, s machine.Share) (_ *server, err error) {
	tree, mapped, err := Open(s.Path, s.ReadOnly, o.UID, o.GID)
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
	if cmd.Stdin, err = noInput(); err == nil {
		defer cmd.Stdin.(*os.File).Close()
		err = confine.Start(cmd, confine.Place{Tree: o.Tree, Cgroup: o.Cgroup, Prepare: func() error { return mountHere(tree) }})
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
		_ = cmd.Wait() // how it ended says nothing
		close(started.reaped)
	}()
	return started, nil
}

func (o Options) logFile(i int) string {
	return filepath.Join(o.LogDir, fmt.Sprintf("%s%d.log", ProgramName, i))
}

// command is virtiofsd's. It is the first process of a PID namespace, so that nothing of it is left when it is killed, and
// makes further namespaces in which the share is the root of all files.
//
// Of the capabilities that it would keep, all of its user namespace, mknod and setfcap are given up. Attributes (xattr)
// stay off: there is no way to let a guest have those of its users and not those of the node's security.
func (o Options) command(mapped bool) *exec.Cmd {
	cmd := exec.Command(o.Program, // not bound to a context: it outlives us
		"-f", fmt.Sprintf("--fd=%d", socketFD), fmt.Sprintf("--rlimit-nofile=%d", fileLimit()),
		"-o", "source="+mountPoint+",sandbox=namespace,cache=auto,log_level=warn,modcaps=-mknod:-setfcap")
	cmd.Env, cmd.Dir = confine.Environment(), "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:                 confine.Namespaces | unix.CLONE_NEWUSER | unix.CLONE_NEWPID,
		UidMappings:                users(o.UID, mapped),
		GidMappings:                users(o.GID, mapped),
		GidMappingsEnableSetgroups: true,
		Credential:                 &syscall.Credential{Uid: 0, Gid: 0},
	}
	return cmd
}

// users maps the users of virtiofsd's user namespace: id is its root, nobody is the node's, all others are themselves.
// Where a share's owners are not mapped, all are themselves.
func users(id int, mapped bool) []syscall.SysProcIDMap {
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

// fileLimit is how many descriptors a virtiofsd may have: as many as we could.
func fileLimit() uint64 {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return 0 // leave it
	}
	return min(limit.Max, maxFiles)
}

// connection makes both ends of virtiofsd's connection: the socket at which it accepts one, and the one that it will accept.
func (o Options) connection(ctx context.Context) (listener, conn *os.File, err error) {
	path := filepath.Join(o.Dir, SocketName)
	if listener, err = machine.Listen(path); err != nil {
		return nil, nil, err
	}
	var dialled *net.UnixConn
	if dialled, err = machine.Dial(ctx, path); err == nil {
		conn, err = dialled.File()
		dialled.Close()
	}
	if err = errors.Join(err, os.Remove(path)); err != nil {
		listener.Close()
		return nil, nil, err
	}
	return listener, conn, nil
}

// noInput is an input that has ended, and nobody else's.
func noInput() (*os.File, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	return r, w.Close()
}

// mountHere gives the calling thread a mount namespace of its own, in which the tree is mounted.
func mountHere(tree *os.File) error {
	if err := unix.Unshare(unix.CLONE_FS | unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("a mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make the mounts private: %w", err)
	}
	if err := unix.MoveMount(int(tree.Fd()), "", unix.AT_FDCWD, mountPoint, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("mount the share: %w", err)
	}
	return nil
}
