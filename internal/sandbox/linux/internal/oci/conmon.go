package oci

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
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
)

// Monitor starts conmon processes (https://github.com/containers/conmon). Each conmon creates one container, holds its
// stdio, writes its log, serves its attach socket and writes its exit code to a file. It keeps none of our descriptors
// and outlives the daemon.
//
// Use OpenMonitor. A Monitor that only has the exported fields can run programs (Exec), but start no containers.
type Monitor struct {
	Path, version string
	Spawner       *Spawner
	// exitDir is the directory of exit files, and logSizeMax the size limit of logs (0: none).
	exitDir    string
	logSizeMax int64
}

// OpenMonitor finds conmon and prepares to start it.
func OpenMonitor(ctx context.Context, cfg Config, g cgroup.Tree) (Monitor, error) {
	find := findMonitor
	if len(cfg.Tried) > 0 {
		find = lookUpMonitor
	}
	m, err := find(ctx, cfg)
	if err == nil {
		m.Spawner, err = NewSpawner(ctx, g)
	}
	return m, err
}

// lookUpMonitor finds conmon without running it.
func lookUpMonitor(_ context.Context, cfg Config) (Monitor, error) {
	found, err := exec.LookPath(cmp.Or(cfg.Conmon, "conmon"))
	if err != nil {
		return Monitor{}, fmt.Errorf("find conmon (Debian: apt-get install conmon): %w: %w", err, errdefs.ErrUnavailable)
	}
	return Monitor{Path: found, exitDir: cfg.ExitDir, logSizeMax: cfg.LogSizeMax}, nil
}

// findMonitor finds conmon, and makes sure that it can run.
func findMonitor(ctx context.Context, cfg Config) (Monitor, error) {
	m, err := lookUpMonitor(ctx, cfg)
	if err != nil {
		return m, err
	}
	out, err := exec.CommandContext(ctx, m.Path, "--version").Output()
	if err != nil {
		return Monitor{}, fmt.Errorf("%s --version: %w: %w", m.Path, err, errdefs.ErrUnavailable)
	}
	m.version, _, _ = strings.Cut(string(out), "\n")
	return m, nil
}

// Launch holds the parameters of one conmon.
type Launch struct {
	ID, Bundle string
	// LogPath is the path of the CRI log file; "" if the container has none.
	LogPath string
	Stdio
	// Foreign means that the container's root is not the node's (see runtimeArgs).
	Foreign bool
}

// Stdio is how a container's stdio is connected, as in a container's CRI configuration.
type Stdio struct{ Stdin, StdinOnce, TTY bool }

// endsStdin reports whether the end of the first client's input closes the container's stdin. A terminal stays open for
// the next client, because its users can end input with Ctrl-D.
func (s Stdio) endsStdin() bool { return s.StdinOnce && !s.TTY }

// Files that conmon and the OCI runtime write into the bundle.
func initPidFile(bundle string) string   { return filepath.Join(bundle, "init.pid") }
func conmonPidFile(bundle string) string { return filepath.Join(bundle, "conmon.pid") }

// RemoveRunFiles removes from the bundle what conmon and the runtime have written about an earlier run.
func RemoveRunFiles(bundle string) error {
	for _, name := range []string{initPidFile(bundle), conmonPidFile(bundle), filepath.Join(bundle, "oom")} {
		if err := ledger.RemoveFile(name); err != nil {
			return err
		}
	}
	return nil
}

// InitPid returns the PID of the container's first process, as the runtime has written it into the bundle.
func InitPid(bundle string) (int, error) { return ReadPid(initPidFile(bundle)) }

// args returns conmon's command line. Recovery recognises our conmons by the bundle in their command lines.
func (m Monitor) args(l Launch, rt Runtime) []string {
	args := []string{
		"--api-version", "1",
		"--cid", l.ID, "--cuuid", l.ID,
		"--bundle", l.Bundle,
		"--container-pidfile", initPidFile(l.Bundle),
		"--conmon-pidfile", conmonPidFile(l.Bundle),
		"--exit-dir", m.exitDir, // only one directory: given a second, conmon writes no exit file at all if the disk has no room for two
		"--full-attach",
		"--no-sync-log",
		"--log-level", "error",
	}
	runtime, globals := l.runtimeArgs(rt)
	args = append(args, "--runtime", runtime)
	for _, global := range globals {
		args = append(args, "--runtime-arg", global)
	}
	if l.LogPath == "" {
		args = append(args, "--log-path", "null")
	} else {
		args = append(args, "--log-path", "k8s-file:"+l.LogPath)
		if m.logSizeMax > 0 {
			args = append(args, "--log-size-max", strconv.FormatInt(m.logSizeMax, 10))
		}
	}
	if l.TTY {
		args = append(args, "--terminal")
	}
	if l.Stdin {
		args = append(args, "--stdin")
		if !l.endsStdin() {
			args = append(args, "--leave-stdin-open")
		}
	}
	return args
}

