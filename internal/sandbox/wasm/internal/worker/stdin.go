package worker

import (
	"io"
	"sync"
)

// stdin is the standard input of a command: the input of all attached clients in order of arrival. It queues a few
// packets, so that a client's disconnection is noticed even if the guest does not read.
type stdin struct {
	once   bool // end of file after the first client with input (CRI stdin_once)
	in     chan []byte
	closed chan struct{}
	end    func() // sends end of file after the queued packets

	rest []byte // rest of the packet being read
}

func newStdin(once bool) *stdin {
	s := &stdin{once: once, in: make(chan []byte, 16), closed: make(chan struct{})}
	s.end = sync.OnceFunc(func() { close(s.closed) })
	return s
}

// put queues data for the guest, and waits while the queue is full. It retains the slice. After a call to end, put
// returns false.
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

// clientDone is called when a client's input ends. If stdin_once is set, clientDone ends the guest's input too.
func (s *stdin) clientDone() {
	if s.once {
		s.end()
	}
}

// Read implements io.Reader. Only one goroutine can call Read.
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
