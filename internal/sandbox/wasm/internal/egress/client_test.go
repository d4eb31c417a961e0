package egress

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/fdpass"
)

// pair returns a client, and the dialer's end of its connection.
func pair(t *testing.T) (*Client, *net.UnixConn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var ends [2]*net.UnixConn
	for i, fd := range fds {
		file := os.NewFile(uintptr(fd), "")
		conn, err := net.FileConn(file)
		file.Close()
		if err != nil {
			t.Fatal(err)
		}
		ends[i] = conn.(*net.UnixConn)
		t.Cleanup(func() { conn.Close() })
	}
	return NewClient(ends[0]), ends[1]
}

// TestCancelledRequestsKeepTheirSlots: a cancelled request counts until the dialer replies, because the dialer counts it
// until then, too.
func TestCancelledRequestsKeepTheirSlots(t *testing.T) {
	client, dialer := pair(t)
	defer client.Close()
	_ = dialer.SetDeadline(time.Now().Add(10 * time.Second))
	frames := fdpass.NewReader(dialer, MaxMessage)
	defer frames.Close()
	next := func() (q Request) {
		t.Helper()
		f, err := frames.Next()
		if err == nil {
			err = json.Unmarshal(f.Payload, &q)
		}
		if err != nil {
			t.Fatal(err)
		}
		return q
	}
	ctx, cancel := context.WithCancel(t.Context())
	results := make(chan error)
	resolve := func(ctx context.Context, name string) {
		_, err := client.Resolve(ctx, name)
		results <- err
	}
	for range MaxPending {
		go resolve(ctx, "cancelled.example")
	}
	for range MaxPending {
		next()
	}
	cancel()
	for range MaxPending {
		if err := <-results; !errors.Is(err, context.Canceled) {
			t.Errorf("Resolve = %v, want %v", err, context.Canceled)
		}
	}
	var last Request
	for range MaxPending {
		if last = next(); last.Op != OpCancel {
			t.Fatalf("request %+v, want %s", last, OpCancel)
		}
	}
	brief, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	go resolve(brief, "early.example")
	if err := <-results; !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Resolve = %v while %d requests have no reply, want %v", err, MaxPending, context.DeadlineExceeded)
	}
	go resolve(t.Context(), "next.example")
	reply, err := json.Marshal(Reply{ID: last.ID, Error: &Error{Code: CodeUnavailable}})
	if err == nil {
		err = fdpass.Write(dialer, MaxMessage, reply, nil)
	}
	if err != nil {
		t.Fatal(err)
	}
	if q := next(); q.Host != "next.example" {
		t.Errorf("request %+v after a reply, want next.example", q)
	}
	dialer.Close()
	if err := <-results; !errors.Is(err, errGone) {
		t.Errorf("Resolve = %v after the end, want %v", err, errGone)
	}
}