// runtimeArgs returns the program that conmon runs as the OCI runtime, and its first arguments. conmon's child has the
// node's /dev/null as stdin and, with a terminal, as stdout. crun makes the container's root the owner of both, and a root
// that is not the node's could then close /dev/null to everyone. For such a container, a shell gives the runtime an empty
// pipe (a here-document) and conmon's pipe for errors instead.
func (l Launch) runtimeArgs(rt Runtime) (program string, args []string) {
	if !l.Foreign {
		return rt.creator(), rt.globals()
	}
	script := `exec "$0" "$@"`
	switch empty := " <<E\nE\n"; {
	case l.TTY:
		script += " >&2" + empty
	case !l.Stdin:
		script += empty
	}
	return "/bin/sh", append([]string{"-c", script, rt.creator()}, rt.globals()...)
}

// execCommand returns the command of a conmon that runs an additional program in a container. conmon exits with the
// program's exit code. The program inherits conmon's stdio ("passthrough"). The given directory contains process.json.
// The PID file and the runtime's log are written there too.
func (m Monitor) execCommand(id, dir string, rt Runtime, options []string) *exec.Cmd {
	args := []string{
		"--api-version", "1", "--exec", "--sync",
		"--cid", id, "--cuuid", id,
		"--runtime", rt.Path,
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
	cmd := exec.Command(m.Path, args...)
	cmd.Dir = dir
	cmd.Env = conmonEnv()[1:] // no sync pipe, because it is enough to wait for conmon
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	return cmd
}

var fpConmon = failpoint.New("linux.start-container.conmon")

// Processes holds the two processes of a container.
type Processes struct{ Conmon, Init *process.Process }

// Start launches conmon and returns once conmon has created the container. If conmon was started, the result includes
// conmon even on error, so that the caller can kill it.
func (m Monitor) Start(ctx context.Context, l Launch, rt Runtime) (Processes, error) {
	reader, writer, err := os.Pipe()
	if err != nil {
		return Processes{}, err
	}
	defer reader.Close()
	cmd := exec.Command(m.Path, m.args(l, rt)...)
	cmd.Dir = l.Bundle
	cmd.Env = conmonEnv()
	cmd.ExtraFiles = []*os.File{writer} // descriptor 3
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	err = m.Spawner.start(cmd)
	writer.Close()
	if err != nil {
		return Processes{}, fmt.Errorf("start conmon: %w", err)
	}
	// conmon forks into the background.
	if err := cmd.Wait(); err != nil {
		return Processes{}, fmt.Errorf("conmon: %w", err)
	}
	var got Processes
	pid, err := ReadPid(conmonPidFile(l.Bundle))
	if err != nil {
		return Processes{}, fmt.Errorf("conmon: %w", err)
	}
	if got.Conmon, err = process.Open(pid); errdefs.IsNotFound(err) {
		got.Conmon = process.Ended(process.ID{Pid: pid}) // readSync returns the reason
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
	got.Init, err = process.Open(initPid)
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

// ReadPid returns the PID in a file.
func ReadPid(file string) (int, error) {
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

// Monitors finds the conmons of the bundles below a directory by their command lines and returns them by container ID. It reads all of
// /proc, so only recovery and what follows a failed start use it, because they cannot rely on the PID files.
func Monitors(bundles string) map[string]process.ID {
	found := map[string]process.ID{}
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		raw, _ := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline"))
		if id, ok := monitorOf(strings.Split(string(raw), "\x00"), bundles); ok {
			if start, err := process.StartTime(pid); err == nil {
				found[id] = process.ID{Pid: pid, Start: start}
			}
		}
	}
	return found
}

// monitorOf returns the ID of the container whose conmon has this command line.
func monitorOf(argv []string, bundles string) (id string, ok bool) {
	i := slices.Index(argv, "--bundle")
	if filepath.Base(argv[0]) != "conmon" || i < 0 || i+1 == len(argv) {
		return "", false
	}
	rel, _ := filepath.Rel(bundles, argv[i+1])
	pod, container, two := strings.Cut(rel, "/")
	return container, two && cgroup.ID().MatchString(pod) && cgroup.ID().MatchString(container)
}
