package worker

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/channel"
)

// reliably starts a module that repeats messages on a channel with QoS 1, and returns its channels.
func reliably(t *testing.T, w *Worker, more ...channel.Channel) *channels {
	run(t, w, "a", append([]channel.Channel{ch("io", "t", channel.ReadWrite|channel.QoS1)}, more...), "echo")
	p, err := w.pod("a")
	require.NoError(t, err)
	return p.channels
}

func (c *channels) until(t *testing.T, what string, condition func(b *backlog) bool) {
	t.Helper()
	require.Eventually(t, func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return condition(&c.backlog)
	}, soon, time.Millisecond, what)
}

// TestUnsettledMessagesComeAgain checks that a daemon gets the messages with QoS 1 that an earlier daemon has read but not
// settled, in order and before later ones.
func TestUnsettledMessagesComeAgain(t *testing.T) {
	w := channelWorker(t)
	c := reliably(t, w)
	d := connect(t, w, "a")
	d.keep = true
	d.expect("open 0 rw:1 t")
	for n := range 3 {
		d.send(0, fmt.Sprint(n))
		d.expect(fmt.Sprintf("0:%d", n))
	}
	d.read = 1
	d.settle()
	c.until(t, "one is settled", func(b *backlog) bool { return len(b.unsettled) == 2 })
	d.raw.Close() // the daemon is killed
	c.until(t, "the link has ended", func(b *backlog) bool { return b.link == nil })
	c.receive(0, []byte("3"))
	c.until(t, "the module has sent one more", func(b *backlog) bool { return len(b.queue) == 3 })
	d = connect(t, w, "a")
	d.expect("open 0 rw:1 t", "0:1", "0:2", "0:3")
	c.until(t, "all are settled", func(b *backlog) bool { return len(b.unsettled) == 0 && b.bytes == 0 })
	require.Zero(t, c.dropped())
}

// TestUnsettledMessagesHoldTheModule checks that a module waits while too many of its messages with QoS 1 are unsettled, with a
// daemon and without one, and that its messages with QoS 0 do not drop them.
func TestUnsettledMessagesHoldTheModule(t *testing.T) {
	w := channelWorker(t)
	c := reliably(t, w, ch("plain", "p", channel.Write))
	d := connect(t, w, "a")
	d.keep = true
	d.expect("open 0 rw:1 t")
	port, plain := c.openPorts()[0], func() *port {
		p, err := c.open("plain", false, true, func() {})
		require.NoError(t, err)
		return p
	}()
	d.expect("open 1 w p")
	full := func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.backlog.full(true)
	}
	for n := 0; !full(); n++ {
		require.NoError(t, port.Send([]byte("m")))
		d.expect("0:m")
	}
	require.False(t, port.Ready(true))
	require.True(t, plain.Ready(true), "it waits for no acknowledgement")
	d.read = 1
	d.settle()
	require.Eventually(t, func() bool { return port.Ready(true) }, soon, time.Millisecond)
	require.NoError(t, port.Send([]byte("n")))
	d.expect("0:n")

	d.raw.Close()
	c.until(t, "the link has ended", func(b *backlog) bool { return b.link == nil && len(b.queue) == maxBacklogMessages })
	require.False(t, port.Ready(true), "it waits without a daemon, too")
	require.True(t, plain.Ready(true))
	require.NoError(t, plain.Send([]byte("dropped")))
	require.EqualValues(t, 1, c.dropped())

	c.mu.Lock()
	c.backlog.progress = time.Now().Add(-patience)
	c.mu.Unlock()
	require.True(t, port.Ready(true), "but not for ever")
	require.NoError(t, port.Send([]byte("last")))
	require.EqualValues(t, 2, c.dropped())
	d = connect(t, w, "a")
	d.expect("open 0 rw:1 t", "open 1 w p")
	for range maxBacklogMessages - 2 {
		d.expect("0:m")
	}
	d.expect("0:n", "0:last")
}

// TestUnsettledMessagesOfAnEndedModule checks that the messages of a module that has ended wait for the next daemon.
func TestUnsettledMessagesOfAnEndedModule(t *testing.T) {
	w := channelWorker(t)
	w.Daemon(true)
	run(t, w, "a", []channel.Channel{ch("io", "t", channel.Write|channel.QoS1)}, "send", "/ch/io", "last words", "w")
	d := connect(t, w, "a")
	d.keep = true
	d.expect("open 0 w:1 t", "0:last words", "close 0")
	w.Daemon(false)
	d.raw.Close()
	d = connect(t, w, "a")
	d.expect("open 0 w:1 t", "0:last words", "close 0", "EOF")
	require.EqualValues(t, 0, exited(t, w, "a").ExitCode)
	p, err := w.pod("a")
	require.NoError(t, err)
	require.Zero(t, p.channels.dropped())
}
