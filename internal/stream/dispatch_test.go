package stream_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"k8s.io/client-go/tools/remotecommand"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/connlimit"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/stream"
	"github.com/tripod-run/tripod/test/harness/testns"
	"github.com/tripod-run/tripod/test/races"
	"github.com/tripod-run/tripod/test/until"
)

// carry is the argument with which the test's program is a carrier.
const carry = "carry"

func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == carry {
		servers := map[string]sandbox.SessionServer{"fake": carrierServer{}}
		if err := stream.Carry(context.Background(), os.Args[2],
			stream.Carriage{Servers: servers, Logger: slog.New(slog.DiscardHandler)}); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(races.Run(m.Run))
}

// carrierServer serves sessions whose program prints the carrier's PID and copies its input.
type carrierServer struct{}

func (carrierServer) Exec(_ context.Context, _ []byte, req sandbox.ExecRequest) (int32, error) {
	fmt.Fprintln(req.Stdout, os.Getpid())
	if req.Stdin != nil {
		_, _ = io.Copy(req.Stdout, req.Stdin)
	}
	return 0, nil
}

func (carrierServer) Attach(context.Context, []byte, sandbox.AttachRequest) error {
	return errdefs.ErrNotImplemented
}

// fakePlanner plans sessions with carrierServer, and counts what it is asked to reap.
type fakePlanner struct{ reaped *atomic.Int32 }

func (fakePlanner) ContainerSession(_ context.Context, id string, _ sandbox.SessionKind) (sandbox.Session, error) {
	return sandbox.Session{Handler: "fake", Container: id, Plan: json.RawMessage(`{}`)}, nil
}

func (fakePlanner) PodSession(context.Context, string) (sandbox.Session, error) {
	return sandbox.Session{}, errdefs.ErrNotImplemented
}

func (p fakePlanner) ReapSessions(context.Context) { p.reaped.Add(1) }

// daemon is one of the daemons that follow each other in a test.
type daemon struct {
	*stream.Dispatcher
	reaped atomic.Int32
	end    func()
}

// startDaemon starts a dispatcher. The carriers end with the test.
func startDaemon(t *testing.T, dir string, idle time.Duration) *daemon {
	t.Helper()
	d := &daemon{}
	var err error
	d.Dispatcher, err = stream.NewDispatcher(t.Context(), stream.DispatcherConfig{
		Dir: dir, CgroupParent: testns.Cgroup(), Command: []string{carry}, Planner: fakePlanner{&d.reaped}, Runtime: fakeRuntime{},
		Connections: connlimit.Config{Files: stream.FilesPerSession}, Idle: idle, Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- d.Serve(ctx) }()
	d.end = func() {
		cancel()
		if err := errors.Join(<-done, d.Close()); err != nil {
			t.Error(err)
		}
		d.end = func() {}
	}
	t.Cleanup(func() { d.end() })
	return d
}

// url returns the URL of a session that copies its input, or only prints the carrier's PID.
func (d *daemon) url(t *testing.T, stdin bool) string {
	t.Helper()
	resp, err := d.GetExec(&runtimeapi.ExecRequest{ContainerId: "c", Cmd: []string{"cat"}, Stdin: stdin, Stdout: true})
	if err != nil {
		t.Fatal(err)
	}
	return resp.GetUrl()
}

// open runs the session of a URL until its input ends, and returns its output.
func open(t *testing.T, url string, stdin io.Reader) (output string, err error) {
	t.Helper()
	client, err := protocols["WebSocket v5"](url)
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	err = client.StreamWithContext(t.Context(), remotecommand.StreamOptions{Stdin: stdin, Stdout: &out})
	return out.String(), err
}

// carrierOf returns the PID of the carrier that serves a URL, and ends this carrier with the test.
func carrierOf(t *testing.T, url string) int {
	t.Helper()
	output, err := open(t, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	var pid int
	if _, err := fmt.Sscan(output, &pid); err != nil {
		t.Fatalf("the session printed %q: %v", output, err)
	}
	t.Cleanup(func() { _ = syscall.Kill(pid, syscall.SIGKILL) })
	return pid
}

// TestNextDaemonTakesOver: the next daemon keeps the carrier and its address, and URLs of the previous daemon work.
func TestNextDaemonTakesOver(t *testing.T) {
	dir := t.TempDir()
	first := startDaemon(t, dir, time.Minute)
	pid, unused := carrierOf(t, first.url(t, false)), first.url(t, false)
	first.end()
	second := startDaemon(t, dir, time.Minute)
	if first.Addr().String() != second.Addr().String() {
		t.Errorf("the address was %s and is %s", first.Addr(), second.Addr())
	}
	for _, url := range []string{unused, second.url(t, false)} {
		if got := carrierOf(t, url); got != pid {
			t.Errorf("carrier %d serves %s, want that of the first daemon, %d", got, url, pid)
		}
	}
	if _, ok := second.Stats(t.Context()); !ok {
		t.Error("the carrier does not report its figures")
	}
	if _, err := open(t, unused, nil); err == nil {
		t.Error("a URL worked twice")
	}
}

// TestCarrierOfOtherConfigurationDrains: its sessions go on, it gets no new ones, and it ends with the last.
func TestCarrierOfOtherConfigurationDrains(t *testing.T) {
	dir := t.TempDir()
	first := startDaemon(t, dir, time.Minute)
	pid := carrierOf(t, first.url(t, false))
	input, feed := io.Pipe()
	ended := make(chan error, 1)
	url := first.url(t, true)
	go func() {
		output, err := open(t, url, input)
		if want := fmt.Sprintf("%d\nbefore after", pid); err == nil && output != want {
			err = fmt.Errorf("the session's output is %q, want %q", output, want)
		}
		ended <- err
	}()
	if _, err := io.WriteString(feed, "before "); err != nil {
		t.Fatal(err)
	}
	first.end()
	second := startDaemon(t, dir, 2*time.Minute)
	if got := carrierOf(t, second.url(t, false)); got == pid {
		t.Errorf("carrier %d of another configuration got a session", got)
	}
	if _, err := io.WriteString(feed, "after"); err != nil {
		t.Fatal(err)
	}
	feed.Close()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	until.Holds(t, "the first carrier ends", func() bool {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		return err != nil || strings.Contains(string(stat), ") Z ")
	})
}

// TestKilledCarrierIsReplaced: unused URLs stay valid, and what its sessions left is reaped.
func TestKilledCarrierIsReplaced(t *testing.T) {
	d := startDaemon(t, t.TempDir(), time.Minute)
	pid, unused := carrierOf(t, d.url(t, false)), d.url(t, false)
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	until.Holds(t, "the carrier's end is noticed", func() bool { return d.reaped.Load() == 1 })
	next := carrierOf(t, unused)
	if next == pid {
		t.Error("a killed carrier served a session")
	}
	if got := carrierOf(t, d.url(t, false)); got != next {
		t.Errorf("carriers %d and %d serve at the same time", next, got)
	}
}
