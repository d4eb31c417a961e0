package nri

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/nri/pkg/adaptation"
	"github.com/containerd/nri/pkg/api"
	nrilog "github.com/containerd/nri/pkg/log"
	"github.com/containerd/ttrpc"
	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/node"
)

// Config configures the plugins.
type Config struct {
	// Socket is the path of the socket to which plugins connect; empty if they must not connect.
	Socket string
	// PluginPath is the directory of the plugins that Start launches; ConfigPath that of their configurations.
	PluginPath, ConfigPath string
	// RegistrationTimeout bounds the time between a plugin's connection and its registration, SynchronizationTimeout its
	// answer to the pods and containers that were there before it, and RequestTimeout every other answer. A plugin that
	// exceeds one of them is disconnected.
	RegistrationTimeout, SynchronizationTimeout, RequestTimeout time.Duration
	// Version is the daemon's version, which plugins learn.
	Version string
	Logger  *slog.Logger
}

// Node is the part of the node that plugins reach. *node.Node implements it.
type Node interface {
	// Records lists the pods, including those that are being made or removed.
	Records() []*node.Pod
	Spec(p *node.Pod, c *node.Container) (*specs.Spec, error)
	UpdateForPlugin(ctx context.Context, id string, res *runtimeapi.LinuxContainerResources) error
	StopContainer(ctx context.Context, id string, grace time.Duration) error
}

// Plugins are the connected plugins. It implements node.Hooks. Until Start, all hooks succeed without an effect.
type Plugins struct {
	cfg  Config
	log  *slog.Logger
	node Node

	adaptation *adaptation.Adaptation
	started    atomic.Bool
	// connected is the number of plugins that are called. syncing means that one more may be about to be called.
	connected atomic.Int64
	syncing   atomic.Bool

	// turn is held while plugins are called, and guards known.
	turn  chan struct{}
	known map[string]*subject

	peers peers
	calls calls
}

var (
	_ node.Hooks         = (*Plugins)(nil)
	_ Node               = (*node.Node)(nil)
	_ adaptation.Metrics = (*Plugins)(nil)
)

// New returns the plugins' hooks for a node that is yet to be opened.
func New(c Config) *Plugins {
	return &Plugins{cfg: c, log: c.Logger, turn: make(chan struct{}, 1), known: map[string]*subject{}, calls: newCalls()}
}

// Start launches the installed plugins, synchronises them with the node's pods, and lets other plugins connect. If it
// returns an error, the node works without the plugins that the error is about.
func (x *Plugins) Start(n Node) error {
	useLog(x.log)
	adaptation.SetPluginRegistrationTimeout(x.cfg.RegistrationTimeout)
	adaptation.SetPluginRequestTimeout(x.cfg.RequestTimeout)
	options := []adaptation.Option{
		adaptation.WithPluginPath(x.cfg.PluginPath), adaptation.WithPluginConfigPath(x.cfg.ConfigPath), adaptation.WithSocketPath(x.cfg.Socket),
		adaptation.WithMetrics(x), adaptation.WithTTRPCOptions(nil, []ttrpc.ServerOpt{
			ttrpc.WithServerHandshaker(&x.peers), ttrpc.WithUnaryServerInterceptor(x.peers.intercept),
		}),
	}
	taken := socketTaken(x.cfg.Socket)
	if x.cfg.Socket == "" || taken != nil {
		options = append(options, adaptation.WithDisabledExternalConnections())
	}
	a, err := adaptation.New("tripod", x.cfg.Version, x.synchronize, x.updateUnsolicited, options...)
	if err != nil {
		return fmt.Errorf("node plugins (NRI): %w", err)
	}
	x.adaptation, x.node = a, n
	x.turn <- struct{}{}
	defer func() { <-x.turn }()
	x.learn(n.Records())
	x.started.Store(true)
	if err := a.Start(); err != nil {
		return errors.Join(taken, fmt.Errorf("node plugins (NRI): %w", err))
	}
	if x.cfg.Socket != "" && taken == nil {
		if err := os.Chmod(x.cfg.Socket, 0o600); err != nil {
			return fmt.Errorf("node plugins (NRI): %w", err)
		}
	}
	return taken
}

