package engine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
)

// hub implements Channels with message queues.
type hub struct {
	mu    sync.Mutex
	named map[string]*queue
	open  int
	most  int // maximum number of open channels
}

// queue is a channel of the hub; a guest may open it once.
type queue struct {
	hub         *hub
	read, write bool
	in, out     []string
	ended       bool
	full        bool
	wake        func()
}

func newHub(names ...string) *hub {
	h := &hub{named: map[string]*queue{}, most: 10}
	for _, n := range names {
		h.named[n] = &queue{hub: h, read: n != "write", write: n != "read"}
	}
	return h
}

func (h *hub) Open(name string, read, write bool, wake func()) (Channel, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	q := h.named[name]
	switch {
	case q == nil:
		return nil, fmt.Errorf("%s: %w", name, errdefs.ErrNotFound)
	case !read && !write:
		return nil, nil
	case read && !q.read || write && !q.write:
		return nil, fmt.Errorf("%s: %w", name, errdefs.ErrPermissionDenied)
	case h.open == h.most:
		return nil, fmt.Errorf("%s: %w", name, errdefs.ErrResourceExhausted)
	}
	h.open++
	q.wake = wake
	return q, nil
}

func (q *queue) Send(p []byte) error {
	q.hub.mu.Lock()
	defer q.hub.mu.Unlock()
	if q.full {
		return ErrWait
	}
	q.out = append(q.out, string(p))
	return nil
}

func (q *queue) Receive() ([]byte, error) {
	q.hub.mu.Lock()
	defer q.hub.mu.Unlock()
	switch {
	case len(q.in) > 0:
		m := q.in[0]
		q.in = q.in[1:]
		return []byte(m), nil
	case q.ended:
		return nil, io.EOF
	}
	return nil, ErrWait
}

func (q *queue) Ready(write bool) bool {
	q.hub.mu.Lock()
	defer q.hub.mu.Unlock()
	if write {
		return !q.full
	}
	return len(q.in) > 0 || q.ended
}

func (q *queue) Close() {
	q.hub.mu.Lock()
	defer q.hub.mu.Unlock()
	q.hub.open--
}

// change changes a channel and wakes the guest that has it open.
func (h *hub) change(name string, do func(q *queue)) {
	h.mu.Lock()
	q := h.named[name]
	do(q)
	wake := q.wake
	h.mu.Unlock()
	if wake != nil {
		wake()
	}
}

func (h *hub) sent(name string) []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.named[name].out
}

func put(messages ...string) func(*queue) {
	return func(q *queue) { q.in = append(q.in, messages...) }
}

func end(q *queue) { q.ended = true }

func channelGuest(t *testing.T) *Code {
	t.Helper()
	return guest(t, testEngine(t), read(t, "channels.wasm"), Host{})
}

func TestChannels(t *testing.T) {
	c := channelGuest(t)
	large := strings.Repeat("0123456789abcdef", 1<<20)
	for _, k := range []struct {
		args []string
		in   []string
		code int
		sent []string
		out  string
	}{
		{args: []string{"echo"}, in: []string{"one", "", "two\x00", large}, sent: []string{"one", "two\x00", large}},
		{args: []string{"pieces"}, in: []string{"abcdefg", "h"}, sent: []string{"abc", "def", "g", "h"}},
		{args: []string{"send", "/ch/write", "words", "w"}},
		{args: []string{"send", "/ch/read", "words", "w"}, code: 2}, {args: []string{"read", "/ch/write"}, code: 2},
		{args: []string{"read", "/ch/none"}, code: 44}, {args: []string{"read", "/other"}, code: 76},
		{args: []string{"read", "/ch/io", "", "n"}, code: 6},
		{args: []string{"large", "/ch/io", "16777216"}, sent: []string{strings.Repeat("\x00", 16<<20)}},
		{args: []string{"large", "/ch/io", "16777217"}, code: 35},
		{args: []string{"vectors"}, in: []string{"received"}, sent: []string{"one message"}, out: "8 rece|i|ved\n"},
		{args: []string{"many"}, code: 33, out: "10\n"},
		{args: []string{"stats", "/ch/io", "", "n"}, out: "2 4 8000042 1 1 44 70 58\n"},
		{args: []string{"both", "/ch/io", "20"}, code: 100},
		{args: []string{"both", "/ch/io", "60000"}, in: []string{"there"}},
		{args: []string{"hostile"}, out: "21 21 35 21 28 21 21 28 21 37 21 44 28 54 31 0 8 8 8 "},
	} {
		h := newHub("io", "read", "write")
		h.named["io"].in = k.in
		if k.args[0] == "echo" || k.args[0] == "pieces" {
			h.named["io"].ended = true
		}
		var out bytes.Buffer
		i := instance(t, c, InstanceOptions{Args: append([]string{"prog"}, k.args...), Stdout: &out, Channels: h})
		code, err := i.Run(t.Context())
		if err != nil || code != k.code || out.String() != k.out {
			t.Errorf("%.60q: code %d, %v, output %.200q; want %d, %.200q", k.args, code, err, out.String(), k.code, k.out)
		}
		if sent := h.sent("io"); strings.Join(sent, "|") != strings.Join(k.sent, "|") {
			t.Errorf("%.60q sent %.200q, want %.200q", k.args, sent, k.sent)
		}
	}
}

