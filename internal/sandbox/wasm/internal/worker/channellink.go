package worker

import (
	"errors"
	"maps"
	"net"
	"os"
	"slices"
	"sync/atomic"
	"time"

	"github.com/tripod-run/tripod/internal/channel"
)

// Limits on the backlog of messages to the daemon. When the backlog is full, guests wait for room while a daemon is
// connected to the worker, even if it has not linked the pod's channels yet. If there is no daemon, or if messages have
// waited for stallTimeout and the daemon has read none, the oldest messages are dropped instead.
//
// Messages of channels with QoS 1 and 2 ("reliable") have a queue of their own. They stay in the backlog until the daemon has
// settled them (channel.Settled), and the next daemon gets those again that were not settled. Only a window of them is sent
// ahead, so that the daemon need not bound them. A guest that sends them waits for room, even without a daemon, until the
// daemon has settled nothing for patience.
const (
	maxBacklogMessages = 4096
	maxBacklogBytes    = 32 << 20
	stallTimeout       = 5 * time.Second
	patience           = 30 * time.Second
	flushTimeout       = 2 * time.Second // for the remaining messages after the pod has ended; for reliable ones, patience
	windowMessages     = 256             // unsettled messages on a link
	windowBytes        = 1 << 20         // beyond this, one message at a time
	greetTimeout       = 5 * time.Second // for the daemon's first message about what it has settled; older daemons send none
	batchMessages      = 256             // frames per write
	batchBytes         = 256 << 10       // message bytes per write
)

// presence says whether a daemon is connected to the worker. All pods of the worker share it.
type presence struct {
	since atomic.Int64 // when the daemon connected, in Unix nanoseconds; 0 without a daemon
}

func (p *presence) set(connected bool) {
	since := int64(0)
	if connected {
		since = time.Now().UnixNano()
	}
	p.since.Store(since)
}

// link is the connection to a daemon.
type link struct {
	raw       net.Conn      // used to write batches of frames
	conn      *channel.Conn // used to read
	out       []byte
	announced map[int]*port // open ports that the daemon knows about, by number; used only by the writer
	settles   mode          // channels.mu guards it
	greeted   chan struct{} // closed by the reader when settles is yes
	late      atomic.Bool   // the reader has ended at the deadline of flush
	gone      chan struct{} // closed by the reader when the connection ends
	ended     chan struct{} // closed when the writer has ended
}

// mode says whether the daemon tells which messages it has settled: it can be unknown only before the first message is sent.
type mode int

const (
	unknown mode = iota
	yes
	no
)

// frame is a frame to be sent to the daemon. The field port is the port that sent the message, or nil for a control
// frame.
type frame struct {
	channel.Message
	port   *port
	number uint64
}

// reliable reports whether messages of the port are kept until they are settled.
func (p *port) reliable() bool { return p.flags.QoS() > 0 }

// connect takes over a new connection to the daemon, and closes the previous one. It returns false if the pod has
// ended.
func (c *channels) connect(conn net.Conn) bool {
	l := &link{raw: conn, conn: channel.NewConn(conn, channel.ConnOptions{MaxFrame: maxWaitingBytes}), announced: map[int]*port{},
		greeted: make(chan struct{}), gone: make(chan struct{}), ended: make(chan struct{})}
	for {
		c.mu.Lock()
		old := c.backlog.link
		if old == nil || c.backlog.ending {
			break
		}
		c.mu.Unlock()
		old.conn.Close()
		<-old.ended
	}
	defer c.mu.Unlock()
	if c.backlog.ending {
		return false
	}
	c.backlog.link, c.backlog.lastRead, c.backlog.progress = l, time.Now(), time.Now()
	c.backlog.linked.wake()
	go c.read(l)
	go c.write(l)
	return true
}

func (c *channels) read(l *link) {
	defer close(l.gone)
	for {
		m, err := l.conn.Read()
		if err != nil {
			l.late.Store(errors.Is(err, os.ErrDeadlineExceeded))
			return
		}
		switch {
		case !m.Control && m.Module == 0:
			c.receive(m.Arg, m.Payload)
		case m.Control && m.Arg == channel.Settled:
			c.settled(l, m.Payload)
		}
	}
}

// settled forgets the messages that the daemon has settled. Its first message of this kind says that it will do so.
func (c *channels) settled(l *link, payload []byte) {
	n, err := channel.ParseSettled(payload)
	if err != nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if l.settles == unknown {
		l.settles = yes
		close(l.greeted)
	}
	b := &c.backlog
	if b.link != l || l.settles != yes || n <= b.settled {
		return
	}
	b.settle(int(min(n-b.settled, uint64(len(b.unsettled)))))
	b.progress = time.Now()
	b.writer.wake() // wakes guests, and ends a link that waits for this
}

// write sends frames to the daemon until the connection or the pod ends.
func (c *channels) write(l *link) {
	defer close(l.ended)
	defer l.conn.Close()
	if c.mayKeep {
		c.greet(l)
	}
	for {
		frames, last := c.next(l)
		if len(frames) > 0 {
			sent, err := l.write(frames)
			if err != nil {
				c.unlink(l, frames[sent:])
				return
			}
			c.mu.Lock()
			c.backlog.lastRead = time.Now()
			c.mu.Unlock()
			continue
		}
		if last {
			c.unlink(l, nil)
			return
		}
		select {
		case <-c.backlog.writer:
		case <-l.gone:
			c.unlink(l, nil)
			return
		}
	}
}

