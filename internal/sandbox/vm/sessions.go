package vm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/console"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// guestTime limits how long a session waits until the guest's agent answers on a session port.
const guestTime = 5 * time.Second

// endTime limits how long the failure of a program waits for the end of its machine, which may be the cause.
const endTime = 2 * time.Second

// Sessions serves the sessions of machines in a carrier. It implements sandbox.SessionServer and SessionDialer.
//
//	exec, port-forward ──▶ guest ══ sessionsN.sock ══ QEMU ══ virtio-serial ══ tripod-agent
//	attach ──────────────▶ console.Attach: the serial log and the serial input
//	port-forward 5900 ───▶ VNC server, if the machine has one
//
// The daemon has the agent's own port, which serves one client. A carrier therefore uses another port, one for all its
// sessions with a machine.
type Sessions struct {
	log *slog.Logger

	mu     sync.Mutex
	guests map[string]*guestLink // by the machine's directory
}

var (
	_ sandbox.SessionPlanner = (*Backend)(nil)
	_ sandbox.SessionServer  = (*Sessions)(nil)
	_ sandbox.SessionDialer  = (*Sessions)(nil)
)

// NewSessions returns the server of the sessions in a carrier.
func NewSessions(log *slog.Logger) *Sessions {
	return &Sessions{log: log, guests: map[string]*guestLink{}}
}

// sessionPlan is what a session needs to know about its machine.
type sessionPlan struct {
	Dir string `json:"dir"`
	// Guest means that the guest's agent serves the session ports.
	Guest      bool         `json:"guest,omitempty"`
	Env        []string     `json:"env,omitempty"`
	IPs        []netip.Addr `json:"ips,omitempty"`
	SerialLog  string       `json:"serialLog,omitempty"`
	Stdin      bool         `json:"stdin,omitempty"`
	Hypervisor process.ID   `json:"hypervisor,omitzero"`
	Screen     screen       `json:"screen,omitzero"`
}

// PlanSession implements sandbox.SessionPlanner. Only the daemon can reach an agent that does not serve the session
// ports: one of an earlier release, and qemu-guest-agent.
func (b *Backend) PlanSession(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, kind sandbox.SessionKind) (json.RawMessage, error) {
	if c == nil {
		return nil, fmt.Errorf("the machine of pod %s is not running: %w", p.ID, errdefs.ErrUnavailable)
	}
	h, l, err := b.ledger.GetRun(p.ID, c.ID)
	if err != nil {
		return nil, err
	}
	s, _ := h.Snapshot()
	plan := sessionPlan{Dir: s.Definition.Dir, Env: environment(c), IPs: p.IPs, SerialLog: s.Definition.SerialLog, Stdin: c.Config.GetStdin(), Screen: screenOf(s.Definition)}
	hypervisor, err := process.Open(s.Pid)
	if err != nil {
		return nil, fmt.Errorf("the machine has ended: %w: %w", err, errdefs.ErrFailedPrecondition)
	}
	plan.Hypervisor = hypervisor.ID
	hypervisor.Close()
	if kind == sandbox.SessionAttach {
		return json.Marshal(plan)
	}
	plan.Guest = s.Definition.SessionPorts && l.servesSessions(ctx)
	if !plan.Guest && (kind == sandbox.SessionExec || l.agent.Load() != nil && l.agent.Load().Ready()) {
		return nil, fmt.Errorf("the guest's agent serves no sessions that outlive the daemon: %w", errdefs.ErrNotImplemented)
	}
	return json.Marshal(plan)
}

// servesSessions reports whether the guest's agent serves the session ports. Right after a restart of the daemon, it
// waits for the agent.
func (l *life) servesSessions(ctx context.Context) bool {
	a := l.agent.Load()
	if a == nil {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, agentTime)
	defer cancel()
	return a.Wait(ctx) == nil && a.ServesSessions()
}

// Exec implements sandbox.SessionServer.
func (s *Sessions) Exec(ctx context.Context, plan []byte, req sandbox.ExecRequest) (int32, error) {
	var p sessionPlan
	if err := json.Unmarshal(plan, &p); err != nil {
		return 0, err
	}
	hypervisor, err := process.Adopt(p.Hypervisor)
	if err != nil {
		return 0, fmt.Errorf("exec: the machine has ended: %w: %w", err, errdefs.ErrFailedPrecondition)
	}
	defer hypervisor.Close()
	g, err := s.enter(ctx, p)
	if err != nil {
		return 0, fmt.Errorf("exec: %w", err)
	}
	defer s.leave(g)
	code, err := g.agent.Exec(ctx, agent.Command{ExecRequest: req, Env: p.Env})
	return code, execError(err, hypervisor)
}

