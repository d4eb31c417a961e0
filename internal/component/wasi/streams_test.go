package wasi

import (
	"bytes"
	"context"
	"errors"
	"io"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tripod-run/tripod/internal/component/wit"
)

const (
	streams = "wasi:io/streams"
	polls   = "wasi:io/poll"
)

func TestReadsWaitOrDoNot(t *testing.T) {
	g := newGuest(t, Options{})
	r, w := io.Pipe()
	in := g.Put(&InputStream{Input: NewReader(r, g.Wake)})
	if n := ok(t, g.call(streams, "[method]input-stream.read", u32(in), u64(10))).Len(); n != 0 {
		t.Errorf("read without input = %d bytes, want 0", n)
	}
	go func() {
		_, _ = w.Write([]byte("hello, world"))
		_ = w.Close()
	}()
	p := g.call(streams, "[method]input-stream.subscribe", u32(in)).U32()
	g.call(polls, "[method]pollable.block", u32(p))
	if got := string(ok(t, g.call(streams, "[method]input-stream.read", u32(in), u64(5))).Bytes()); got != "hello" {
		t.Errorf("read = %q, want \"hello\"", got)
	}
	if n := ok(t, g.call(streams, "[method]input-stream.blocking-skip", u32(in), u64(2))).U64(); n != 2 {
		t.Errorf("blocking-skip = %d, want 2", n)
	}
	if got := string(ok(t, g.call(streams, "[method]input-stream.blocking-read", u32(in), u64(1<<40))).Bytes()); got != "world" {
		t.Errorf("blocking-read = %q, want \"world\"", got)
	}
	failed(t, g.call(streams, "[method]input-stream.blocking-read", u32(in), u64(5)), 1)
}

func TestStreamErrors(t *testing.T) {
	g := newGuest(t, Options{})
	in := g.Put(&InputStream{Input: NewReader(io.MultiReader(strings.NewReader("x"), broken{}), g.Wake)})
	ok(t, g.call(streams, "[method]input-stream.blocking-read", u32(in), u64(5)))
	r := g.call(streams, "[method]input-stream.blocking-read", u32(in), u64(5))
	failed(t, r, 0)
	if text := g.call("wasi:io/error", "[method]error.to-debug-string", u32(r.U32())).String(); text != "it broke" {
		t.Errorf("to-debug-string = %q, want \"it broke\"", text)
	}
	failed(t, g.call(streams, "[method]input-stream.read", u32(in), u64(5)), 1) // closed after the first error
}

type broken struct{}

func (broken) Read([]byte) (int, error)  { return 0, errors.New("it broke") }
func (broken) Write([]byte) (int, error) { return 0, errors.New("it broke") }

// slow blocks writes until take is closed.
type slow struct {
	take    chan struct{}
	writing atomic.Bool
	bytes.Buffer
}

func (s *slow) Write(p []byte) (int, error) {
	s.writing.Store(true)
	<-s.take
	return s.Buffer.Write(p)
}

