package worker

import (
	"sync"
	"time"

	"github.com/tripod-run/tripod/internal/loglimit"
)

// lossInterval is the minimum time between two log lines for the same loss, so that a pod cannot fill the disk.
const lossInterval = 10 * time.Second

// loss says which of a pod's messages were dropped: the channel, and the reader that they waited for, "daemon" or
// "component".
type loss struct{ channel, topic, reader string }

// losses reports a pod's dropped messages.
type losses struct {
	report func(l loss, messages int)

	mu    sync.Mutex // held while report is called, so that end waits for it
	lines loglimit.Limiter[loss]
	ended bool
}

// add reports dropped messages, immediately or with a later line. The caller must not hold channels.mu.
func (s *losses) add(l loss, messages int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if messages = s.lines.Add(l, messages, time.Now()); messages > 0 && !s.ended {
		s.report(l, messages)
	}
}

// end reports the messages that no line has yet. Nothing is reported afterwards.
func (s *losses) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
	for l, messages := range s.lines.Rest() {
		s.report(l, messages)
	}
}
