package wasi

import (
	"bytes"
	"context"
	"encoding/hex"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/component/wit"
	"github.com/tripod-run/tripod/test/accept"
	"github.com/tripod-run/tripod/test/until"
)

// loopback is a Network that reaches this host only.
type loopback struct {
	hold   chan struct{} // if it is not nil, Connect and Resolve wait for it, or for ctx
	failed error
	names  map[string][]netip.Addr
	opened chan net.Conn
}

func (l *loopback) wait(ctx context.Context) error {
	if l.hold != nil {
		select {
		case <-l.hold:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return l.failed
}

func (l *loopback) Connect(ctx context.Context, network string, to netip.AddrPort) (Socket, error) {
	if err := l.wait(ctx); err != nil {
		return nil, err
	}
	conn, err := net.Dial(network, to.String())
	if err != nil {
		return nil, err
	}
	if l.opened != nil {
		l.opened <- conn
	}
	return conn.(Socket), nil
}

func (l *loopback) Resolve(ctx context.Context, name string) ([]netip.Addr, error) {
	if err := l.wait(ctx); err != nil {
		return nil, err
	}
	if addrs, ok := l.names[name]; ok {
		return addrs, nil
	}
	return nil, CodeNameUnresolvable
}

const (
	tcpType = "[method]tcp-socket."
	udpType = "[method]udp-socket."
)

func address(text string) []byte {
	c := Call{}
	c.writeAddress(netip.MustParseAddrPort(text))
	return c.Out
}

func some(b []byte) []byte { return append(wit.AppendOption(nil, true), b...) }

var none = wit.AppendOption(nil, false)

func (g *guest) tcp(name string, self uint32, params ...[]byte) *wit.Reader {
	g.t.Helper()
	return g.call("wasi:sockets/tcp", tcpType+name, slices.Insert(params, 0, u32(self))...)
}

func (g *guest) udp(name string, self uint32, params ...[]byte) *wit.Reader {
	g.t.Helper()
	return g.call("wasi:sockets/udp", udpType+name, slices.Insert(params, 0, u32(self))...)
}

func (g *guest) newSocket(kind string, f family) uint32 {
	g.t.Helper()
	return ok(g.t, g.call("wasi:sockets/"+kind+"-create-socket", "create-"+kind+"-socket", u32(uint32(f)))).U32()
}

func (g *guest) network() []byte {
	return u32(g.call("wasi:sockets/instance-network", "instance-network").U32())
}

// block waits for a pollable that a function returned.
func (g *guest) block(r *wit.Reader) {
	g.t.Helper()
	ctx, cancel := context.WithTimeout(g.t.Context(), 10*time.Second)
	defer cancel()
	pollable := r.U32()
	g.ctx = ctx
	g.call("wasi:io/poll", "[method]pollable.block", u32(pollable))
	g.ctx = g.t.Context()
	g.Drop(pollable)
}

// connect connects a new TCP socket and returns it with its streams.
func (g *guest) connect(to string) (socket, in, out uint32) {
	g.t.Helper()
	socket = g.newSocket("tcp", ipv4)
	ok(g.t, g.tcp("start-connect", socket, g.network(), address(to)))
	g.block(g.tcp("subscribe", socket))
	streams := ok(g.t, g.tcp("finish-connect", socket))
	return socket, streams.U32(), streams.U32()
}

func echoTCP(conn net.Conn) { _, _ = io.Copy(conn, conn) }

func TestSocketsWithoutNetwork(t *testing.T) {
	g := newGuest(t, Options{})
	failed(t, g.call("wasi:sockets/tcp-create-socket", "create-tcp-socket", u32(0)), int(CodeAccessDenied))
	failed(t, g.call("wasi:sockets/udp-create-socket", "create-udp-socket", u32(1)), int(CodeAccessDenied))
	failed(t, g.call("wasi:sockets/ip-name-lookup", "resolve-addresses", g.network(), str("example.com")), int(CodeAccessDenied))
}

// TestTCP: bytes pass both ways, and each side sees the other's end.
func TestTCP(t *testing.T) {
	g := newGuest(t, Options{Network: &loopback{}})
	at := accept.Loopback(t, echoTCP)
	socket, in, out := g.connect(at)
	if got := g.tcp("remote-address", socket).Rest(); !bytes.Equal(got[4:], address(at)) {
		t.Errorf("remote-address = % x, want % x", got[4:], address(at))
	}
	local := ok(t, g.tcp("local-address", socket))
	if local.Case(2) != 0 || local.U16() == 0 || !bytes.Equal(local.Raw(4), []byte{127, 0, 0, 1}) {
		t.Error("local-address is not a port of 127.0.0.1")
	}
	sent := strings.Repeat("0123456789", 30_000) // more than a window
	var got []byte
	for rest := []byte(sent); len(got) < len(sent); {
		if len(rest) > 0 {
			n := ok(t, g.call("wasi:io/streams", "[method]output-stream.check-write", u32(out))).U64()
			part := rest[:min(uint64(len(rest)), n)]
			ok(t, g.call("wasi:io/streams", "[method]output-stream.write", u32(out), list(part)))
			if rest = rest[len(part):]; len(rest) == 0 {
				ok(t, g.tcp("shutdown", socket, u32(shutdownSend)))
				failed(t, g.call("wasi:io/streams", "[method]output-stream.check-write", u32(out)), 1)
			}
		}
		got = append(got, ok(t, g.call("wasi:io/streams", "[method]input-stream.blocking-read", u32(in), u64(1<<20))).Bytes()...)
	}
	if string(got) != sent {
		t.Error("the echo differs from what was sent")
	}
	failed(t, g.call("wasi:io/streams", "[method]input-stream.blocking-read", u32(in), u64(1)), 1) // closed
	ok(t, g.tcp("shutdown", socket, u32(shutdownBoth)))
}

// TestTCPDroppedEarly: what a guest has written before it drops everything is sent, and then the connection ends.
func TestTCPDroppedEarly(t *testing.T) {
	received := make(chan []byte, 1)
	at := accept.Loopback(t, func(conn net.Conn) {
		all, _ := io.ReadAll(conn)
		received <- all
	})
	g := newGuest(t, Options{Network: &loopback{}})
	socket, in, out := g.connect(at)
	data := bytes.Repeat([]byte("x"), 50_000)
	ok(t, g.call("wasi:io/streams", "[method]output-stream.write", u32(out), list(data)))
	for _, rep := range []uint32{socket, in, out} {
		g.Drop(rep)
	}
	select {
	case got := <-received:
		if !bytes.Equal(got, data) {
			t.Errorf("the server received %d bytes, want %d", len(got), len(data))
		}
	case <-time.After(10 * time.Second):
		t.Fatal("the connection was not closed")
	}
	if g.held != 0 {
		t.Errorf("%d bytes are held after all resources were dropped", g.held)
	}
}

// TestTCPLingersBriefly: a server that does not read cannot keep the connection of a guest that has dropped it.
func TestTCPLingersBriefly(t *testing.T) {
	n := &loopback{opened: make(chan net.Conn, 1)}
	g := newGuest(t, Options{Network: n})
	at := accept.Loopback(t, func(net.Conn) { <-t.Context().Done() })
	socket, in, out := g.connect(at)
	conn := (<-n.opened).(*net.TCPConn)
	const calm = 200 * time.Millisecond
	last := time.Now()
	until.Holds(t, "the connection takes no more bytes", func() bool {
		free := ok(t, g.call("wasi:io/streams", "[method]output-stream.check-write", u32(out))).U64()
		if free > 0 {
			ok(t, g.call("wasi:io/streams", "[method]output-stream.write", u32(out), list(make([]byte, free))))
			last = time.Now()
		}
		return time.Since(last) > calm
	})
	began := time.Now()
	for _, rep := range []uint32{out, in, socket} {
		g.Drop(rep)
	}
	until.Within(t, 5*lingerTime, "the connection is closed", func() bool { return conn.SetLinger(-1) != nil })
	if took := time.Since(began); took < lingerTime/2 {
		t.Errorf("the connection ended after %v, although bytes were left", took)
	}
}

// TestSocketsEndWithTheInstance: connections, attempts and lookups end when the State is closed.
func TestSocketsEndWithTheInstance(t *testing.T) {
	closed := make(chan struct{}, 1)
	at := accept.Loopback(t, func(conn net.Conn) {
		_, _ = io.Copy(io.Discard, conn)
		closed <- struct{}{}
	})
	n := &loopback{opened: make(chan net.Conn, 4)}
	s := NewState(Options{Network: n})
	g := &guest{t: t, State: s, ctx: t.Context()}
	g.connect(at)
	datagrams := g.newSocket("udp", ipv4)
	ok(t, g.udp("start-bind", datagrams, g.network(), address("0.0.0.0:0")))
	ok(t, g.udp("finish-bind", datagrams))
	ok(t, g.udp("stream", datagrams, some(address(at))))
	g.call("wasi:sockets/udp", "[method]incoming-datagram-stream.subscribe", u32(g.Put(incoming{s.slots[datagrams].(*udpSocket).flow})))
	n.hold = make(chan struct{}) // never closed
	pending := g.newSocket("tcp", ipv4)
	ok(t, g.tcp("start-connect", pending, g.network(), address(at)))
	ok(t, g.call("wasi:sockets/ip-name-lookup", "resolve-addresses", g.network(), str("example.com")))
	g.Close()
	select {
	case <-closed:
	case <-time.After(10 * time.Second):
		t.Fatal("the connection outlives its instance")
	}
	<-n.opened
	if _, err := (<-n.opened).Write([]byte("x")); err == nil {
		t.Error("the UDP socket outlives its instance")
	}
	if g.held != 0 {
		t.Errorf("%d bytes are held after Close", g.held)
	}
}

// TestTCPWrongOrder: each function in each state in which it is not allowed.
func TestTCPWrongOrder(t *testing.T) {
	n := &loopback{hold: make(chan struct{})}
	g := newGuest(t, Options{Network: n})
	at := accept.Loopback(t, echoTCP)
	s := g.newSocket("tcp", ipv4)
	refused := func(state string, want map[ErrorCode]string) {
		t.Helper()
		for code, names := range want {
			for name := range strings.FieldsSeq(names) {
				var params [][]byte
				switch name {
				case "start-bind":
					params = [][]byte{g.network(), address("0.0.0.0:0")}
				case "start-connect":
					params = [][]byte{g.network(), address(at)}
				case "shutdown":
					params = [][]byte{u32(shutdownBoth)}
				case "set-listen-backlog-size":
					params = [][]byte{u64(1)}
				}
				r := g.tcp(name, s, params...)
				if r.Case(2) != 1 {
					t.Errorf("%s: %s succeeds", state, name)
				} else if got := ErrorCode(r.U32()); got != code {
					t.Errorf("%s: %s: error-code %d, want %d", state, name, got, code)
				}
			}
		}
	}
	never := map[ErrorCode]string{CodeInvalidState: "accept", CodeNotInProgress: "finish-listen", CodeNotSupported: "set-listen-backlog-size"}
	refused("new", map[ErrorCode]string{CodeNotInProgress: "finish-bind finish-connect",
		CodeInvalidState: "local-address remote-address shutdown start-listen"})
	refused("new", never)
	ok(t, g.tcp("start-bind", s, g.network(), address("0.0.0.0:0")))
	refused("binding", map[ErrorCode]string{CodeConcurrencyConflict: "start-bind start-connect start-listen local-address remote-address shutdown", CodeNotInProgress: "finish-connect"})
	ok(t, g.tcp("finish-bind", s))
	refused("bound", map[ErrorCode]string{CodeInvalidState: "start-bind remote-address shutdown",
		CodeNotInProgress: "finish-bind finish-connect", CodeAccessDenied: "start-listen"})
	if got := ok(t, g.tcp("local-address", s)).Rest(); !bytes.Equal(got, address("0.0.0.0:0")) {
		t.Errorf("local-address of a bound socket = % x", got)
	}
	ok(t, g.tcp("start-connect", s, g.network(), address(at)))
	refused("connecting", map[ErrorCode]string{CodeConcurrencyConflict: "start-bind start-connect start-listen local-address remote-address shutdown",
		CodeNotInProgress: "finish-bind", CodeWouldBlock: "finish-connect"})
	close(n.hold)
	g.block(g.tcp("subscribe", s))
	ok(t, g.tcp("finish-connect", s))
	refused("connected", map[ErrorCode]string{CodeInvalidState: "start-bind start-connect start-listen",
		CodeNotInProgress: "finish-bind finish-connect"})
	refused("connected", never)
	s = g.newSocket("tcp", ipv4)
	n.failed = CodeAccessDenied
	ok(t, g.tcp("start-connect", s, g.network(), address(at)))
	g.block(g.tcp("subscribe", s))
	failed(t, g.tcp("finish-connect", s), int(CodeAccessDenied))
	refused("closed", map[ErrorCode]string{CodeInvalidState: "start-bind start-connect start-listen local-address remote-address shutdown",
		CodeNotInProgress: "finish-connect"})
}

// TestSocketAddresses: addresses of another family, and those that no peer can have, are invalid. Only the wildcard can be
// bound.
func TestSocketAddresses(t *testing.T) {
	g := newGuest(t, Options{Network: &loopback{}})
	for to, f := range map[string]family{"[::1]:80": ipv4, "127.0.0.1:80": ipv6, "0.0.0.0:80": ipv4, "127.0.0.1:0": ipv4, "[::]:80": ipv6} {
		failed(t, g.tcp("start-connect", g.newSocket("tcp", f), g.network(), address(to)), int(CodeInvalidArgument))
		socket := g.newSocket("udp", f)
		ok(t, g.udp("start-bind", socket, g.network(), address(f.wildcard().String())))
		ok(t, g.udp("finish-bind", socket))
		failed(t, g.udp("stream", socket, some(address(to))), int(CodeInvalidArgument))
	}
	// ::ffff:127.0.0.1
	mapped := slices.Concat(u32(1), wit.AppendU16(nil, 80), u32(0), make([]byte, 10), []byte{255, 255, 0, 127, 1, 0}, u32(0))
	failed(t, g.tcp("start-connect", g.newSocket("tcp", ipv6), g.network(), mapped), int(CodeInvalidArgument))
	for to, want := range map[string]ErrorCode{"[::]:0": CodeInvalidArgument, "0.0.0.0:80": CodeAccessDenied,
		"127.0.0.1:0": CodeAccessDenied} {
		failed(t, g.tcp("start-bind", g.newSocket("tcp", ipv4), g.network(), address(to)), int(want))
		failed(t, g.udp("start-bind", g.newSocket("udp", ipv4), g.network(), address(to)), int(want))
	}
}

// TestSocketOptions: options take effect in the kernel, whether they are set before or after the connection.
func TestSocketOptions(t *testing.T) {
	n := &loopback{opened: make(chan net.Conn, 1)}
	g := newGuest(t, Options{Network: n})
	s := g.newSocket("tcp", ipv4)
	ok(t, g.tcp("set-keep-alive-enabled", s, wit.AppendBool(nil, true)))
	ok(t, g.tcp("set-keep-alive-idle-time", s, u64(1_500_000_000))) // is rounded up
	ok(t, g.tcp("set-hop-limit", s, []byte{7}))
	for name, zero := range map[string][]byte{"keep-alive-idle-time": u64(0), "keep-alive-interval": u64(0), "keep-alive-count": u32(0),
		"hop-limit": {0}, "receive-buffer-size": u64(0), "send-buffer-size": u64(0)} {
		failed(t, g.tcp("set-"+name, s, zero), int(CodeInvalidArgument))
	}
	ok(t, g.tcp("start-connect", s, g.network(), address(accept.Loopback(t, echoTCP))))
	g.block(g.tcp("subscribe", s))
	ok(t, g.tcp("finish-connect", s))
	ok(t, g.tcp("set-keep-alive-count", s, u32(1000)))
	ok(t, g.tcp("set-receive-buffer-size", s, u64(1<<62)))
	_ = onDescriptorOf((<-n.opened).(Socket), func(fd int) error {
		for _, o := range []struct{ level, name, want int }{
			{unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1}, {unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, 2}, {unix.IPPROTO_TCP, unix.TCP_KEEPCNT, 127},
			{unix.IPPROTO_IP, unix.IP_TTL, 7},
		} {
			if got, err := unix.GetsockoptInt(fd, o.level, o.name); err != nil || got != o.want {
				t.Errorf("option %d of level %d = %d, %v; want %d", o.name, o.level, got, err, o.want)
			}
		}
		return nil
	})
	if got := ok(t, g.tcp("keep-alive-idle-time", s)).U64(); got != 2_000_000_000 {
		t.Errorf("keep-alive-idle-time = %d", got)
	}
	if got := ok(t, g.tcp("receive-buffer-size", s)).U64(); got == 0 || got > 1<<20 {
		t.Errorf("receive-buffer-size = %d, want at most 1 MiB", got)
	}
	if !ok(t, g.tcp("keep-alive-enabled", s)).Bool() || g.tcp("is-listening", s).Bool() || g.tcp("address-family", s).Case(2) != 0 {
		t.Error("keep-alive-enabled, is-listening or address-family is wrong")
	}
}

// TestStreamErrorCode: the error of a stream has the code of its connection.
func TestStreamErrorCode(t *testing.T) {
	g := newGuest(t, Options{Network: &loopback{}})
	_, in, out := g.connect(accept.Loopback(t, func(conn net.Conn) {
		_, _ = conn.Read(make([]byte, 1))
		_ = conn.(*net.TCPConn).SetLinger(0) // so that Close resets the connection
	}))
	ok(t, g.call("wasi:io/streams", "[method]output-stream.blocking-write-and-flush", u32(out), str("x")))
	r := g.call("wasi:io/streams", "[method]input-stream.blocking-read", u32(in), u64(1))
	if r.Case(2) != 1 || r.Case(2) != 0 {
		t.Fatal("the read did not fail")
	}
	if code := g.call("wasi:sockets/network", "network-error-code", u32(r.U32())); !code.Option() ||
		ErrorCode(code.Case(21)) != CodeConnectionReset {
		t.Error("network-error-code is not connection-reset")
	}
	if g.call("wasi:sockets/network", "network-error-code", u32(g.Put(&StreamError{io.ErrUnexpectedEOF}))).Option() {
		t.Error("an error of another stream has a network-error-code")
	}
}

// TestSocketsAreBounded: peers, sockets and connections.
func TestSocketsAreBounded(t *testing.T) {
	g := newGuest(t, Options{Network: &loopback{}})
	_, _, out := g.datagrams(none)
	for i := range maxPeers {
		ok(t, g.sendTo(out, "x", some(address(netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), uint16(20_000+i)).String()))))
	}
	failed(t, g.sendTo(out, "x", some(address("127.0.0.1:30000"))), int(CodeNewSocketLimit))

	g = newGuest(t, Options{Network: &loopback{hold: make(chan struct{})}})
	count := func(do func() *wit.Reader) (n int) {
		for ; n <= maxHeld/socketBytes; n++ {
			if r := do(); r.Case(2) == 1 {
				if code := ErrorCode(r.U32()); code != CodeOutOfMemory {
					t.Errorf("error-code %d, want out-of-memory", code)
				}
				return n
			}
		}
		t.Error("there is no bound")
		return n
	}
	connecting := count(func() *wit.Reader {
		return g.tcp("start-connect", g.newSocket("tcp", ipv4), g.network(), address("127.0.0.1:1"))
	})
	if connecting > maxHeld/streamBytes {
		t.Errorf("%d connections, which need %d bytes each", connecting, streamBytes)
	}
	lookups := func() *wit.Reader {
		return g.call("wasi:sockets/ip-name-lookup", "resolve-addresses", u32(0), str("example.com"))
	}
	count(lookups)
	count(func() *wit.Reader { return g.call("wasi:sockets/udp-create-socket", "create-udp-socket", u32(0)) })
}

