package agent_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent/wire"
	"github.com/tripod-run/tripod/internal/unixsocket"
)

// TestNoAgent: without an agent in the guest, or without a machine, operations fail immediately, and the error says
// what to do.
func TestNoAgent(t *testing.T) {
	_, path := newPort(t)
	for _, socket := range []string{path, filepath.Join(t.TempDir(), "none.sock")} {
		a := agent.Open(socket, quiet())
		if _, err := a.Exec(t.Context(), command(nil, nil, nil, "true")); !errdefs.IsUnavailable(err) ||
			!strings.Contains(err.Error(), agent.Label) {
			t.Errorf("Exec error = %v, want ErrUnavailable that names the agent's disk", err)
		}
		if _, err := a.DialTCP(t.Context(), 80); !errdefs.IsUnavailable(err) {
			t.Errorf("DialTCP error = %v, want ErrUnavailable", err)
		}
		if _, err := a.Info(t.Context()); !errdefs.IsUnavailable(err) || a.Ready() {
			t.Errorf("Info error = %v, want ErrUnavailable; Ready = %t, want false", err, a.Ready())
		}
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		if err := a.Wait(ctx); !errdefs.IsUnavailable(err) || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Wait error = %v, want ErrUnavailable and DeadlineExceeded", err)
		}
		cancel()
		a.Close()
		if err := a.Wait(deadline(t)); !errdefs.IsUnavailable(err) {
			t.Errorf("Wait after Close: error = %v, want ErrUnavailable", err)
		}
	}
}

// TestHostsInTurn: if a host dies, leaving a program and half a frame, the next host gets a session immediately and the
// program is killed. No goroutines stay behind.
func TestHostsInTurn(t *testing.T) {
	p, path := newPort(t)
	guestIn(t, p)
	goroutines := runtime.NumGoroutine()
	for range 10 {
		a := open(t, path)
		lines := make(chan string, 1)
		failed := make(chan error, 1)
		go func() {
			_, err := a.Exec(deadline(t), command(nil, lineWriter(lines), nil, "sh", "-c", "echo $$; exec sleep 1000"))
			failed <- err
		}()
		pid := <-lines
		a.Close()
		if err := <-failed; !errdefs.IsUnavailable(err) {
			t.Errorf("Exec of a closed agent: error = %v, want ErrUnavailable", err)
		}
		c, err := unixsocket.Dial(t.Context(), path)
		if err != nil {
			t.Fatal(err)
		}
		c.Write([]byte("\x07half"))
		c.Close()
		var n int
		for _, digit := range pid {
			n = 10*n + int(digit-'0')
		}
		awaitGone(t, n)
	}
	for end := time.Now().Add(patience); runtime.NumGoroutine() > goroutines+5; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d goroutines became %d", goroutines, runtime.NumGoroutine())
		}
	}
}

// fakeGuest returns the guest's end of the port, as a reader of frames and a function that writes.
func fakeGuest(t *testing.T, p *port) (*wire.Reader, func([]byte)) {
	t.Helper()
	if _, err := p.wait(); err != nil {
		t.Fatal(err)
	}
	return wire.NewReader(p), func(frame []byte) { p.Write(frame) }
}

// hello waits for a Hello and returns its session.
func hello(t *testing.T, frames *wire.Reader) uint64 {
	t.Helper()
	for {
		f, err := frames.Next()
		if err != nil {
			t.Fatal(err)
		}
		if f.Kind == wire.KindHello {
			return f.Session
		}
	}
}

// TestBadGuest: an agent of an unsupported version is refused, and the error says why. An agent that violates the
// protocol loses its session and gets a new one, and its operations fail.
func TestBadGuest(t *testing.T) {
	p, path := newPort(t)
	a := agent.Open(path, quiet())
	defer a.Close()
	frames, say := fakeGuest(t, p)
	first := hello(t, frames)
	say([]byte("login: \x00\x00garbage\x00"))
	say(wire.AppendFrame(nil, first+1, 0, wire.KindWelcome, wire.Welcome{Version: 1, Program: "stale"}.Append(nil)))
	say(wire.AppendFrame(nil, first, 0, wire.KindWelcome, wire.Welcome{Version: 0, Program: "0.0\x1b[2J"}.Append(nil)))
	for {
		err := a.Wait(deadline(t))
		if err == nil {
			t.Fatal("an unsupported version was accepted")
		}
		if strings.Contains(err.Error(), "0.0?[2J") {
			break
		}
	}
	say(wire.AppendFrame(nil, 0, 0, wire.KindReady))
	second := hello(t, frames)
	if second == first {
		t.Error("the second session has the number of the first")
	}
	say(wire.AppendFrame(nil, second, 0, wire.KindWelcome, wire.Welcome{Version: 1, Program: "liar"}.Append(nil)))
	for !a.Ready() {
		time.Sleep(time.Millisecond)
	}
	failed := make(chan error, 1)
	go func() {
		_, err := a.Info(deadline(t))
		failed <- err
	}()
	for {
		f, err := frames.Next()
		if err != nil {
			t.Fatal(err)
		}
		if f.Kind == wire.KindOpen {
			say(wire.AppendFrame(nil, second, f.Stream+1, wire.KindResult, wire.Result{}.Append(nil)))
			break
		}
	}
	if err := <-failed; !errdefs.IsUnavailable(err) || !errors.Is(err, wire.ErrSession) {
		t.Errorf("Info error = %v, want ErrUnavailable and ErrSession", err)
	}
	if third := hello(t, frames); third == second {
		t.Error("the third session has the number of the second")
	}
}

