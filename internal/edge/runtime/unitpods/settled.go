package unitpods

import (
	"sync"

	"github.com/tripod-run/tripod/internal/channel"
)

// settler tells a worker which of the messages with QoS 1 and 2 on one connection it need not keep any more. Until then the
// worker keeps them, and sends them again to the next daemon if this one is killed.
type settler struct {
	conn *channel.Conn

	mu      sync.Mutex
	last    uint64          // number of the last message that was received
	settled uint64          // all messages up to this number are settled
	early   map[uint64]bool // settled messages beyond
	told    uint64          // the number that the worker has been told
	more    chan struct{}   // has a token when settled has grown
	done    chan struct{}   // closed at the end of the connection
}

func newSettler(conn *channel.Conn) *settler {
	return &settler{conn: conn, early: map[uint64]bool{}, more: make(chan struct{}, 1), done: make(chan struct{})}
}

func (s *settler) tell(n uint64) error {
	return s.conn.Write(channel.Message{Header: channel.Header{Control: true, Arg: channel.Settled}, Payload: channel.AppendSettled(nil, n)})
}

// received counts a message, and returns the function that settles it.
func (s *settler) received() func() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.last++
	n := s.last
	return func() { s.settle(n) }
}

func (s *settler) settle(n uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n != s.settled+1 {
		s.early[n] = true
		return
	}
	for s.settled = n; s.early[s.settled+1]; s.settled++ {
		delete(s.early, s.settled+1)
	}
	select {
	case s.more <- struct{}{}:
	default:
	}
}

// run tells the worker until the connection ends. It begins with 0, for which the worker waits before it sends messages.
func (s *settler) run() {
	if s.tell(0) != nil {
		return // the reader of the connection fails, too
	}
	for {
		select {
		case <-s.more:
		case <-s.done:
			return
		}
		s.mu.Lock()
		n := s.settled
		s.mu.Unlock()
		if n > s.told && s.tell(n) != nil {
			return
		}
		s.told = n
	}
}