// greet waits for the daemon's first message about what it has settled.
func (c *channels) greet(l *link) {
	greet := time.NewTimer(greetTimeout)
	defer greet.Stop()
	select {
	case <-l.greeted:
	case <-greet.C:
	case <-l.gone:
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if l.settles == unknown {
		l.settles = no
	}
}

// write writes frames in one call and returns how many were written completely.
func (l *link) write(frames []frame) (sent int, err error) {
	const maxKept = 2 * batchBytes // maximum buffer kept for the next call; one message can exceed batchBytes
	l.out = l.out[:0]
	ends := make([]int, len(frames))
	for k, f := range frames {
		if l.out, err = f.Append(l.out, false); err != nil {
			return 0, err
		}
		ends[k] = len(l.out)
	}
	n, err := l.raw.Write(l.out)
	for sent < len(ends) && ends[sent] <= n {
		sent++
	}
	if cap(l.out) > maxKept {
		l.out = nil
	}
	return sent, err
}

// unlink forgets the connection, requeues the unsent frames and wakes guests that waited for the daemon to read.
func (c *channels) unlink(l *link, frames []frame) {
	c.mu.Lock()
	c.backlog.link = nil
	c.backlog.putBack(l, frames)
	blocked := c.unblock()
	c.mu.Unlock()
	wake(blocked)
}

// unblock clears the flag blocked of the ports that need not wait any more, and returns these ports. The caller holds c.mu.
func (c *channels) unblock() (blocked []*port) {
	for _, p := range c.ports {
		if p.blocked && !c.backlog.busy(p.reliable()) {
			p.blocked = false
			blocked = append(blocked, p)
		}
	}
	return blocked
}

func wake(ports []*port) {
	for _, p := range ports {
		p.wake()
	}
}

// next returns the next batch of frames for the daemon. If the second result is true, the pod has ended, and nothing is left
// that the daemon has to get or to settle.
func (c *channels) next(l *link) (frames []frame, last bool) {
	c.mu.Lock()
	frames, last = c.frames(l), c.backlog.ending && len(c.backlog.unsettled) == 0
	blocked := c.unblock()
	c.mu.Unlock()
	wake(blocked)
	return frames, last
}

// frames returns a batch: first a close frame for each closed port without queued messages, then an open frame for each
// port whose number is not yet announced, then messages.
func (c *channels) frames(l *link) (frames []frame) {
	for fd, p := range l.announced {
		if p.closed && p.queued == 0 {
			frames = append(frames, l.close(fd))
		}
	}
	for _, fd := range slices.Sorted(maps.Keys(c.ports)) {
		if l.announced[fd] == nil {
			frames = append(frames, l.open(c.ports[fd]))
		}
	}
	for size := 0; len(frames) < batchMessages && size < batchBytes; {
		o, ok := c.backlog.send(l)
		if !ok {
			break
		}
		size += len(o.message)
		if announced := l.announced[o.port.fd]; announced != o.port {
			if announced != nil {
				frames = append(frames, l.close(o.port.fd))
			}
			frames = append(frames, l.open(o.port))
		}
		frames = append(frames, frame{channel.Message{Header: channel.Header{Arg: o.port.fd}, Payload: o.message}, o.port, o.number})
	}
	return frames
}

func (l *link) open(p *port) frame {
	l.announced[p.fd] = p
	return controlFrame(channel.OpenChannel, channel.Open{FD: p.fd, Flags: p.flags, Topic: p.topic}.Append(nil))
}

func (l *link) close(fd int) frame {
	delete(l.announced, fd)
	return controlFrame(channel.CloseChannel, channel.AppendClose(nil, fd))
}

func controlFrame(kind int, payload []byte) frame {
	return frame{Message: channel.Message{Header: channel.Header{Control: true, Arg: kind}, Payload: payload}}
}

// awaitLink waits until the daemon has linked the channels, if messages wait for a daemon that is connected to the
// worker: a module can end before the daemon has made the link. It waits for at most flushTimeout since the pod has ended, or
// for patience, even without a daemon, if reliable messages wait.
func (c *channels) awaitLink(ended time.Time) {
	poll := time.NewTicker(flushTimeout / 8)
	defer poll.Stop()
	for {
		c.mu.Lock()
		b, passed := &c.backlog, time.Since(ended)
		await := b.link == nil && (b.keeps() && passed < patience || len(b.queue) > 0 && b.daemon.since.Load() != 0 && passed < flushTimeout)
		c.mu.Unlock()
		if !await {
			return
		}
		select {
		case <-b.linked:
		case <-poll.C:
		}
	}
}

// flush sends the backlog to the daemon and ends the connection. It takes at most flushTimeout once there is a link, and
// patience while reliable messages are not settled: if the daemon ends meanwhile, the next one gets them. The ports are
// already closed.
func (c *channels) flush() {
	b := &c.backlog
	for ended := time.Now(); ; {
		c.awaitLink(ended)
		deadline := time.Now().Add(flushTimeout)
		if c.mayKeep {
			deadline = deadline.Add(greetTimeout)
		}
		c.mu.Lock()
		l := b.link
		if limit := ended.Add(patience); b.keeps() && limit.After(deadline) {
			deadline = limit
		}
		b.ending = true
		b.writer.wake()
		c.mu.Unlock()
		if l == nil {
			break
		}
		_ = l.raw.SetDeadline(deadline)
		<-l.ended
		c.mu.Lock()
		again := b.keeps() && !l.late.Load() && time.Since(ended) < patience
		b.ending = !again
		c.mu.Unlock()
		if !again {
			break
		}
	}
	c.mu.Lock()
	lost := slices.Concat(b.queue, b.reliable)
	b.queue, b.reliable = nil, nil
	c.mu.Unlock()
	c.lose(lost)
}
