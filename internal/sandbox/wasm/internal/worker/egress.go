package worker

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"net"
	"net/http"
	"net/http/httptrace"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"weak"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/component/wasihttp"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/egress"
)

// Limits of a pod's connections to HTTP servers. Idle connections count as open sockets.
const (
	maxIdleConns   = 64
	maxIdlePerHost = 32
	idleConnTime   = 30 * time.Second
	handshakeTime  = 30 * time.Second
	continueTime   = time.Second
	// stuckTime is how long a server can read nothing from an HTTP/2 connection while there are bytes for it. After that
	// the connection is closed. Its calls cannot end before, because they wait for their turn to write.
	stuckTime = 15 * time.Second
	// maxAnswerHeader bounds the header of a response, in bytes. The worker reads the header before it is counted, and
	// small fields need thirty times as much memory.
	maxAnswerHeader = 64 << 10
	// connBuffer is the size of each of a connection's two buffers. With HTTP/2, a server can send connWindow bytes of all
	// streams of a connection that the guests have not read.
	connBuffer = 32 << 10
	connWindow = 4 << 20
	// maxRoots bounds the size of a file with authorities, in bytes.
	maxRoots = 8 << 20
)

// podEgress opens the connections of a pod, and sends its HTTP requests. The pod's instances share its idle connections;
// pods do not.
type podEgress struct {
	pod    *pod
	limit  int64 // open sockets; 0 means unlimited
	opened atomic.Int64
	client atomic.Pointer[egress.Client]
	plain  *http.Transport
	h2c    *http.Transport // HTTP/2 without TLS, for gRPC

	connecting sync.Mutex // guards closed, and changes of client
	closed     bool

	opening sync.Mutex
	secure  atomic.Pointer[http.Transport] // nil until the first request needs the authorities
}

// openEgress makes the pod's podEgress, if the pod may call out.
func (p *pod) openEgress() error {
	e := p.spec.Egress
	if e == nil {
		return nil
	}
	o := &podEgress{pod: p, limit: p.spec.Holdings.Sockets}
	if err := o.connect(e.Dialer.File); err != nil {
		return fmt.Errorf("pod %s: %w", p.spec.ID, err)
	}
	e.Dialer.File = nil
	o.plain, o.h2c = o.transport(nil), o.transport(nil)
	o.h2c.Protocols = new(http.Protocols)
	o.h2c.Protocols.SetUnencryptedHTTP2(true)
	p.egress = o
	return nil
}

// secureTransport returns the transport for https. It reads the pod's authorities first.
func (o *podEgress) secureTransport() (*http.Transport, error) {
	o.opening.Lock()
	defer o.opening.Unlock()
	if t := o.secure.Load(); t != nil {
		return t, nil
	}
	roots, err := o.roots()
	if err != nil {
		return nil, &wasihttp.CodeError{Code: "TLS-certificate-error"}
	}
	t := o.transport(&tls.Config{RootCAs: roots, ClientSessionCache: tls.NewLRUClientSessionCache(maxIdlePerHost)})
	o.secure.Store(t)
	return t, nil
}

// roots reads the pod's authorities. It logs an error.
func (o *podEgress) roots() (*x509.CertPool, error) {
	roots, err := o.pod.worker.roots.read(o.pod.spec.Egress.Roots.File)
	if err != nil {
		o.pod.output.logLine(fmt.Sprintf("tripod: the authorities for outgoing connections: %v", err))
	}
	return roots, err
}

// connect makes the podEgress use a connection to the dialer, and closes the file and the previous connection. It returns
// errdefs.ErrFailedPrecondition after close.
func (o *podEgress) connect(dialer *os.File) error {
	if dialer == nil {
		return fmt.Errorf("no connection to the dialer was passed: %w", errdefs.ErrInvalidArgument)
	}
	defer dialer.Close()
	conn, err := net.FileConn(dialer) // makes a copy
	if err != nil {
		return fmt.Errorf("the connection to the dialer: %w: %w", err, errdefs.ErrInvalidArgument)
	}
	unix, ok := conn.(*net.UnixConn)
	if !ok {
		conn.Close()
		return fmt.Errorf("the connection to the dialer is not a unix socket: %w", errdefs.ErrInvalidArgument)
	}
	o.connecting.Lock()
	defer o.connecting.Unlock()
	if o.closed {
		conn.Close()
		return fmt.Errorf("the pod has exited: %w", errdefs.ErrFailedPrecondition)
	}
	if previous := o.client.Swap(egress.NewClient(unix)); previous != nil {
		previous.Close()
	}
	return nil
}

