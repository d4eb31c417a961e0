package vm

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/sessions"
)

var fpUpdated = failpoint.New("vm.update-container.updated")

// agentTime bounds the wait for a session with the agent. Exec waits because, right after a restart of the daemon,
// there is no session yet.
const agentTime = 500 * time.Millisecond

// Exec implements sandbox.Execer. It uses tripod-agent. If tripod-agent does not answer, and no terminal is requested,
// Exec uses qemu-guest-agent.
func (b *Backend) Exec(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, req sandbox.ExecRequest) (int32, error) {
	h, l, err := b.ledger.GetRun(p.ID, c.ID)
	if err != nil {
		return 0, err
	}
	s, _ := h.Snapshot()
	hypervisor, err := process.Open(s.Pid)
	if err != nil {
		return 0, fmt.Errorf("exec: the machine has ended: %w: %w", err, errdefs.ErrFailedPrecondition)
	}
	defer hypervisor.Close()
	command := agent.Command{ExecRequest: req, Env: environment(c)}
	if a := l.agent.Load(); a != nil {
		waiting, cancel := context.WithTimeout(ctx, agentTime)
		err := a.Wait(waiting)
		cancel()
		if err == nil {
			code, err := a.Exec(ctx, command)
			return code, sessions.ExecError(err, hypervisor)
		}
	}
	if !req.TTY && l.qga.Ping(ctx) == nil {
		return l.qga.ExecSync(ctx, command)
	}
	return 0, fmt.Errorf("no agent answers in the guest: it has not booted yet, or has no agent. Images with cloud-init start tripod-agent from the disk "+
		"labelled TRIPODAGENT, which every machine has; other images must start it themselves, or run qemu-guest-agent (for commands without a terminal): %w", errdefs.ErrNotImplemented)
}

// environment returns the container's own variables.
func environment(c *sandbox.Container) (env []string) {
	for _, e := range c.Config.GetEnvs() {
		env = append(env, e.GetKey()+"="+string(e.GetValue()))
	}
	return env
}

// Attach implements sandbox.Attacher. It attaches to the serial console.
func (b *Backend) Attach(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, req sandbox.AttachRequest) error {
	_, l, err := b.ledger.GetRun(p.ID, c.ID)
	if err != nil {
		return err
	}
	if !c.Config.GetStdin() {
		req.Stdin = nil
	}
	return l.console.Attach(ctx, req)
}

// ReopenLog implements sandbox.LogReopener.
func (b *Backend) ReopenLog(_ context.Context, p *sandbox.Pod, c *sandbox.Container) error {
	_, l, err := b.ledger.GetRun(p.ID, c.ID)
	if err != nil {
		return err
	}
	return l.console.ReopenLog()
}

// Dial implements sandbox.Dialer. For a loopback address, the guest's agent connects inside the guest. If the agent
// does not answer, Dial connects to the same port at the pod's addresses of the same family. The VNC server takes the
// place of the guest's port vncPort.
func (b *Backend) Dial(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, network, address string) (net.Conn, error) {
	if c == nil {
		return nil, fmt.Errorf("the machine of pod %s is not running: %w", p.ID, errdefs.ErrUnavailable)
	}
	h, l, err := b.ledger.GetRun(p.ID, c.ID)
	if err != nil {
		return nil, err
	}
	at, err := netip.ParseAddrPort(address)
	if err != nil {
		return nil, fmt.Errorf("%q is not ADDRESS:PORT: %w", address, errdefs.ErrInvalidArgument)
	}
	if !at.Addr().IsLoopback() {
		return sessions.Dial(ctx, network, at)
	}
	s, _ := h.Snapshot()
	if vnc := sessions.ScreenOf(s.Definition); vnc.Serves(network, at) {
		return vnc.Dial(ctx)
	}
	if a := l.agent.Load(); a != nil && a.Ready() && network == "tcp" {
		return a.DialTCP(ctx, at.Port())
	}
	return sessions.DialPod(ctx, network, at, p.IPs)
}

// PlanSession implements sandbox.SessionPlanner. Only the daemon can reach an agent that does not serve the session
// ports: one of an earlier release, and qemu-guest-agent.
func (b *Backend) PlanSession(ctx context.Context, p *sandbox.Pod, c *sandbox.Container,
	kind sandbox.SessionKind) (json.RawMessage, error) {
	if c == nil {
		return nil, fmt.Errorf("the machine of pod %s is not running: %w", p.ID, errdefs.ErrUnavailable)
	}
	h, l, err := b.ledger.GetRun(p.ID, c.ID)
	if err != nil {
		return nil, err
	}
	s, _ := h.Snapshot()
	plan := sessions.Plan{Dir: s.Definition.Dir, Env: environment(c), IPs: p.IPs, SerialLog: s.Definition.SerialLog,
		Stdin: c.Config.GetStdin(), Screen: sessions.ScreenOf(s.Definition)}
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

// NewSessions returns the server of the machines' sessions in a carrier. It implements sandbox.SessionServer and SessionDialer.
func NewSessions(log *slog.Logger) *sessions.Server { return sessions.New(log) }
