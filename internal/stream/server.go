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
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/connlimit"
	"github.com/tripod-run/tripod/internal/sandbox"
)

// Runtime performs the work of sessions. The node implements it.
type Runtime interface {
	// Exec runs a program in a container; see sandbox.Execer.
	Exec(ctx context.Context, containerID string, req sandbox.ExecRequest) (exitCode int32, err error)
	// Attach connects to a container's stdio; see sandbox.Attacher.
	Attach(ctx context.Context, containerID string, req sandbox.AttachRequest) error
	// PortForward connects stream to a port of a pod, until stream or the connection to the port closes, or ctx ends.
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

// closeWait limits how long Close waits for sessions to end.
const closeWait = 5 * time.Second

// Config configures a Server. Runtime is required. Other fields that are zero get their defaults.
type Config struct {
	// Address is a loopback IP address and a TCP port; port 0 means any free port. Other addresses are refused, because
	// sessions are not encrypted. The server's client, the kubelet, is on the same machine.
	Address string
	Runtime Runtime
	// Logger logs the end of each session at debug level. It also gets the messages of libraries that use klog.
	Logger *slog.Logger
	// IdleTimeout ends a session that has had no traffic for this time.
	IdleTimeout time.Duration
	// CreationTimeout limits how long an SPDY client may take to open its streams.
	CreationTimeout time.Duration
	// TokenTTL is the lifetime of an unused URL. MaxTokens limits the number of unused URLs.
	TokenTTL  time.Duration
	MaxTokens int
	// Connections limits the connections to Address; nil means the defaults of connlimit.
	Connections *connlimit.Limiter
}

// FilesPerSession is the number of descriptors that a session needs for its connection and the program's pipes or
// terminal.
const FilesPerSession = 8

// Server serves exec, attach and port-forward sessions. Its URLs work as soon as Serve runs.
type Server struct {
	config   Config
	log      *slog.Logger
	tokens   *tokens // issued by this process; nil in a carrier
	redeem   redeemer
	listener net.Listener
	http     *http.Server
	ctx      context.Context // the parent of all sessions' contexts
	cancel   context.CancelCauseFunc

	mu       sync.Mutex // held to start a session and to cancel ctx, so that no session starts after the cancellation
	sessions sync.WaitGroup
	open     atomic.Int64  // sessions that have not ended
	draining atomic.Bool   // Drain was called
	drained  chan struct{} // closed by Drain when no more sessions can begin
}

// redeemer returns the request that a token was issued for, and the runtime that serves it. It returns false if the
// token is unknown, used, expired, or of another kind.
type redeemer func(kind, token string) (req any, rt Runtime, ok bool)

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
	if config.Runtime == nil {
		return nil, fmt.Errorf("streaming server without a Runtime: %w", errdefs.ErrInvalidArgument)
	}
	listener, err := listen(config.Address)
	if err != nil {
		return nil, err
	}
	tokens := newTokens(config.TokenTTL, config.MaxTokens)
	s := newServer(config, listener, func(kind, token string) (any, Runtime, bool) {
		req, ok := tokens.redeem(kind, token)
		return req, config.Runtime, ok
	})
	s.tokens = tokens
	return s, nil
}

func newServer(config Config, listener net.Listener, redeem redeemer) *Server {
	if config.Connections == nil {
		config.Connections = connlimit.NewGroup(config.Logger).Limiter("streaming", connlimit.Config{Files: FilesPerSession})
	}
	routeKlog(config.Logger)
	s := &Server{
		config:   config,
		log:      config.Logger.With("component", "stream"),
		redeem:   redeem,
		listener: config.Connections.Listener(listener),
		drained:  make(chan struct{}),
	}
	s.ctx, s.cancel = context.WithCancelCause(context.Background())
	s.http = config.Connections.HTTPServer(s.routes())
	s.http.BaseContext = func(net.Listener) context.Context { return s.ctx }
	s.http.ErrorLog = slog.NewLogLogger(s.log.Handler(), slog.LevelDebug)
	return s
}

// listen listens on a loopback address.
func listen(address string) (*net.TCPListener, error) {
	if err := checkLoopback(address); err != nil {
		return nil, err
	}
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("streaming server on %s: %w", address, err)
	}
	return listener.(*net.TCPListener), nil
}

func checkLoopback(address string) error {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return fmt.Errorf("streaming address %q: %w: give an IP address and a port, e.g. %s: %w", address, err, DefaultAddress,
			errdefs.ErrInvalidArgument)
	}
	if ip := net.ParseIP(host); ip == nil || !ip.IsLoopback() {
		return fmt.Errorf("streaming address %q is not a loopback IP address: sessions are not encrypted, use e.g. %s: %w", address,
			DefaultAddress, errdefs.ErrInvalidArgument)
	}
	return nil
}