// close ends the podEgress. The guests' requests have ended by then.
func (o *podEgress) close() {
	o.connecting.Lock()
	o.closed = true
	o.client.Load().Close()
	o.connecting.Unlock()
	o.closeIdle()
}

// sockets returns the number of open connections. A nil podEgress has none.
func (o *podEgress) sockets() int64 {
	if o == nil {
		return 0
	}
	return o.opened.Load()
}

func (o *podEgress) transport(config *tls.Config) *http.Transport {
	return &http.Transport{
		DialContext: o.dial, TLSClientConfig: config, ForceAttemptHTTP2: true, DisableCompression: true,
		MaxIdleConns: maxIdleConns, MaxIdleConnsPerHost: maxIdlePerHost, IdleConnTimeout: idleConnTime,
		TLSHandshakeTimeout: handshakeTime, ExpectContinueTimeout: continueTime,
		MaxResponseHeaderBytes: maxAnswerHeader, ReadBufferSize: connBuffer, WriteBufferSize: connBuffer,
		HTTP2: &http.HTTP2Config{MaxReceiveBufferPerStream: wasihttp.StreamWindow, MaxReceiveBufferPerConnection: connWindow,
			WriteByteTimeout: stuckTime},
	}
}

// RoundTrip implements http.RoundTripper. Errors that only the dialer knows are *wasihttp.CodeError.
func (o *podEgress) RoundTrip(r *http.Request) (*http.Response, error) {
	r = withOption(r)
	if r.URL.Scheme != "https" {
		return o.plain.RoundTrip(r)
	}
	secure, err := o.secureTransport()
	if err != nil {
		return nil, err
	}
	return secure.RoundTrip(r)
}

// withOption returns a request that has the connection option te on connections of HTTP/1.1, if it has the field te (RFC
// 9110, 10.1.4). HTTP/2 forbids the option, and a transport knows the protocol only when it has a connection; when it
// repeats a request, the protocol can differ.
func withOption(r *http.Request) *http.Request {
	if r.Header["Te"] == nil {
		return r
	}
	header := maps.Clone(r.Header)
	r = r.WithContext(httptrace.WithClientTrace(r.Context(), &httptrace.ClientTrace{GotConn: func(got httptrace.GotConnInfo) {
		if secure, ok := got.Conn.(*tls.Conn); ok && secure.ConnectionState().NegotiatedProtocol == "h2" {
			delete(header, "Connection")
		} else {
			header["Connection"] = []string{"te"}
		}
	}}))
	r.Header = header
	return r
}

// grpcEgress sends the requests of gRPC calls, for which targets without TLS get HTTP/2.
type grpcEgress struct{ *podEgress }

// RoundTrip implements http.RoundTripper.
func (o grpcEgress) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.URL.Scheme != "https" {
		return o.h2c.RoundTrip(r)
	}
	return o.podEgress.RoundTrip(r)
}

// dial opens a TCP connection for a transport. The transports call it for each new connection, so each is compared with
// the pod's rules, wherever a redirect or a name leads.
func (o *podEgress) dial(ctx context.Context, _, address string) (net.Conn, error) {
	host, text, err := net.SplitHostPort(address)
	if err != nil {
		return nil, &wasihttp.CodeError{Code: "HTTP-request-URI-invalid"}
	}
	port, err := strconv.ParseUint(text, 10, 16)
	if err != nil {
		return nil, &wasihttp.CodeError{Code: "HTTP-request-URI-invalid"}
	}
	conn, err := o.open(ctx, "tcp", host, uint16(port))
	if err != nil {
		return nil, httpCode(err)
	}
	return conn, nil
}

// errSockets is the error of open at the limit of open sockets.
var errSockets = &egress.Error{Code: egress.CodeLimit, Message: "the limit of open sockets is reached"}

// open opens a socket, which counts until it is closed. If there are too many, it first closes connections that nobody
// uses.
func (o *podEgress) open(ctx context.Context, network, host string, port uint16) (*countedConn, error) {
	if !o.take() {
		o.closeIdle()
		if !o.take() {
			return nil, errSockets
		}
	}
	conn, err := o.client.Load().Connect(ctx, network, host, port)
	if err != nil {
		o.give()
		return nil, err
	}
	return &countedConn{Conn: conn, give: sync.OnceFunc(o.give)}, nil
}