// TestWritesDoNotWait: a guest fills the window, sees that there is no room left, and waits for room.
func TestWritesDoNotWait(t *testing.T) {
	g := newGuest(t, Options{})
	to := &slow{take: make(chan struct{})}
	w := NewWriter(to, nil, g.Wake)
	out := g.Put(&OutputStream{Output: w})
	piece := bytes.Repeat([]byte("x"), 1<<10)
	written := 0
	for {
		writing := to.writing.Load() // before that, the background write would make room later
		room := ok(t, g.call(streams, "[method]output-stream.check-write", u32(out))).U64()
		if room == 0 && writing {
			break
		} else if room == 0 {
			runtime.Gosched()
			continue
		} else if room < uint64(len(piece)) {
			t.Fatalf("check-write = %d, want 0 or at least %d", room, len(piece))
		}
		ok(t, g.call(streams, "[method]output-stream.write", u32(out), list(piece)))
		written += len(piece)
	}
	if written > 3*window {
		t.Errorf("the stream accepted %d bytes, want at most %d", written, 3*window)
	}
	if _, err := g.try(streams, "[method]output-stream.write", u32(out), list(piece)); err == nil {
		t.Error("write beyond check-write succeeded")
	}
	p := g.call(streams, "[method]output-stream.subscribe", u32(out)).U32()
	if g.call(polls, "[method]pollable.ready", u32(p)).Bool() {
		t.Error("the pollable of a full stream is ready")
	}
	close(to.take)
	g.call(polls, "[method]pollable.block", u32(p))
	ok(t, g.call(streams, "[method]output-stream.blocking-flush", u32(out)))
	if got := to.Len(); got != written {
		t.Errorf("%d bytes arrived, want %d", got, written)
	}
	ok(t, g.call(streams, "[method]output-stream.blocking-write-zeroes-and-flush", u32(out), u64(3)))
	if err := w.Close(); err != nil || !bytes.HasSuffix(to.Bytes(), []byte("x\x00\x00\x00")) {
		t.Errorf("Close: %v; the last bytes are %q", err, to.Bytes()[max(0, to.Len()-4):])
	}
	failed(t, g.call(streams, "[method]output-stream.write", u32(out), list(nil)), 1)
}

func TestFailedWriteIsToldOnce(t *testing.T) {
	g := newGuest(t, Options{})
	out := g.Put(&OutputStream{Output: NewWriter(broken{}, nil, g.Wake)})
	failed(t, g.call(streams, "[method]output-stream.blocking-write-and-flush", u32(out), list([]byte("x"))), 0)
	failed(t, g.call(streams, "[method]output-stream.check-write", u32(out)), 1)
}

// TestFlushOfWritten: blocking-flush passes on what was written without blocking, and then returns.
func TestFlushOfWritten(t *testing.T) {
	for name, output := range map[string]func(*Writer) Output{
		"on the guest's thread": func(w *Writer) Output { return w },
		"in the background":     (*Writer).Background,
	} {
		t.Run(name, func(t *testing.T) {
			g := newGuest(t, Options{})
			var to bytes.Buffer
			w := NewWriter(&to, nil, g.Wake)
			out := g.Put(&OutputStream{Output: output(w)})
			for i, want := range []string{"one", "onemore"} {
				ok(t, g.call(streams, "[method]output-stream.write", u32(out), list([]byte([]string{"one", "more"}[i]))))
				ok(t, g.call(streams, "[method]output-stream.blocking-flush", u32(out)))
				if got := to.String(); got != want {
					t.Errorf("%q arrived, want %q", got, want)
				}
			}
		})
	}
}

// TestFlushIsSent: flushed bytes are sent soon, and bytes written shortly after each other are sent together.
func TestFlushIsSent(t *testing.T) {
	g := newGuest(t, Options{})
	sent := make(chan int, 100)
	var to bytes.Buffer
	w := NewWriter(&to, func() error { sent <- to.Len(); return nil }, g.Wake)
	out := g.Put(&OutputStream{Output: w})
	for range 10 {
		ok(t, g.call(streams, "[method]output-stream.blocking-write-and-flush", u32(out), list([]byte("x"))))
	}
	total, sends := 0, 0
	for total < 10 {
		total = <-sent
		sends++
	}
	if sends > 5 {
		t.Errorf("10 bytes were sent in %d packets, want at most 5", sends)
	}
	if err := w.Close(); err != nil {
		t.Error(err)
	}
}

