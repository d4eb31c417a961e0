package stream

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/connlimit"
	"github.com/tripod-run/tripod/internal/fdpass"
	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/unixsocket"
)

const (
	// startTime limits how long a carrier can take to start, and planTime how long a backend can take to plan a session.
	startTime = 20 * time.Second
	planTime  = 10 * time.Second
	// orderTime limits how long a carrier can take to answer an order.
	orderTime = 2 * time.Second
	// restartPause is the pause before a carrier that has died is replaced, in case every carrier dies immediately.
	restartPause = 200 * time.Millisecond
	// carrierIdle is how long a carrier without sessions stays. It exceeds DefaultTokenTTL.
	carrierIdle = 5 * time.Minute
)

var errClosed = fmt.Errorf("%w: %w", errServerClosed, errdefs.ErrUnavailable)

// Planner finds out where sessions lead. The node implements it. ErrNotImplemented means that only the daemon can serve
// the session.
type Planner interface {
	ContainerSession(ctx context.Context, containerID string, kind sandbox.SessionKind) (sandbox.Session, error)
	PodSession(ctx context.Context, podID string) (sandbox.Session, error)
	// ReapSessions removes what the sessions of a killed carrier have left behind.
	ReapSessions(ctx context.Context)
}

// DispatcherConfig configures a Dispatcher.
type DispatcherConfig struct {
	// Address is like Config.Address.
	Address string
	// Dir is the directory of the tickets and of the carrier's socket. Only root may have access.
	Dir string
	// Command is the command line of a carrier, after the program's name and before the argument of Carry. The program
	// is this process's own.
	Command []string
	// CgroupDriver and CgroupParent are the node's; carriers run among the helpers.
	CgroupDriver, CgroupParent string
	Planner                    Planner
	// Runtime serves, in this process, the sessions that Planner cannot plan.
	Runtime Runtime
	// Connections limits the connections to Address.
	Connections connlimit.Config
	// Idle is how long a carrier without sessions stays; 5 minutes by default.
	Idle   time.Duration
	Logger *slog.Logger
}

// Dispatcher issues the URLs of sessions that a carrier serves. It starts the carrier with the first URL. A carrier
// outlives the daemon; the next daemon's Dispatcher finds it by its socket and takes it over, or lets it drain if it is
// of another build or configuration.
//
//	Dispatcher ── ticket file ──▶ carrier ◀── client
//	    ├──────── control socket ────┘            both hold the same TCP listener; only the carrier accepts
//	    └── Server, with an address of its own, for sessions that only the daemon can serve
type Dispatcher struct {
	config   DispatcherConfig
	log      *slog.Logger
	tickets  *issuer
	listener *net.TCPListener
	argument string

	starting sync.Mutex // held while a carrier starts

	mu      sync.Mutex
	carrier *process.Process // nil if none was started or found
	own     *Server          // nil until it is needed
	closed  bool
	// changed wakes Serve when there is another carrier.
	changed chan struct{}
}

// NewDispatcher takes over the carrier of the previous daemon, if there is one, and otherwise listens on the address.
func NewDispatcher(ctx context.Context, config DispatcherConfig) (*Dispatcher, error) {
	config.Address = cmp.Or(config.Address, DefaultAddress)
	if err := checkLoopback(config.Address); err != nil {
		return nil, err
	}
	argument, err := json.Marshal(carrierConfig{Tickets: filepath.Join(config.Dir, "tickets"), Idle: cmp.Or(config.Idle, carrierIdle),
		Connections: config.Connections})
	if err != nil {
		return nil, err
	}
	d := &Dispatcher{config: config, log: config.Logger.With("component", "stream"), argument: string(argument),
		changed: make(chan struct{}, 1)}
	if d.tickets, err = newIssuer(filepath.Join(config.Dir, "tickets"), DefaultTokenTTL, DefaultMaxTokens, d.log); err != nil {
		return nil, fmt.Errorf("streaming: %w", err)
	}
	if err := d.takeOver(ctx); err != nil {
		d.log.Debug("no session carrier to take over", "reason", err)
	}
	if d.listener == nil {
		if d.listener, err = listen(config.Address); err != nil {
			return nil, err
		}
	}
	d.log.Info("streaming address", "address", d.Addr(), "carrier", d.carrierPID())
	return d, nil
}

