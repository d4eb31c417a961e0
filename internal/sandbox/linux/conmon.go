package linux

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/process"
)

// monitor starts conmon processes (https://github.com/containers/conmon). Each conmon creates one container, holds its
// stdio, writes its log, serves its attach socket and writes its exit code to a file. It keeps none of our descriptors
// and outlives the daemon.
type monitor struct {
	path, version string
	spawner       *spawner
}

// openMonitor finds conmon and prepares to start it.
func openMonitor(ctx context.Context, cfg Config, g cgroups) (monitor, error) {
	find := findMonitor
	if len(cfg.Tried) > 0 {
		find = lookUpMonitor
	}
	m, err := find(ctx, cfg)
	if err == nil {
		m.spawner, err = newSpawner(ctx, g)
	}
	return m, err
}

// lookUpMonitor finds conmon without running it.
func lookUpMonitor(_ context.Context, cfg Config) (monitor, error) {
	found, err := exec.LookPath(cmp.Or(cfg.Conmon, "conmon"))
	if err != nil {
		return monitor{}, fmt.Errorf("find conmon (Debian: apt-get install conmon): %w: %w", err, errdefs.ErrUnavailable)
	}
	return monitor{path: found}, nil
}

// findMonitor finds conmon, and makes sure that it can run.
func findMonitor(ctx context.Context, cfg Config) (monitor, error) {
	m, err := lookUpMonitor(ctx, cfg)
	if err != nil {
		return m, err
	}
	out, err := exec.CommandContext(ctx, m.path, "--version").Output()
	if err != nil {
		return monitor{}, fmt.Errorf("%s --version: %w: %w", m.path, err, errdefs.ErrUnavailable)
	}
	m.version, _, _ = strings.Cut(string(out), "\n")
	return m, nil
}

// launch holds the parameters of one conmon.
type launch struct {
	id, bundle string
	logPath    string
	stdin      bool
	stdinOnce  bool
	tty        bool
	// foreign means that the container's root is not the node's (see runtimeArgs).
	foreign bool
}

// Files that conmon and the OCI runtime write into the bundle.
func initPidFile(bundle string) string   { return filepath.Join(bundle, "init.pid") }
func conmonPidFile(bundle string) string { return filepath.Join(bundle, "conmon.pid") }

// args returns conmon's command line. Recovery recognises our conmons by the bundle in their command lines.
func (m monitor) args(l launch, cfg Config, rt ociRuntime) []string {
	args := []string{
		"--api-version", "1",
		"--cid", l.id, "--cuuid", l.id,
		"--bundle", l.bundle,
		"--container-pidfile", initPidFile(l.bundle),
		"--conmon-pidfile", conmonPidFile(l.bundle),
		"--exit-dir", cfg.exitDir(), // only one directory: given a second, conmon writes no exit file at all if the disk has no room for two
		"--full-attach",
		"--no-sync-log",
		"--log-level", "error",
	}
	runtime, globals := l.runtimeArgs(rt)
	args = append(args, "--runtime", runtime)
	for _, global := range globals {
		args = append(args, "--runtime-arg", global)
	}
	if l.logPath == "" {
		args = append(args, "--log-path", "null")
	} else {
		args = append(args, "--log-path", "k8s-file:"+l.logPath)
		if cfg.LogSizeMax > 0 {
			args = append(args, "--log-size-max", strconv.FormatInt(cfg.LogSizeMax, 10))
		}
	}
	if l.tty {
		args = append(args, "--terminal")
	}
	if l.stdin {
		args = append(args, "--stdin")
		if !endsStdin(l.stdinOnce, l.tty) {
			args = append(args, "--leave-stdin-open")
		}
	}
	return args
}

// runtimeArgs returns the program that conmon runs as the OCI runtime, and its first arguments. conmon's child has the
// node's /dev/null as stdin and, with a terminal, as stdout. crun makes the container's root the owner of both, and a root
// that is not the node's could then close /dev/null to everyone. For such a container, a shell gives the runtime an empty
// pipe (a here-document) and conmon's pipe for errors instead.
func (l launch) runtimeArgs(rt ociRuntime) (program string, args []string) {
	if !l.foreign {
		return rt.creator(), rt.globals()
	}
	script := `exec "$0" "$@"`
	switch empty := " <<E\nE\n"; {
	case l.tty:
		script += " >&2" + empty
	case !l.stdin:
		script += empty
	}
	return "/bin/sh", append([]string{"-c", script, rt.creator()}, rt.globals()...)
}

