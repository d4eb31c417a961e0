package wire

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"os"
	"sync"
)

// Stream is one operation's traffic. Each of its channels may be read by one goroutine at a time, and written by one.
type Stream struct {
	mux *Mux
	id  uint32
	in  [channels]inbox
	out [channels]credit

	once sync.Once
	done chan struct{}

	mu    sync.Mutex
	value any
}

// ID is the stream's number.
func (s *Stream) ID() uint32 { return s.id }

// Done is closed when the stream is over, by Finish or with its session.
func (s *Stream) Done() <-chan struct{} { return s.done }

// SetValue keeps what the side that made the stream wants to find again in its control function.
func (s *Stream) SetValue(v any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.value = v
}

// Value is what SetValue kept.
func (s *Stream) Value() any {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.value
}

// Finish ends the stream: received data can still be read, then each channel returns its end.
func (s *Stream) Finish() {
	s.mux.mu.Lock()
	if s.mux.streams[s.id] == s {
		delete(s.mux.streams, s.id)
	}
	s.mux.mu.Unlock()
	s.end(io.EOF)
}

func (s *Stream) end(err error) {
	s.once.Do(func() {
		for c := range s.in {
			s.in[c].end(err)
		}
		close(s.done)
	})
}

// Send sends a frame after those that were sent before; false when the stream or cancel ended first.
func (s *Stream) Send(cancel <-chan struct{}, kind Kind, parts ...[]byte) bool {
	select {
	case <-s.done:
		return false
	default:
	}
	select {
	case s.mux.data <- AppendFrame(nil, s.mux.session, s.id, kind, parts...):
		return true
	case <-cancel:
	case <-s.done:
	}
	return false
}

// Urgent sends a frame before those that wait, and does not wait itself.
func (s *Stream) Urgent(kind Kind, parts ...[]byte) { s.mux.Urgent(s.id, kind, parts...) }

// Write writes to a channel as its window allows. It ends with ErrEnded, or with os.ErrDeadlineExceeded when cancel is
// closed.
func (s *Stream) Write(channel byte, p []byte, cancel <-chan struct{}) (int, error) {
	written := 0
	for len(p) > 0 {
		n := s.out[channel].take(min(len(p), MaxData))
		if n == 0 {
			select {
			case <-s.out[channel].wake:
				continue
			case <-s.done:
				return written, ErrEnded
			case <-cancel:
				return written, os.ErrDeadlineExceeded
			}
		}
		if !s.Send(cancel, KindData, []byte{channel}, p[:n]) {
			select {
			case <-s.done:
				return written, ErrEnded
			default:
				_ = s.out[channel].add(uint32(n)) // it was not sent
				return written, os.ErrDeadlineExceeded
			}
		}
		written += n
		p = p[n:]
	}
	return written, nil
}

// Close says that nothing more comes on a channel.
func (s *Stream) Close(channel byte) { s.Send(nil, KindClose, []byte{channel}) }

// Read reads from a channel: io.EOF at its end, os.ErrDeadlineExceeded when cancel is closed.
func (s *Stream) Read(channel byte, p []byte, cancel <-chan struct{}) (int, error) {
	n, grant, err := s.in[channel].read(p, cancel)
	if grant > 0 {
		s.window(channel, grant)
	}
	return n, err
}

// Grant gives a channel its first window.
func (s *Stream) Grant(channel byte) {
	s.in[channel].grow(Window)
	s.window(channel, Window)
}

// Up is signalled when a channel may be written to.
func (s *Stream) Up(channel byte) <-chan struct{} { return s.out[channel].wake }

func (s *Stream) window(channel byte, n int) {
	select {
	case <-s.done:
	default:
		s.Urgent(KindWindow, []byte{channel}, binary.BigEndian.AppendUint32(nil, uint32(n)))
	}
}

// inbox is what a channel has received.
type inbox struct {
	wake chan struct{}

	mu   sync.Mutex
	buf  bytes.Buffer
	room int // what the other side may still send
	owed int // read, but not yet returned to the sender's window
	err  error
	over bool // the stream has ended: what still comes does not count
}

func (b *inbox) put(p []byte) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.over: // what was on the way
		return nil
	case b.err != nil:
		return errors.Join(ErrSession, errors.New("data after the end of a channel"))
	case len(p) > b.room:
		return errors.Join(ErrSession, errors.New("data beyond the window of a channel"))
	}
	b.room -= len(p)
	b.buf.Write(p)
	b.signal()
	return nil
}

// close is the other side's end of the channel.
func (b *inbox) close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.err == nil {
		b.err = io.EOF
	}
	b.signal()
}

// end is the end of the stream.
func (b *inbox) end(err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.over = true; b.err == nil {
		b.err = err
	}
	b.signal()
}

func (b *inbox) grow(n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.room += n
}

func (b *inbox) signal() {
	select {
	case b.wake <- struct{}{}:
	default:
	}
}

// read takes what there is, or waits. The grant is by how much the window is to be opened again.
func (b *inbox) read(p []byte, cancel <-chan struct{}) (n, grant int, err error) {
	for {
		b.mu.Lock()
		if b.buf.Len() > 0 {
			n, _ = b.buf.Read(p)
			if b.owed += n; b.owed >= Window/2 && b.err == nil {
				grant, b.owed = b.owed, 0
				b.room += grant
			}
		} else {
			err = b.err
		}
		b.mu.Unlock()
		if n > 0 || err != nil || len(p) == 0 {
			return n, grant, err
		}
		select {
		case <-b.wake:
		case <-cancel:
			return 0, 0, os.ErrDeadlineExceeded
		}
	}
}

// credit is what may be sent on a channel.
type credit struct {
	wake chan struct{}

	mu   sync.Mutex
	left int
}

func (c *credit) take(want int) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := min(want, c.left)
	c.left -= n
	return n
}

func (c *credit) add(n uint32) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if n > Window || c.left+int(n) > Window {
		return errors.Join(ErrSession, errors.New("a window is larger than any is"))
	}
	c.left += int(n)
	select {
	case c.wake <- struct{}{}:
	default:
	}
	return nil
}