// Addr returns the address of the URLs, with the actual port.
func (d *Dispatcher) Addr() net.Addr { return d.listener.Addr() }

func (d *Dispatcher) carrierPID() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.carrier == nil {
		return 0
	}
	return d.carrier.Pid
}

// takeOver finds the carrier of a previous daemon, and takes its listener. It keeps the carrier if it is the one that
// this daemon would start, and otherwise lets it drain.
func (d *Dispatcher) takeOver(ctx context.Context) error {
	var hello carrierHello
	files, err := d.order(ctx, orderHello, &hello)
	if err != nil {
		return err
	}
	defer fdpass.CloseFiles(files)
	if len(files) != 1 {
		return fmt.Errorf("the session carrier sent %d files, not its listener", len(files))
	}
	found, err := net.FileListener(files[0])
	if err != nil {
		return err
	}
	listener, ok := found.(*net.TCPListener)
	if !ok || !sameAddress(d.config.Address, listener.Addr()) {
		_ = found.Close()
	} else {
		d.listener = listener
	}
	if d.listener != nil && d.isOurs(hello.PID) {
		d.carrier, err = process.Open(hello.PID)
		return err
	}
	d.log.Info("the session carrier is of another build or configuration; it ends with its sessions", "pid", hello.PID, "sessions",
		hello.Sessions)
	_, err = d.order(ctx, orderDrain, &hello)
	return err
}

// sameAddress reports whether a listener has the configured address. Port 0 stands for every port.
func sameAddress(configured string, have net.Addr) bool {
	host, port, _ := net.SplitHostPort(configured)
	haveHost, havePort, _ := net.SplitHostPort(have.String())
	return net.ParseIP(host).Equal(net.ParseIP(haveHost)) && (port == "0" || port == havePort)
}

// isOurs reports whether a process runs this program with the command line of our carriers.
func (d *Dispatcher) isOurs(pid int) bool {
	have, err1 := os.Stat(fmt.Sprintf("/proc/%d/exe", pid))
	want, err2 := os.Stat("/proc/self/exe")
	words, err3 := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	return errors.Join(err1, err2, err3) == nil && os.SameFile(have, want) &&
		strings.TrimSuffix(string(words), "\x00") == strings.Join(d.command(), "\x00")
}

func (d *Dispatcher) command() []string {
	return append(append([]string{"tripod"}, d.config.Command...), d.argument)
}

// order sends an order to the carrier and decodes its reply into answer.
func (d *Dispatcher) order(ctx context.Context, order string, answer any) ([]*os.File, error) {
	ctx, cancel := context.WithTimeout(ctx, orderTime)
	defer cancel()
	conn, err := unixsocket.Dial(ctx, d.controlSocket())
	if err != nil {
		return nil, err
	}
	return fdpass.Call(ctx, conn, carrierOrder{order}, answer)
}

func (d *Dispatcher) controlSocket() string { return filepath.Join(d.config.Dir, "carrier.sock") }

// Serve watches the carriers until ctx ends. It replaces a carrier that died, so that unused URLs stay valid.
func (d *Dispatcher) Serve(ctx context.Context) error {
	d.replace(ctx)
	for {
		d.mu.Lock()
		watched := d.carrier
		d.mu.Unlock()
		var dead chan struct{}
		if watched != nil {
			dead = watched.Dead
		}
		select {
		case <-ctx.Done():
			return nil
		case <-d.changed:
			continue
		case <-dead:
		}
		d.forget(watched)
		d.config.Planner.ReapSessions(ctx)
		select {
		case <-time.After(restartPause):
			d.replace(ctx)
		case <-ctx.Done():
		}
	}
}

