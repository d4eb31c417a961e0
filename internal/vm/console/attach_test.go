package console_test

import (
	"context"
	"errors"
	"io"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/vm/console"
	"github.com/tripod-run/tripod/sandbox"
)

// qemu is the socket of a machine's serial console.
func qemu(t *testing.T, dir string) (accept func() net.Conn, stop func()) {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, "serial.sock"), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return func() net.Conn {
		t.Helper()
		l.SetDeadline(time.Now().Add(patience))
		c, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		c.SetDeadline(time.Now().Add(patience))
		return c
	}, func() { l.Close() }
}

// attached joins a console and gives its ends.
func attached(ctx context.Context, c *console.Console) (in io.WriteCloser, out *io.PipeReader, ended chan error) {
	stdin, in := io.Pipe()
	out, stdout := io.Pipe()
	ended = make(chan error, 1)
	go func() {
		err := c.Attach(ctx, sandbox.AttachRequest{Stdin: stdin, Stdout: stdout, TTY: true, Resize: make(chan sandbox.TermSize)})
		stdout.CloseWithError(io.EOF)
		ended <- err
	}()
	return in, out, ended
}

func expect(t *testing.T, from io.Reader, want string) {
	t.Helper()
	got := make([]byte, len(want))
	if _, err := io.ReadFull(from, got); err != nil || string(got) != want {
		t.Fatalf("%q, %v; want %q", got, err, want)
	}
}

// dialogue has a client say something to the machine, which answers: from then on the client is known to be attached.
func dialogue(t *testing.T, machine net.Conn, in io.Writer, out io.Reader) {
	t.Helper()
	if _, err := io.WriteString(in, "id\r"); err != nil {
		t.Fatal(err)
	}
	expect(t, machine, "id\r")
	io.WriteString(machine, "id\r\nroot\r\n")
	expect(t, out, "id\r\nroot\r\n")
}

// TestAttach: several clients see and say everything; the end of one is nobody else's; the machine's end is all's.
func TestAttach(t *testing.T) {
	dir := newDir(t)
	accept, _ := qemu(t, dir)
	c := open(t, dir)
	machine := accept()
	in1, out1, ended1 := attached(t.Context(), c)
	dialogue(t, machine, in1, out1)
	ctx, cancel := context.WithCancel(t.Context())
	in2, out2, ended2 := attached(ctx, c)
	go func() { expectEventually(out1, "root") }()
	dialogue(t, machine, in2, out2)
	cancel()
	if err := <-ended2; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	in1.Close() // the end of input is not the end of the client, nor of the console's input
	in3, out3, ended3 := attached(t.Context(), c)
	go io.Copy(io.Discard, out1)
	dialogue(t, machine, in3, out3)
	io.WriteString(machine, "bye")
	machine.Close()
	if err := c.Drain(deadline(t)); err != nil {
		t.Fatal(err)
	}
	go c.Close()
	if rest, _ := io.ReadAll(out3); string(rest) != "bye" {
		t.Errorf("the last output is %q", rest)
	}
	for _, ended := range []chan error{ended1, ended3} {
		if err := <-ended; err != nil {
			t.Errorf("the machine's end: %v", err)
		}
	}
	if err := c.Attach(t.Context(), sandbox.AttachRequest{}); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("after the end: %v", err)
	}
}

func expectEventually(from io.Reader, want string) {
	var all strings.Builder
	buf := make([]byte, 100)
	for !strings.Contains(all.String(), want) {
		n, err := from.Read(buf)
		all.Write(buf[:n])
		if err != nil {
			return
		}
	}
}

// TestSlowClient: a client that does not read holds nobody up, and is cut off.
func TestSlowClient(t *testing.T) {
	dir := newDir(t)
	accept, _ := qemu(t, dir)
	c := open(t, dir)
	machine := accept()
	in, out, ended := attached(t.Context(), c)
	dialogue(t, machine, in, out)
	piece := make([]byte, 64<<10)
	for {
		select {
		case err := <-ended:
			if !errdefs.IsResourceExhausted(err) {
				t.Error(err)
			}
			return
		default:
		}
		if _, err := machine.Write(piece); err != nil {
			t.Fatal(err)
		}
	}
}

// TestReconnect: a client stays over a connection that ended, and speaks to the machine as soon as it is back.
func TestReconnect(t *testing.T) {
	dir := newDir(t)
	c := open(t, dir)
	in, out, _ := attached(t.Context(), c) // before there is anything to connect to
	accept, stop := qemu(t, dir)
	machine := accept()
	dialogue(t, machine, in, out)
	stop()
	machine.Close()
	accept, _ = qemu(t, dir)
	dialogue(t, accept(), in, out)
}
