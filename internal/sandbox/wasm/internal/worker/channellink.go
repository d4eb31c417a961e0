package worker

import (
	"maps"
	"net"
	"slices"
	"time"

	"github.com/tripod-run/tripod/internal/channel"
)

// Bounds of what waits for the daemon. While it reads, guests wait for room; while there is none, or it has read nothing for a
// while, the oldest messages go.
const (
	maxBacklogMessages = 4096
	maxBacklogBytes    = 32 << 20
	patience           = 5 * time.Second // with a daemon that does not read
	parting            = 2 * time.Second // for what is under way when the pod has ended
	batchMessages      = 256             // that are written in one go
	batchBytes         = 256 << 10
)

// backlog is what the daemon has not been told. It is guarded by the mutex of its channels.
type backlog struct {
	queue  []outgoing
	bytes  int
	linked *link     // nil: no daemon
	moved  time.Time // when the daemon has taken something last, or came
	ending bool      // no daemon is wanted any more
	wake   chan struct{}
}

// outgoing is a message of a port, which may be closed since.
type outgoing struct {
	port    *port
	message []byte
}

// link is the connection to a daemon.
type link struct {
	raw   net.Conn      // for writing, many frames at a time
	conn  *channel.Conn // for reading
	out   []byte
	told  map[int]*port // open for the daemon, by number; the writer's
	gone  chan struct{} // closed by the reader at the end of the connection
	ended chan struct{} // closed when the writer has ended
}

// frame is a frame for the daemon; port is that of a message.
type frame struct {
	channel.Message
	port *port
}

func (b *backlog) init() { b.wake = make(chan struct{}, 1) }

// work wakes the writer.
func (b *backlog) work() {
	select {
	case b.wake <- struct{}{}:
	default:
	}
}

func (b *backlog) full() bool {
	return len(b.queue) >= maxBacklogMessages || b.bytes >= maxBacklogBytes
}

// busy tells whether there is no room, and likely to be some soon.
func (b *backlog) busy() bool {
	return b.full() && b.linked != nil && time.Since(b.moved) < patience
}

// add takes a message, and gives how many others had to go for it.
func (b *backlog) add(p *port, m []byte) (lost int) {
	for ; b.full(); lost++ {
		b.take()
	}
	b.queue = append(b.queue, outgoing{p, m})
	b.bytes += len(m)
	p.queued++
	b.work()
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

// untake puts messages back that have not gone.
func (b *backlog) untake(frames []frame) {
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

// connect makes conn the way to the daemon, in the place of an earlier one; false: the pod is over.
func (c *channels) connect(conn net.Conn) bool {
	l := &link{raw: conn, conn: channel.NewConn(conn, channel.ConnOptions{MaxFrame: maxWaitingBytes}), told: map[int]*port{}, gone: make(chan struct{}), ended: make(chan struct{})}
	for {
		c.mu.Lock()
		old := c.backlog.linked
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
	c.backlog.linked, c.backlog.moved = l, time.Now()
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

// write tells the daemon what it is to know, until the connection is over, or the pod.
func (c *channels) write(l *link) {
	defer close(l.ended)
	defer l.conn.Close()
	for {
		frames, over := c.next(l)
		if len(frames) > 0 {
			gone, err := l.write(frames)
			if err != nil {
				c.unlink(frames[gone:])
				return
			}
			c.moved()
			continue
		}
		if over {
			c.unlink(nil)
			return
		}
		select {
		case <-c.backlog.wake:
		case <-l.gone:
			c.unlink(nil)
			return
		}
	}
}

// write writes frames in one go, and gives how many have gone whole.
func (l *link) write(frames []frame) (gone int, err error) {
	const kept = 2 * batchBytes // of the buffer: one message can be longer than a batch
	l.out = l.out[:0]
	ends := make([]int, len(frames))
	for k, f := range frames {
		if l.out, err = f.Append(l.out, false); err != nil {
			return 0, err
		}
		ends[k] = len(l.out)
	}
	n, err := l.raw.Write(l.out)
	for gone < len(ends) && ends[gone] <= n {
		gone++
	}
	if cap(l.out) > kept {
		l.out = nil
	}
	return gone, err
}

// moved notes that the daemon reads.
func (c *channels) moved() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.backlog.moved = time.Now()
}

// unlink is the end of a connection; frames have not gone.
func (c *channels) unlink(frames []frame) {
	c.mu.Lock()
	c.backlog.linked = nil
	c.backlog.untake(frames)
	blocked := c.unblock()
	c.mu.Unlock()
	wake(blocked)
}

// unblock gives the ports whose guests wait for room. c.mu is held.
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

// next are the frames that the daemon is to get now, some of them; over: there will be no more.
func (c *channels) next(l *link) (frames []frame, over bool) {
	c.mu.Lock()
	frames, over = c.frames(l), c.backlog.ending
	var blocked []*port
	if !c.backlog.busy() {
		blocked = c.unblock()
	}
	c.mu.Unlock()
	wake(blocked)
	return frames, over
}

// frames closes ports for the daemon that are closed, once all that they have published has gone, and opens those whose number
// is free; then come messages.
func (c *channels) frames(l *link) (frames []frame) {
	for fd, p := range l.told {
		if p.closed && p.queued == 0 {
			frames = append(frames, l.close(fd))
		}
	}
	for _, fd := range slices.Sorted(maps.Keys(c.ports)) {
		if l.told[fd] == nil {
			frames = append(frames, l.open(c.ports[fd]))
		}
	}
	for size := 0; len(c.backlog.queue) > 0 && len(frames) < batchMessages && size < batchBytes; {
		o := c.backlog.take()
		size += len(o.message)
		if told := l.told[o.port.fd]; told != o.port {
			if told != nil {
				frames = append(frames, l.close(o.port.fd))
			}
			frames = append(frames, l.open(o.port))
		}
		frames = append(frames, frame{channel.Message{Header: channel.Header{Arg: o.port.fd}, Payload: o.message}, o.port})
	}
	return frames
}

func (l *link) open(p *port) frame {
	l.told[p.fd] = p
	return ctrl(channel.OpenChannel, channel.Open{FD: p.fd, Flags: p.flags, Topic: p.topic}.Append(nil))
}

func (l *link) close(fd int) frame {
	delete(l.told, fd)
	return ctrl(channel.CloseChannel, channel.AppendClose(nil, fd))
}

func ctrl(kind int, payload []byte) frame {
	return frame{Message: channel.Message{Header: channel.Header{Control: true, Arg: kind}, Payload: payload}}
}

// flush gives what is for the daemon a moment to get there, and ends the connection. The ports are closed.
func (c *channels) flush() {
	c.mu.Lock()
	c.backlog.ending = true
	l := c.backlog.linked
	c.backlog.work()
	c.mu.Unlock()
	if l != nil {
		_ = l.raw.SetWriteDeadline(time.Now().Add(parting))
		<-l.ended
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lost.Add(uint64(len(c.backlog.queue)))
	c.backlog.queue = nil
}
