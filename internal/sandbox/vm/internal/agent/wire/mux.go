package wire

import (
	"encoding/binary"
	"errors"
	"io"
	"sync"
)

const (
	// Window is how many bytes of a channel may be on the way, or wait for their reader.
	Window = 128 << 10
	// MaxStreams is how many streams a session has at a time.
	MaxStreams = 128
	// maxUrgent is how many frames may wait that were sent without waiting: more than the rules allow to be needed.
	maxUrgent = 16 * MaxStreams
)

var (
	// ErrSession is what the other side did against the rules: the session is over.
	ErrSession = errors.New("tripod-agent protocol")
	// ErrEnded is the use of a stream that is over.
	ErrEnded = errors.New("the stream has ended")
	// ErrTooMany is a stream beyond MaxStreams.
	ErrTooMany = errors.New("too many streams")
)

// Mux is the streams of one session, of either side.
type Mux struct {
	session uint64
	control func(*Stream, Frame) error

	data chan []byte // from those who wait
	wake chan struct{}
	done chan struct{}

	mu      sync.Mutex
	urgent  [][]byte // from those who must not
	streams map[uint32]*Stream
	last    uint32 // the highest stream there was
	err     error
}

// NewMux makes a session's streams. What a frame means that is neither data nor a window's is decided by control, on the
// goroutine that calls Handle.
func NewMux(session uint64, control func(*Stream, Frame) error) *Mux {
	return &Mux{
		session: session, control: control, data: make(chan []byte), wake: make(chan struct{}, 1), done: make(chan struct{}),
		streams: map[uint32]*Stream{},
	}
}

// Session is the session's number.
func (m *Mux) Session() uint64 { return m.session }

// Done is closed when the session is over; Err tells why.
func (m *Mux) Done() <-chan struct{} { return m.done }

// Err is why the session is over.
func (m *Mux) Err() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.err
}

// End ends the session and all of its streams. The first reason counts.
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

// Write writes the session's frames to w until it is over, which a failing write makes it.
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

func (m *Mux) takeUrgent() [][]byte {
	m.mu.Lock()
	defer m.mu.Unlock()
	frames := m.urgent
	m.urgent = nil
	return frames
}

// Urgent sends a frame before those that wait, and does not wait itself.
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
		m.End(errors.Join(ErrSession, errors.New("the other side asks and does not read the answers")))
		return
	}
	select {
	case m.wake <- struct{}{}:
	default:
	}
}

// Next makes a stream with a number that none had: the host's way. ErrTooMany when there are MaxStreams.
func (m *Mux) Next(room bool) (*Stream, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.add(m.last+1, room)
}

// Accept makes the stream that the host opened.
func (m *Mux) Accept(id uint32, room bool) (*Stream, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.add(id, room)
}

func (m *Mux) add(id uint32, room bool) (*Stream, error) {
	switch {
	case m.err != nil:
		return nil, m.err
	case id <= m.last: // so also after 2^32 streams
		return nil, errors.Join(ErrSession, errors.New("a stream's number is used again"))
	case len(m.streams) >= MaxStreams:
		return nil, ErrTooMany
	}
	s := &Stream{mux: m, id: id, done: make(chan struct{})}
	for c := range s.in {
		s.in[c].wake = make(chan struct{}, 1)
		s.out[c].wake = make(chan struct{}, 1)
		if room {
			s.in[c].room = Window
		} else {
			s.out[c].left = Window // the host has room from the beginning
		}
	}
	m.last, m.streams[id] = id, s
	return s, nil
}

// Handle does what a frame of this session says. An error is the end of the session: give it to End.
func (m *Mux) Handle(f Frame) error {
	m.mu.Lock()
	s, last := m.streams[f.Stream], m.last
	m.mu.Unlock()
	if s == nil {
		if f.Stream > last {
			return errors.Join(ErrSession, errors.New("a frame is for a stream that was never opened"))
		}
		return nil // it was on the way when the stream ended
	}
	switch f.Kind {
	case KindData, KindClose, KindWindow:
		if len(f.Payload) == 0 || f.Payload[0] >= channels {
			return errors.Join(ErrSession, errors.New("a frame is for no channel"))
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
