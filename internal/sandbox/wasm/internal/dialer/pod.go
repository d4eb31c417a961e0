package dialer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/fdpass"
	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/network/netthread"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/egress"
)

// The rates at which a pod may connect and resolve names, per second. Faster requests wait. A bucket holds what a pod
// may do at once.
const (
	connectRate, connectBurst = 1000, 1000
	lookupRate, lookupBurst   = 100, 200
)

// replyTime is how long the worker may take to read a reply.
const replyTime = 10 * time.Second

// pod is a pod that the dialer serves.
type pod struct {
	rules    egress.Rules
	netns    *os.File
	conn     *net.UnixConn
	logger   *slog.Logger
	resolver resolver
	connects *pace
	lookups  *pace
	resolved resolved

	writing sync.Mutex

	mu      sync.Mutex
	pending map[uint64]context.CancelFunc // requests until their reply is sent
}

func makePod(o egress.Order, rules egress.Rules, netns *os.File, conn *net.UnixConn, logger *slog.Logger) *pod {
	p := &pod{
		rules: rules, netns: netns, conn: conn, logger: logger.With("pod", o.Pod), pending: map[uint64]context.CancelFunc{},
		connects: newPace(connectRate, connectBurst), lookups: newPace(lookupRate, lookupBurst),
	}
	p.resolver = newResolver(o.DNS, p.open)
	return p
}

func (p *pod) close() {
	p.conn.Close()
	p.netns.Close()
}

// serve answers requests until the worker closes its end of the connection.
func (p *pod) serve() {
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	r := fdpass.NewReader(fdpass.NoFiles(p.conn), egress.MaxMessage)
	for {
		f, err := r.Next()
		var q egress.Request
		if err == nil && json.Unmarshal(f.Payload, &q) != nil {
			err = fmt.Errorf("%w: not a JSON request", fdpass.ErrFrame)
		}
		if err == nil {
			err = p.begin(ctx, q, &running)
		}
		if errors.Is(err, fdpass.ErrFrame) {
			p.logger.Error("the worker breaks the protocol; its egress is closed", "err", err)
		}
		if err != nil {
			break
		}
	}
	cancel()
	p.conn.Close()
	running.Wait()
	r.Close()
	p.netns.Close()
}

// begin starts to carry out a request. It does not wait for the worker. It returns fdpass.ErrFrame if the worker may not
// send the request now.
func (p *pod) begin(ctx context.Context, q egress.Request, running *sync.WaitGroup) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	known := p.pending[q.ID]
	switch {
	case q.Op == egress.OpCancel && known != nil:
		known()
		return nil
	case q.Op == egress.OpCancel:
		return nil
	case known != nil:
		return fmt.Errorf("%w: request %d was sent twice", fdpass.ErrFrame, q.ID)
	case len(p.pending) >= egress.MaxPending:
		return fmt.Errorf("%w: more than %d requests at a time", fdpass.ErrFrame, egress.MaxPending)
	}
	ctx, cancel := context.WithTimeout(ctx, egress.DialTime)
	p.pending[q.ID] = cancel
	running.Go(func() {
		var addrs []netip.Addr
		var socket *os.File
		err := guard.Call(p.logger, "dialer request", func() (err error) {
			addrs, socket, err = p.do(ctx, q)
			return err
		})
		cancel()
		p.reply(q.ID, addrs, socket, err)
	})
	return nil
}

// do carries out a request.
func (p *pod) do(ctx context.Context, q egress.Request) ([]netip.Addr, *os.File, error) {
	switch q.Op {
	case egress.OpResolve:
		names, addrs, err := p.resolve(ctx, q.Host, 0)
		if err == nil {
			addrs, err = p.allowed(q.Host, names, addrs, 0)
		}
		p.resolved.add(names, addrs)
		return addrs, nil, err
	case egress.OpConnect:
		socket, err := p.connect(ctx, q.Network, q.Host, q.Port)
		return nil, socket, err
	}
	return nil, nil, failure(egress.CodeInvalid, "operation %q", q.Op)
}

// reply sends a reply and closes the socket. The request is pending until it is the turn of its reply, so that replies
// that the worker does not read are bounded, too.
func (p *pod) reply(id uint64, addrs []netip.Addr, socket *os.File, failed error) {
	reply := egress.Reply{ID: id, Addrs: addrs}
	var files []*os.File
	if socket != nil {
		defer socket.Close()
		files = append(files, socket)
	}
	if failed != nil {
		reply.Error = asError(failed)
	}
	payload, err := json.Marshal(reply)
	if err != nil {
		p.logger.Error("encode a reply failed", "err", err)
		p.conn.Close() // ends serve
		return
	}
	p.writing.Lock()
	defer p.writing.Unlock()
	p.mu.Lock()
	delete(p.pending, id) // before the reply, because the worker may then send the next request
	p.mu.Unlock()
	_ = p.conn.SetWriteDeadline(time.Now().Add(replyTime))
	if err := fdpass.Write(p.conn, egress.MaxMessage, payload, files); err != nil {
		p.conn.Close() // ends serve
	}
}

