package stream

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/connlimit"
	"github.com/tripod-run/tripod/internal/sandbox"
)

// Runtime is what sessions are made of. Implemented by the node.
type Runtime interface {
	// Exec runs a program in a container, as sandbox.Execer has it.
	Exec(ctx context.Context, containerID string, req sandbox.ExecRequest) (exitCode int32, err error)
	// Attach joins a container's stdio, as sandbox.Attacher has it.
	Attach(ctx context.Context, containerID string, req sandbox.AttachRequest) error
	// PortForward joins stream with a port of a pod until one of the two ends, or ctx does.
	PortForward(ctx context.Context, podID string, port int32, stream io.ReadWriteCloser) error
}

// Defaults of Config.
const (
	DefaultAddress         = "127.0.0.1:0"
	DefaultIdleTimeout     = 4 * time.Hour
	DefaultCreationTimeout = 30 * time.Second
	DefaultTokenTTL        = time.Minute
	DefaultMaxTokens       = 1000
)

// closeWait is how long Close waits for sessions to end.
const closeWait = 5 * time.Second

// Config is what a Server needs. Zero values are the defaults; Runtime has none.
type Config struct {
	// Address is a loopback IP address and a TCP port, 0 for any. Others are refused: sessions are not encrypted,
	// and the kubelet, which is the server's client, is on the same machine.
	Address string
	Runtime Runtime
	// Logger gets sessions' beginnings and ends at debug level, and what klog-using libraries say.
	Logger *slog.Logger
	// IdleTimeout ends a session in which nothing was sent for so long.
	IdleTimeout time.Duration
	// CreationTimeout is how long an SPDY client may take to open its streams.
	CreationTimeout time.Duration
	// TokenTTL is how long a URL may be used, MaxTokens how many unused ones there may be.
	TokenTTL  time.Duration
	MaxTokens int
	// Connections bounds those of Address; nil: by its defaults.
	Connections *connlimit.Limiter
}

// FilesPerSession is how many descriptors a session holds: its connection, and the program's pipes or terminal.
const FilesPerSession = 8

// Server serves exec, attach and port-forward sessions. Its URLs work as soon as New returns, once Serve runs.
type Server struct {
	config   Config
	log      *slog.Logger
	tokens   *tokens
	listener net.Listener
	http     *http.Server
	ctx      context.Context // its end is that of all sessions
	cancel   context.CancelCauseFunc

	mu       sync.Mutex // orders the beginning of sessions with the end of ctx
	sessions sync.WaitGroup
}

var errServerClosed = errors.New("the streaming server was closed")

// New listens on config.Address. An address that is not loopback is an errdefs.ErrInvalidArgument.
// The server must be closed even if Serve is never called.
func New(config Config) (*Server, error) {
	config.Address = cmp.Or(config.Address, DefaultAddress)
	config.Logger = cmp.Or(config.Logger, slog.Default())
	config.IdleTimeout = cmp.Or(config.IdleTimeout, DefaultIdleTimeout)
	config.CreationTimeout = cmp.Or(config.CreationTimeout, DefaultCreationTimeout)
	config.TokenTTL = cmp.Or(config.TokenTTL, DefaultTokenTTL)
	config.MaxTokens = cmp.Or(config.MaxTokens, DefaultMaxTokens)
	if config.Connections == nil {
		config.Connections = connlimit.NewGroup(config.Logger).Limiter("streaming", connlimit.Config{Files: FilesPerSession})
	}
	if config.Runtime == nil {
		return nil, fmt.Errorf("streaming server without a Runtime: %w", errdefs.ErrInvalidArgument)
	}
	if err := checkLoopback(config.Address); err != nil {
		return nil, err
	}
	listener, err := net.Listen("tcp", config.Address)
	if err != nil {
		return nil, fmt.Errorf("streaming server on %s: %w", config.Address, err)
	}
	routeKlog(config.Logger)
	s := &Server{
		config:   config,
		log:      config.Logger.With("component", "stream"),
		tokens:   newTokens(config.TokenTTL, config.MaxTokens),
		listener: config.Connections.Listener(listener),
	}
	s.ctx, s.cancel = context.WithCancelCause(context.Background())
	s.http = config.Connections.HTTPServer(s.routes())
	s.http.BaseContext = func(net.Listener) context.Context { return s.ctx }
	s.http.ErrorLog = slog.NewLogLogger(s.log.Handler(), slog.LevelDebug)
	return s, nil
}

func checkLoopback(address string) error {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return fmt.Errorf("streaming address %q: %w: give an IP address and a port, e.g. %s: %w", address, err, DefaultAddress, errdefs.ErrInvalidArgument)
	}
	if ip := net.ParseIP(host); ip == nil || !ip.IsLoopback() {
		return fmt.Errorf("streaming address %q is not a loopback IP address: sessions are not encrypted, use e.g. %s: %w", address, DefaultAddress, errdefs.ErrInvalidArgument)
	}
	return nil
}