// Addr returns the address that the server listens on, with the actual port.
func (s *Server) Addr() net.Addr { return s.listener.Addr() }

// Serve serves until ctx ends or Close is called, and then closes the server. In both cases it returns nil.
func (s *Server) Serve(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { s.Close() })
	defer stop()
	s.log.Info("streaming server listens", "address", s.Addr())
	if err := s.http.Serve(s.listener); !errors.Is(err, http.ErrServerClosed) {
		return errors.Join(fmt.Errorf("streaming server on %s: %w", s.Addr(), err), s.Close())
	}
	if s.draining.Load() {
		<-s.drained
		s.sessions.Wait()
	}
	return s.Close()
}

// Drain stops listening. Serve then returns as soon as all sessions have ended.
func (s *Server) Drain() {
	if s.draining.Swap(true) {
		return
	}
	go func() {
		defer close(s.drained)
		// Shutdown closes the listener at once. Its wait is for connections whose request has not arrived yet.
		_ = s.http.Shutdown(s.ctx)
	}()
}

// Close stops listening and ends all sessions. It waits up to closeWait for the sessions to end, and no longer, because
// a runtime may be stuck.
func (s *Server) Close() error {
	s.mu.Lock()
	s.cancel(errServerClosed)
	s.mu.Unlock()
	err := s.http.Close()
	// If Serve was never called, s.http does not know the listener and has not closed it.
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
		return errors.Join(err, fmt.Errorf("streaming sessions did not end within %s of the server's close", closeWait))
	}
}

// enter registers a session. If the server is closed, it returns false. The session calls s.sessions.Done when it ends.
func (s *Server) enter() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ctx.Err() != nil {
		return false
	}
	s.sessions.Add(1)
	s.open.Add(1)
	return true
}

// GetExec checks the request and returns a URL for the session. It returns errdefs.ErrInvalidArgument for an invalid
// request, and ErrResourceExhausted if too many URLs are unused.
func (s *Server) GetExec(req *runtimeapi.ExecRequest) (*runtimeapi.ExecResponse, error) {
	if err := checkExec(req); err != nil {
		return nil, err
	}
	url, err := s.url(kindExec, req)
	return &runtimeapi.ExecResponse{Url: url}, err
}

// GetAttach is like GetExec, for attach.
func (s *Server) GetAttach(req *runtimeapi.AttachRequest) (*runtimeapi.AttachResponse, error) {
	if err := checkContainer("attach", req); err != nil {
		return nil, err
	}
	url, err := s.url(kindAttach, req)
	return &runtimeapi.AttachResponse{Url: url}, err
}

// GetPortForward is like GetExec, for port-forward. Ports may be empty: SPDY clients name a port for each connection.
func (s *Server) GetPortForward(req *runtimeapi.PortForwardRequest) (*runtimeapi.PortForwardResponse, error) {
	if err := checkPortForward(req); err != nil {
		return nil, err
	}
	url, err := s.url(kindPortForward, req)
	return &runtimeapi.PortForwardResponse{Url: url}, err
}

func (s *Server) url(kind string, req any) (string, error) {
	token, err := s.tokens.issue(kind, req)
	if err != nil {
		return "", err
	}
	return sessionURL(s.Addr(), kind, token), nil
}

func sessionURL(server net.Addr, kind, token string) string {
	return fmt.Sprintf("http://%s/%s/%s", server, kind, token)
}

func checkExec(req *runtimeapi.ExecRequest) error {
	if err := checkContainer("exec", req); err != nil {
		return err
	}
	if len(req.GetCmd()) == 0 {
		return invalid("exec: cmd is empty: name a program")
	}
	return nil
}

func checkPortForward(req *runtimeapi.PortForwardRequest) error {
	if req.GetPodSandboxId() == "" {
		return invalid("port-forward: pod_sandbox_id is empty")
	}
	for _, port := range req.GetPort() {
		if !validPort(port) {
			return invalid("port-forward: port %d is not between 1 and 65535", port)
		}
	}
	return nil
}

// stdioRequest has the common methods of exec and attach requests.
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
		return invalid("%s: none of stdin, stdout and stderr is requested", what)
	}
	return nil
}

func invalid(format string, args ...any) error {
	return fmt.Errorf("%s: %w", fmt.Sprintf(format, args...), errdefs.ErrInvalidArgument)
}

func validPort(port int32) bool { return port >= 1 && port <= 65535 }