// execError explains the failure of a program in a guest, if its machine has ended or ends within endTime.
func execError(err error, hypervisor *process.Process) error {
	if !errdefs.IsUnavailable(err) || !hypervisor.WaitFor(endTime) {
		return err
	}
	return fmt.Errorf("the machine went off while the program ran: %w", errdefs.ErrFailedPrecondition)
}

// Attach implements sandbox.SessionServer.
func (s *Sessions) Attach(ctx context.Context, plan []byte, req sandbox.AttachRequest) error {
	var p sessionPlan
	if err := json.Unmarshal(plan, &p); err != nil {
		return err
	}
	hypervisor, err := process.Adopt(p.Hypervisor)
	if err != nil {
		return fmt.Errorf("attach: the machine has ended: %w: %w", err, errdefs.ErrFailedPrecondition)
	}
	defer hypervisor.Close()
	if !p.Stdin {
		req.Stdin = nil
	}
	return console.Attach(ctx, console.Config{SerialLog: p.SerialLog, Input: filepath.Join(p.Dir, machine.SerialInput), Logger: s.log}, hypervisor.Dead, req)
}

// Dial implements sandbox.SessionDialer.
func (s *Sessions) Dial(ctx context.Context, plan []byte, network, address string) (net.Conn, error) {
	var p sessionPlan
	if err := json.Unmarshal(plan, &p); err != nil {
		return nil, err
	}
	at, err := netip.ParseAddrPort(address)
	if err != nil {
		return nil, fmt.Errorf("%q is not ADDRESS:PORT: %w", address, errdefs.ErrInvalidArgument)
	}
	if !at.Addr().IsLoopback() {
		return dial(ctx, network, at)
	}
	if p.Screen.serves(network, at) {
		return p.Screen.dial(ctx)
	}
	if !p.Guest || network != "tcp" {
		return dialPod(ctx, network, at, p.IPs)
	}
	g, err := s.enter(ctx, p)
	if err != nil {
		return nil, err
	}
	conn, err := g.agent.DialTCP(ctx, at.Port())
	if err != nil {
		s.leave(g)
		return nil, err
	}
	return &guestConn{conn.(*agent.Conn), sync.OnceFunc(func() { s.leave(g) })}, nil
}

// guestConn is a connection in the guest. Its Close leaves the guest.
type guestConn struct {
	*agent.Conn
	leave func()
}

func (c *guestConn) Close() error {
	err := c.Conn.Close()
	c.leave()
	return err
}

// guestLink is a carrier's connection to the agent of one machine, as long as it has sessions.
type guestLink struct {
	dir      string
	agent    *agent.Agent
	lock     *os.File
	sessions int
}

// enter connects to the guest's agent, unless the carrier is connected already, and counts a session.
func (s *Sessions) enter(ctx context.Context, p sessionPlan) (*guestLink, error) {
	s.mu.Lock()
	g := s.guests[p.Dir]
	if g == nil {
		lock, socket, err := lockPort(p.Dir)
		if err != nil {
			s.mu.Unlock()
			return nil, err
		}
		g = &guestLink{dir: p.Dir, agent: agent.Open(socket, s.log), lock: lock}
		s.guests[p.Dir] = g
	}
	g.sessions++
	s.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, guestTime)
	defer cancel()
	if err := g.agent.Wait(ctx); err != nil {
		s.leave(g)
		return nil, err
	}
	return g, nil
}

// leave closes the connection after its last session.
func (s *Sessions) leave(g *guestLink) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if g.sessions--; g.sessions > 0 {
		return
	}
	delete(s.guests, g.dir)
	_ = g.agent.Close()
	_ = g.lock.Close()
}

// lockPort finds a session port that no other carrier uses.
func lockPort(dir string) (lock *os.File, socket string, err error) {
	for _, name := range machine.SessionSockets {
		socket = filepath.Join(dir, name)
		lock, err = os.OpenFile(machine.LockFile(socket), os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
		if err != nil {
			return nil, "", fmt.Errorf("the machine is not running: %w: %w", err, errdefs.ErrUnavailable)
		}
		if err = unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err == nil {
			return lock, socket, nil
		}
		_ = lock.Close()
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return nil, "", err
		}
	}
	return nil, "", fmt.Errorf("sessions of %d earlier builds of tripod still use the guest's session ports; end them: %w",
		len(machine.SessionSockets), errdefs.ErrResourceExhausted)
}
