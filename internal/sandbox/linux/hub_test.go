package linux

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/oci"
	"github.com/tripod-run/tripod/internal/unixsocket"
	"github.com/tripod-run/tripod/test/until"
)

// chatter is a script that writes to both streams as fast as it can, so that conmon is almost always writing to its
// clients.
const chatter = "yes error >&2 & yes output"

func withStdin(once, tty bool) func(*runtimeapi.ContainerConfig) {
	return func(c *runtimeapi.ContainerConfig) { c.Stdin, c.StdinOnce, c.Tty = true, once, tty }
}

// attach runs Attach in the background and returns a channel with its result.
func (c *testContainer) attach(ctx context.Context, req sandbox.AttachRequest) <-chan error {
	result := make(chan error, 1)
	b := c.pod.r.Backend
	go func() { result <- b.Attach(ctx, c.pod.Pod, c.Container, req) }()
	return result
}

func (c *testContainer) hub(t *testing.T) *oci.Hub {
	t.Helper()
	_, l := c.handle(t).Snapshot()
	if l == nil {
		t.Fatal("the container is not running")
	}
	s := c.pod.r.Backend.sessions
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.hubs[l.Init.ID]
}

func await(t *testing.T, what string, done <-chan struct{}) {
	t.Helper()
	select {
	case <-done:
	case <-time.After(20 * time.Second):
		t.Fatal(what)
	}
}

// wantResult waits for the end of an attach session and checks its error.
func wantResult(t *testing.T, result <-chan error, want func(error) bool) {
	t.Helper()
	select {
	case err := <-result:
		if !want(err) {
			t.Errorf("the session ended with error %v, want another result", err)
		}
	case <-time.After(20 * time.Second):
		t.Error("the session did not end within 20 s")
	}
}

func canceled(err error) bool { return errors.Is(err, context.Canceled) }
func fine(err error) bool     { return err == nil }

// strictConmon makes conmon crash on every use of a freed client: with these settings the C library (mallopt(3)) gives
// each client its own mapping and removes the mapping when the client is freed.
func (r *rig) strictConmon() {
	r.tb.Helper()
	real, err := exec.LookPath("conmon")
	if err != nil {
		r.tb.Fatal(err)
	}
	r.cfg.Conmon = filepath.Join(r.tb.TempDir(), "conmon")
	script := "#!/bin/sh\nMALLOC_MMAP_THRESHOLD_=4096 MALLOC_TOP_PAD_=0 MALLOC_TRIM_THRESHOLD_=0 exec " + real + " \"$@\"\n"
	if err := os.WriteFile(r.cfg.Conmon, []byte(script), 0o700); err != nil {
		r.tb.Fatal(err)
	}
	r.restart()
}

// TestC5AttachClientsComeAndGo: conmon survives clients that attach and disconnect while the container floods them,
// with and without input, and nothing is left behind on either side.
func TestC5AttachClientsComeAndGo(t *testing.T) {
	for name, stdin := range map[string]bool{"output only": false, "with input": true} {
		t.Run(name, func(t *testing.T) {
			bothRuntimes(t, func(t *testing.T, r *rig) { comeAndGo(t, r, stdin) })
		})
	}
}

func comeAndGo(t *testing.T, r *rig, stdin bool) {
	r.strictConmon()
	p := r.pod()
	c := p.container(chatter, func(c *runtimeapi.ContainerConfig) { c.Stdin, c.LogPath = stdin, "" }).start()
	s, _ := c.handle(t).Snapshot()
	goroutines, here, there := runtime.NumGoroutine(), countDescriptors(t), countSockets(t, s.Conmon.Pid)
	var wg sync.WaitGroup
	var visits atomic.Int64
	for begin, client := time.Now(), 0; client < 6; client++ {
		wg.Go(func() {
			for time.Since(begin) < 1500*time.Millisecond && !t.Failed() {
				ctx, cancel := context.WithCancel(t.Context())
				seen := writerFunc(func(p []byte) (int, error) { cancel(); return len(p), nil })
				err := r.Attach(ctx, p.Pod, c.Container, sandbox.AttachRequest{Stdin: strings.NewReader("x"), Stdout: seen})
				if cancel(); !canceled(err) && !errdefs.IsResourceExhausted(err) { // at this rate a short pause is 8 MiB
					t.Errorf("attach: %v", err)
				}
				visits.Add(1)
			}
		})
	}
	wg.Wait()
	if s := c.status(); s.State != sandbox.StateRunning {
		t.Fatalf("status after %d clients: got %+v, want a running container", visits.Load(), s)
	}
	t.Logf("%d clients", visits.Load())
	err := until.Poll(10*time.Second, func() error { // the last clients disconnect
		routines, descriptors, sockets := runtime.NumGoroutine(), countDescriptors(t), countSockets(t, s.Conmon.Pid)
		if routines <= goroutines && descriptors <= here && sockets <= there {
			return nil
		}
		stacks := make([]byte, 64<<10)
		return fmt.Errorf("got %d goroutines, %d descriptors and %d sockets of conmon, want at most %d, %d and %d; stacks:\n%s",
			routines, descriptors, sockets, goroutines, here, there, stacks[:runtime.Stack(stacks, true)])
	})
	if err != nil {
		t.Fatal(err)
	}
}