func TestPollGivesThoseThatAreReady(t *testing.T) {
	g := newGuest(t, Options{})
	begin := time.Now()
	soon := g.call("wasi:clocks/monotonic-clock", "subscribe-duration", u64(uint64(20*time.Millisecond))).U32()
	later := g.call("wasi:clocks/monotonic-clock", "subscribe-duration", u64(1<<63)).U32()
	now := g.call("wasi:clocks/monotonic-clock", "now").U64()
	past := g.call("wasi:clocks/monotonic-clock", "subscribe-instant", u64(now-1)).U32()
	poll := func(pollables ...uint32) []uint32 {
		args := wit.AppendLen(nil, len(pollables))
		for _, p := range pollables {
			args = wit.AppendU32(args, p)
		}
		r := g.call(polls, "poll", args)
		ready := make([]uint32, r.Len())
		for i := range ready {
			ready[i] = r.U32()
		}
		return ready
	}
	if got := poll(later, past, soon); len(got) != 1 || got[0] != 1 {
		t.Errorf("poll = %v, want [1]", got)
	}
	if got := poll(later, soon); len(got) != 1 || got[0] != 1 || time.Since(begin) < 20*time.Millisecond {
		t.Errorf("poll = %v after %v, want [1] after 20 ms", got, time.Since(begin))
	}
	if _, err := g.try(polls, "poll", wit.AppendLen(nil, 0)); err == nil {
		t.Error("poll of an empty list succeeded")
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	g.ctx = ctx
	over := errors.New("the request is over")
	time.AfterFunc(time.Millisecond, func() { cancel(over) })
	if _, err := g.try(polls, "[method]pollable.block", u32(later)); !errors.Is(err, over) {
		t.Errorf("interrupted block: error %v, want %v", err, over)
	}
}

func TestSplice(t *testing.T) {
	g := newGuest(t, Options{})
	var to bytes.Buffer
	w := NewWriter(&to, nil, g.Wake)
	in, out := g.Put(&InputStream{Input: NewReader(strings.NewReader("some bytes"), g.Wake)}), g.Put(&OutputStream{Output: w})
	if n := ok(t, g.call(streams, "[method]output-stream.blocking-splice", u32(out), u32(in), u64(4))).U64(); n != 4 {
		t.Errorf("blocking-splice = %d, want 4", n)
	}
	ok(t, g.call(streams, "[method]output-stream.splice", u32(out), u32(in), u64(100)))
	failed(t, g.call(streams, "[method]output-stream.blocking-splice", u32(out), u32(in), u64(100)), 1)
	if err := w.Close(); err != nil || to.String() != "some bytes" {
		t.Errorf("spliced %q, error %v; want \"some bytes\"", to.String(), err)
	}
}

func TestStandardStreams(t *testing.T) {
	var stdout, stderr bytes.Buffer
	g := newGuest(t, Options{Stdin: strings.NewReader("input"), Stdout: &stdout, Stderr: &stderr})
	for name, to := range map[string]*bytes.Buffer{"stdout": &stdout, "stderr": &stderr} {
		out := g.call("wasi:cli/"+name, "get-"+name).U32()
		ok(t, g.call(streams, "[method]output-stream.write", u32(out), list([]byte("to "+name))))
		if to.String() != "to "+name {
			t.Errorf("%s received %q, want %q", name, to, "to "+name)
		}
	}
	in := g.call("wasi:cli/stdin", "get-stdin").U32()
	if got := string(ok(t, g.call(streams, "[method]input-stream.blocking-read", u32(in), u64(10))).Bytes()); got != "input" {
		t.Errorf("blocking-read of stdin = %q, want \"input\"", got)
	}
	none := newGuest(t, Options{})
	in = none.call("wasi:cli/stdin", "get-stdin").U32()
	failed(t, none.call(streams, "[method]input-stream.blocking-read", u32(in), u64(10)), 1)
}

func TestResourcesAreReused(t *testing.T) {
	g := newGuest(t, Options{})
	for range 1000 {
		p := g.call("wasi:clocks/monotonic-clock", "subscribe-duration", u64(0)).U32()
		g.Drop(p)
		g.Drop(p) // harmless
	}
	if len(g.slots) > 1 {
		t.Errorf("the table has %d slots, want at most 1", len(g.slots))
	}
	if _, err := Get[*InputStream](g.State, 5); err == nil {
		t.Error("Get found a resource that does not exist")
	}
}
