package health

import (
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"
)

// Names of conditions. A kubelet acts on the first two, which are the CRI's, and ignores the others.
const (
	RuntimeReady = "RuntimeReady"
	NetworkReady = "NetworkReady"
	EdgeReady    = "EdgeReady"
	// Clean is false while leftovers cannot be cleaned up. The node works all the same.
	Clean = "Clean"
)

// Problem is something that the node cannot do.
type Problem struct {
	// Part of the node that has the problem; each has one at most.
	Part string
	// Condition is false while the problem lasts.
	Condition string
	// Reason is a word in CamelCase. Err says what is wrong and what to do.
	Reason string
	Err    error
	Since  time.Time
}

// Board holds the problems of a node. It may be used from many goroutines; a nil Board has no problems.
type Board struct {
	log *slog.Logger
	mu  sync.Mutex
	all map[string]Problem
}

// NewBoard makes a board without problems.
func NewBoard(log *slog.Logger) *Board { return &Board{log: log, all: map[string]Problem{}} }

// Report sets the problem of a part, or clears it with a nil error. Changes are logged.
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
