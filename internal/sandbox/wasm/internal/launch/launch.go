// Package launch starts tripod-wasm, and opens what its processes inherit. Some processes are short-lived and unprivileged, because
// they read untrusted input; others outlive the daemon.
//
//	daemon ──Unprivileged──▶ compiler · worker of a standalone component       ends with the daemon
//	   └─────Lasting───────▶ worker · dialer                                   keeps its sockets, log and ready pipe
package launch

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
	"github.com/tripod-run/tripod/internal/unixsocket"
)

var fpListening = failpoint.New("wasm.worker.listening")

// Name is the name of the program.
const Name = "tripod-wasm"

// The files in the directory of a lasting process: its sockets for orders and for requests, and its log.
const (
	ControlSocket = "control.sock"
	DataSocket    = "data.sock"
	LogFile       = "log"
)

// Program is an installed tripod-wasm.
type Program struct {
	// Path is absolute.
	Path string
	// UID and GID are the user and group of processes that read untrusted input.
	UID, GID int
	// Env is added to the environment, which contains nothing from the daemon's.
	Env []string
}

// Find returns path, or looks for the program beside the executable of this process and in PATH if path is empty. It returns
// errdefs.ErrNotFound if there is no tripod-wasm.
func Find(path string) (string, error) {
	if path != "" {
		return path, nil
	}
	return process.FindProgram(Name, "of the workers that run components")
}

func (p Program) env() []string {
	return append([]string{"RUST_BACKTRACE=0", "PATH=/usr/bin:/bin"}, p.Env...)
}

// Unprivileged returns a command that runs the program as the unprivileged user, in new namespaces. Without root privileges,
// the command runs as the user of this process, in the same namespaces. It inherits the given files from file descriptor 3
// on. The command runs the program through a file descriptor, because the user may lack access to the program's directory. The
// caller closes the command's ExtraFiles, which include the given files; if Unprivileged fails, it has closed them.
func (p Program) Unprivileged(ctx context.Context, inherited []*os.File, args ...string) (*exec.Cmd, error) {
	fd, err := unix.Open(p.Path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		CloseAll(inherited)
		return nil, fmt.Errorf("%s: %w: %w", p.Path, err, errdefs.ErrUnavailable)
	}
	const firstFD = 3 // of ExtraFiles
	cmd := exec.CommandContext(ctx, fmt.Sprintf("/proc/self/fd/%d", firstFD+len(inherited)), args...)
	cmd.Args[0] = Name
	cmd.ExtraFiles = append(inherited, os.NewFile(uintptr(fd), p.Path))
	cmd.Env, cmd.Dir = p.env(), "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if os.Geteuid() == 0 {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uint32(p.UID), Gid: uint32(p.GID)}
		cmd.SysProcAttr.Cloneflags = workerapi.Namespaces &^ unix.CLONE_NEWNS
	}
	return cmd, nil
}

// Lasting creates sockets and a log in a directory, and the command of a process that inherits them and outlives the
// daemon: the sockets from workerapi.FDControl on, and then the pipe where it reports that it is ready. See Started and
// AwaitReady.
func (p Program) Lasting(ctx context.Context, dir string, sockets []string, mode string,
	config any) (ready *os.File, cmd *exec.Cmd, err error) {
	var files []*os.File
	defer func() {
		if err != nil {
			CloseAll(files)
		}
	}()
	for _, name := range sockets {
		f, err := unixsocket.Listen(filepath.Join(dir, name))
		if err != nil {
			return nil, nil, err
		}
		files = append(files, f)
	}
	if err := fpListening.Hit(ctx); err != nil {
		return nil, nil, err
	}
	text, err := json.Marshal(config)
	if err != nil {
		return nil, nil, err
	}
	log, err := os.OpenFile(filepath.Join(dir, LogFile), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return nil, nil, err
	}
	reader, writer, err := os.Pipe()
	if err != nil {
		log.Close()
		return nil, nil, err
	}
	cmd = exec.Command(p.Path, mode, string(text)) // without a context, because the process outlives the daemon
	cmd.ExtraFiles = append(files, writer)
	cmd.Stderr = log
	cmd.Env, cmd.Dir = p.env(), "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Setsid:     true,
		Cloneflags: workerapi.Namespaces,
	}
	return reader, cmd, nil
}