// execCommand returns the command of a conmon that runs an additional program in a container. conmon exits with the
// program's exit code. The program inherits conmon's stdio ("passthrough"). The given directory contains process.json.
// The PID file and the runtime's log are written there too.
func (m monitor) execCommand(id, dir string, rt ociRuntime, options []string) *exec.Cmd {
	args := []string{
		"--api-version", "1", "--exec", "--sync",
		"--cid", id, "--cuuid", id,
		"--runtime", rt.path,
		"--exec-process-spec", filepath.Join(dir, "process.json"),
		"--container-pidfile", filepath.Join(dir, "pid"),
		"--log-path", "passthrough",
		"--log-level", "error",
	}
	for _, global := range append(rt.globals(), "--log", filepath.Join(dir, "log"), "--log-format", "json") {
		args = append(args, "--runtime-arg", global)
	}
	for _, option := range options {
		args = append(args, "--runtime-opt="+option)
	}
	cmd := exec.Command(m.path, args...)
	cmd.Dir = dir
	cmd.Env = conmonEnv()[1:] // no sync pipe, because it is enough to wait for conmon
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	return cmd
}

// launched holds the two processes of a container.
type launched struct{ conmon, init *process.Process }

// start launches conmon and returns once conmon has created the container. If conmon was started, the result includes
// conmon even on error, so that the caller can kill it.
func (m monitor) start(ctx context.Context, l launch, cfg Config, rt ociRuntime) (launched, error) {
	reader, writer, err := os.Pipe()
	if err != nil {
		return launched{}, err
	}
	defer reader.Close()
	cmd := exec.Command(m.path, m.args(l, cfg, rt)...)
	cmd.Dir = l.bundle
	cmd.Env = conmonEnv()
	cmd.ExtraFiles = []*os.File{writer} // descriptor 3
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	err = m.spawner.start(cmd)
	writer.Close()
	if err != nil {
		return launched{}, fmt.Errorf("start conmon: %w", err)
	}
	// conmon forks into the background.
	if err := cmd.Wait(); err != nil {
		return launched{}, fmt.Errorf("conmon: %w", err)
	}
	var got launched
	pid, err := readPid(conmonPidFile(l.bundle))
	if err != nil {
		return launched{}, fmt.Errorf("conmon: %w", err)
	}
	if got.conmon, err = process.Open(pid); errdefs.IsNotFound(err) {
		got.conmon = process.Ended(process.ID{Pid: pid}) // readSync returns the reason
	} else if err != nil {
		return got, err
	}
	if err := fpConmon.Hit(ctx); err != nil {
		return got, err
	}
	initPid, err := readSync(ctx, reader)
	if err != nil {
		return got, err
	}
	got.init, err = process.Open(initPid)
	if errdefs.IsNotFound(err) {
		err = errors.New("the container's first process ended before it was started")
	}
	return got, err
}

// conmonEnv returns the environment of conmon, which the OCI runtime inherits. It leaves out most of the daemon's
// variables, because some of them, such as NOTIFY_SOCKET and LISTEN_FDS, would affect both programs.
func conmonEnv() []string {
	env := []string{"_OCI_SYNCPIPE=3", "PATH=" + os.Getenv("PATH"), "LC_ALL=C"}
	for _, name := range []string{"XDG_RUNTIME_DIR", "TMPDIR"} {
		if v, ok := os.LookupEnv(name); ok {
			env = append(env, name+"="+v)
		}
	}
	return env
}

// readSync waits for conmon's message and returns the PID of the container's init. If conmon ends without a message, it
// has failed.
func readSync(ctx context.Context, pipe *os.File) (int, error) {
	stop := context.AfterFunc(ctx, func() { _ = pipe.Close() })
	defer stop()
	line, err := bufio.NewReader(io.LimitReader(pipe, 64<<10)).ReadBytes('\n')
	if ctx.Err() != nil {
		return 0, fmt.Errorf("wait for the OCI runtime to create the container: %w", ctx.Err())
	}
	if err != nil && len(line) == 0 {
		return 0, errors.New("the container's monitor ended before the container was created")
	}
	var msg struct {
		Data    int    `json:"data"`    // the PID, or -1
		Message string `json:"message"` // the runtime's error
	}
	if err := json.Unmarshal(line, &msg); err != nil {
		return 0, fmt.Errorf("parse conmon's message %q: %w", line, err)
	}
	if msg.Data <= 0 {
		return 0, errors.New(runtimeMessage(msg.Message))
	}
	return msg.Data, nil
}

