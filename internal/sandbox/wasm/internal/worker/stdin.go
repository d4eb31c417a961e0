package worker

import (
	"io"
	"sync"
)

// stdin is the standard input of a command: what attached clients send, in the order in which it comes. A few packets are
// held for a guest that does not read, so that a client that has gone is noticed all the same.
type stdin struct {
	once   bool // ends with the first client that had it (CRI stdin_once)
	in     chan []byte
	closed chan struct{}
	end    func() // makes the guest meet end of file, after what was put before

	rest []byte // of the reader
}

func newStdin(once bool) *stdin {
	s := &stdin{once: once, in: make(chan []byte, 16), closed: make(chan struct{})}
	s.end = sync.OnceFunc(func() { close(s.closed) })
	return s
}

// put gives the guest a packet, which is kept, and waits while too many are not read; false after the end.
func (s *stdin) put(data []byte) bool {
	select {
	case <-s.closed:
		return false
	default:
	}
	select {
	case s.in <- data:
		return true
	case <-s.closed:
		return false
	}
}

// left is called when a client has no more input.
func (s *stdin) left() {
	if s.once {
		s.end()
	}
}

// Read implements io.Reader for one goroutine.
func (s *stdin) Read(p []byte) (int, error) {
	for len(s.rest) == 0 {
		select {
		case s.rest = <-s.in:
			continue
		default:
		}
		select {
		case s.rest = <-s.in:
		case <-s.closed:
			if len(s.in) == 0 {
				return 0, io.EOF
			}
		}
	}
	n := copy(p, s.rest)
	s.rest = s.rest[n:]
	return n, nil
}