// forget forgets a dead carrier, unless a new URL has already started another one.
func (d *Dispatcher) forget(dead *process.Process) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.carrier == dead {
		d.carrier = nil
	}
}

// replace starts a carrier if there is none and a ticket is unused.
func (d *Dispatcher) replace(ctx context.Context) {
	if !d.tickets.dir.valid() {
		return
	}
	if err := d.ensure(ctx); err != nil && ctx.Err() == nil {
		d.log.Error("cannot start the session carrier; its URLs do not work", "err", err)
	}
}

// Close ends the sessions in this process. Those of carriers go on.
func (d *Dispatcher) Close() error {
	d.mu.Lock()
	own := d.own
	d.closed = true
	d.mu.Unlock()
	err := d.listener.Close()
	if own != nil {
		err = errors.Join(err, own.Close())
	}
	return err
}

// Stats returns the figures of the connections to the streaming address. ok is false if there is no carrier.
func (d *Dispatcher) Stats(ctx context.Context) (s connlimit.Stats, ok bool) {
	if d.carrierPID() == 0 {
		return s, false
	}
	_, err := d.order(ctx, orderStats, &s)
	return s, err == nil
}

// ensure starts a carrier unless one runs.
func (d *Dispatcher) ensure(ctx context.Context) error {
	d.starting.Lock()
	defer d.starting.Unlock()
	d.mu.Lock()
	running, closed := d.carrier != nil && d.carrier.Alive(), d.closed
	d.mu.Unlock()
	if closed {
		return errClosed
	}
	if running {
		return nil
	}
	p, err := d.start(ctx)
	if err != nil {
		return fmt.Errorf("start the session carrier: %w: %w", err, errdefs.ErrUnavailable)
	}
	d.mu.Lock()
	d.carrier = p
	d.mu.Unlock()
	select {
	case d.changed <- struct{}{}:
	default:
	}
	return nil
}

// start starts a carrier and waits until it serves.
func (d *Dispatcher) start(ctx context.Context) (*process.Process, error) {
	listener, err := d.listener.File()
	if err != nil {
		return nil, err
	}
	defer listener.Close()
	control, err := unixsocket.Listen(d.controlSocket()) // a draining carrier, whose socket it replaces, needs no orders
	if err != nil {
		return nil, err
	}
	defer control.Close()
	ready, theirs, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer ready.Close()
	// Without a context, because the carrier outlives the daemon.
	cmd := exec.Command("/proc/self/exe")
	cmd.Args = d.command()
	cmd.Dir, cmd.Env = "/", carrierEnv()
	cmd.Stderr = os.Stderr
	cmd.ExtraFiles = []*os.File{listener, control, theirs} // carrierListener and the following
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	err = d.place(ctx, cmd)
	theirs.Close()
	if err != nil {
		return nil, err
	}
	p, err := process.Open(cmd.Process.Pid)
	go func() { _ = cmd.Wait() }() // reaps it
	if err == nil {
		err = awaitReady(ctx, ready)
	}
	if err != nil {
		_ = cmd.Process.Kill()
		return nil, err
	}
	d.log.Info("session carrier started", "pid", p.Pid)
	return p, nil
}

// place starts a carrier in a cgroup outside the daemon's.
func (d *Dispatcher) place(ctx context.Context, carrier *exec.Cmd) error {
	tree, err := cgroup.Open(cgroup.Defaults(d.config.CgroupDriver, d.config.CgroupParent))
	if err != nil {
		return err
	}
	helpers, err := tree.Helpers(ctx)
	if err != nil {
		return err
	}
	dir := path.Join(helpers, cgroup.Mark+"sessions")
	if err := tree.Create(dir); err != nil {
		return err
	}
	return tree.Start(carrier, dir, nil)
}

