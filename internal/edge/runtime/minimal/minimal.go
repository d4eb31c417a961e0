package minimal

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"path/filepath"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/edge/runtime"
	"github.com/tripod-run/tripod/internal/edge/wire"
)

// Type is the default runtime_type.
const Type = "linux/minimal"

// DefaultDir is the directory where public runtimes expect their socket.
const DefaultDir = "/tmp/sl"

// Variables in the program's environment.
const (
	EnvSocket = "TRIPOD_EDGE_SOCKET" // path of the socket
	EnvWire   = "TRIPOD_EDGE_WIRE"   // "wide": the manager accepts an offer of the wide header (channel.Conn.Widen)
)

// Config describes one external runtime.
type Config struct {
	// Info describes the runtime. By default, Info.Type is Type and Info.MaxModules is channel.MaxModules.
	Info runtime.Info
	// Index is the runtime's index on its node, 0 to 255. The socket's name contains the index, and the program gets
	// the index as its last argument.
	Index int
	// Dir is the directory of the sockets; DefaultDir by default. A missing directory is created. A directory that
	// other users own or can write to is refused.
	Dir string
	// Command is the program with its arguments. The index is appended.
	Command []string
	// Env is added to the daemon's environment, as NAME=value.
	Env []string

	ConnectTimeout time.Duration // from the program's start to its connection; 5 s by default
	WriteTimeout   time.Duration // for the program to read a frame; 30 s by default
	StopTimeout    time.Duration // from the Stop message to SIGKILL; 5 s by default
	MaxFrame       int           // in bytes; channel.DefaultMaxFrame by default

	Log *slog.Logger
}

// Runtime implements runtime.Runtime with an external program.
type Runtime struct {
	cfg Config

	mu     sync.Mutex
	life   *life // nil before Start and during it
	closed bool
}

var _ runtime.Runtime = (*Runtime)(nil)

// New checks the configuration. It starts nothing.
func New(cfg Config) (*Runtime, error) {
	cfg.Info.Type = cmp.Or(cfg.Info.Type, Type)
	cfg.Info.MaxModules = cmp.Or(cfg.Info.MaxModules, channel.MaxModules)
	cfg.Dir = cmp.Or(cfg.Dir, DefaultDir)
	cfg.ConnectTimeout = cmp.Or(max(cfg.ConnectTimeout, 0), 5*time.Second)
	cfg.WriteTimeout = cmp.Or(max(cfg.WriteTimeout, 0), 30*time.Second)
	cfg.StopTimeout = cmp.Or(max(cfg.StopTimeout, 0), 5*time.Second)
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	cfg.Log = cfg.Log.With("runtime", cfg.Info.Name)
	switch {
	case len(cfg.Command) == 0 || cfg.Command[0] == "":
		return nil, fmt.Errorf("runtime %q has no command: %w", cfg.Info.Name, errdefs.ErrInvalidArgument)
	case cfg.Index < 0 || cfg.Index > 0xff:
		return nil, fmt.Errorf("runtime %q has the index %d: want 0 to 255: %w", cfg.Info.Name, cfg.Index, errdefs.ErrInvalidArgument)
	case cfg.Info.MaxModules < 1 || cfg.Info.MaxModules > channel.MaxModules:
		return nil, fmt.Errorf("runtime %q has room for %d modules: want 1 to %d: %w", cfg.Info.Name, cfg.Info.MaxModules, channel.MaxModules,
			errdefs.ErrInvalidArgument)
	case !filepath.IsAbs(cfg.Dir):
		return nil, fmt.Errorf("runtime %q has its socket in %q: want an absolute path: %w", cfg.Info.Name, cfg.Dir, errdefs.ErrInvalidArgument)
	}
	return &Runtime{cfg: cfg}, nil
}

// Info implements runtime.Runtime.
func (r *Runtime) Info() runtime.Info { return r.cfg.Info }

// SocketPath returns the path of a runtime's socket. The socket's name is the index in hexadecimal.
func SocketPath(dir string, index int) string {
	return filepath.Join(dir, fmt.Sprintf("%02x.s", index))
}