func countSockets(t *testing.T, pid int) (n int) {
	for _, name := range descriptors(t, pid) {
		if strings.HasPrefix(name, "socket:") {
			n++
		}
	}
	return n
}

// TestEndOfInputBeforeClose: conmon survives a connection that closes during a write if the hub has sent the end of
// input. Otherwise conmon can crash, which is why the hub sends it.
func TestEndOfInputBeforeClose(t *testing.T) {
	r := newRig(t, "crun")
	r.strictConmon()
	p := r.pod()
	for _, sent := range []bool{true, false} {
		c := p.container("until test -e /go; do sleep 0.01; done; exec yes", func(c *runtimeapi.ContainerConfig) { c.LogPath = "" }).start()
		h := c.handle(t)
		conn, err := unixsocket.DialPacket(t.Context(), filepath.Join(r.bundleOf(h), "attach"))
		if err != nil {
			t.Fatal(err)
		}
		if sent {
			sendEOF(t, conn)
		}
		c.exec("touch /go")
		s, _ := h.Snapshot()
		waitBlocked(t, s.Conmon.Pid)
		conn.Close()
		if again, err := unixsocket.DialPacket(t.Context(), filepath.Join(r.bundleOf(h), "attach")); err == nil {
			for n := 0; n < 2000 && err == nil; n++ {
				_, err = again.Read(make([]byte, 16<<10))
			}
			if err != nil && sent {
				t.Errorf("read from conmon after the first connection closed: %v", err)
			}
			t.Logf("end of input sent: %t, then reading from conmon: %v", sent, err)
			again.Close()
		} else if sent {
			t.Errorf("connect to conmon after the first connection closed: %v", err)
		}
	}
}

// sendEOF sends conmon the end of input, as a hub does, and waits until conmon has seen it.
func sendEOF(t *testing.T, conn *net.UnixConn) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) { // pacing: no event reports that a peer stops reading
		if _, err := conn.Write(nil); err != nil && !errors.Is(err, unix.EAGAIN) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("conmon has not seen the end of input")
		}
	}
}

// waitBlocked waits until a process is blocked on writing to its socket.
func waitBlocked(t *testing.T, pid int) {
	t.Helper()
	where := ""
	for deadline := time.Now().Add(20 * time.Second); where != "sock_alloc_send_pskb"; time.Sleep(5 * time.Millisecond) {
		raw, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/wchan")
		if where = string(raw); err != nil || time.Now().After(deadline) {
			t.Fatalf("process %d waits in %q, error %v; want sock_alloc_send_pskb", pid, where, err)
		}
	}
}

