package wire

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"os"
	"sync"
)

// Stream carries one operation. Only one goroutine at a time may read a channel, and only one may write it.
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

// Done returns a channel that is closed when the stream ends, by Finish or with its session.
func (s *Stream) Done() <-chan struct{} { return s.done }

// SetValue attaches a value to the stream, for the Mux's control function.
func (s *Stream) SetValue(v any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.value = v
}

// Value returns the value of the last SetValue, or nil.
func (s *Stream) Value() any {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.value
}

// Finish ends the stream. Read still returns the data that has already arrived, and after that io.EOF.
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

// Send queues a frame behind earlier frames, and waits until the session can write the frame. It returns false if the
// stream ends or cancel is closed first.
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

// Urgent queues a frame ahead of frames that were not sent with Urgent. It does not wait.
func (s *Stream) Urgent(kind Kind, parts ...[]byte) { s.mux.Urgent(s.id, kind, parts...) }

// Write writes to a channel, as the channel's window allows, until the stream ends (ErrEnded) or cancel is closed
// (os.ErrDeadlineExceeded).
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
				_ = s.out[channel].add(uint32(n)) // p[:n] was not sent
				return written, os.ErrDeadlineExceeded
			}
		}
		written += n
		p = p[n:]
	}
	return written, nil
}

// Close tells the peer that no more data will come on a channel.
func (s *Stream) Close(channel byte) { s.Send(nil, KindClose, []byte{channel}) }

// Read reads from a channel. It returns io.EOF at the channel's end, and os.ErrDeadlineExceeded if cancel is closed.
func (s *Stream) Read(channel byte, p []byte, cancel <-chan struct{}) (int, error) {
	n, grant, err := s.in[channel].read(p, cancel)
	if grant > 0 {
		s.window(channel, grant)
	}
	return n, err
}

// Grant gives the host its first window on a channel.
func (s *Stream) Grant(channel byte) {
	s.in[channel].grow(Window)
	s.window(channel, Window)
}

// Writable returns a Go channel that receives a value when the peer extends the window of the stream's given channel.
func (s *Stream) Writable(channel byte) <-chan struct{} { return s.out[channel].wake }

func (s *Stream) window(channel byte, n int) {
	select {
	case <-s.done:
	default:
		s.Urgent(KindWindow, []byte{channel}, binary.BigEndian.AppendUint32(nil, uint32(n)))
	}
}

// inbox is the buffer for the data that a channel has received.
type inbox struct {
	wake chan struct{}

	mu    sync.Mutex
	buf   bytes.Buffer
	room  int   // bytes that the peer may still send
	owed  int   // bytes that were read, but not yet added to the peer's window
	err   error // returned by read after the buffered data
	ended bool  // the stream has ended; later data is ignored
}

func (b *inbox) put(p []byte) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.ended:
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

// close ends the channel after the peer's KindClose.
func (b *inbox) close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.err == nil {
		b.err = io.EOF
	}
	b.signal()
}

// end ends the channel because its stream ended.
func (b *inbox) end(err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.ended = true
	if b.err == nil {
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

// read reads buffered data, and waits if there is none. The caller must extend the peer's window by grant bytes.
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

// credit counts the bytes that may be sent on a channel.
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
		return errors.Join(ErrSession, errors.New("a window is larger than the maximum"))
	}
	c.left += int(n)
	select {
	case c.wake <- struct{}{}:
	default:
	}
	return nil
}