// server starts a TCP server that echoes each connection's input, and then writes "bye". It returns the port.
func server(t *testing.T, address string) uint16 {
	t.Helper()
	l, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				io.Copy(c, c)
				io.WriteString(c, "bye")
			}()
		}
	}()
	return uint16(l.Addr().(*net.TCPAddr).Port)
}

// TestDial: data flows in both directions, and one side can be closed, with either loopback address.
func TestDial(t *testing.T) {
	a, _ := connected(t)
	for _, address := range []string{"127.0.0.1:0", "[::1]:0"} {
		c, err := a.DialTCP(deadline(t), server(t, address))
		if err != nil {
			t.Fatal(err)
		}
		data := make([]byte, 3_000_000)
		rand.NewChaCha8([32]byte{3}).Read(data)
		go func() {
			c.Write(data)
			c.(*agent.Conn).CloseWrite()
		}()
		got, err := io.ReadAll(c)
		if err != nil || sha256.Sum256(got) != sha256.Sum256(append(bytes.Clone(data), "bye"...)) {
			t.Errorf("%s: read %d bytes, error %v; want %d bytes and \"bye\"", address, len(got), err, len(data))
		}
		c.Close()
		if _, err := c.Write([]byte("x")); !errors.Is(err, net.ErrClosed) {
			t.Errorf("Write after Close: error = %v, want net.ErrClosed", err)
		}
	}
}

func TestDialFailures(t *testing.T) {
	a, _ := connected(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := uint16(l.Addr().(*net.TCPAddr).Port)
	c, err := a.DialTCP(deadline(t), port)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("Read after the deadline: error = %v, want os.ErrDeadlineExceeded", err)
	}
	c.SetReadDeadline(time.Now().Add(patience))
	peer, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	io.WriteString(peer, "x")
	if n, err := c.Read(make([]byte, 1)); n != 1 || err != nil {
		t.Errorf("Read with a new deadline = %d, %v; want 1 byte", n, err)
	}
	c.SetWriteDeadline(time.Now().Add(time.Second))
	if _, err := c.Write(make([]byte, 64<<20)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("Write to a server that does not read: error = %v, want os.ErrDeadlineExceeded", err)
	}
	peer.(*net.TCPConn).SetLinger(0)
	peer.Close()
	if _, err := c.Read(make([]byte, 1)); err == nil || err == io.EOF {
		t.Errorf("Read of a reset connection: error = %v, want one other than io.EOF", err)
	}
	l.Close()
	if _, err := a.DialTCP(deadline(t), port); !errdefs.IsUnavailable(err) {
		t.Errorf("DialTCP to a closed port: error = %v, want ErrUnavailable", err)
	}
	if _, err := a.DialTCP(deadline(t), 0); !errdefs.IsInvalidArgument(err) {
		t.Errorf("DialTCP to port 0: error = %v, want ErrInvalidArgument", err)
	}
}

// TestReports: Info and Stats describe the guest, which is the test's host here.
func TestReports(t *testing.T) {
	a, _ := connected(t)
	info, err := a.Info(deadline(t))
	name, _ := os.Hostname()
	if err != nil || info.Hostname != name || info.Program != "test" || len(info.Interfaces) == 0 {
		t.Errorf("Info = %+v, %v; want host name %s, program test and interfaces", info, err, name)
	}
	stats, err := a.Stats(deadline(t))
	if err != nil || stats.MemoryTotal == 0 || stats.MemoryAvailable > stats.MemoryTotal || len(stats.Filesystems) == 0 {
		t.Errorf("Stats = %+v, %v; want memory and file systems", stats, err)
	}
}

func TestDisk(t *testing.T) {
	dir := t.TempDir()
	program := filepath.Join(dir, "program")
	os.WriteFile(program, []byte("one"), 0o755)
	first, err := agent.Disk(filepath.Join(dir, "disks"), program)
	if err != nil {
		t.Fatal(err)
	}
	image, err := os.ReadFile(first)
	if err != nil || !bytes.Contains(image[:64<<10], []byte(agent.Label)) || !bytes.Contains(image, []byte(agent.ProgramName)) {
		t.Errorf("the image (%d bytes, error %v) lacks the label or the program", len(image), err)
	}
	if second, err := agent.Disk(filepath.Join(dir, "disks"), program); err != nil || second != first {
		t.Errorf("second Disk = %s, %v; want %s", second, err, first)
	}
	os.WriteFile(program, []byte("two"), 0o755)
	if other, err := agent.Disk(filepath.Join(dir, "disks"), program); err != nil || other == first {
		t.Errorf("Disk of another program = %s, %v; want another file", other, err)
	}
	if left, _ := os.ReadDir(filepath.Join(dir, "disks")); len(left) != 2 {
		t.Errorf("files = %v, want the two disks", left)
	}
	if _, err := agent.Disk(dir, filepath.Join(dir, "none")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("Disk of a missing program: error = %v, want ErrNotExist", err)
	}
}
