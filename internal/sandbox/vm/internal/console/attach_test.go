package console_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/console"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// qemu is a fake of a machine's serial console: it reads input from a pipe, and writes output to the serial log.
type qemu struct {
	*testing.T
	dir   string
	input *os.File
}

func newQEMU(t *testing.T, dir string) *qemu {
	t.Helper()
	input, err := machine.MakePipe(filepath.Join(dir, "serial.in"))
	if err != nil {
		t.Fatal(err)
	}
	q := &qemu{T: t, dir: dir, input: input}
	t.Cleanup(q.end)
	return q
}

func (q *qemu) end() { q.input.Close() }

// expectInput reads input and compares it with want.
func (q *qemu) expectInput(want string) {
	q.Helper()
	q.input.SetReadDeadline(time.Now().Add(patience))
	expect(q.T, q.input, want)
}

// write writes output.
func (q *qemu) write(text string) {
	q.Helper()
	f, err := os.OpenFile(filepath.Join(q.dir, "serial.log"), os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		q.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteString(text); err != nil {
		q.Fatal(err)
	}
}

// attached attaches a client to a console. ended receives the error of Attach.
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
		t.Fatalf("read %q, %v; want %q", got, err, want)
	}
}

// dialogue has a client send a line to the machine, which answers. After it, the client is certainly attached.
func (q *qemu) dialogue(in io.Writer, out io.Reader) {
	q.Helper()
	if _, err := io.WriteString(in, "id\r"); err != nil {
		q.Fatal(err)
	}
	q.expectInput("id\r")
	q.write("id\r\nroot\r\n")
	expect(q.T, out, "id\r\nroot\r\n")
}

// TestAttach: several clients get all output from the moment they attach, and can send input. The end of one client
// does not affect the others. The end of the machine ends all.
func TestAttach(t *testing.T) {
	dir := newDir(t)
	q := newQEMU(t, dir)
	c := open(t, dir)
	q.write("before the first client\r\n")
	in1, out1, ended1 := attached(t.Context(), c)
	q.dialogue(in1, out1)
	ctx, cancel := context.WithCancel(t.Context())
	in2, out2, ended2 := attached(ctx, c)
	go func() { expectEventually(out1, "root") }()
	q.dialogue(in2, out2)
	cancel()
	if err := <-ended2; !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled Attach: error = %v, want context.Canceled", err)
	}
	in1.Close() // ends neither the client nor the console's input
	in3, out3, ended3 := attached(t.Context(), c)
	go io.Copy(io.Discard, out1)
	q.dialogue(in3, out3)
	q.write("bye")
	q.end()
	if err := c.Drain(deadline(t)); err != nil {
		t.Fatal(err)
	}
	go c.Close()
	if rest, _ := io.ReadAll(out3); string(rest) != "bye" {
		t.Errorf("the last output is %q, want \"bye\"", rest)
	}
	for _, ended := range []chan error{ended1, ended3} {
		if err := <-ended; err != nil {
			t.Errorf("Attach at the machine's end: error = %v, want nil", err)
		}
	}
	if err := c.Attach(t.Context(), sandbox.AttachRequest{}); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("Attach after the machine's end: error = %v, want ErrFailedPrecondition", err)
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

// TestSlowClient: a client that does not read is detached, and does not block the console.
func TestSlowClient(t *testing.T) {
	dir := newDir(t)
	q := newQEMU(t, dir)
	c := open(t, dir)
	in, out, ended := attached(t.Context(), c)
	q.dialogue(in, out)
	piece := strings.Repeat("x", 63) + "\n"
	for {
		select {
		case err := <-ended:
			if !errdefs.IsResourceExhausted(err) {
				t.Errorf("Attach error = %v, want ErrResourceExhausted", err)
			}
			return
		default:
		}
		q.write(strings.Repeat(piece, 1024))
	}
}

// TestFlood: an attached client gets all output, although the relay frees the logged part of the serial log.
func TestFlood(t *testing.T) {
	dir := newDir(t)
	q := newQEMU(t, dir)
	c := open(t, dir)
	in, out, _ := attached(t.Context(), c)
	q.dialogue(in, out)
	var want, got bytes.Buffer
	for i := range 2000 {
		line := fmt.Sprintf("%d %s\n", i, strings.Repeat("y", 500))
		want.WriteString(line)
		q.write(line)
		if _, err := io.CopyN(&got, out, int64(len(line))); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(want.Bytes(), got.Bytes()) {
		t.Error("the client's output differs from the guest's")
	}
}

// TestReconnect: a client stays attached when the pipe is closed, and can send input again when there is a new pipe.
func TestReconnect(t *testing.T) {
	dir := newDir(t)
	c := open(t, dir)
	in, out, _ := attached(t.Context(), c) // before the pipe exists
	q := newQEMU(t, dir)
	q.dialogue(in, out)
	q.end()
	newQEMU(t, dir).dialogue(in, out)
}