// socketTaken returns an error if another process serves the socket. Another runtime of the node keeps its plugins.
func socketTaken(path string) error {
	if path == "" {
		return nil
	}
	conn, err := net.DialTimeout("unix", path, time.Second)
	if err != nil {
		return nil
	}
	return errors.Join(fmt.Errorf("node plugins (NRI) cannot connect: another process serves %s; set nri.socket to another path: %w",
		path, errdefs.ErrUnavailable), conn.Close())
}

// Close disconnects from the plugins and ends those that Start launched.
func (x *Plugins) Close() error {
	if !x.started.Swap(false) {
		return nil
	}
	x.adaptation.Stop()
	if err := os.Remove(x.cfg.Socket); err != nil && !errors.Is(err, fs.ErrNotExist) && x.cfg.Socket != "" {
		return err
	}
	return nil
}

// Names lists the connected plugins as index-name, in the order in which they are called.
func (x *Plugins) Names() []string { return x.peers.names() }

// Active implements node.Hooks.
func (x *Plugins) Active() bool {
	return x.started.Load() && (x.connected.Load() > 0 || x.syncing.Load())
}

// peers knows the names of the connected plugins. The adaptation accepts one connection after the other, so a plugin
// that registers uses the newest connection.
type peers struct {
	mu     sync.Mutex
	newest *peer
	all    []*peer
}

// peer is the connection over which a plugin calls us.
type peer struct {
	net.Conn
	peers *peers
	name  string // index-name; empty until the plugin registers
}

// Handshake implements ttrpc.Handshaker.
func (ps *peers) Handshake(_ context.Context, conn net.Conn) (net.Conn, any, error) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	ps.newest = &peer{Conn: conn, peers: ps}
	return ps.newest, nil, nil
}

// intercept notes the names of plugins that register.
func (ps *peers) intercept(ctx context.Context, unmarshal ttrpc.Unmarshaler, _ *ttrpc.UnaryServerInfo, method ttrpc.Method) (any, error) {
	return method(ctx, func(message any) error {
		err := unmarshal(message)
		if r, ok := message.(*api.RegisterPluginRequest); ok && err == nil {
			ps.register(r.GetPluginIdx() + "-" + r.GetPluginName())
		}
		return err
	})
}

func (ps *peers) register(name string) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	if p := ps.newest; p != nil && p.name == "" {
		p.name = name
		ps.all = append(ps.all, p)
	}
}

func (p *peer) Close() error {
	p.peers.mu.Lock()
	p.peers.all = slices.DeleteFunc(p.peers.all, func(other *peer) bool { return other == p })
	p.peers.mu.Unlock()
	return p.Conn.Close()
}

func (ps *peers) names() []string {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	var names []string
	for _, p := range ps.all {
		names = append(names, p.name)
	}
	slices.Sort(names)
	return names
}

// libraryLog is the log to which the NRI library writes. The library has one for the whole process, and reads it even after
// the plugins of a node have been closed, so it is set once and passes lines on.
var libraryLog atomic.Pointer[slog.Logger]

var setLibraryLog = sync.OnceFunc(func() { nrilog.Set(logger{}) })

func useLog(l *slog.Logger) {
	libraryLog.Store(l)
	setLibraryLog()
}

// logger implements the NRI library's interface.
type logger struct{}

func (logger) Debugf(ctx context.Context, format string, args ...any) {
	libraryLog.Load().DebugContext(ctx, fmt.Sprintf(format, args...))
}

func (logger) Infof(ctx context.Context, format string, args ...any) {
	libraryLog.Load().InfoContext(ctx, fmt.Sprintf(format, args...))
}

func (logger) Warnf(ctx context.Context, format string, args ...any) {
	libraryLog.Load().WarnContext(ctx, fmt.Sprintf(format, args...))
}

func (logger) Errorf(ctx context.Context, format string, args ...any) {
	libraryLog.Load().ErrorContext(ctx, fmt.Sprintf(format, args...))
}