// TestC5SlowAttachClient: a client that does not read is disconnected; the container and other clients continue.
func TestC5SlowAttachClient(t *testing.T) {
	bothRuntimes(t, func(t *testing.T, r *rig) {
		p := r.pod()
		c := p.container("read x; yes 0123456789abcdef0123456789abcdef | head -c 20000000; echo; echo done; read x", withStdin(false, false),
			func(c *runtimeapi.ContainerConfig) { c.LogPath = "" }).start()
		stuck := make(chan struct{})
		defer close(stuck)
		slow := c.attach(t.Context(), sandbox.AttachRequest{Stdout: writerFunc(func([]byte) (int, error) { <-stuck; return 0, io.EOF })})
		var total atomic.Int64
		finished := make(chan struct{})
		reader := writerFunc(func(p []byte) (int, error) {
			total.Add(int64(len(p)))
			if bytes.Contains(p, []byte("done")) {
				close(finished)
			}
			return len(p), nil
		})
		stdin, feed := io.Pipe()
		good := c.attach(t.Context(), sandbox.AttachRequest{Stdin: stdin, Stdout: reader})
		waitClients(t, c, 2)
		_, _ = io.WriteString(feed, "go\n")
		wantResult(t, slow, errdefs.IsResourceExhausted)
		await(t, "the other client did not receive the last output", finished)
		if n, want := total.Load(), 20000000+len64("\ndone\n"); n != want {
			t.Errorf("output of the other client: got %d bytes, want %d", n, want)
		}
		_, _ = io.WriteString(feed, "end\n")
		wantResult(t, good, fine)
		feed.Close()
		c.waitExit()
	})
}

func len64(s string) int64 { return int64(len(s)) }

func waitClients(t *testing.T, c *testContainer, n int) {
	t.Helper()
	count := func() int {
		h := c.hub(t)
		if h == nil {
			return 0
		}
		return int(h.Attached.Load())
	}
	for deadline := time.Now().Add(20 * time.Second); count() != n; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("got %d attached clients, want %d", count(), n)
		}
	}
}

// TestAttachTogether: two clients see the same output, share one connection, and both can send input.
func TestAttachTogether(t *testing.T) {
	bothRuntimes(t, func(t *testing.T, r *rig) {
		p := r.pod()
		c := p.container("while read x; do echo got-$x; echo err-$x >&2; done", withStdin(false, false)).start()
		s, _ := c.handle(t).Snapshot()
		before := countSockets(t, s.Conmon.Pid)
		if c.hub(t) != nil {
			t.Error("got a hub before the first client, want none")
		}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var outs, errs [2]safeBuffer
		var feeds [2]*io.PipeWriter
		var results [2]<-chan error
		for i := range outs {
			var stdin *io.PipeReader
			stdin, feeds[i] = io.Pipe()
			results[i] = c.attach(ctx, sandbox.AttachRequest{Stdin: stdin, Stdout: &outs[i], Stderr: &errs[i]})
		}
		waitClients(t, c, 2)
		for i, feed := range feeds {
			_, _ = io.WriteString(feed, strconv.Itoa(i)+"\n")
			outs[0].waitFor(t, "got-"+strconv.Itoa(i))
		}
		for i := range outs {
			outs[i].waitFor(t, "got-0\ngot-1\n")
			errs[i].waitFor(t, "err-0\nerr-1\n")
		}
		if after := countSockets(t, s.Conmon.Pid); after != before+1 {
			t.Errorf("two clients opened %d sockets of conmon, want 1", after-before)
		}
		cancel()
		for i := range results {
			wantResult(t, results[i], canceled)
			feeds[i].Close()
		}
		// The next client gets the same connection, because nothing was written in between.
		same := c.hub(t)
		var out safeBuffer
		again := c.attach(t.Context(), sandbox.AttachRequest{Stdin: strings.NewReader("again\n"), Stdout: &out})
		out.waitFor(t, "got-again")
		if c.hub(t) != same {
			t.Error("the next client opened another connection, want the same")
		}
		c.stop(0)
		wantResult(t, again, fine)
	})
}

