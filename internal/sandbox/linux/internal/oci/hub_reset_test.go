package oci

import (
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestHubReadsPastReset: a client gets all output of a container that ends before conmon has read all packets of the hub. The kernel
// then reports a reset of the connection before what conmon has sent.
func TestHubReadsPastReset(t *testing.T) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	conmon, ours := pair[0], os.NewFile(uintptr(pair[1]), "attach")
	conn, err := net.FileConn(ours)
	if err != nil {
		t.Fatal(err)
	}
	ours.Close()
	if _, err := conn.Write([]byte("unread")); err != nil {
		t.Fatal(err)
	}
	for _, packet := range []string{"\x02some input\n", "\x03error\n"} {
		if _, err := unix.Write(conmon, []byte(packet)); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Close(conmon); err != nil {
		t.Fatal(err)
	}
	previous := make(chan struct{})
	close(previous)
	h, client := newHub(conn.(*net.UnixConn), true, true, previous)
	defer h.remove(client)
	var stdout, stderr strings.Builder
	if err := client.Serve(t.Context(), &stdout, &stderr); err != nil || stdout.String() != "some input\n" || stderr.String() != "error\n" {
		t.Errorf("output: got %q and %q, error %v, want what conmon has sent", stdout.String(), stderr.String(), err)
	}
	select {
	case <-h.Disconnected:
	case <-time.After(20 * time.Second):
		t.Error("the hub is not disconnected")
	}
}