func TestLookup(t *testing.T) {
	n := &loopback{hold: make(chan struct{}), names: map[string][]netip.Addr{
		"example.com":           {netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")},
		"xn--bcher-kva.example": {netip.MustParseAddr("192.0.2.2")},
	}}
	g := newGuest(t, Options{Network: n})
	resolve := func(name string) *wit.Reader {
		return g.call("wasi:sockets/ip-name-lookup", "resolve-addresses", g.network(), str(name))
	}
	next := func(l uint32) *wit.Reader {
		return g.call("wasi:sockets/ip-name-lookup", "[method]resolve-address-stream.resolve-next-address", u32(l))
	}
	l := ok(t, resolve("example.com")).U32()
	failed(t, next(l), int(CodeWouldBlock))
	close(n.hold)
	g.block(g.call("wasi:sockets/ip-name-lookup", "[method]resolve-address-stream.subscribe", u32(l)))
	for _, want := range []string{"01000000" + "00000000" + "c0000201", "01000000" + "01000000" + "0120b80d000000000000000000000100"} {
		if got := ok(t, next(l)).Rest(); !strings.EqualFold(hex.EncodeToString(got), want) {
			t.Errorf("address % x, want %s", got, want)
		}
	}
	for range 2 {
		if ok(t, next(l)).Option() {
			t.Error("a third address")
		}
	}
	for name, want := range map[string]string{"bücher.example": "c0000202", "192.0.2.3": "c0000203", "::ffff:192.0.2.4": "c0000204"} {
		l := ok(t, resolve(name)).U32()
		g.block(g.call("wasi:sockets/ip-name-lookup", "[method]resolve-address-stream.subscribe", u32(l)))
		if got := ok(t, next(l)).Rest(); !strings.HasSuffix(hex.EncodeToString(got), want) {
			t.Errorf("%s: address % x, want %s", name, got, want)
		}
	}
	l = ok(t, resolve("missing.example")).U32()
	g.block(g.call("wasi:sockets/ip-name-lookup", "[method]resolve-address-stream.subscribe", u32(l)))
	failed(t, next(l), int(CodeNameUnresolvable))
	for _, name := range []string{"", strings.Repeat("a", 254)} {
		failed(t, resolve(name), int(CodeInvalidArgument))
	}
}