// TestAttachStdinOnce: the end of the first client's input is the program's end of input, however that client
// disconnects; an earlier client without input changes nothing. A terminal stays open.
func TestAttachStdinOnce(t *testing.T) {
	bothRuntimes(t, func(t *testing.T, r *rig) {
		p := r.pod()
		c := p.container("while read x; do echo got-$x; done; echo end of input; sleep 0.1; exit 6", withStdin(true, false)).start()
		ctx, cancel := context.WithCancel(t.Context())
		onlooker := c.attach(ctx, sandbox.AttachRequest{Stdout: io.Discard})
		waitClients(t, c, 1)
		cancel()
		wantResult(t, onlooker, canceled)
		var out safeBuffer
		witness := c.attach(t.Context(), sandbox.AttachRequest{Stdout: &out})
		waitClients(t, c, 1) // it sees only what is printed after it has come
		stdin, feed := io.Pipe()
		ctx, cancel = context.WithCancel(t.Context())
		first := c.attach(ctx, sandbox.AttachRequest{Stdin: stdin, Stdout: io.Discard})
		_, _ = io.WriteString(feed, "one\n")
		out.waitFor(t, "got-one")
		cancel() // an abrupt disconnect
		wantResult(t, first, canceled)
		wantResult(t, witness, fine)
		feed.Close()
		if got := out.String(); got != "got-one\nend of input\n" {
			t.Errorf("output of the other client: got %q, want the echoed line and the end of input", got)
		}
		if s := c.waitExit(); s.ExitCode != 6 {
			t.Errorf("status: got %+v, want exit code 6", s)
		}
		tty := p.container("while read x; do echo got-$x; done", withStdin(true, true)).start()
		for _, word := range []string{"one", "two"} {
			var out safeBuffer
			ctx, cancel := context.WithCancel(t.Context())
			result := tty.attach(ctx, sandbox.AttachRequest{Stdin: strings.NewReader(word + "\n"), Stdout: &out, TTY: true})
			out.waitFor(t, "got-"+word)
			cancel()
			wantResult(t, result, canceled)
		}
	})
}

// TestAttachAfterRestart: a new backend does not know the previous backend's connection and opens its own.
func TestAttachAfterRestart(t *testing.T) {
	bothRuntimes(t, func(t *testing.T, r *rig) {
		p := r.pod()
		c := p.container("while read x; do echo got-$x; done", withStdin(false, false)).start()
		for n := range 3 {
			var out safeBuffer
			result := c.attach(t.Context(), sandbox.AttachRequest{Stdin: strings.NewReader(strconv.Itoa(n) + "\n"), Stdout: &out})
			out.waitFor(t, "got-"+strconv.Itoa(n))
			r.restart(p.known(c))
			wantResult(t, result, fine)
		}
		if s := c.status(); s.State != sandbox.StateRunning {
			t.Errorf("status: got %+v, want a running container", s)
		}
	})
}

// TestN2AttachedFlood: a container that floods its clients survives a crash of the daemon, which closes the connection
// to conmon abruptly.
func TestN2AttachedFlood(t *testing.T) {
	bothRuntimes(t, func(t *testing.T, r *rig) {
		r.strictConmon()
		p := r.pod()
		c := p.container(chatter, func(c *runtimeapi.ContainerConfig) { c.LogPath = "" }).start()
		for n := range 500 {
			seen := make(chan struct{})
			once := sync.OnceFunc(func() { close(seen) })
			result := c.attach(t.Context(), sandbox.AttachRequest{Stdout: writerFunc(func(p []byte) (int, error) { once(); return len(p), nil })})
			await(t, "the client received no output", seen)
			h := c.hub(t)
			await(t, "conmon has not seen the end of input", h.Closable)
			_ = h.Conn.Close()
			wantResult(t, result, fine)
			if s := c.status(); s.State != sandbox.StateRunning {
				t.Fatalf("status after %d crashes: got %+v, want a running container", n, s)
			}
		}
	})
}

// TestAttachUnreadInput: input that the container does not read blocks neither output nor the disconnection of clients,
// and more clients do not leave more behind.
func TestAttachUnreadInput(t *testing.T) {
	r := newRig(t, "crun")
	p := r.pod()
	c := p.container("while :; do echo tick; sleep 0.01; done", withStdin(false, false)).start()
	visit := func() {
		var out safeBuffer
		ctx, cancel := context.WithCancel(t.Context())
		result := c.attach(ctx, sandbox.AttachRequest{Stdin: io.LimitReader(zeros{}, 1<<20), Stdout: &out})
		out.waitFor(t, "tick")
		cancel()
		wantResult(t, result, canceled)
	}
	visit()
	visit()
	goroutines, here := runtime.NumGoroutine(), countDescriptors(t)
	for range 20 {
		visit()
	}
	err := until.Poll(10*time.Second, func() error {
		if routines, descriptors := runtime.NumGoroutine(), countDescriptors(t); routines > goroutines+3 || descriptors > here+1 {
			return fmt.Errorf("got %d goroutines and %d descriptors, want at most %d and %d", routines, descriptors, goroutines+3, here+1)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }
