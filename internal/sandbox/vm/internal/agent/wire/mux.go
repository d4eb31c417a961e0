package wire

import (
	"encoding/binary"
	"errors"
	"io"
	"sync"
)

const (
	// Window is the maximum number of bytes of a channel that are in flight or that the receiver has not read yet.
	Window = 128 << 10
	// MaxStreams is the maximum number of streams in a session at a time.
	MaxStreams = 128
	// maxUrgent is the maximum number of queued urgent frames. A peer that follows the rules never causes that many.
	maxUrgent = 16 * MaxStreams
)

var (
	// ErrSession means that the peer violated the protocol. The session must end.
	ErrSession = errors.New("tripod-agent protocol")
	// ErrEnded means that the stream has ended.
	ErrEnded = errors.New("the stream has ended")
	// ErrTooMany means that the session already has MaxStreams streams.
	ErrTooMany = errors.New("too many streams")
)

// Mux multiplexes the streams of one session, on either side.
type Mux struct {
	session uint64
	control func(*Stream, Frame) error

	data chan []byte // frames whose senders wait
	wake chan struct{}
	done chan struct{}

	mu      sync.Mutex
	urgent  [][]byte // frames whose senders do not wait
	streams map[uint32]*Stream
	last    uint32 // the highest stream number so far
	err     error
}

// NewMux returns the Mux of a session. Handle itself processes data and windows, and passes all other frames to
// control.
func NewMux(session uint64, control func(*Stream, Frame) error) *Mux {
	return &Mux{
		session: session, control: control, data: make(chan []byte), wake: make(chan struct{}, 1), done: make(chan struct{}),
		streams: map[uint32]*Stream{},
	}
}

// Session returns the session's number.
func (m *Mux) Session() uint64 { return m.session }

// Done returns a channel that is closed when the session ends.
func (m *Mux) Done() <-chan struct{} { return m.done }

// Err returns why the session has ended, or nil if it has not.
func (m *Mux) Err() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.err
}

// End ends the session and all of its streams. Only the first call's err counts.
func (m *Mux) End(err error) {
	m.mu.Lock()
	if m.err != nil {
		m.mu.Unlock()
		return
	}
	m.err = err
	streams := m.streams
	m.streams = nil
	m.urgent = nil
	m.mu.Unlock()
	close(m.done)
	for _, s := range streams {
		s.end(err)
	}
}

// Write writes the session's frames to w until the session ends. A failing write ends the session.
func (m *Mux) Write(w io.Writer) {
	for {
		for _, frame := range m.takeUrgent() {
			if _, err := w.Write(frame); err != nil {
				m.End(err)
				return
			}
		}
		var frame []byte
		select {
		case <-m.done:
			return
		case <-m.wake:
			continue
		case frame = <-m.data:
		}
		if _, err := w.Write(frame); err != nil {
			m.End(err)
			return
		}
	}
}

// LockedWriter writes one frame at a time. It is needed because an ending session may still be writing a frame when the
// next session begins.
type LockedWriter struct {
	mu sync.Mutex
	W  io.Writer
}

// Write implements io.Writer.
func (l *LockedWriter) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.W.Write(p)
}

func (m *Mux) takeUrgent() [][]byte {
	m.mu.Lock()
	defer m.mu.Unlock()
	frames := m.urgent
	m.urgent = nil
	return frames
}

// Urgent queues a frame ahead of frames that were not sent with Urgent. It does not wait.
func (m *Mux) Urgent(stream uint32, kind Kind, parts ...[]byte) {
	frame := AppendFrame(nil, m.session, stream, kind, parts...)
	m.mu.Lock()
	if m.err != nil {
		m.mu.Unlock()
		return
	}
	full := len(m.urgent) >= maxUrgent
	if !full {
		m.urgent = append(m.urgent, frame)
	}
	m.mu.Unlock()
	if full {
		m.End(errors.Join(ErrSession, errors.New("the peer does not read the answers")))
		return
	}
	select {
	case m.wake <- struct{}{}:
	default:
	}
}

// Open makes a stream with a new number. Only the host calls Open. It returns ErrTooMany if the session has MaxStreams
// streams.
func (m *Mux) Open() (*Stream, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.add(m.last+1, true)
}

// Accept makes the stream that the host has opened under the given number. Only the guest calls Accept. It returns
// ErrTooMany as Open does, and ErrSession for a number that is not greater than all earlier ones.
func (m *Mux) Accept(id uint32) (*Stream, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.add(id, false)
}

func (m *Mux) add(id uint32, host bool) (*Stream, error) {
	switch {
	case m.err != nil:
		return nil, m.err
	case id <= m.last: // also true after 2^32 streams
		return nil, errors.Join(ErrSession, errors.New("a stream number is reused"))
	case len(m.streams) >= MaxStreams:
		return nil, ErrTooMany
	}
	s := &Stream{mux: m, id: id, done: make(chan struct{})}
	for c := range s.in {
		s.in[c].wake = make(chan struct{}, 1)
		s.out[c].wake = make(chan struct{}, 1)
		if host {
			s.in[c].room = Window // the guest may send immediately
		} else {
			s.out[c].left = Window
		}
	}
	m.last, m.streams[id] = id, s
	return s, nil
}

// Handle processes a frame of this session. If it returns an error, the session must end: pass the error to End.
func (m *Mux) Handle(f Frame) error {
	m.mu.Lock()
	s, last := m.streams[f.Stream], m.last
	m.mu.Unlock()
	if s == nil {
		if f.Stream > last {
			return errors.Join(ErrSession, errors.New("a frame has a stream that was never opened"))
		}
		return nil // it was in flight when the stream ended
	}
	switch f.Kind {
	case KindData, KindClose, KindWindow:
		if len(f.Payload) == 0 || f.Payload[0] >= channels {
			return errors.Join(ErrSession, errors.New("a frame has no valid channel"))
		}
	default:
		return m.control(s, f)
	}
	channel, rest := f.Payload[0], f.Payload[1:]
	switch f.Kind {
	case KindData:
		return s.in[channel].put(rest)
	case KindClose:
		s.in[channel].close()
		return nil
	default:
		if len(rest) != 4 {
			return errors.Join(ErrSession, errors.New("a window has no size"))
		}
		return s.out[channel].add(binary.BigEndian.Uint32(rest))
	}
}