// TestChannelsAreStdio: channels with these names replace the streams.
func TestChannelsAreStdio(t *testing.T) {
	h := newHub("stdin", "stdout")
	h.change("stdin", put("first\n", "second\n"))
	h.change("stdin", end)
	i := instance(t, channelGuest(t), InstanceOptions{Args: []string{"prog", "stdio"}, Channels: h})
	if code, err := i.Run(t.Context()); code != 0 || err != nil {
		t.Errorf("Run = %d, %v; want 0", code, err)
	}
	if sent := h.sent("stdout"); fmt.Sprintf("%q", sent) != `["first\n" "second\n"]` {
		t.Errorf("sent %q", sent)
	}
}

// TestChannelsAndDirectories: a guest can have both.
func TestChannelsAndDirectories(t *testing.T) {
	c := channelGuest(t)
	for range 3 {
		dir, h := t.TempDir(), newHub("io")
		h.change("io", put("one", "two"))
		h.change("io", end)
		var out bytes.Buffer
		i := instance(t, c, InstanceOptions{
			Args: []string{"prog", "files", "", "words"}, Env: []string{"NAME=a=b"}, Stdout: &out, Channels: h,
			Preopens: []Preopen{{Path: dir, Guest: "/data"}},
		})
		code, err := i.Run(t.Context())
		if err != nil || code != 0 || out.String() != "75 63 a=b\n" {
			t.Errorf("Run = %d, %v, output %q; want 0 and \"75 63 a=b\\n\"", code, err, out.String())
		}
		if sent := h.sent("io"); strings.Join(sent, "|") != "words|one|two" {
			t.Errorf("sent %q, want words, one, two", sent)
		}
		if data, err := os.ReadFile(filepath.Join(dir, "moved")); string(data) != "words" {
			t.Errorf("file moved contains %q, %v; want words", data, err)
		}
		i.Close()
	}
}

// TestChannelsWake: a guest that waits for a channel is woken by a message, by room, and by the channel's end.
func TestChannelsWake(t *testing.T) {
	c := channelGuest(t)
	dirs := []Preopen{{Path: t.TempDir(), Guest: "/data"}}
	stdin, w := io.Pipe() // never written
	defer w.Close()
	for _, k := range []struct {
		args []string
		do   func(*queue)
		code int
	}{
		{[]string{"read"}, put("m"), 0}, {[]string{"read"}, end, 0},
		{[]string{"both", "/ch/io", "60000"}, put("m"), 0}, {[]string{"both", "/ch/io", "60000"}, end, 0},
		{[]string{"send", "/ch/io", "message"}, func(q *queue) { q.full = false }, 0},
	} {
		for _, preopens := range [][]Preopen{nil, dirs} {
			h := newHub("io")
			h.named["io"].full = true
			i := instance(t, c, InstanceOptions{Args: append([]string{"prog"}, k.args...), Channels: h, Preopens: preopens, Stdin: stdin})
			timer := time.AfterFunc(50*time.Millisecond, func() { h.change("io", k.do) })
			if code, err := i.Run(t.Context()); code != k.code || err != nil {
				t.Errorf("%v, %d directories: Run = %d, %v; want %d", k.args, len(preopens), code, err, k.code)
			}
			timer.Stop()
		}
	}
}

// TestChannelsAreLeft: a guest that waits for a channel can be ended immediately, and is released.
func TestChannelsAreLeft(t *testing.T) {
	c, account := channelGuest(t), NewAccount(0)
	for _, args := range [][]string{{"read"}, {"both", "/ch/io", "60000"}, {"send", "/ch/io", "message"}} {
		for _, preopens := range [][]Preopen{nil, {{Path: t.TempDir(), Guest: "/data"}}} {
			h := newHub("io")
			h.named["io"].full = true
			i := instance(t, c, InstanceOptions{Args: append([]string{"prog"}, args...), Channels: h, Preopens: preopens, Account: account})
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			start := time.Now()
			_, err := i.Run(ctx)
			cancel()
			if took := time.Since(start); !errors.Is(err, context.DeadlineExceeded) || took > time.Second {
				t.Errorf("%v: error %v after %v, want DeadlineExceeded within 1 s", args, err, took)
			}
			i.Close()
			h.change("io", put("too late")) // must be harmless
			awaitRelease(t, account)
		}
	}
}

// TestChannelsThatPanic: the guest sees panics of the host as I/O errors.
func TestChannelsThatPanic(t *testing.T) {
	i := instance(t, channelGuest(t), InstanceOptions{Args: []string{"prog", "read"}, Channels: panicking{}})
	if code, err := i.Run(t.Context()); code != 29 || err != nil {
		t.Errorf("Run = %d, %v; want 29", code, err)
	}
}

type panicking struct{}

func (panicking) Open(name string, _, _ bool, _ func()) (Channel, error) {
	if strings.HasPrefix(name, "std") {
		return nil, errdefs.ErrNotFound
	}
	panic("as requested")
}
