package linux

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox"
)

// Sessions serves exec and attach sessions of running containers from plans, in the daemon or in a carrier. It
// implements sandbox.SessionServer.
type Sessions struct {
	log *slog.Logger
	// starts has an element for each program that is being started. It is nil if their number has no limit.
	starts chan struct{}

	mu      sync.Mutex
	spawner *spawner // nil until the first exec in a carrier
	// hubs holds the connection of each run's attach clients. The key is the container's first process.
	hubs map[process.ID]*hub
}

// NewSessions returns the server of the sessions in a carrier.
func NewSessions(log *slog.Logger) *Sessions { return newSessions(log, nil, 0) }

func newSessions(log *slog.Logger, sp *spawner, starts int) *Sessions {
	s := &Sessions{log: log, spawner: sp, hubs: map[process.ID]*hub{}}
	if starts > 0 {
		s.starts = make(chan struct{}, starts)
	}
	return s
}

// sessionPlan is what a session needs to know about its container and this backend.
type sessionPlan struct {
	ID     string     `json:"id"`
	Bundle string     `json:"bundle"`
	Init   process.ID `json:"init"`

	Stdin     bool `json:"stdin,omitempty"`
	StdinOnce bool `json:"stdinOnce,omitempty"`
	TTY       bool `json:"tty,omitempty"`

	ExecDir      string `json:"execDir"`
	Conmon       string `json:"conmon"`
	Runtime      string `json:"runtime"`
	RuntimeRoot  string `json:"runtimeRoot"`
	CgroupDriver string `json:"cgroupDriver"`
	CgroupParent string `json:"cgroupParent"`
}

// plan returns the plan of a running container's sessions.
func (b *Backend) plan(p *sandbox.Pod, c *sandbox.Container) (sessionPlan, error) {
	h, l, err := b.ledger.GetRun(p.ID, c.ID)
	if err != nil {
		return sessionPlan{}, err
	}
	return sessionPlan{
		ID: h.ID, Bundle: b.bundleOf(h), Init: l.init.ID,
		Stdin: c.Config.GetStdin(), StdinOnce: c.Config.GetStdinOnce(), TTY: c.Config.GetTty(),
		ExecDir: b.cfg.execDir(), Conmon: b.conmon.path, Runtime: b.runtime.path, RuntimeRoot: b.runtime.root,
		CgroupDriver: b.cfg.CgroupDriver, CgroupParent: b.cfg.CgroupParent,
	}, nil
}

// PlanSession implements sandbox.SessionPlanner.
func (b *Backend) PlanSession(_ context.Context, p *sandbox.Pod, c *sandbox.Container, _ sandbox.SessionKind) (json.RawMessage, error) {
	plan, err := b.plan(p, c)
	if err != nil {
		return nil, err
	}
	return json.Marshal(plan)
}

// Exec implements sandbox.SessionServer.
func (s *Sessions) Exec(ctx context.Context, plan []byte, req sandbox.ExecRequest) (int32, error) {
	var p sessionPlan
	if err := json.Unmarshal(plan, &p); err != nil {
		return 0, err
	}
	return s.exec(ctx, p, req)
}

// Attach implements sandbox.SessionServer.
func (s *Sessions) Attach(ctx context.Context, plan []byte, req sandbox.AttachRequest) error {
	var p sessionPlan
	if err := json.Unmarshal(plan, &p); err != nil {
		return err
	}
	init, err := p.init()
	if err != nil {
		return err
	}
	init.Close()
	return s.attach(ctx, p, req)
}

// Close disconnects the attach clients, and ends the thread that starts monitors. Sessions must not begin afterwards.
func (s *Sessions) Close() error {
	s.disconnectAll()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.spawner != nil {
		s.spawner.close()
	}
	return nil
}

