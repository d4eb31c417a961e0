package worker

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/component/engine"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

const soon = 30 * time.Second

// channelEngine returns the engine that all tests share, because a process can have only a few.
var channelEngine = sync.OnceValue(func() *engine.Engine {
	e, err := engine.New(engine.Config{Instances: 64})
	if err != nil {
		panic(err)
	}
	return e
})

// channelWorker returns an in-process worker with file loaded; the default is the engine tests' module that uses
// channels.
func channelWorker(tb testing.TB, file ...string) *Worker {
	tb.Helper()
	w := New(Config{Engine: channelEngine(), Logger: slog.New(slog.DiscardHandler), Publish: func(workerapi.Event) {}})
	tb.Cleanup(w.Close)
	loadFile(tb, w, append(file, "../../../../component/engine/testdata/channels.wasm")[0], CompileOptions())
	return w
}

func loadFile(tb testing.TB, w *Worker, file string, options engine.CompileOptions) {
	tb.Helper()
	wasm, err := os.ReadFile(file)
	require.NoError(tb, err)
	image, err := w.engine.Compile(context.Background(), wasm, options)
	require.NoError(tb, err)
	path := filepath.Join(tb.TempDir(), "code")
	require.NoError(tb, os.WriteFile(path, image, 0o600))
	code, err := os.Open(path)
	require.NoError(tb, err)
	_, err = w.Load(context.Background(), workerapi.Code{Digest: "d", Image: workerapi.File{File: code}})
	require.NoError(tb, err)
}

func ch(name, topic string, flags channel.Flags) channel.Channel {
	return channel.Channel{Name: name, Topic: topic, Flags: flags}
}

// run starts the loaded module with arguments.
func run(tb testing.TB, w *Worker, id string, channels []channel.Channel, args ...string) {
	tb.Helper()
	_, err := w.Start(context.Background(),
		workerapi.PodSpec{ID: id, Digest: "d", Args: append([]string{"prog"}, args...), Channels: channels})
	require.NoError(tb, err)
}

// opened waits until a pod has opened n channels.
func opened(tb testing.TB, w *Worker, id string, n int) {
	tb.Helper()
	require.Eventually(tb, func() bool { return w.router.Count(id, 0) == n }, soon, time.Millisecond)
}

// exited waits for a pod to exit and returns its status.
func exited(tb testing.TB, w *Worker, id string) workerapi.Status {
	tb.Helper()
	p, err := w.pod(id)
	require.NoError(tb, err)
	select {
	case <-p.done:
	case <-time.After(soon):
		tb.Fatalf("pod %s has not exited after %v", id, soon)
	}
	return p.currentStatus()
}

// daemon is the daemon's end of a pod's channels. It settles messages as it reads them, unless keep is set.
type daemon struct {
	tb       testing.TB
	conn     *channel.Conn
	raw      net.Conn
	keep     bool
	reliable map[int]bool
	read     uint64 // messages that are to be settled
}

// connect connects a daemon.
func connect(tb testing.TB, w *Worker, id string) *daemon {
	tb.Helper()
	d := connectOld(tb, w, id)
	d.settle()
	return d
}

// connectOld connects a daemon that does not say which messages it has settled.
func connectOld(tb testing.TB, w *Worker, id string) *daemon {
	tb.Helper()
	theirs, ours := net.Pipe()
	require.NoError(tb, ours.SetDeadline(time.Now().Add(soon)))
	require.NoError(tb, w.Channels(context.Background(), id, theirs))
	tb.Cleanup(func() { ours.Close() })
	return &daemon{tb: tb, conn: channel.NewConn(ours, channel.ConnOptions{}), raw: ours, reliable: map[int]bool{}}
}

// settle settles what the daemon has read.
func (d *daemon) settle() {
	d.tb.Helper()
	require.NoError(d.tb, d.conn.Write(channel.Message{Header: channel.Header{Control: true, Arg: channel.Settled},
		Payload: channel.AppendSettled(nil, d.read)}))
}

