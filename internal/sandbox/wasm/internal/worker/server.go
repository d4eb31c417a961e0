package worker

import (
	"fmt"
	"net"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	"go.opentelemetry.io/otel/trace"

	"github.com/tripod-run/tripod/internal/component/engine"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/dataplane"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

// queueTime is how long a request beyond the concurrency limit waits before it is refused.
const queueTime = time.Second

// server is a program that serves requests: a gRPC or wasi:http component.
type server struct {
	pod     *pod
	plane   *dataplane.Server
	tls     *dataplane.TLS // nil without TLS
	counter *dataplane.Metrics
	health  *dataplane.Health
	tracer  trace.TracerProvider
	pool    pool

	limits  atomic.Pointer[workerapi.Limits]
	handler atomic.Pointer[http.Handler] // replaced when limits change

	requests requests
	cut      atomic.Bool // a request was aborted when the grace period expired
	ended    chan exit
}

func newServer(p *pod) *server {
	return &server{pod: p, pool: pool{pod: p}, counter: dataplane.NewMetrics(), tracer: p.worker.spans.provider(p.spec),
		ended: make(chan exit, 1)}
}

func (s *server) start() error {
	spec := &s.pod.spec
	if spec.Stdin {
		return fmt.Errorf("pod %s: stdin is for commands, but this component is a server: %w", spec.ID, errdefs.ErrInvalidArgument)
	}
	if len(spec.Channels) > 0 {
		return fmt.Errorf("pod %s: channels are for commands, but this component is a server: %w", spec.ID, errdefs.ErrInvalidArgument)
	}
	if spec.TLS != nil {
		var err error
		if s.tls, err = dataplane.NewTLS(material(*spec.TLS)); err != nil {
			return fmt.Errorf("pod %s: %w", spec.ID, err)
		}
	}
	if err := s.updateLimits(spec.Limits); err != nil {
		return err
	}
	if err := s.pool.probe(spec.Limits); err != nil {
		return err
	}
	var err error
	s.plane, err = dataplane.NewServer(dataplane.Config{
		Handler: s, TLS: s.tls, Logger: s.pod.worker.logger.With("pod", spec.ID),
		Name: spec.ID, Group: s.pod.worker.connections, Connections: s.pod.worker.config.Connections,
	})
	if err != nil {
		return err
	}
	sockets, err := openSockets(spec)
	if err != nil {
		return fmt.Errorf("pod %s: %w", spec.ID, err)
	}
	if err := s.plane.Start(sockets); err != nil {
		_ = s.plane.Close()
		return fmt.Errorf("pod %s: %w", spec.ID, err)
	}
	return nil
}

// openSockets turns the ports' sockets into listeners, and closes the passed descriptors.
func openSockets(spec *workerapi.PodSpec) (dataplane.Sockets, error) {
	var sockets dataplane.Sockets
	var err error
	for i := range spec.Ports {
		port := &spec.Ports[i]
		switch {
		case port.Socket.File == nil:
			err = fmt.Errorf("port %q: no socket was passed: %w", port.Kind, errdefs.ErrInvalidArgument)
		case port.Kind == workerapi.PortTLS && sockets.TLS == nil:
			sockets.TLS, err = net.FileListener(port.Socket.File)
		case port.Kind == workerapi.PortCleartext && sockets.Cleartext == nil:
			sockets.Cleartext, err = net.FileListener(port.Socket.File)
		case port.Kind == workerapi.PortQUIC && sockets.QUIC == nil:
			sockets.QUIC, err = udpConn(port.Socket.File)
		default:
			err = fmt.Errorf("port %q: unknown or duplicate kind: %w", port.Kind, errdefs.ErrInvalidArgument)
		}
		if err != nil {
			sockets.Close()
			return dataplane.Sockets{}, err
		}
		port.Socket.Close() // the listener has a duplicate
		port.Socket.File = nil
	}
	return sockets, nil
}

func udpConn(file *os.File) (*net.UDPConn, error) {
	conn, err := net.FilePacketConn(file)
	if err != nil {
		return nil, err
	}
	udp, ok := conn.(*net.UDPConn)
	if !ok {
		conn.Close()
		return nil, fmt.Errorf("the socket for QUIC is not a UDP socket: %w", errdefs.ErrInvalidArgument)
	}
	return udp, nil
}

func material(t workerapi.TLS) dataplane.Material {
	return dataplane.Material{Certificate: t.Certificate, Key: t.Key, ClientCAs: t.ClientCAs, RequireClient: t.RequireClient}
}

// updateLimits replaces the limits, and the handler that enforces them.
func (s *server) updateLimits(l workerapi.Limits) error {
	options := dataplane.Options{
		Limiter: dataplane.NewLimiter(l.Concurrency, queueTime), Metrics: s.counter, Tracer: s.tracer,
		Logger: s.pod.worker.logger.With("pod", s.pod.spec.ID),
	}
	handler, err := s.makeHandler(options, l)
	if err != nil {
		return err
	}
	handler = dataplane.WithCORS(dataplane.CORS(s.pod.spec.CORS), handler)
	s.limits.Store(&l)
	s.handler.Store(&handler)
	return nil
}

func (s *server) makeHandler(options dataplane.Options, l workerapi.Limits) (http.Handler, error) {
	if s.pod.code.World == engine.WorldHTTP {
		return dataplane.NewHTTP(options, http.HandlerFunc(s.serveComponent)), nil
	}
	if s.health == nil {
		s.health = dataplane.NewHealth(s.pod.code.services()...)
	}
	return dataplane.NewGRPC(dataplane.GRPCOptions{
		Options: options, Methods: s.pod.code.methods, Invoker: s, MaxMessageBytes: int(l.MaxMessageBytes),
		Health: s.health, Files: s.pod.code.files, Ahead: aheadMemory{s.pod},
	})
}

// aheadMemory is the memory for the rests of half-duplex streams to a pod. It belongs to the worker, and the pod's
// account is charged as well.
type aheadMemory struct{ pod *pod }

// TryAcquire implements dataplane.Memory.
func (m aheadMemory) TryAcquire(n int64) bool {
	if !m.pod.worker.ahead.TryAcquire(n) {
		return false
	}
	if !m.pod.account.Take(engine.HeldBytes, n) {
		m.pod.worker.ahead.Release(n)
		return false
	}
	return true
}

// Release implements dataplane.Memory.
func (m aheadMemory) Release(n int64) {
	m.pod.account.Give(engine.HeldBytes, n)
	m.pod.worker.ahead.Release(n)
}

// ServeHTTP serves a request from the pod's own sockets or the node's router. When the grace period expires, the
// request's context ends, because connections to the pod's own sockets are closed and requests from the router are
// cancelled (route).
func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if !s.requests.begin() {
		w.Header().Set("Retry-After", "1")
		http.Error(w, "the pod is being stopped", http.StatusServiceUnavailable)
		return
	}
	defer func() {
		if s.pod.alive.Err() != nil {
			s.cut.Store(true)
		}
		s.requests.end()
	}()
	(*s.handler.Load()).ServeHTTP(w, r)
}

