package worker

import (
	"maps"
	"net"
	"slices"
	"sync/atomic"
	"time"

	"github.com/tripod-run/tripod/internal/channel"
)

// Limits on the backlog of messages to the daemon. When the backlog is full, guests wait for room while a daemon is
// connected to the worker, even if it has not linked the pod's channels yet. If there is no daemon, or if messages have
// waited for stallTimeout and the daemon has read none, the oldest messages are dropped instead.
const (
	maxBacklogMessages = 4096
	maxBacklogBytes    = 32 << 20
	stallTimeout       = 5 * time.Second
	flushTimeout       = 2 * time.Second // for the remaining messages after the pod has ended
	batchMessages      = 256             // frames per write
	batchBytes         = 256 << 10       // message bytes per write
)

// backlog holds the messages to be sent to the daemon. channels.mu guards it.
type backlog struct {
	queue    []outgoing
	bytes    int
	daemon   *presence
	link     *link     // nil until the daemon has linked the channels, and after the link has ended
	lastRead time.Time // time of the last successful write to the daemon, of connect, or when messages began to wait
	ending   bool      // the pod has ended; new daemon connections are refused
	writer   notifier
	linked   notifier // woken by connect
}

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

// outgoing is a message from a port. The port may have been closed since.
type outgoing struct {
	port    *port
	message []byte
}

// link is the connection to a daemon.
type link struct {
	raw       net.Conn      // used to write batches of frames
	conn      *channel.Conn // used to read
	out       []byte
	announced map[int]*port // open ports that the daemon knows about, by number; used only by the writer
	gone      chan struct{} // closed by the reader when the connection ends
	ended     chan struct{} // closed when the writer has ended
}

// frame is a frame to be sent to the daemon. The field port is the port that sent the message, or nil for a control
// frame.
type frame struct {
	channel.Message
	port *port
}

func (b *backlog) full() bool {
	return len(b.queue) >= maxBacklogMessages || b.bytes >= maxBacklogBytes
}

// busy reports whether the backlog is full but a daemon drains it or is about to link, so that a guest should wait.
func (b *backlog) busy() bool {
	if !b.full() {
		return false
	}
	since := b.daemon.since.Load()
	if b.link == nil && since == 0 {
		return false
	}
	return time.Since(b.lastRead) < stallTimeout || b.link == nil && time.Since(time.Unix(0, since)) < stallTimeout
}

// add queues a message and returns the older messages that it dropped to make room.
func (b *backlog) add(p *port, m []byte) (lost []outgoing) {
	for b.full() {
		lost = append(lost, b.take())
	}
	if len(b.queue) == 0 {
		b.lastRead = time.Now() // an idle time does not count as the daemon's delay
	}
	b.queue = append(b.queue, outgoing{p, m})
	b.bytes += len(m)
	p.queued++
	b.writer.wake()
	return lost
}

func (b *backlog) take() outgoing {
	o := b.queue[0]
	b.queue[0] = outgoing{}
	b.queue = b.queue[1:]
	b.bytes -= len(o.message)
	o.port.queued--
	return o
}

// putBack returns unsent messages to the front of the queue.
func (b *backlog) putBack(frames []frame) {
	var back []outgoing
	for _, f := range frames {
		if f.port != nil {
			back = append(back, outgoing{f.port, f.Payload})
			b.bytes += len(f.Payload)
			f.port.queued++
		}
	}
	b.queue = append(back, b.queue...)
}

// connect takes over a new connection to the daemon, and closes the previous one. It returns false if the pod has
// ended.
func (c *channels) connect(conn net.Conn) bool {
	l := &link{raw: conn, conn: channel.NewConn(conn, channel.ConnOptions{MaxFrame: maxWaitingBytes}), announced: map[int]*port{}, gone: make(chan struct{}), ended: make(chan struct{})}
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
	c.backlog.link, c.backlog.lastRead = l, time.Now()
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
			return
		}
		if !m.Control && m.Module == 0 {
			c.receive(m.Arg, m.Payload)
		}
	}
}

// write sends frames to the daemon until the connection or the pod ends.
func (c *channels) write(l *link) {
	defer close(l.ended)
	defer l.conn.Close()
	for {
		frames, last := c.next(l)
		if len(frames) > 0 {
			sent, err := l.write(frames)
			if err != nil {
				c.unlink(frames[sent:])
				return
			}
			c.mu.Lock()
			c.backlog.lastRead = time.Now()
			c.mu.Unlock()
			continue
		}
		if last {
			c.unlink(nil)
			return
		}
		select {
		case <-c.backlog.writer:
		case <-l.gone:
			c.unlink(nil)
			return
		}
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
func (c *channels) unlink(frames []frame) {
	c.mu.Lock()
	c.backlog.link = nil
	c.backlog.putBack(frames)
	blocked := c.unblock()
	c.mu.Unlock()
	wake(blocked)
}

// unblock clears the flag blocked of all ports and returns the ports that were blocked. The caller holds c.mu.
func (c *channels) unblock() (blocked []*port) {
	for _, p := range c.ports {
		if p.blocked {
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

// next returns the next batch of frames for the daemon. If the second result is true, the pod has ended and only queued
// frames are left.
func (c *channels) next(l *link) (frames []frame, last bool) {
	c.mu.Lock()
	frames, last = c.frames(l), c.backlog.ending
	var blocked []*port
	if !c.backlog.busy() {
		blocked = c.unblock()
	}
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
	for size := 0; len(c.backlog.queue) > 0 && len(frames) < batchMessages && size < batchBytes; {
		o := c.backlog.take()
		size += len(o.message)
		if announced := l.announced[o.port.fd]; announced != o.port {
			if announced != nil {
				frames = append(frames, l.close(o.port.fd))
			}
			frames = append(frames, l.open(o.port))
		}
		frames = append(frames, frame{channel.Message{Header: channel.Header{Arg: o.port.fd}, Payload: o.message}, o.port})
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
// worker: a module can end before the daemon has made the link. It waits for at most flushTimeout.
func (c *channels) awaitLink() {
	timer := time.NewTimer(flushTimeout)
	defer timer.Stop()
	for {
		c.mu.Lock()
		await := c.backlog.link == nil && len(c.backlog.queue) > 0 && c.backlog.daemon.since.Load() != 0
		c.mu.Unlock()
		if !await {
			return
		}
		select {
		case <-c.backlog.linked:
		case <-timer.C:
			return
		}
	}
}

// flush sends the backlog to the daemon, for at most flushTimeout once there is a link, and ends the connection. The
// ports are already closed.
func (c *channels) flush() {
	c.awaitLink()
	c.mu.Lock()
	c.backlog.ending = true
	l := c.backlog.link
	c.backlog.writer.wake()
	c.mu.Unlock()
	if l != nil {
		_ = l.raw.SetWriteDeadline(time.Now().Add(flushTimeout))
		<-l.ended
	}
	c.mu.Lock()
	lost := c.backlog.queue
	c.backlog.queue = nil
	c.mu.Unlock()
	c.lose(lost)
}
