package sessions

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

// Server serves the sessions of machines in a carrier. It implements sandbox.SessionServer and SessionDialer.
//
//	exec, port-forward ──▶ guest ══ sessionsN.sock ══ QEMU ══ virtio-serial ══ tripod-agent
//	attach ──────────────▶ console.Attach: the serial log and the serial input
//	port-forward 5900 ───▶ VNC server, if the machine has one
//
// The daemon has the agent's own port, which serves one client. A carrier therefore uses another port, one for all its
// sessions with a machine.
type Server struct {
	log *slog.Logger

	mu     sync.Mutex
	guests map[string]*guestLink // by the machine's directory
}

var (
	_ sandbox.SessionServer = (*Server)(nil)
	_ sandbox.SessionDialer = (*Server)(nil)
)

// New returns the server of the sessions in a carrier.
func New(log *slog.Logger) *Server {
	return &Server{log: log, guests: map[string]*guestLink{}}
}

// Plan is what a session needs to know about its machine.
type Plan struct {
	Dir string `json:"dir"`
	// Guest means that the guest's agent serves the session ports.
	Guest      bool         `json:"guest,omitempty"`
	Env        []string     `json:"env,omitempty"`
	IPs        []netip.Addr `json:"ips,omitempty"`
	SerialLog  string       `json:"serialLog,omitempty"`
	Stdin      bool         `json:"stdin,omitempty"`
	Hypervisor process.ID   `json:"hypervisor,omitzero"`
	Screen     Screen       `json:"screen,omitzero"`
}

// Exec implements sandbox.SessionServer.
func (s *Server) Exec(ctx context.Context, plan []byte, req sandbox.ExecRequest) (int32, error) {
	var p Plan
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
	return code, ExecError(err, hypervisor)
}

// ExecError explains the failure of a program in a guest, if its machine has ended or ends within endTime.
func ExecError(err error, hypervisor *process.Process) error {
	if !errdefs.IsUnavailable(err) || !hypervisor.WaitFor(endTime) {
		return err
	}
	return fmt.Errorf("the machine went off while the program ran: %w", errdefs.ErrFailedPrecondition)
}

// Attach implements sandbox.SessionServer.
func (s *Server) Attach(ctx context.Context, plan []byte, req sandbox.AttachRequest) error {
	var p Plan
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
	return console.Attach(ctx, console.Config{SerialLog: p.SerialLog, Input: filepath.Join(p.Dir, machine.SerialInput), Logger: s.log},
		hypervisor.Dead, req)
}

// Dial implements sandbox.SessionDialer.
func (s *Server) Dial(ctx context.Context, plan []byte, network, address string) (net.Conn, error) {
	var p Plan
	if err := json.Unmarshal(plan, &p); err != nil {
		return nil, err
	}
	at, err := netip.ParseAddrPort(address)
	if err != nil {
		return nil, fmt.Errorf("%q is not ADDRESS:PORT: %w", address, errdefs.ErrInvalidArgument)
	}
	if !at.Addr().IsLoopback() {
		return Dial(ctx, network, at)
	}
	if p.Screen.Serves(network, at) {
		return p.Screen.Dial(ctx)
	}
	if !p.Guest || network != "tcp" {
		return DialPod(ctx, network, at, p.IPs)
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
func (s *Server) enter(ctx context.Context, p Plan) (*guestLink, error) {
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
func (s *Server) leave(g *guestLink) {
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

// DialPod connects to a port of the guest's localhost without an agent: at the pod's addresses of the same family.
func DialPod(ctx context.Context, network string, at netip.AddrPort, ips []netip.Addr) (net.Conn, error) {
	failed := fmt.Errorf("the guest has no agent to connect to port %d on its localhost: %w", at.Port(), errdefs.ErrUnavailable)
	for _, ip := range ips {
		if ip.Is4() != at.Addr().Is4() {
			continue
		}
		conn, err := Dial(ctx, network, netip.AddrPortFrom(ip, at.Port()))
		if err == nil {
			return conn, nil
		}
		failed = fmt.Errorf("%w; at the pod's address: %w", failed, err)
	}
	return nil, failed
}

// Dial connects to an address outside the guest's localhost. Its errors are errdefs.ErrUnavailable.
func Dial(ctx context.Context, network string, at netip.AddrPort) (net.Conn, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, network, at.String())
	if err != nil {
		return nil, fmt.Errorf("%w: %w", err, errdefs.ErrUnavailable)
	}
	return conn, nil
}