// Started closes the files that a command of Lasting inherits. Call it once the command was started, or has failed to.
func Started(cmd *exec.Cmd) {
	CloseAll(cmd.ExtraFiles)
	if log, ok := cmd.Stderr.(*os.File); ok {
		log.Close()
	}
}

// AwaitReady waits until a process reports that it is ready. If the pipe is closed first, the process has ended, and
// AwaitReady returns errdefs.ErrUnavailable.
func AwaitReady(ctx context.Context, ready *os.File) error {
	stop := context.AfterFunc(ctx, func() { _ = ready.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	line, err := bufio.NewReader(ready).ReadString('\n')
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("wait for the worker to be ready: %w", context.Cause(ctx))
	case err != nil || line != "ready\n":
		return fmt.Errorf("the worker ended before it was ready: %w", errdefs.ErrUnavailable)
	default:
		return nil
	}
}

// LastWords returns the last line of the log in the directory of a lasting process.
func LastWords(dir string) string {
	return LastLine(process.LogTail(filepath.Join(dir, LogFile), 4<<10))
}

// Runs reports whether a process runs the program that is now installed.
func (p Program) Runs(pid int) bool {
	have, err := os.Stat(fmt.Sprintf("/proc/%d/exe", pid))
	if err != nil {
		return false
	}
	want, err := os.Stat(p.Path)
	return err == nil && os.SameFile(have, want)
}

// engineTimeout bounds how long `tripod-wasm fingerprint` can run.
const engineTimeout = 30 * time.Second

// Engine asks the program for the fingerprint of its engine. It returns errdefs.ErrUnavailable if the program gives none.
func (p Program) Engine() (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), engineTimeout)
	defer cancel()
	cmd, err := p.Unprivileged(ctx, nil, "fingerprint")
	if err != nil {
		return "", err
	}
	defer CloseAll(cmd.ExtraFiles)
	out, err := cmd.Output()
	line := strings.TrimSpace(string(out))
	if err != nil || line == "" {
		return "", fmt.Errorf("%s fingerprint: %w: %w", p.Path, withStderr(err), errdefs.ErrUnavailable)
	}
	return line, nil
}

// withStderr adds the last line of a program's standard error to its exit error.
func withStderr(err error) error {
	var exit *exec.ExitError
	if errors.As(err, &exit) && len(exit.Stderr) > 0 {
		return fmt.Errorf("%w: %s", err, LastLine(exit.Stderr))
	}
	if err == nil {
		return errors.New("it printed nothing")
	}
	return err
}

// maxFiles returns a process's limit on open files: enough for a thousand pods with a thousand connections or files
// each, but at most fs.nr_open.
func maxFiles() uint64 {
	const wanted = 1 << 20
	text, _ := os.ReadFile("/proc/sys/fs/nr_open")
	limit, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
	if err != nil {
		return wanted
	}
	return min(limit, wanted)
}

// Limit sets the resource limits of a lasting process. It disables core files, which would contain guests' data. A limit that
// the daemon cannot raise without CAP_SYS_RESOURCE stays as it is.
func Limit(pid int) error {
	files := maxFiles()
	for resource, limit := range map[int]unix.Rlimit{
		unix.RLIMIT_NOFILE: {Cur: files, Max: files},
		unix.RLIMIT_NICE:   {Cur: 20, Max: 20}, // lets the worker restore nice 0 (getrlimit(2))
		unix.RLIMIT_CORE:   {},
	} {
		if err := unix.Prlimit(pid, resource, &limit, nil); err != nil && !errors.Is(err, unix.EPERM) {
			return fmt.Errorf("limits of worker %d: %w", pid, err)
		}
	}
	return nil
}

// LastLine returns the last line of text that is not empty.
func LastLine(text []byte) string {
	lines := bytes.Split(bytes.TrimSpace(text), []byte{'\n'})
	return string(bytes.TrimSpace(lines[len(lines)-1]))
}

// CloseAll closes files.
func CloseAll(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}
