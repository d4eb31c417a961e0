package wasm

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
	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
	"github.com/tripod-run/tripod/internal/unixsocket"
)

var (
	fpListening = failpoint.New("wasm.worker.listening")
	fpSpawned   = failpoint.New("wasm.worker.spawned")
	fpReady     = failpoint.New("wasm.worker.ready")
)

// startTime bounds the time that a worker takes to become ready.
const startTime = time.Minute

// maxFiles returns a worker's limit on open files: enough for a thousand pods with a thousand connections or files
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

// spawn starts the process of w and connects to it. If spawn fails, it removes what it has created.
func (k *keeper) spawn(ctx context.Context, w *worker, own *place) error {
	err := guard.Call(k.log, "wasm worker", func() error { return k.launch(ctx, w, own) })
	if err != nil {
		err = errors.Join(err, k.undoSpawn(w))
	}
	return err
}

// launch is spawn without the roll-back.
func (k *keeper) launch(ctx context.Context, w *worker, own *place) (err error) {
	if err := os.MkdirAll(w.dir, 0o700); err != nil {
		return fmt.Errorf("wasm worker: %w", err)
	}
	if own == nil {
		shared, err := k.shared(ctx)
		if err != nil {
			return err
		}
		own = &shared
	}
	in := own.forWorker(w.name)
	w.cgroup = in.dir
	if err := w.writeState(); err != nil { // before the cgroup exists, so that recovery finds the cgroup
		return err
	}
	ready, cmd, err := k.prepare(ctx, w)
	if err != nil {
		return err
	}
	defer ready.Close()
	if err := in.run(cmd); err != nil {
		return err
	}
	w.child = cmd
	if w.proc, err = process.Open(cmd.Process.Pid); err != nil {
		return err
	}
	if err := w.writeState(); err != nil {
		return err
	}
	if err := errors.Join(limitProcess(w.proc.Pid), in.setOOMScore(w.proc.Pid), fpSpawned.Hit(ctx)); err != nil {
		return err
	}
	if err := awaitReady(ctx, ready); err != nil {
		return fmt.Errorf("%w: %s", err, lastLine(process.LogTail(filepath.Join(w.dir, workerLog), 4<<10)))
	}
	if err := w.connect(ctx); err != nil {
		return err
	}
	w.log.Info("worker started", "pid", w.proc.Pid, "engine", w.conn().Hello().Engine)
	return fpReady.Hit(ctx)
}

// prepare creates the worker's sockets, its log and the command that inherits them.
func (k *keeper) prepare(ctx context.Context, w *worker) (ready *os.File, cmd *exec.Cmd, err error) {
	config := workerapi.WorkerConfig{
		Name: w.name, UID: k.cfg.UID, GID: k.cfg.GID, Instances: k.cfg.Instances, MaxMemory: k.cfg.MaxMemory, Connections: k.cfg.Connections,
		LogLevel: k.cfg.LogLevel, LogSizeMax: k.cfg.LogSizeMax, Spans: k.cfg.Spans != nil, Isolated: true,
	}
	return k.cfg.command(ctx, w.dir, []string{controlSocket, dataSocket}, "worker", config)
}

// command creates sockets and a log in a directory, and the command of a process that inherits them and outlives the
// daemon: the sockets from workerapi.FDControl on, and then the pipe where it reports that it is ready.
func (c setup) command(ctx context.Context, dir string, sockets []string, mode string, config any) (ready *os.File, cmd *exec.Cmd, err error) {
	var files []*os.File
	defer func() {
		if err != nil {
			closeAll(files)
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
	log, err := os.OpenFile(filepath.Join(dir, workerLog), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return nil, nil, err
	}
	reader, writer, err := os.Pipe()
	if err != nil {
		log.Close()
		return nil, nil, err
	}
	cmd = exec.Command(c.Program, mode, string(text)) // without a context, because the process outlives the daemon
	cmd.ExtraFiles = append(files, writer)
	cmd.Stderr = log
	cmd.Env, cmd.Dir = programEnv, "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Setsid:     true,
		Cloneflags: workerapi.Namespaces,
	}
	return reader, cmd, nil
}

// run starts a command of setup.command, and closes the files that it inherits.
func (p place) run(cmd *exec.Cmd) error {
	err := p.start(cmd)
	closeAll(cmd.ExtraFiles)
	if log, ok := cmd.Stderr.(*os.File); ok {
		log.Close()
	}
	if err != nil {
		return fmt.Errorf("start %s: %w", cmd.Path, err)
	}
	return nil
}

// undoSpawn removes the process, the cgroup and the files of a failed start.
func (k *keeper) undoSpawn(w *worker) error {
	if w.child != nil {
		_ = w.child.Process.Kill()
		_ = w.child.Wait()
	}
	if c := w.conn(); c != nil {
		c.Close()
	}
	return errors.Join(k.removeCgroup(w.cgroup), os.RemoveAll(w.dir))
}

// limitProcess sets a worker's resource limits. It disables core files, which would contain guests' data. A limit that
// the daemon cannot raise without CAP_SYS_RESOURCE stays as it is.
func limitProcess(pid int) error {
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

// setOOMScore sets a worker's oom_score_adj. A value that the daemon may not set without CAP_SYS_RESOURCE is left out.
func (p place) setOOMScore(pid int) error {
	if p.oomScore == nil {
		return nil
	}
	err := os.WriteFile(fmt.Sprintf("/proc/%d/oom_score_adj", pid), []byte(strconv.FormatInt(*p.oomScore, 10)), 0)
	if err != nil && !errors.Is(err, unix.EACCES) {
		return fmt.Errorf("oom_score_adj of worker %d: %w", pid, err)
	}
	return nil
}

// awaitReady waits until the worker reports that it is ready. If the pipe is closed first, the worker has ended, and
// awaitReady returns errdefs.ErrUnavailable.
func awaitReady(ctx context.Context, ready *os.File) error {
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

// processFromHello returns the process whose ID is in the worker's Hello, and records the process. It returns an error
// if the process's command line is not the worker's.
func (k *keeper) processFromHello(w *worker) (*process.Process, error) {
	pid := w.conn().Hello().Pid
	p, err := process.Open(pid)
	if err != nil {
		return nil, err
	}
	cmdline, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	words := bytes.Split(cmdline, []byte{0})
	var config workerapi.WorkerConfig
	if err != nil || len(words) < 3 || string(words[1]) != "worker" || json.Unmarshal(words[2], &config) != nil || config.Name != w.name {
		p.Close()
		return nil, fmt.Errorf("process %d is not worker %s: %w", pid, w.name, errdefs.ErrFailedPrecondition)
	}
	w.proc = p
	return p, w.writeState()
}

// writeState records the process and the cgroup, so that the next daemon can end the worker and remove its cgroup.
func (w *worker) writeState() error {
	s := workerState{Cgroup: w.cgroup}
	if w.proc != nil {
		s.Process = w.proc.ID
	}
	return format.Write(filepath.Join(w.dir, workerFile), s)
}

// runsProgram reports whether a process runs the program that is now installed at the given path.
func runsProgram(pid int, path string) bool {
	have, err := os.Stat(fmt.Sprintf("/proc/%d/exe", pid))
	if err != nil {
		return false
	}
	want, err := os.Stat(path)
	return err == nil && os.SameFile(have, want)
}

// credential returns the user and group of child processes that read untrusted input.
func (c Config) credential() *syscall.Credential {
	return &syscall.Credential{Uid: uint32(c.UID), Gid: uint32(c.GID)}
}

func closeAll(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}
