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
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// TestNobodyThere: without a guest's agent, or without a machine, the answer is at once, and says what to do.
func TestNobodyThere(t *testing.T) {
	_, path := newPort(t)
	for _, socket := range []string{path, filepath.Join(t.TempDir(), "none.sock")} {
		a := agent.Open(socket, quiet())
		if _, err := a.Exec(t.Context(), command(nil, nil, nil, "true")); !errdefs.IsUnavailable(err) || !strings.Contains(err.Error(), agent.Label) {
			t.Error(err)
		}
		if _, err := a.DialTCP(t.Context(), 80); !errdefs.IsUnavailable(err) {
			t.Error(err)
		}
		if _, err := a.Info(t.Context()); !errdefs.IsUnavailable(err) || a.Ready() || a.Program() != "" {
			t.Error(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		if err := a.Wait(ctx); !errdefs.IsUnavailable(err) || !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
		cancel()
		a.Close()
		if err := a.Wait(deadline(t)); !errdefs.IsUnavailable(err) {
			t.Error(err)
		}
	}
}

// TestHostsInTurn: a host that died leaves a program and half a frame; the next one has a session at once, and the program is
// dead. Nothing of either stays on the host.
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
			t.Error(err)
		}
		c, err := machine.Dial(t.Context(), path)
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

// guestOf plays a guest on the other end of the port by hand.
func guestOf(t *testing.T, p *port) (*wire.Reader, func(frame []byte)) {
	t.Helper()
	if _, err := p.wait(); err != nil {
		t.Fatal(err)
	}
	return wire.NewReader(p), func(frame []byte) { p.Write(frame) }
}

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

// TestGuestThatLies: an agent of another version is refused with the reason; one that breaks the rules loses its session, gets
// another, and holds nobody up.
func TestGuestThatLies(t *testing.T) {
	p, path := newPort(t)
	a := agent.Open(path, quiet())
	defer a.Close()
	frames, say := guestOf(t, p)
	first := hello(t, frames)
	say([]byte("login: \x00\x00garbage\x00"))
	say(wire.AppendFrame(nil, first+1, 0, wire.KindWelcome, wire.Welcome{Version: 1, Program: "stale"}.Append(nil)))
	say(wire.AppendFrame(nil, first, 0, wire.KindWelcome, wire.Welcome{Version: 0, Program: "0.0\x1b[2J"}.Append(nil)))
	for {
		err := a.Wait(deadline(t))
		if err == nil {
			t.Fatal("a version that nobody speaks is taken")
		}
		if strings.Contains(err.Error(), "0.0?[2J") {
			break
		}
	}
	say(wire.AppendFrame(nil, 0, 0, wire.KindReady))
	second := hello(t, frames)
	if second == first {
		t.Error("the same session again")
	}
	say(wire.AppendFrame(nil, second, 0, wire.KindWelcome, wire.Welcome{Version: 1, Program: "liar"}.Append(nil)))
	for a.Program() != "liar" {
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
		t.Error(err)
	}
	if third := hello(t, frames); third == second {
		t.Error("the same session again")
	}
}

// server echoes what a connection says to its end, then says bye.
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

// TestDial: both ways, half closed, over either loopback address.
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
			t.Errorf("%s: %d bytes, %v", address, len(got), err)
		}
		c.Close()
		if _, err := c.Write([]byte("x")); !errors.Is(err, net.ErrClosed) {
			t.Errorf("a write after Close: %v", err)
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
		t.Errorf("a deadline: %v", err)
	}
	c.SetReadDeadline(time.Now().Add(patience))
	peer, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	io.WriteString(peer, "x")
	if n, err := c.Read(make([]byte, 1)); n != 1 || err != nil {
		t.Errorf("after it: %v", err)
	}
	c.SetWriteDeadline(time.Now().Add(time.Second))
	if _, err := c.Write(make([]byte, 64<<20)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a write that nobody reads: %v", err)
	}
	peer.(*net.TCPConn).SetLinger(0)
	peer.Close()
	if _, err := c.Read(make([]byte, 1)); err == nil || err == io.EOF {
		t.Errorf("a connection that was reset: %v", err)
	}
	l.Close()
	if _, err := a.DialTCP(deadline(t), port); !errdefs.IsUnavailable(err) {
		t.Errorf("a port where nobody listens: %v", err)
	}
	if _, err := a.DialTCP(deadline(t), 0); !errdefs.IsInvalidArgument(err) {
		t.Errorf("port 0: %v", err)
	}
}

// TestReports: what a guest says of itself is what it is; here it is us.
func TestReports(t *testing.T) {
	a, _ := connected(t)
	info, err := a.Info(deadline(t))
	name, _ := os.Hostname()
	if err != nil || info.Hostname != name || info.Program != "test" || len(info.Interfaces) == 0 || a.Program() != "test" {
		t.Errorf("%+v, %v", info, err)
	}
	stats, err := a.Stats(deadline(t))
	if err != nil || stats.MemoryTotal == 0 || stats.MemoryAvailable > stats.MemoryTotal || len(stats.Filesystems) == 0 {
		t.Errorf("%+v, %v", stats, err)
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
		t.Errorf("%d bytes, %v", len(image), err)
	}
	if again, err := agent.Disk(filepath.Join(dir, "disks"), program); err != nil || again != first {
		t.Errorf("%s and %s, %v", first, again, err)
	}
	os.WriteFile(program, []byte("two"), 0o755)
	if other, err := agent.Disk(filepath.Join(dir, "disks"), program); err != nil || other == first {
		t.Errorf("another program's disk is %s, %v", other, err)
	}
	if left, _ := os.ReadDir(filepath.Join(dir, "disks")); len(left) != 2 {
		t.Errorf("%v", left)
	}
	if _, err := agent.Disk(dir, filepath.Join(dir, "none")); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}