func readPid(file string) (int, error) {
	raw, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(raw)))
	if err != nil || pid <= 0 {
		return 0, fmt.Errorf("%s contains no PID: %q", file, raw)
	}
	return pid, nil
}

// spawner starts the conmons of all pods in one cgroup of their own. A conmon must not be killed because of its pod's
// limits, and must not end with the daemon's service.
//
// On cgroup v1, moving a process takes an RCU grace period (over 1 ms) for each hierarchy. To avoid this, one thread
// moves itself into the cgroup once and starts all conmons. It keeps the daemon's share of CPU time: the conmons and the
// OCI runtimes that they start would otherwise divide the share of one cgroup, however many containers start. On v2,
// clone3(2) starts a process directly in the cgroup.
type spawner struct {
	cgroups cgroups
	jobs    chan func()
	// closed ends the thread.
	closed chan struct{}
}

// conmonCgroup is the name of the conmons' cgroup, which is one of the helpers'.
const conmonCgroup = cgroup.Mark + "conmon"

func newSpawner(ctx context.Context, g cgroups) (*spawner, error) {
	s := &spawner{cgroups: g, jobs: make(chan func()), closed: make(chan struct{})}
	dir, err := s.place(ctx)
	if err != nil {
		return nil, err
	}
	if g.V2 {
		return s, nil
	}
	ready := make(chan error)
	go s.loop(func() error { return g.withoutCPU().Enter(dir) }, ready)
	if err := <-ready; err != nil {
		s.close()
		return nil, fmt.Errorf("enter the monitors' cgroup: %w", err)
	}
	return s, nil
}

// place makes the monitors' cgroup, which goes when somebody stops the helpers' unit, and returns its path.
func (s *spawner) place(ctx context.Context) (string, error) {
	helpers, err := s.cgroups.Helpers(ctx)
	if err == nil {
		helpers = filepath.Join(helpers, conmonCgroup)
		err = s.cgroups.Create(helpers)
	}
	if err != nil {
		return "", fmt.Errorf("the monitors: %w", err)
	}
	return helpers, nil
}

// loop runs jobs on its own thread, in the cgroup. The thread ends with the spawner.
func (s *spawner) loop(enter func() error, ready chan<- error) {
	runtime.LockOSThread()
	if unix.Gettid() == unix.Getpid() {
		// The main thread cannot end, and its cgroup counts as the cgroup of the whole process. So block the main
		// thread while another thread runs the loop.
		done := make(chan struct{})
		go func() { defer close(done); s.loop(enter, ready) }()
		<-done
		runtime.UnlockOSThread()
		return
	}
	ready <- enter()
	for {
		select {
		case job := <-s.jobs:
			job()
		case <-s.closed:
			return
		}
	}
}

func (s *spawner) close() { close(s.closed) }

// start starts cmd in the cgroup. Calls whose clients have gone can still be here when the daemon ends.
func (s *spawner) start(cmd *exec.Cmd) error {
	if s.cgroups.V2 {
		return s.startIn(cmd)
	}
	done := make(chan error, 1)
	select {
	case s.jobs <- func() { done <- cmd.Start() }:
		return <-done
	case <-s.closed:
		return errStopping
	}
}

var errStopping = fmt.Errorf("the daemon is stopping: %w", errdefs.ErrUnavailable)

// startIn implements start on v2.
func (s *spawner) startIn(cmd *exec.Cmd) error {
	select {
	case <-s.closed:
		return errStopping
	default:
	}
	dir, err := s.place(context.Background())
	if err != nil {
		return err
	}
	return s.cgroups.Start(cmd, dir, nil)
}

// monitors finds the conmons of our bundles by their command lines and returns them by container ID. It reads all of
// /proc, so only recovery and what follows a failed start use it, because they cannot rely on the PID files.
func monitors(root string) map[string]process.ID {
	found := map[string]process.ID{}
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		raw, _ := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline"))
		if id, ok := monitorOf(strings.Split(string(raw), "\x00"), root); ok {
			if start, err := process.StartTime(pid); err == nil {
				found[id] = process.ID{Pid: pid, Start: start}
			}
		}
	}
	return found
}

// monitorOf returns the ID of the container whose conmon has this command line.
func monitorOf(argv []string, root string) (id string, ok bool) {
	i := slices.Index(argv, "--bundle")
	if filepath.Base(argv[0]) != "conmon" || i < 0 || i+1 == len(argv) {
		return "", false
	}
	rel, _ := filepath.Rel(root, argv[i+1])
	pod, container, two := strings.Cut(rel, "/")
	return container, two && cgroup.ID().MatchString(pod) && cgroup.ID().MatchString(container)
}
