// Package accept serves the connections of listeners in tests.
package accept

import (
	"net"
	"testing"
)

// Each calls serve, in a goroutine of its own, with each connection to the listener, and then closes the connection. The
// listener is closed at the end of the test. Calls of serve can go on until their connections end.
func Each(t testing.TB, l net.Listener, serve func(net.Conn)) {
	t.Helper()
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				serve(conn)
			}()
		}
	}()
}

// Loopback is Each with a listener on a free TCP port of 127.0.0.1. It returns the listener's address.
func Loopback(t testing.TB, serve func(net.Conn)) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	Each(t, l, serve)
	return l.Addr().String()
}