// Addr is the address that the server listens on, with the port it was given.
func (s *Server) Addr() net.Addr { return s.listener.Addr() }

// Serve serves until ctx ends or Close is called, and then closes the server. It returns nil in both cases.
func (s *Server) Serve(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { s.Close() })
	defer stop()
	s.log.Info("streaming server listens", "address", s.Addr())
	if err := s.http.Serve(s.listener); !errors.Is(err, http.ErrServerClosed) {
		return errors.Join(fmt.Errorf("streaming server on %s: %w", s.Addr(), err), s.Close())
	}
	return s.Close()
}

// Close stops listening, ends all sessions and waits for them, a few seconds at most: a runtime that is stuck must not
// hold up the end of the daemon.
func (s *Server) Close() error {
	s.mu.Lock()
	s.cancel(errServerClosed)
	s.mu.Unlock()
	err := s.http.Close()
	// Serve may never have been called; then the listener is not known to s.http.
	if lerr := s.listener.Close(); lerr != nil && !errors.Is(lerr, net.ErrClosed) {
		err = errors.Join(err, lerr)
	}
	ended := make(chan struct{})
	go func() {
		s.sessions.Wait()
		close(ended)
	}()
	timer := time.NewTimer(closeWait)
	defer timer.Stop()
	select {
	case <-ended:
		return err
	case <-timer.C:
		return errors.Join(err, fmt.Errorf("streaming sessions did not end within %s of being told to", closeWait))
	}
}

// enter counts a session in, unless the server is closed; the session counts itself out.
func (s *Server) enter() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ctx.Err() != nil {
		return false
	}
	s.sessions.Add(1)
	return true
}

// GetExec checks the request and returns a URL for it. The errors are errdefs.ErrInvalidArgument and, with too many
// URLs unused, ErrResourceExhausted.
func (s *Server) GetExec(req *runtimeapi.ExecRequest) (*runtimeapi.ExecResponse, error) {
	if err := checkContainer("exec", req); err != nil {
		return nil, err
	}
	if len(req.GetCmd()) == 0 {
		return nil, invalid("exec: cmd is empty: name a program")
	}
	url, err := s.url(kindExec, req)
	if err != nil {
		return nil, err
	}
	return &runtimeapi.ExecResponse{Url: url}, nil
}

// GetAttach is GetExec for attach.
func (s *Server) GetAttach(req *runtimeapi.AttachRequest) (*runtimeapi.AttachResponse, error) {
	if err := checkContainer("attach", req); err != nil {
		return nil, err
	}
	url, err := s.url(kindAttach, req)
	if err != nil {
		return nil, err
	}
	return &runtimeapi.AttachResponse{Url: url}, nil
}

// GetPortForward is GetExec for port-forward. Ports may be empty: SPDY clients name them for each connection.
func (s *Server) GetPortForward(req *runtimeapi.PortForwardRequest) (*runtimeapi.PortForwardResponse, error) {
	if req.GetPodSandboxId() == "" {
		return nil, invalid("port-forward: pod_sandbox_id is empty")
	}
	for _, port := range req.GetPort() {
		if !validPort(port) {
			return nil, invalid("port-forward: port %d is not between 1 and 65535", port)
		}
	}
	url, err := s.url(kindPortForward, req)
	if err != nil {
		return nil, err
	}
	return &runtimeapi.PortForwardResponse{Url: url}, nil
}

func (s *Server) url(kind string, req any) (string, error) {
	token, err := s.tokens.issue(kind, req)
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("http://%s/%s/%s", s.Addr(), kind, token), nil
}

// stdioRequest is what exec and attach requests have in common.
type stdioRequest interface {
	GetContainerId() string
	GetTty() bool
	GetStdin() bool
	GetStdout() bool
	GetStderr() bool
}

func checkContainer(what string, req stdioRequest) error {
	switch {
	case req.GetContainerId() == "":
		return invalid("%s: container_id is empty", what)
	case req.GetTty() && req.GetStderr():
		return invalid("%s: tty and stderr exclude each other: a terminal has one output", what)
	case !req.GetStdin() && !req.GetStdout() && !req.GetStderr():
		return invalid("%s: none of stdin, stdout and stderr is asked for", what)
	}
	return nil
}

func invalid(format string, args ...any) error {
	return fmt.Errorf("%s: %w", fmt.Sprintf(format, args...), errdefs.ErrInvalidArgument)
}

func validPort(port int32) bool { return port >= 1 && port <= 65535 }