// next reads a frame and formats it as text.
func (d *daemon) next() string {
	m, err := d.conn.Read()
	switch {
	case err != nil:
		return err.Error()
	case m.Control && m.Arg == channel.OpenChannel:
		o, err := channel.ParseOpen(m.Payload)
		require.NoError(d.tb, err)
		d.reliable[o.FD] = o.Flags.QoS() > 0
		return fmt.Sprintf("open %d %s %s", o.FD, o.Flags, o.Topic)
	case m.Control && m.Arg == channel.CloseChannel:
		return fmt.Sprintf("close %d", m.Payload[0])
	case m.Control:
		return fmt.Sprintf("control %d", m.Arg)
	case d.reliable[m.Arg]:
		if d.read++; !d.keep {
			d.settle()
		}
	}
	return fmt.Sprintf("%d:%s", m.Arg, m.Payload)
}

func (d *daemon) expect(frames ...string) {
	d.tb.Helper()
	for _, want := range frames {
		require.Equal(d.tb, want, d.next())
	}
}

func (d *daemon) send(fd int, message string) {
	d.tb.Helper()
	require.NoError(d.tb, d.conn.Write(channel.Message{Header: channel.Header{Arg: fd}, Payload: []byte(message)}))
}

func TestChannelsOverASocket(t *testing.T) {
	w := channelWorker(t)
	run(t, w, "a", []channel.Channel{ch("io", "t/a", channel.ReadWrite|channel.QoS1)}, "echo")
	d := connect(t, w, "a")
	d.expect("open 0 rw:1 t/a")
	d.send(0, "one")
	d.expect("0:one")
	d.send(9, "unknown channel")
	d.send(0, "two")
	d.expect("0:two")
	d.raw.Close() // the daemon is restarted
	d = connect(t, w, "a")
	d.expect("open 0 rw:1 t/a")
	later := connect(t, w, "a") // a second restart, before the pod has seen the end of d's connection
	later.expect("open 0 rw:1 t/a")
	require.Equal(t, "EOF", d.next())
	later.send(0, "three")
	later.expect("0:three")
	go func() { _, _ = w.Stop(context.Background(), "a", soon) }()
	later.expect("close 0", "EOF")
	require.EqualValues(t, 0, exited(t, w, "a").ExitCode)
	theirs, ours := net.Pipe()
	defer ours.Close()
	require.ErrorIs(t, w.Channels(t.Context(), "a", theirs), errdefs.ErrFailedPrecondition)
	require.ErrorIs(t, w.Channels(t.Context(), "none", theirs), errdefs.ErrNotFound)
	run(t, w, "plain", nil, "exit")
	require.ErrorIs(t, w.Channels(t.Context(), "plain", theirs), errdefs.ErrFailedPrecondition)
}

// TestChannelsWithinAWorker checks that modules of one worker exchange messages without a daemon.
func TestChannelsWithinAWorker(t *testing.T) {
	w := channelWorker(t)
	run(t, w, "echo", []channel.Channel{ch("io", "a/b", channel.ReadWrite)}, "echo")
	run(t, w, "other", []channel.Channel{ch("io", "a/+", channel.Read)}, "read", "/ch/io", "", "r")
	opened(t, w, "echo", 1)
	opened(t, w, "other", 1)
	run(t, w, "ping", []channel.Channel{ch("out", "a/b", channel.Write), ch("in", "a/b", channel.Read)}, "ping", "/ch/out", "/ch/in", "1")
	require.EqualValues(t, 0, exited(t, w, "ping").ExitCode)
	require.EqualValues(t, 0, exited(t, w, "other").ExitCode)
}

// TestChannelsWithoutADaemon checks that a module's messages are queued for the daemon, up to a limit, and that the
// module does not receive its own messages.
func TestChannelsWithoutADaemon(t *testing.T) {
	w := channelWorker(t)
	const more = 100
	run(t, w, "flood", []channel.Channel{ch("io", "t", channel.ReadWrite)}, "flood-and-read", "/ch/io", fmt.Sprint(maxBacklogMessages+more))
	p, err := w.pod("flood")
	require.NoError(t, err)
	require.Eventually(t, func() bool { return p.channels.dropped() == more }, soon, time.Millisecond)
	d := connect(t, w, "flood")
	d.expect("open 0 rw t")
	thousand := "0:" + strings.Repeat("\x00", 1000)
	for range maxBacklogMessages {
		d.expect(thousand)
	}
	d.send(0, "go on")
	d.expect("close 0", "EOF")
	require.EqualValues(t, 0, exited(t, w, "flood").ExitCode)
}

