package health

import (
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"
)

// Names of conditions. The first two are the CRI's; kubelets ignore the others.
const (
	RuntimeReady = "RuntimeReady"
	NetworkReady = "NetworkReady"
	EdgeReady    = "EdgeReady"
	// HandlersReady is false while a handler other than the default cannot run pods, or an enabled one is not installed.
	HandlersReady = "HandlersReady"
	// NRIReady is false if node plugins cannot connect or could not be started.
	NRIReady = "NRIReady"
	// ForwardingReady is false while the node's firewall drops what pods send and receive.
	ForwardingReady = "ForwardingReady"
	// Clean is false while leftovers cannot be removed. The node still works.
	Clean = "Clean"
)

// NotInstalled is the reason for a handler whose programs were missing when the daemon started.
const NotInstalled = "NotInstalled"

// Problem is a problem of the node.
type Problem struct {
	// Part is the part of the node that has the problem. A part has at most one problem.
	Part string
	// Condition is the name of the condition that is false while the problem lasts.
	Condition string
	// Reason is a word in CamelCase.
	Reason string
	// Err says what is wrong and what to do.
	Err   error
	Since time.Time
}

// Board holds the problems of a node. It is safe for concurrent use. A nil Board has no problems.
type Board struct {
	log *slog.Logger
	mu  sync.Mutex
	all map[string]Problem
}

// NewBoard makes a board without problems.
func NewBoard(log *slog.Logger) *Board { return &Board{log: log, all: map[string]Problem{}} }

// Report sets the problem of a part; a nil err clears it. Report logs changes.
func (b *Board) Report(part, condition, reason string, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	old, had := b.all[part]
	switch {
	case err == nil && had:
		delete(b.all, part)
		b.log.Info("problem solved", "problem", part, "reason", old.Reason, "lasted", time.Since(old.Since).Round(time.Millisecond))
	case err != nil:
		now := Problem{Part: part, Condition: condition, Reason: reason, Err: err, Since: time.Now()}
		if had {
			now.Since = old.Since
		}
		b.all[part] = now
		if !had || old.Err.Error() != err.Error() {
			b.log.Error("new problem", "problem", part, "condition", condition, "reason", reason, "err", err)
		}
	}
}

// Problems returns the problems, sorted by part.
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
