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

// A client that closes, resets, or closes behind more than fits into the buffers, is gone; before that it is not.
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
				t.Errorf("%s, %s: a living client is taken for gone", address, how)
			}
			client.Write([]byte("hello"))
			if peerGone(server) || unread(server) != 5 {
				t.Errorf("%s, %s: gone after it wrote, or %d bytes unread", address, how, unread(server))
			}
			leave(client)
			if peerGone(server) {
				t.Errorf("%s, %s: gone before it closed", address, how)
			}
			client.Close()
			if !peerGone(server) {
				t.Errorf("%s, %s: a client that is gone is taken for living", address, how)
			}
		}
	}
	for _, address := range []string{"127.0.0.1", "::1"} {
		nobody := &net.TCPAddr{IP: net.ParseIP(address), Port: 1}
		if state, err := socketState(nobody, nobody); !errors.Is(err, unix.ENOENT) {
			t.Errorf("%s: a socket that is not there has state %d, %v", address, state, err)
		}
	}
}

func BenchmarkPeerClosed(b *testing.B) {
	client, _ := pair(b, "127.0.0.1:0")
	for b.Loop() {
		peerClosed(client)
	}
}
