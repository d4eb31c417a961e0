package machine_test

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// TestSocketsOfLongPaths: a socket whose path fits into no address is made, reached, and replaced.
func TestSocketsOfLongPaths(t *testing.T) {
	dir := filepath.Join(t.TempDir(), strings.Repeat("d", 120))
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, machine.AgentSocket)
	for range 2 {
		f, err := machine.Listen(path)
		if err != nil {
			t.Fatal(err)
		}
		c, err := machine.Dial(context.Background(), path)
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
	if _, err := machine.Dial(context.Background(), path); !errdefs.IsUnavailable(err) {
		t.Errorf("a socket that nobody listens at: %v", err)
	}
	if _, err := machine.Dial(context.Background(), filepath.Join(dir, "none")); !errdefs.IsUnavailable(err) {
		t.Errorf("no socket: %v", err)
	}
	if _, err := machine.Dial(context.Background(), filepath.Join(dir, "none", "none")); !errdefs.IsUnavailable(err) {
		t.Errorf("no directory: %v", err)
	}
}
