package linux

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/oci"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/spec"
	"github.com/tripod-run/tripod/internal/stream"
)

// disconnectTime limits how long Close waits for conmons to notice that the hubs disconnect.
const disconnectTime = time.Second

// Exec implements sandbox.Execer.
func (b *Backend) Exec(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, req sandbox.ExecRequest) (int32, error) {
	plan, err := b.plan(p, c)
	if err != nil {
		return 0, err
	}
	return b.sessions.exec(ctx, plan, req)
}

// exec runs a program in a container.
func (s *Sessions) exec(ctx context.Context, p sessionPlan, req sandbox.ExecRequest) (int32, error) {
	m, rt, err := s.tools(ctx, p)
	if err != nil {
		return 0, err
	}
	config, err := readConfig(p.Bundle)
	if err != nil {
		return 0, err
	}
	program, err := spec.Process(spec.ExecInput{Spec: config, Cmd: req.Cmd, TTY: req.TTY})
	if err != nil {
		return 0, err
	}
	init, err := p.init()
	if err != nil {
		return 0, err
	}
	defer init.Close()
	return m.Exec(ctx, rt, oci.ExecInput{ID: p.ID, Init: init, Dir: p.ExecDir, Process: program, Request: req, Begin: s.beginStart})
}

// beginStart waits until a program may be started. The caller calls the returned function when the program has started, or will
// not start.
func (s *Sessions) beginStart(ctx context.Context) (started func(), err error) {
	if s.starts == nil {
		return func() {}, nil
	}
	select {
	case s.starts <- struct{}{}:
		return sync.OnceFunc(func() { <-s.starts }), nil
	case <-ctx.Done():
		return nil, fmt.Errorf("exec: wait for programs that are being started: %w", context.Cause(ctx))
	}
}

// Attach implements sandbox.Attacher.
func (b *Backend) Attach(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, req sandbox.AttachRequest) error {
	plan, err := b.plan(p, c)
	if err != nil {
		return err
	}
	return b.sessions.attach(ctx, plan, req)
}

// attach connects a client to a container's stdio. A client that does not read its output cannot block the container:
// once the client's backlog reaches stream.MaxBacklog, the client is disconnected with errdefs.ErrResourceExhausted.
// After attach returns, a read of req.Stdin or a write to req.Stdout or req.Stderr can still be in progress.
func (s *Sessions) attach(ctx context.Context, p sessionPlan, req sandbox.AttachRequest) error {
	hub, client, err := s.join(ctx, p)
	if err != nil {
		return err
	}
	following, stop := context.WithCancel(ctx)
	defer stop()
	go oci.FollowSize(req.Resize, following.Done(), func(size sandbox.TermSize) {
		if err := oci.Resize(p.Bundle, size); err != nil {
			s.log.Debug("resize an attached terminal", "container", p.ID, "err", err)
		}
	})
	stdin, stderr := req.Stdin, req.Stderr
	if !p.Stdin {
		stdin = nil
	}
	if req.TTY {
		stderr = req.Stdout
	}
	return hub.Serve(ctx, client, stdin, req.Stdout, stderr)
}

// join adds a client to the run's hub, or to a new hub if no hub accepts clients.
func (s *Sessions) join(ctx context.Context, p sessionPlan) (*oci.Hub, *stream.OutputQueue, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	previous := make(chan struct{})
	if old := s.hubs[p.Init]; old == nil {
		close(previous)
	} else {
		if client := old.Add(); client != nil {
			return old, client, nil
		}
		previous = old.Disconnected
	}
	hub, client, err := oci.Attach(ctx, p.Bundle, oci.Stdio{Stdin: p.Stdin, StdinOnce: p.StdinOnce, TTY: p.TTY}, previous)
	if err != nil {
		return nil, nil, err
	}
	s.hubs[p.Init] = hub
	go func() {
		<-hub.Disconnected
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.hubs[p.Init] == hub {
			delete(s.hubs, p.Init)
		}
	}()
	return hub, client, nil
}

// disconnectAll disconnects all hubs and waits at most disconnectTime for them.
func (s *Sessions) disconnectAll() {
	s.mu.Lock()
	hubs := slices.Collect(maps.Values(s.hubs))
	s.mu.Unlock()
	limit := time.After(disconnectTime)
	for _, hub := range hubs {
		go hub.Disconnect()
	}
	for _, hub := range hubs {
		select {
		case <-hub.Disconnected:
		case <-limit:
			return
		}
	}
}

// Sessions serves exec and attach sessions of running containers from plans, in the daemon or in a carrier. It
// implements sandbox.SessionServer.
type Sessions struct {
	log *slog.Logger
	// starts has an element for each program that is being started. It is nil if their number has no limit.
	starts chan struct{}

	mu      sync.Mutex
	spawner *oci.Spawner // nil until the first exec in a carrier
	// hubs holds the connection of each run's attach clients. The key is the container's first process.
	hubs map[process.ID]*oci.Hub
}

// NewSessions returns the server of the sessions in a carrier.
func NewSessions(log *slog.Logger) *Sessions { return newSessions(log, nil, 0) }

func newSessions(log *slog.Logger, sp *oci.Spawner, starts int) *Sessions {
	s := &Sessions{log: log, spawner: sp, hubs: map[process.ID]*oci.Hub{}}
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
		ID: h.ID, Bundle: b.bundleOf(h), Init: l.Init.ID,
		Stdin: c.Config.GetStdin(), StdinOnce: c.Config.GetStdinOnce(), TTY: c.Config.GetTty(),
		ExecDir: b.cfg.execDir(), Conmon: b.conmon.Path, Runtime: b.runtime.Path, RuntimeRoot: b.runtime.StateDir,
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
		s.spawner.Close()
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
func (s *Sessions) tools(ctx context.Context, p sessionPlan) (oci.Monitor, oci.Runtime, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.spawner == nil {
		groups, err := openCgroups(p.CgroupDriver, p.CgroupParent)
		if err != nil {
			return oci.Monitor{}, oci.Runtime{}, err
		}
		if s.spawner, err = oci.NewSpawner(ctx, groups.Tree); err != nil {
			return oci.Monitor{}, oci.Runtime{}, err
		}
	}
	return oci.Monitor{Path: p.Conmon, Spawner: s.spawner},
		oci.Runtime{Path: p.Runtime, StateDir: p.RuntimeRoot, Systemd: p.CgroupDriver == cgroup.DriverSystemd}, nil
}

// ReapSessions implements sandbox.SessionReaper.
func (b *Backend) ReapSessions(context.Context) error { return oci.ReapExecs(b.cfg.execDir()) }
