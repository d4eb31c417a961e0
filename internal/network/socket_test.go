package network

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
)

func TestDialErrors(t *testing.T) {
	n := newNode(t, nil)
	r := n.setup(Attachment{ID: "pod"})
	for name, c := range map[string]struct {
		netns, network, addr string
		is                   func(error) bool
	}{
		"refused":      {r.Netns, "tcp", "127.0.0.1:1", errdefs.IsUnavailable},
		"localhost":    {r.Netns, "tcp", "localhost:1", errdefs.IsUnavailable},
		"name":         {r.Netns, "tcp", "example.com:80", errdefs.IsInvalidArgument},
		"no port":      {r.Netns, "tcp", "127.0.0.1", errdefs.IsInvalidArgument},
		"network":      {r.Netns, "unix", "/run/x", errdefs.IsInvalidArgument},
		"no namespace": {r.Netns + "x", "tcp", "127.0.0.1:1", errdefs.IsNotFound},
		"no nsfs":      {os.Args[0], "tcp", "127.0.0.1:1", errdefs.IsFailedPrecondition},
	} {
		conn, err := n.Dial(t.Context(), c.netns, c.network, c.addr)
		if err == nil {
			_ = conn.Close()
		}
		if !c.is(err) {
			t.Errorf("%s: Dial(%s, %q) failed with the wrong class of error, or not at all: %v", name, c.network, c.addr, err)
		}
	}
	if _, err := n.Listen(t.Context(), r.Netns, "tcp", "192.0.2.77:80"); err == nil {
		t.Error("Listen succeeded with an address that the namespace does not have")
	}
	n.teardown(Attachment{ID: "pod"})
}

// TestDialEndsWithItsContext dials an unused address: the kernel would try for at least three seconds.
func TestDialEndsWithItsContext(t *testing.T) {
	n := newNode(t, nil)
	r := n.setup(Attachment{ID: "pod"})
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	start := time.Now()
	_, err := n.Dial(ctx, r.Netns, "tcp", "10.88.255.254:80")
	if !errors.Is(err, context.DeadlineExceeded) || time.Since(start) > time.Second {
		t.Errorf("Dial returned %v after %s, want DeadlineExceeded within 1 s", err, time.Since(start))
	}
	n.teardown(Attachment{ID: "pod"})
}

// TestConnectionOutlivesItsDial checks that neither the end of Dial's context nor a half-close ends the other
// direction.
func TestConnectionOutlivesItsDial(t *testing.T) {
	n := newNode(t, nil)
	r := n.setup(Attachment{ID: "pod"})
	file, err := n.Listen(t.Context(), r.Netns, "tcp", "[::1]:80")
	if err != nil {
		t.Fatal(err)
	}
	listener, err := net.FileListener(file)
	_ = file.Close()
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	ctx, cancel := context.WithCancel(t.Context())
	conn, err := n.Dial(ctx, r.Netns, "tcp", "localhost:80") // 127.0.0.1 refuses, ::1 answers
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	cancel()
	server, err := listener.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	if err := conn.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if _, err := server.Read(make([]byte, 1)); err == nil {
		t.Error("the half-close did not arrive")
	}
	if _, err := server.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Read(make([]byte, 1)); err != nil {
		t.Errorf("Read after the end of the context and a half-close: %v", err)
	}
	n.teardown(Attachment{ID: "pod"})
}

// TestNamespacesAreNotMixedUp opens sockets with the same address in many namespaces in parallel.
func TestNamespacesAreNotMixedUp(t *testing.T) {
	n := newNode(t, nil)
	const pods = 8
	var paths [pods]string
	for i := range pods {
		id := fmt.Sprintf("pod-%d", i)
		path, err := n.NewNetns(t.Context(), id)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = n.RemoveNetns(t.Context(), id) }()
		paths[i] = path
		n.serve(path, "127.0.0.1:80", id)
	}
	var wg sync.WaitGroup
	for i := range pods {
		for range 25 {
			wg.Go(func() {
				n.mustAsk(paths[i], "127.0.0.1:80", fmt.Sprintf("pod-%d", i))
				if stats, err := n.Stats(paths[i]); err != nil || len(stats) != 0 {
					t.Errorf("Stats of a namespace with only lo = %+v, %v, want none", stats, err)
				}
			})
		}
	}
	wg.Wait()
}
