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
	c.until(t, "the module has sent one more", func(b *backlog) bool { return len(b.reliable) == 3 })
	d = connect(t, w, "a")
	d.expect("open 0 rw:1 t", "0:1", "0:2", "0:3")
	c.until(t, "all are settled", func(b *backlog) bool { return !b.keeps() && b.kept == 0 && b.sent == 0 })
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
	fill := func() (n int) {
		for ; port.Ready(true); n++ {
			require.NoError(t, port.Send([]byte("m")))
		}
		return n
	}
	require.Equal(t, maxBacklogMessages, fill())
	for range windowMessages {
		d.expect("0:m")
	}
	require.NoError(t, plain.Send([]byte("passes")), "it waits for no acknowledgement")
	d.expect("1:passes")
	d.settle()
	for range windowMessages {
		d.expect("0:m")
	}
	require.Equal(t, windowMessages, fill())

	d.raw.Close()
	c.until(t, "the link has ended", func(b *backlog) bool { return b.link == nil && len(b.reliable) == maxBacklogMessages })
	require.Zero(t, fill(), "it waits without a daemon, too")
	require.NoError(t, plain.Send([]byte("p")))
	require.Zero(t, c.dropped())
	d = connect(t, w, "a")
	d.keep = true
	d.expect("open 0 rw:1 t", "open 1 w p")
	for range windowMessages {
		d.expect("0:m")
	}
	require.Equal(t, "1:p", d.next())
	require.Zero(t, fill(), "it waits for a daemon that settles nothing")
	c.mu.Lock()
	c.backlog.progress = time.Now().Add(-patience)
	c.mu.Unlock()
	for range 3 {
		require.True(t, port.Ready(true), "but not for ever")
		require.NoError(t, port.Send([]byte("n")))
	}
	require.EqualValues(t, 3, c.dropped())
	d.settle()
	for range windowMessages {
		d.expect("0:m")
	}
	fill()
	require.False(t, port.Ready(true), "it waits again")
	c.mu.Lock()
	c.backlog.reliable, c.backlog.unsettled = nil, nil // the end of the module does not wait for them
	c.mu.Unlock()
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
	p, err := w.pod("a")
	require.NoError(t, err)
	p.channels.until(t, "the worker waits for the next daemon", func(b *backlog) bool { return b.link == nil && !b.ending })
	d = connect(t, w, "a")
	d.expect("open 0 w:1 t", "0:last words", "close 0", "EOF")
	require.EqualValues(t, 0, exited(t, w, "a").ExitCode)
	require.Zero(t, p.channels.dropped())
}