// resolve returns the addresses of a host, and the names that they belong to: the host, and its full name if the
// resolver has completed it. An address has the names whose lookup has led to it (OpResolve).
func (p *pod) resolve(ctx context.Context, host string, port uint16) (names []string, addrs []netip.Addr, err error) {
	name := egress.Normalize(host)
	if addr, err := netip.ParseAddr(name); err == nil {
		addr = addr.Unmap().WithZone("")
		return p.resolved.names(addr), []netip.Addr{addr}, nil
	}
	if isLocalhost(name) {
		return []string{name}, []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()}, nil
	}
	candidates, err := p.resolver.candidates(host)
	if err != nil {
		return nil, nil, err
	}
	candidates = slices.DeleteFunc(candidates, func(full string) bool { return !p.rules.MayResolve([]string{name, full}, port) })
	if len(candidates) == 0 {
		return nil, nil, failure(egress.CodeDenied, "the pod's egress rules do not allow %s", describe(host, port))
	}
	if err := p.lookups.wait(ctx); err != nil {
		return nil, nil, failure(egress.CodeNameTimeout, "more than %d lookups per second", lookupRate)
	}
	full, addrs, err := p.resolver.lookup(ctx, candidates)
	return []string{name, full}, addrs, err
}

// allowed returns the addresses that the rules allow.
func (p *pod) allowed(host string, names []string, addrs []netip.Addr, port uint16) ([]netip.Addr, error) {
	var list []netip.Addr
	for _, addr := range addrs {
		if p.rules.Allows(names, netip.AddrPortFrom(addr, port)) {
			list = append(list, addr)
		}
	}
	if len(list) == 0 {
		return nil, failure(egress.CodeProhibited, "the pod's egress rules do not allow the addresses of %s: %v", describe(host, port), addrs)
	}
	return list, nil
}

func describe(host string, port uint16) string {
	if port == 0 {
		return host
	}
	return net.JoinHostPort(host, fmt.Sprint(port))
}

// connect opens a connection to the first address that accepts one. Each address gets its share of the time that is
// left.
func (p *pod) connect(ctx context.Context, network, host string, port uint16) (*os.File, error) {
	kind, ok := map[string]int{"tcp": unix.SOCK_STREAM, "udp": unix.SOCK_DGRAM}[network]
	if !ok || port == 0 {
		return nil, failure(egress.CodeInvalid, "%s port %d", network, port)
	}
	names, addrs, err := p.resolve(ctx, host, port)
	if err != nil {
		return nil, err
	}
	if addrs, err = p.allowed(host, names, addrs, port); err != nil {
		return nil, err
	}
	if err := p.connects.wait(ctx); err != nil {
		return nil, failure(egress.CodeLimit, "more than %d connections per second", connectRate)
	}
	var first error
	for i, addr := range addrs {
		socket, err := p.attempt(ctx, kind, netip.AddrPortFrom(addr, port), len(addrs)-i)
		if err == nil {
			return socket, nil
		}
		if first == nil {
			first = err
		}
		if ctx.Err() != nil {
			break
		}
	}
	return nil, first
}

// attempt opens a connection to one of n addresses that are left.
func (p *pod) attempt(ctx context.Context, kind int, to netip.AddrPort, n int) (*os.File, error) {
	deadline, _ := ctx.Deadline() // begin has set one
	ctx, cancel := context.WithTimeout(ctx, time.Until(deadline)/time.Duration(n))
	defer cancel()
	socket, err := p.open(ctx, kind, to)
	if err != nil {
		return nil, connectError(to, err)
	}
	return socket, nil
}

// open opens a connected socket in the pod's network namespace, whatever the rules say. The resolver uses it, too.
func (p *pod) open(ctx context.Context, kind int, to netip.AddrPort) (socket *os.File, err error) {
	raw, err := p.netns.SyscallConn()
	if err != nil {
		return nil, err
	}
	entered := raw.Control(func(fd uintptr) {
		err = netthread.In(int(fd), func() (err error) {
			socket, err = netthread.Socket(kind, to)
			return err
		})
	})
	if err = errors.Join(entered, err); err != nil {
		return nil, err
	}
	if err := netthread.Connect(ctx, socket, to); err != nil {
		socket.Close()
		return nil, err
	}
	return socket, nil
}

// codes maps the errors of a connection attempt to codes.
var codes = []struct {
	err  error
	code egress.Code
}{
	{errdefs.ErrUnavailable, egress.CodeRefused},
	{unix.ECONNRESET, egress.CodeRefused},
	{unix.ETIMEDOUT, egress.CodeTimeout},
	{context.DeadlineExceeded, egress.CodeTimeout},
	{unix.ENETUNREACH, egress.CodeUnroutable},
	{unix.EHOSTUNREACH, egress.CodeUnroutable},
	{unix.EAFNOSUPPORT, egress.CodeUnroutable},
	{unix.EADDRNOTAVAIL, egress.CodeUnroutable},
	{unix.EACCES, egress.CodeProhibited}, // an administratively prohibited destination (icmp(7))
	{unix.EPERM, egress.CodeProhibited},  // a rule of the node's firewall for outgoing packets
	{unix.EMFILE, egress.CodeLimit},
	{unix.ENFILE, egress.CodeLimit},
}

func connectError(to netip.AddrPort, err error) *egress.Error {
	for _, c := range codes {
		if errors.Is(err, c.err) {
			return failure(c.code, "connect to %s: %v", to, err)
		}
	}
	return failure(egress.CodeUnavailable, "connect to %s: %v", to, err)
}

func failure(code egress.Code, format string, args ...any) *egress.Error {
	return &egress.Error{Code: code, Message: fmt.Sprintf(format, args...)}
}

func asError(err error) *egress.Error {
	if e, ok := errors.AsType[*egress.Error](err); ok {
		return e
	}
	return failure(egress.CodeUnavailable, "%v", err)
}
