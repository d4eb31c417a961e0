package main

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

func TestNotifierSpeaksToSystemd(t *testing.T) {
	systemd := systemdSocket(t)
	t.Setenv("WATCHDOG_USEC", "20000")
	t.Setenv("WATCHDOG_PID", strconv.Itoa(os.Getpid()))
	n := newNotifier(quiet)
	for _, key := range []string{"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"} {
		if v, set := os.LookupEnv(key); set {
			t.Errorf("%s=%s is still there for children to inherit", key, v)
		}
	}
	n.ready("3 pods")
	expect(t, systemd, "READY=1\nSTATUS=3 pods")
	probed := make(chan struct{}, 100)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go n.watchdog(ctx, func(context.Context) error {
		probed <- struct{}{}
		if len(probed) < 4 {
			return errors.New("does not answer")
		}
		return nil
	})
	expect(t, systemd, "WATCHDOG=1")
	expect(t, systemd, "WATCHDOG=1")
	if len(probed) < 5 {
		t.Errorf("the watchdog was told twice after %d probes, of which the first three failed", len(probed))
	}
	cancel()
	n.stopping()
	for { // another watchdog message may be under way
		if text := receive(t, systemd); text == "STOPPING=1" {
			break
		} else if text != "WATCHDOG=1" {
			t.Fatalf("got %q", text)
		}
	}
}

// systemdSocket stands in for systemd in this process's environment.
func systemdSocket(t *testing.T) *net.UnixConn {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "notify")
	systemd, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: socket, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { systemd.Close() })
	t.Setenv("NOTIFY_SOCKET", socket)
	return systemd
}

// TestNotifierWithoutSystemd: without systemd, the notifier neither blocks nor complains.
func TestNotifierWithoutSystemd(t *testing.T) {
	t.Setenv("NOTIFY_SOCKET", "")
	n := newNotifier(quiet)
	n.ready("")
	n.watchdog(t.Context(), func(context.Context) error { t.Error("probed"); return nil })
}

func expect(t *testing.T, c *net.UnixConn, want string) {
	t.Helper()
	if got := receive(t, c); got != want {
		t.Errorf("systemd got %q, want %q", got, want)
	}
}

func receive(t *testing.T, c *net.UnixConn) string {
	t.Helper()
	_ = c.SetReadDeadline(time.Now().Add(10 * time.Second))
	b := make([]byte, 1024)
	n, err := c.Read(b)
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(b[:n]))
}

// TestProbeAnswers checks that the probe succeeds for a serving daemon and fails otherwise.
func TestProbeAnswers(t *testing.T) {
	c := fakeNode(t)
	stop := start(t, c)
	if err := probe(c.GRPC.Socket)(t.Context()); err != nil {
		t.Errorf("a daemon that serves: %v", err)
	}
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	if err := probe(c.GRPC.Socket)(t.Context()); err == nil {
		t.Error("nobody there, and yet healthy")
	}
}