// fill fills the backlog with messages of port fd. It reports whether a guest would then wait.
func (c *channels) fill(tb testing.TB, fd int) (busy bool) {
	tb.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	for !c.backlog.full(false) {
		require.Empty(tb, c.backlog.add(c.ports[fd], []byte("queued")))
	}
	return c.backlog.busy(false)
}

// blocks waits until the guest waits for room in the backlog for its port fd.
func (c *channels) blocks(tb testing.TB, fd int) {
	tb.Helper()
	require.Eventually(tb, func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.ports[fd].blocked
	}, soon, time.Millisecond, "%d messages dropped", c.dropped())
}

// TestChannelsBeforeTheLink checks that a module that writes before a running daemon has linked its channels waits
// instead of losing messages.
func TestChannelsBeforeTheLink(t *testing.T) {
	w := channelWorker(t)
	w.Daemon(true)
	const more = 100
	run(t, w, "flood", []channel.Channel{ch("io", "t", channel.ReadWrite)}, "flood-and-read", "/ch/io", fmt.Sprint(maxBacklogMessages+more))
	opened(t, w, "flood", 1)
	p, err := w.pod("flood")
	require.NoError(t, err)
	p.channels.blocks(t, 0)
	require.Zero(t, p.channels.dropped())
	d := connect(t, w, "flood")
	d.expect("open 0 rw t")
	thousand := "0:" + strings.Repeat("\x00", 1000)
	for range maxBacklogMessages + more {
		d.expect(thousand)
	}
	d.send(0, "go on")
	d.expect("close 0", "EOF")
	require.EqualValues(t, 0, exited(t, w, "flood").ExitCode)
	require.Zero(t, p.channels.dropped())
}

// TestChannelsOfARestartedDaemon checks that the oldest messages are dropped while the daemon is down, and that the
// module waits once the next daemon has connected, before it has linked the channels.
func TestChannelsOfARestartedDaemon(t *testing.T) {
	w := channelWorker(t)
	w.Daemon(true)
	run(t, w, "a", []channel.Channel{ch("io", "t", channel.ReadWrite)}, "echo")
	d := connect(t, w, "a")
	d.expect("open 0 rw t")
	w.Daemon(false)
	d.raw.Close()
	p, err := w.pod("a")
	require.NoError(t, err)
	require.Eventually(t, func() bool { return !p.channels.hasLink() }, soon, time.Millisecond)
	require.False(t, p.channels.fill(t, 0))
	p.channels.receive(0, []byte("one"))
	require.Eventually(t, func() bool { return p.channels.dropped() == 1 }, soon, time.Millisecond)
	w.Daemon(true)
	p.channels.receive(0, []byte("two"))
	p.channels.blocks(t, 0)
	d = connect(t, w, "a")
	d.expect("open 0 rw t")
	for range maxBacklogMessages - 1 {
		d.expect("0:queued")
	}
	d.expect("0:one", "0:two")
	require.EqualValues(t, 1, p.channels.dropped())
}

func (c *channels) hasLink() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.backlog.link != nil
}

// TestChannelsAfterIdleTime checks that a burst of messages after a time without any is not dropped: the daemon had
// nothing to fetch.
func TestChannelsAfterIdleTime(t *testing.T) {
	w := channelWorker(t)
	run(t, w, "a", []channel.Channel{ch("io", "t", channel.ReadWrite)}, "echo")
	d := connect(t, w, "a")
	d.expect("open 0 rw t")
	p, err := w.pod("a")
	require.NoError(t, err)
	p.channels.mu.Lock()
	p.channels.backlog.lastRead = time.Now().Add(-2 * stallTimeout)
	p.channels.mu.Unlock()
	require.True(t, p.channels.fill(t, 0))
}

