package stream

import (
	"errors"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func pair(t testing.TB, address string) (client, server *net.TCPConn) {
	t.Helper()
	listener, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	a, err := net.Dial("tcp", listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	b, err := listener.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close(); b.Close() })
	return a.(*net.TCPConn), b.(*net.TCPConn)
}

// TestLeft checks that peerGone recognises clients that close or reset their connection, even with full buffers, but no
// connected ones.
func TestLeft(t *testing.T) {
	for _, address := range []string{"127.0.0.1:0", "[::1]:0"} {
		for how, leave := range map[string]func(*net.TCPConn){
			"close": func(c *net.TCPConn) {},
			"reset": func(c *net.TCPConn) { c.SetLinger(0) },
			"flood": func(c *net.TCPConn) {
				c.SetWriteDeadline(time.Now().Add(100 * time.Millisecond))
				for {
					if _, err := c.Write(make([]byte, 1<<20)); err != nil {
						return
					}
				}
			},
		} {
			client, server := pair(t, address)
			if peerGone(server) || peerGone(client) || unread(server) != 0 {
				t.Errorf("%s, %s: a connected client counts as gone, or has unread bytes", address, how)
			}
			client.Write([]byte("hello"))
			if peerGone(server) || unread(server) != 5 {
				t.Errorf("%s, %s: after 5 bytes were written, the client counts as gone, or %d bytes are unread", address, how, unread(server))
			}
			leave(client)
			if peerGone(server) {
				t.Errorf("%s, %s: the client counts as gone before it closes", address, how)
			}
			client.Close()
			if !peerGone(server) {
				t.Errorf("%s, %s: the client does not count as gone after it closed", address, how)
			}
		}
	}
	for _, address := range []string{"127.0.0.1", "::1"} {
		nobody := &net.TCPAddr{IP: net.ParseIP(address), Port: 1}
		if state, err := socketState(nobody, nobody); !errors.Is(err, unix.ENOENT) {
			t.Errorf("%s: socketState of a missing socket = %d, %v, want ENOENT", address, state, err)
		}
	}
}

func BenchmarkPeerClosed(b *testing.B) {
	client, _ := pair(b, "127.0.0.1:0")
	for b.Loop() {
		peerClosed(client)
	}
}