// Start implements runtime.Runtime. It first ends an earlier run of the program.
func (r *Runtime) Start(ctx context.Context) (map[string]any, error) {
	r.mu.Lock()
	old, closed := r.life, r.closed
	r.life = nil
	r.mu.Unlock()
	if closed {
		return nil, fmt.Errorf("start runtime %q: it is closed: %w", r.cfg.Info.Name, errdefs.ErrFailedPrecondition)
	}
	if old != nil {
		old.end(errStartedAgain)
		<-old.ended
	}
	l, err := r.begin(ctx)
	if err != nil {
		return nil, fmt.Errorf("start runtime %q: %w", r.cfg.Info.Name, err)
	}
	r.mu.Lock()
	r.life, closed = l, r.closed
	r.mu.Unlock()
	if closed {
		l.stop(r.cfg.StopTimeout)
		return nil, fmt.Errorf("start runtime %q: it was closed meanwhile: %w", r.cfg.Info.Name, errdefs.ErrFailedPrecondition)
	}
	return nil, nil
}

func (r *Runtime) current() (*life, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.life == nil {
		return nil, fmt.Errorf("runtime %q does not run: %w", r.cfg.Info.Name, errdefs.ErrUnavailable)
	}
	return r.life, nil
}

// Send implements runtime.Runtime. For a message that does not fit in a frame, it returns errdefs.ErrInvalidArgument
// and keeps the connection.
func (r *Runtime) Send(ctx context.Context, m channel.Message) error {
	l, err := r.current()
	if err != nil {
		return err
	}
	if err := l.conn.Fits(m); err != nil {
		return err
	}
	select {
	case <-l.lost:
		return l.cause()
	default:
	}
	select {
	case l.out <- m:
		return nil
	case <-l.lost:
		return l.cause()
	case <-ctx.Done():
		return fmt.Errorf("runtime %q does not read messages: %w", r.cfg.Info.Name, ctx.Err())
	}
}

// control sends a control message to the program.
func (r *Runtime) control(ctx context.Context, index, kind int, payload []byte) error {
	return r.Send(ctx, channel.Message{Header: channel.Header{Control: true, Module: index, Arg: kind}, Payload: payload})
}

// Create implements runtime.Runtime. It does not wait for the program, because the protocol has no answer.
func (r *Runtime) Create(ctx context.Context, index int, data wire.ModuleData) error {
	return r.control(ctx, index, wire.Create, data.Bytes())
}

// Adopt implements runtime.Runtime. No module outlives the program.
func (r *Runtime) Adopt(context.Context, int, wire.ModuleData) (bool, error) { return false, nil }

// Delete implements runtime.Runtime.
func (r *Runtime) Delete(ctx context.Context, index int, _ string) error {
	return r.control(ctx, index, wire.Delete, nil)
}

// Cleanup implements runtime.Runtime. The program leaves nothing behind.
func (r *Runtime) Cleanup(context.Context, int, string) error { return nil }

// Group implements runtime.Runtime. All messages pass through the manager.
func (r *Runtime) Group(int) string { return "" }

// Stop implements runtime.Runtime. It asks the program to end.
func (r *Runtime) Stop(ctx context.Context) error { return r.control(ctx, 0, wire.Stop, nil) }

// Receive implements runtime.Runtime. Each line of the program's output becomes a message of type wire.RuntimeLog.
func (r *Runtime) Receive(ctx context.Context) (channel.Message, error) {
	l, err := r.current()
	if err != nil {
		return channel.Message{}, err
	}
	select {
	case m := <-l.in:
		return m, nil
	case <-ctx.Done():
		return channel.Message{}, ctx.Err()
	case <-l.ended:
	}
	select { // messages that arrived before the end
	case m := <-l.in:
		return m, nil
	default:
		return channel.Message{}, l.cause()
	}
}

// Close implements runtime.Runtime: it asks the program to stop, and kills it after StopTimeout.
func (r *Runtime) Close() error {
	r.mu.Lock()
	l := r.life
	r.closed = true
	r.mu.Unlock()
	if l != nil {
		l.stop(r.cfg.StopTimeout)
	}
	return nil
}