// closeIdle closes the connections that no request uses.
func (o *podEgress) closeIdle() {
	o.plain.CloseIdleConnections()
	o.h2c.CloseIdleConnections()
	if secure := o.secure.Load(); secure != nil {
		secure.CloseIdleConnections()
	}
	if redis := o.pod.redis; redis != nil {
		redis.CloseIdle()
	}
}

// take counts a socket. It returns false at the limit of the pod or of the worker.
func (o *podEgress) take() bool {
	if n := o.opened.Add(1); o.limit > 0 && n > o.limit {
		o.opened.Add(-1)
		return false
	}
	if o.pod.worker.sockets.Add(1) > maxSockets() {
		o.give()
		return false
	}
	return true
}

func (o *podEgress) give() {
	o.opened.Add(-1)
	o.pod.worker.sockets.Add(-1)
}

// maxSockets returns how many sockets the guests of a worker can open: a quarter of RLIMIT_NOFILE. Half belongs to files
// (boundFiles), and the last quarter to the connections of clients.
func maxSockets() int64 {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return math.MaxInt64
	}
	return int64(min(limit.Cur, math.MaxInt64) / 4)
}

// countedConn is a connection that counts as an open socket until it is closed. It implements wasi.Socket.
type countedConn struct {
	net.Conn
	give func()
}

// SyscallConn implements syscall.Conn.
func (c *countedConn) SyscallConn() (syscall.RawConn, error) {
	socket, ok := c.Conn.(syscall.Conn)
	if !ok {
		return nil, fmt.Errorf("%T is not a socket: %w", c.Conn, errdefs.ErrInternal)
	}
	return socket.SyscallConn()
}

func (c *countedConn) Close() error {
	c.give()
	return c.Conn.Close()
}

// httpCodes maps the codes of the dialer to error-codes of wasi:http.
var httpCodes = map[egress.Code]string{
	egress.CodeDenied: "HTTP-request-denied", egress.CodeProhibited: "destination-IP-prohibited",
	egress.CodeNotFound: "DNS-error", egress.CodeNameFailure: "DNS-error", egress.CodeNameTimeout: "DNS-timeout",
	egress.CodeRefused: "connection-refused", egress.CodeTimeout: "connection-timeout",
	egress.CodeUnroutable: "destination-IP-unroutable", egress.CodeLimit: "connection-limit-reached",
	egress.CodeInvalid: "HTTP-request-URI-invalid", egress.CodeUnavailable: "destination-unavailable",
}

// rcodes are the payloads of DNS-error (RFC 1035, 4.1.1).
var rcodes = map[egress.Code]string{egress.CodeNotFound: "NXDOMAIN", egress.CodeNameFailure: "SERVFAIL"}

func httpCode(err error) error {
	e, ok := errors.AsType[*egress.Error](err)
	if !ok {
		return err
	}
	return &wasihttp.CodeError{Code: httpCodes[e.Code], Message: rcodes[e.Code]}
}

// rootCache shares the authorities of pods that have the same ones.
type rootCache struct {
	mu    sync.Mutex
	pools map[[sha256.Size]byte]weak.Pointer[x509.CertPool]
}

// read reads a PEM file with authorities.
func (c *rootCache) read(file *os.File) (*x509.CertPool, error) {
	if file == nil {
		return nil, fmt.Errorf("the node has none: %w", errdefs.ErrNotFound)
	}
	text, err := io.ReadAll(io.NewSectionReader(file, 0, maxRoots))
	if err != nil {
		return nil, err
	}
	digest := sha256.Sum256(text)
	c.mu.Lock()
	defer c.mu.Unlock()
	if pool := c.pools[digest].Value(); pool != nil {
		return pool, nil
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(text) {
		return nil, fmt.Errorf("the file has no certificate: %w", errdefs.ErrInvalidArgument)
	}
	if c.pools == nil {
		c.pools = map[[sha256.Size]byte]weak.Pointer[x509.CertPool]{}
	}
	for old, p := range c.pools {
		if p.Value() == nil {
			delete(c.pools, old)
		}
	}
	c.pools[digest] = weak.Make(pool)
	return pool, nil
}

var _ http.RoundTripper = (*podEgress)(nil)
