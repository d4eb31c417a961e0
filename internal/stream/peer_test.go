package stream

import (
	"net"
	"testing"
)

func TestPeerGone(t *testing.T) {
	for _, address := range []string{"127.0.0.1:0", "[::1]:0"} {
		listener, err := net.Listen("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		defer listener.Close()
		client, err := net.Dial("tcp", listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		server, err := listener.Accept()
		if err != nil {
			t.Fatal(err)
		}
		defer server.Close()
		if peerGone(server) || peerGone(client) {
			t.Errorf("%s: a living client is taken for gone", address)
		}
		if n := unread(server); n != 0 {
			t.Errorf("%s: %d bytes that nobody sent", address, n)
		}
		client.Write([]byte("hello"))
		client.Close()
		if !peerGone(server) {
			t.Errorf("%s: a client that is gone is taken for living", address)
		}
		if n := unread(server); n != 5 {
			t.Errorf("%s: %d bytes unread, want 5", address, n)
		}
	}
}

func BenchmarkPeerGone(b *testing.B) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer listener.Close()
	client, err := net.Dial("tcp", listener.Addr().String())
	if err != nil {
		b.Fatal(err)
	}
	defer client.Close()
	for b.Loop() {
		peerGone(client)
	}
}
