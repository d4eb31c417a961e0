package loglimit

import (
	"maps"
	"strings"
	"sync"
	"time"
)

// most bounds the kinds of events that a Limiter tells apart.
const most = 1024

// Text returns a text from outside, such as a topic, for a key: at most its first 256 bytes.
func Text(s string) string {
	const most = 256
	if len(s) <= most {
		return s
	}
	return strings.Clone(s[:most])
}

// Limiter allows a log line for each kind of event at most once per Every. The events of one kind have the same key. Its
// methods may be called concurrently. A Limiter uses a bounded amount of memory: while there are too many kinds, those
// beyond the bound get no lines.
type Limiter[K comparable] struct {
	Every time.Duration

	mu    sync.Mutex
	lines map[K]line
	swept time.Time // when the lines were last searched for old ones
}

// line is the state of the lines for a kind of event.
type line struct {
	at     time.Time // of the last line
	events int       // since then
}

// Add records n events. If a line may be written now, Add returns the number of events since the last line, and otherwise
// 0.
func (l *Limiter[K]) Add(key K, n int, now time.Time) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	last, known := l.lines[key]
	if known && now.Sub(last.at) < l.Every {
		last.events += n
		l.lines[key] = last
		return 0
	}
	if !known && len(l.lines) >= most {
		if now.Sub(l.swept) >= l.Every {
			l.swept = now
			maps.DeleteFunc(l.lines, func(_ K, one line) bool { return now.Sub(one.at) >= l.Every })
		}
		if len(l.lines) >= most {
			return 0
		}
	}
	if l.lines == nil {
		l.lines = map[K]line{}
	}
	l.lines[key] = line{at: now}
	return last.events + n
}

// Rest returns the number of events that no line has yet, by kind, and forgets them.
func (l *Limiter[K]) Rest() map[K]int {
	l.mu.Lock()
	defer l.mu.Unlock()
	rest := map[K]int{}
	for key, last := range l.lines {
		if last.events > 0 {
			rest[key] = last.events
		}
	}
	clear(l.lines)
	return rest
}