// init returns the container's first process. If it has ended, the session is for an earlier run of the container.
func (p sessionPlan) init() (*process.Process, error) {
	init, err := process.Adopt(p.Init)
	if errdefs.IsNotFound(err) {
		return nil, fmt.Errorf("the container has ended: %w", errdefs.ErrFailedPrecondition)
	}
	return init, err
}

// tools returns the programs that run another program in the container.
func (s *Sessions) tools(ctx context.Context, p sessionPlan) (monitor, ociRuntime, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.spawner == nil {
		groups, err := openCgroups(p.CgroupDriver, p.CgroupParent)
		if err != nil {
			return monitor{}, ociRuntime{}, err
		}
		if s.spawner, err = newSpawner(ctx, groups); err != nil {
			return monitor{}, ociRuntime{}, err
		}
	}
	return monitor{path: p.Conmon, spawner: s.spawner},
		ociRuntime{path: p.Runtime, root: p.RuntimeRoot, systemd: p.CgroupDriver == cgroup.DriverSystemd}, nil
}

// execDir is the directory of a program that is run by exec. It is locked as long as the process that serves the
// session lives, so that another process knows when to remove it.
type execDir struct {
	path string
	lock *os.File
}

func makeExecDir(parent string) (execDir, error) {
	for {
		path, err := os.MkdirTemp(parent, "")
		if err != nil {
			return execDir{}, err
		}
		lock, err := os.Open(path)
		if err == nil {
			err = unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		}
		if err == nil {
			if _, err = os.Stat(path); err == nil {
				return execDir{path, lock}, nil
			}
		}
		_ = lock.Close()
		if !errors.Is(err, os.ErrNotExist) && !errors.Is(err, unix.EWOULDBLOCK) {
			return execDir{}, errors.Join(err, os.RemoveAll(path))
		}
		// Just now reapExecs took the directory for an abandoned one.
	}
}

func (d execDir) remove() {
	_ = os.RemoveAll(d.path)
	_ = d.lock.Close()
}

// ReapSessions implements sandbox.SessionReaper.
func (b *Backend) ReapSessions(context.Context) error { return reapExecs(b.cfg.execDir()) }

// reapExecs kills the programs whose serving process was killed, because nobody reads their output or learns their exit
// code, and removes their directories.
func reapExecs(parent string) error {
	entries, err := os.ReadDir(parent)
	if len(entries) == 0 {
		return err
	}
	abandoned := map[string]*os.File{}
	for _, e := range entries {
		path := filepath.Join(parent, e.Name())
		lock, openErr := os.Open(path)
		if openErr == nil && unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil {
			abandoned[path] = lock
			continue
		}
		_ = lock.Close()
	}
	if len(abandoned) > 0 {
		killAbandoned(abandoned)
	}
	for path, lock := range abandoned {
		err = errors.Join(err, os.RemoveAll(path), lock.Close())
	}
	return err
}

// killAbandoned kills the programs of the given directories. A directory has a PID file, but the PID may be reused, so
// the program must be the child of the conmon that names the directory in its command line.
func killAbandoned(dirs map[string]*os.File) {
	processes, _ := os.ReadDir("/proc")
	for _, e := range processes {
		conmon, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		raw, _ := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline"))
		dir, ok := execDirOf(strings.Split(string(raw), "\x00"))
		if !ok || dirs[dir] == nil {
			continue
		}
		x := execution{dir: dir}
		if pid, err := readPid(x.pidFile()); err == nil {
			if parent, err := process.ParentOf(pid); err == nil && parent == conmon {
				x.killProgram()
			}
		}
		if p, err := process.Open(conmon); err == nil {
			_ = p.KillGroup()
			p.Close()
		}
	}
}

// execDirOf returns the directory of the program that is run by the conmon with this command line.
func execDirOf(argv []string) (string, bool) {
	for i, word := range argv[:max(len(argv)-1, 0)] {
		if word == "--exec-process-spec" && filepath.Base(argv[0]) == "conmon" {
			return filepath.Dir(argv[i+1]), true
		}
	}
	return "", false
}