// awaitReady waits until the carrier writes to the pipe.
func awaitReady(ctx context.Context, ready *os.File) error {
	ctx, cancel := context.WithTimeout(ctx, startTime)
	defer cancel()
	defer context.AfterFunc(ctx, func() { _ = ready.SetReadDeadline(time.Unix(1, 0)) })()
	if _, err := ready.Read(make([]byte, 1)); err != nil {
		return fmt.Errorf("it ended before it was ready, its log says why: %w", cmp.Or(context.Cause(ctx), err))
	}
	return nil
}

// carrierEnv returns the daemon's environment without the variables by which service managers address the daemon.
func carrierEnv() []string {
	return slices.DeleteFunc(os.Environ(), func(v string) bool {
		name, _, _ := strings.Cut(v, "=")
		return slices.Contains([]string{"NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"}, name)
	})
}

// GetExec is like Server.GetExec.
func (d *Dispatcher) GetExec(req *runtimeapi.ExecRequest) (*runtimeapi.ExecResponse, error) {
	if err := checkExec(req); err != nil {
		return nil, err
	}
	url, err := d.containerURL(kindExec, req, req.GetContainerId())
	return &runtimeapi.ExecResponse{Url: url}, err
}

// GetAttach is like Server.GetAttach.
func (d *Dispatcher) GetAttach(req *runtimeapi.AttachRequest) (*runtimeapi.AttachResponse, error) {
	if err := checkContainer("attach", req); err != nil {
		return nil, err
	}
	url, err := d.containerURL(kindAttach, req, req.GetContainerId())
	return &runtimeapi.AttachResponse{Url: url}, err
}

// GetPortForward is like Server.GetPortForward.
func (d *Dispatcher) GetPortForward(req *runtimeapi.PortForwardRequest) (*runtimeapi.PortForwardResponse, error) {
	if err := checkPortForward(req); err != nil {
		return nil, err
	}
	url, err := d.url(kindPortForward, req, d.config.Planner.PodSession, req.GetPodSandboxId())
	return &runtimeapi.PortForwardResponse{Url: url}, err
}

func (d *Dispatcher) containerURL(kind string, req proto.Message, id string) (string, error) {
	plan := func(ctx context.Context, id string) (sandbox.Session, error) {
		return d.config.Planner.ContainerSession(ctx, id, sandbox.SessionKind(kind))
	}
	return d.url(kind, req, plan, id)
}

// url plans a session and returns its URL, at a carrier or in this process.
func (d *Dispatcher) url(kind string, req proto.Message, plan func(context.Context, string) (sandbox.Session, error),
	id string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), planTime)
	defer cancel()
	session, err := plan(ctx, id)
	if errdefs.IsNotImplemented(err) {
		own, err := d.ownServer()
		if err != nil {
			return "", err
		}
		return own.url(kind, req)
	}
	if err != nil {
		return "", err
	}
	token, err := d.tickets.issue(kind, req, session)
	if err != nil {
		return "", err
	}
	return sessionURL(d.Addr(), kind, token), d.ensure(context.Background())
}

// ownServer returns the server of the sessions that only this process can serve. It listens on a port of its own.
func (d *Dispatcher) ownServer() (*Server, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil, errClosed
	}
	if d.own != nil {
		return d.own, nil
	}
	host, _, _ := net.SplitHostPort(d.config.Address)
	limits := d.config.Connections
	own, err := New(Config{
		Address: net.JoinHostPort(host, "0"), Runtime: d.config.Runtime, Logger: d.config.Logger,
		Connections: connlimit.NewGroup(d.log).Limiter("streaming", limits),
	})
	if err != nil {
		return nil, err
	}
	go func() {
		if err := own.Serve(context.Background()); err != nil {
			d.log.Error("streaming in the daemon failed", "err", err)
		}
	}()
	d.own = own
	return own, nil
}
