package wasi

import (
	"bytes"
	"net"
	"strings"
	"testing"

	"github.com/tripod-run/tripod/internal/component/wit"
)

// echoUDP starts a server that sends datagrams back.
func echoUDP(t *testing.T) string {
	t.Helper()
	conn, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	go func() {
		buf := make([]byte, 1<<16)
		for {
			n, from, err := conn.ReadFrom(buf)
			if err != nil {
				return
			}
			_, _ = conn.WriteTo(buf[:n], from)
		}
	}()
	return conn.LocalAddr().String()
}

func (g *guest) datagrams(remote []byte) (socket, in, out uint32) {
	g.t.Helper()
	socket = g.newSocket("udp", ipv4)
	failed(g.t, g.udp("stream", socket, remote), int(CodeInvalidState)) // not bound
	ok(g.t, g.udp("start-bind", socket, g.network(), address("0.0.0.0:0")))
	ok(g.t, g.udp("finish-bind", socket))
	streams := ok(g.t, g.udp("stream", socket, remote))
	return socket, streams.U32(), streams.U32()
}

// sendTo sends a datagram, and waits until its peer is connected. It returns the result of send.
func (g *guest) sendTo(out uint32, data string, to []byte) *wit.Reader {
	g.t.Helper()
	for {
		for ok(g.t, g.call("wasi:sockets/udp", "[method]outgoing-datagram-stream.check-send", u32(out))).U64() == 0 {
			g.block(g.call("wasi:sockets/udp", "[method]outgoing-datagram-stream.subscribe", u32(out)))
		}
		datagram := append(str(data), to...)
		r := g.call("wasi:sockets/udp", "[method]outgoing-datagram-stream.send", u32(out), u32(1), datagram)
		if !bytes.Equal(r.Rest(), append(u32(0), u64(0)...)) { // ok(0): not yet
			return r
		}
	}
}

// receive waits for one datagram and returns its data and address.
func (g *guest) receive(in uint32) (string, []byte) {
	g.t.Helper()
	g.block(g.call("wasi:sockets/udp", "[method]incoming-datagram-stream.subscribe", u32(in)))
	r := ok(g.t, g.call("wasi:sockets/udp", "[method]incoming-datagram-stream.receive", u32(in), u64(1)))
	if n := r.U32(); n != 1 {
		g.t.Fatalf("%d datagrams, want 1", n)
	}
	return r.String(), r.Rest()
}

// TestUDP: datagrams to one peer and to several peers, and their answers.
func TestUDP(t *testing.T) {
	g := newGuest(t, Options{Network: &loopback{}})
	first, second := echoUDP(t), echoUDP(t)
	socket, in, out := g.datagrams(some(address(first)))
	if got := ok(t, g.udp("remote-address", socket)).Rest(); !bytes.Equal(got, address(first)) {
		t.Errorf("remote-address = % x", got)
	}
	ok(t, g.sendTo(out, "hello", none))
	if data, from := g.receive(in); data != "hello" || !bytes.Equal(from, address(first)) {
		t.Errorf("received %q from % x", data, from)
	}
	failed(t, g.sendTo(out, "x", some(address(second))), int(CodeInvalidArgument))
	failed(t, g.sendTo(out, strings.Repeat("x", maxPayload+1), none), int(CodeDatagramTooLarge))

	streams := ok(t, g.udp("stream", socket, none))
	failed(t, g.call("wasi:sockets/udp", "[method]incoming-datagram-stream.receive", u32(in), u64(1)), int(CodeInvalidState))
	failed(t, g.call("wasi:sockets/udp", "[method]outgoing-datagram-stream.check-send", u32(out)), int(CodeInvalidState))
	in, out = streams.U32(), streams.U32()
	failed(t, g.udp("remote-address", socket), int(CodeInvalidState))
	failed(t, g.sendTo(out, "x", none), int(CodeInvalidArgument))
	for _, to := range []string{first, second} {
		ok(t, g.sendTo(out, "to "+to, some(address(to))))
		if data, from := g.receive(in); data != "to "+to || !bytes.Equal(from, address(to)) {
			t.Errorf("received %q from % x", data, from)
		}
	}
	ok(t, g.udp("set-unicast-hop-limit", socket, []byte{9}))
	if got := ok(t, g.udp("unicast-hop-limit", socket)).U8(); got != 9 {
		t.Errorf("unicast-hop-limit = %d", got)
	}
	_, err := g.try("wasi:sockets/udp", "[method]outgoing-datagram-stream.send", u32(out), u32(maxDatagrams+1),
		bytes.Repeat(append(str(""), none...), maxDatagrams+1))
	if err == nil {
		t.Error("more datagrams than check-send allowed were sent")
	}
}

// TestUDPErrors: a peer that is denied, and one that refuses.
func TestUDPErrors(t *testing.T) {
	n := &loopback{}
	g := newGuest(t, Options{Network: n})
	_, _, out := g.datagrams(none)
	to := echoUDP(t)
	n.failed = CodeAccessDenied
	failed(t, g.sendTo(out, "x", some(address(to))), int(CodeAccessDenied))
	n.failed = nil
	ok(t, g.sendTo(out, "x", some(address(to))))

	closed, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	at := closed.LocalAddr().String()
	closed.Close()
	_, in, out := g.datagrams(some(address(at)))
	ok(t, g.sendTo(out, "x", none))
	g.block(g.call("wasi:sockets/udp", "[method]incoming-datagram-stream.subscribe", u32(in)))
	failed(t, g.call("wasi:sockets/udp", "[method]incoming-datagram-stream.receive", u32(in), u64(1)), int(CodeConnectionRefused))
}
