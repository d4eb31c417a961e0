package unixsocket_test

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/unixsocket"
)

// TestSocketsOfLongPaths: Listen and Dial work for a path that does not fit in an address. Listen replaces a socket.
func TestSocketsOfLongPaths(t *testing.T) {
	dir := filepath.Join(t.TempDir(), strings.Repeat("d", 120))
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "agent.sock")
	for range 2 {
		f, err := unixsocket.Listen(path)
		if err != nil {
			t.Fatal(err)
		}
		c, err := unixsocket.Dial(context.Background(), path)
		if err != nil {
			t.Fatal(err)
		}
		l, err := net.FileListener(f)
		if err != nil {
			t.Fatal(err)
		}
		peer, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		peer.Close()
		c.Close()
		l.Close()
		f.Close()
	}
	if _, err := unixsocket.Dial(context.Background(), path); !errdefs.IsUnavailable(err) {
		t.Errorf("Dial of a closed socket: got error %v, want ErrUnavailable", err)
	}
	if _, err := unixsocket.Dial(context.Background(), filepath.Join(dir, "none")); !errdefs.IsUnavailable(err) {
		t.Errorf("Dial of a missing socket: got error %v, want ErrUnavailable", err)
	}
	if _, err := unixsocket.Dial(context.Background(), filepath.Join(dir, "none", "none")); !errdefs.IsUnavailable(err) {
		t.Errorf("Dial in a missing directory: got error %v, want ErrUnavailable", err)
	}
}