// TestChannelsOfAShortModule checks that the messages of a module that ends before the daemon has linked its channels
// reach the daemon.
func TestChannelsOfAShortModule(t *testing.T) {
	w := channelWorker(t)
	w.Daemon(true)
	run(t, w, "a", []channel.Channel{ch("io", "t", channel.Write)}, "send", "/ch/io", "last words", "w")
	p, err := w.pod("a")
	require.NoError(t, err)
	require.Eventually(t, func() bool { // the guest has ended
		p.channels.mu.Lock()
		defer p.channels.mu.Unlock()
		return p.channels.ended && len(p.channels.ports) == 0
	}, soon, time.Millisecond)
	d := connect(t, w, "a")
	d.expect("open 0 w t", "0:last words")
	require.EqualValues(t, 0, exited(t, w, "a").ExitCode)
	require.Zero(t, p.channels.dropped())
}

// TestChannelsOfASlowDaemon checks that no message is lost while the daemon reads slowly.
func TestChannelsOfASlowDaemon(t *testing.T) {
	w := channelWorker(t)
	const many = 3 * maxBacklogMessages
	run(t, w, "a", []channel.Channel{ch("in", "start", channel.Read), ch("io", "t", channel.Write)}, "flood-on-start", "/ch/io",
		fmt.Sprint(many), "w")
	d := connect(t, w, "a")
	d.expect("open 0 r start")
	d.send(0, "go")
	opened, got := 0, 0
	for got < many {
		m, err := d.conn.Read()
		require.NoError(t, err)
		if m.Control {
			opened++
		} else if got++; got%1000 == 0 {
			time.Sleep(time.Millisecond) // pacing: a slow reader
		}
	}
	require.LessOrEqual(t, opened, 1)
	d.send(0, "leave")
	require.EqualValues(t, 0, exited(t, w, "a").ExitCode)
}

// TestChannelsUnread checks that a guest that does not read blocks no sender, and that the oldest messages are dropped.
func TestChannelsUnread(t *testing.T) {
	w := channelWorker(t)
	run(t, w, "a", []channel.Channel{ch("io", "t", channel.ReadWrite)}, "sleep", "/ch/io", "600")
	d := connect(t, w, "a")
	d.expect("open 0 rw t")
	for k := range maxWaiting + 10 {
		d.send(0, fmt.Sprint(k))
	}
	p, err := w.pod("a")
	require.NoError(t, err)
	require.Eventually(t, func() bool { return p.channels.overrun.Load() == 10 }, soon, time.Millisecond)
	large := strings.Repeat("x", 15<<20)
	for range 3 {
		d.send(0, large)
	}
	require.Eventually(t, func() bool { return p.channels.overrun.Load() == 10+maxWaiting+1 }, soon, time.Millisecond)
	require.EqualValues(t, maxWaiting+11, w.mustStats(t, "a").ChannelDropped)
	start := time.Now()
	require.NoError(t, w.Kill(t.Context(), "a"))
	require.Less(t, time.Since(start), 5*time.Second)
	require.EqualValues(t, exitKill, exited(t, w, "a").ExitCode)
	require.Zero(t, p.channels.waiting)
}

func (w *Worker) mustStats(tb testing.TB, id string) workerapi.Stats {
	tb.Helper()
	all, err := w.Stats(context.Background(), []string{id})
	require.NoError(tb, err)
	require.Len(tb, all, 1)
	return all[0]
}

// TestChannelsOfAStuckDaemon checks that a daemon that stops reading delays neither the module nor its exit for long.
func TestChannelsOfAStuckDaemon(t *testing.T) {
	w := channelWorker(t)
	run(t, w, "a", []channel.Channel{ch("in", "start", channel.Read), ch("io", "t", channel.Write)}, "flood-on-start", "/ch/io",
		fmt.Sprint(3*maxBacklogMessages), "w")
	d := connect(t, w, "a")
	d.expect("open 0 r start")
	d.send(0, "go") // from here on the daemon does not read
	p, err := w.pod("a")
	require.NoError(t, err)
	require.Eventually(t, func() bool { return p.channels.lost.Load() > maxBacklogMessages }, soon, time.Millisecond)
	d.send(0, "leave")
	require.EqualValues(t, 0, exited(t, w, "a").ExitCode)
}