// stop waits for the requests in progress, but only until the grace period expires.
func (s *server) stop() {
	if s.health != nil {
		s.health.SetServing(false)
	}
	_ = s.plane.Shutdown(s.pod.alive) // fails only when the grace period expires; see s.cut
	s.requests.close()
	s.pool.close()
	if s.cut.Load() {
		s.ended <- killed("requests were still in progress when the grace period expired")
		return
	}
	s.ended <- exit{reason: reasonCompleted, message: "stopped"}
}

func (s *server) wait() exit { return <-s.ended }

func (s *server) updateTLS(t workerapi.TLS) error {
	if s.tls == nil {
		return fmt.Errorf("pod %s was started without TLS: %w", s.pod.spec.ID, errdefs.ErrFailedPrecondition)
	}
	return s.tls.Update(material(t))
}

func (s *server) metrics() []workerapi.MethodMetrics {
	var list []workerapi.MethodMetrics
	for _, m := range s.counter.Snapshot() {
		list = append(list, workerapi.MethodMetrics{
			Procedure: m.Procedure, Codes: m.Codes, ReceivedBytes: m.ReceivedBytes, SentBytes: m.SentBytes, InFlight: m.InFlight,
			Bounds: m.Latency.Bounds, Buckets: m.Latency.Counts, Seconds: m.Latency.Sum,
		})
	}
	return list
}

var _ program = (*server)(nil)

// requests counts the requests in progress, and refuses new requests once it is closed.
type requests struct {
	mu     sync.Mutex
	active int
	closed bool
	idle   chan struct{} // made by close; closed when active is 0
}

func (r *requests) begin() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return false
	}
	r.active++
	return true
}

func (r *requests) end() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.active--
	if r.closed && r.active == 0 {
		close(r.idle)
	}
}

// close refuses new requests and waits for the requests in progress. They end shortly after the grace period at the
// latest.
func (r *requests) close() {
	r.mu.Lock()
	r.closed, r.idle = true, make(chan struct{})
	if r.active == 0 {
		close(r.idle)
	}
	r.mu.Unlock()
	<-r.idle
}
