package health

import (
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"
)

// Names of conditions. The first two are the CRI's, which a kubelet acts on; others it shows nobody.
const (
	RuntimeReady = "RuntimeReady"
	NetworkReady = "NetworkReady"
	EdgeReady    = "EdgeReady"
	// Clean is false while something that is over could not be cleaned up: nothing else is held up by it.
	Clean = "Clean"
)

// Problem is something that the node cannot do.
type Problem struct {
	// Part is who has it: one part has one problem.
	Part string
	// Condition is what is false while it lasts.
	Condition string
	// Reason is a word in CamelCase, Err what is wrong and what to do.
	Reason string
	Err    error
	Since  time.Time
}

// Board holds the problems of a node. Its methods may be called from many goroutines; a nil Board has none.
type Board struct {
	log *slog.Logger
	mu  sync.Mutex
	all map[string]Problem
}

// NewBoard makes a board without problems.
func NewBoard(log *slog.Logger) *Board { return &Board{log: log, all: map[string]Problem{}} }

// Report says what a part's problem is now; with a nil error it has none. It is logged when it changes.
func (b *Board) Report(part, condition, reason string, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	old, had := b.all[part]
	switch {
	case err == nil && had:
		delete(b.all, part)
		b.log.Info("a problem of the node is solved", "problem", part, "reason", old.Reason, "lasted", time.Since(old.Since).Round(time.Millisecond))
	case err != nil:
		now := Problem{Part: part, Condition: condition, Reason: reason, Err: err, Since: time.Now()}
		if had {
			now.Since = old.Since
		}
		b.all[part] = now
		if !had || old.Err.Error() != err.Error() {
			b.log.Error("the node has a problem", "problem", part, "condition", condition, "reason", reason, "err", err)
		}
	}
}

// Problems lists the problems by part.
func (b *Board) Problems() []Problem {
	if b == nil {
		return nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	all := make([]Problem, 0, len(b.all))
	for _, p := range b.all {
		all = append(all, p)
	}
	slices.SortFunc(all, func(a, b Problem) int { return strings.Compare(a.Part, b.Part) })
	return all
}
