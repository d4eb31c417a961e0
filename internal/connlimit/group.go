package connlimit

import (
	"cmp"
	"log/slog"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// logInterval is the shortest time between two log lines for an address.
const logInterval = 10 * time.Second

// Group holds the Limiters of a process. They share a budget of half of the process's file descriptors. The other half
// is for the process's own work, and for sockets that only root may connect to.
type Group struct {
	budget func() int64
	held   atomic.Int64
	log    *slog.Logger

	mu       sync.Mutex
	limiters map[*Limiter]struct{}
}

// NewGroup makes a Group without Limiters.
func NewGroup(log *slog.Logger) *Group {
	return &Group{budget: halfOfFiles, log: log, limiters: map[*Limiter]struct{}{}}
}

// halfOfFiles returns half of the process's limit on open files. It is called for each connection, because prlimit(1)
// can change the limit of a running process.
func halfOfFiles() int64 {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil || limit.Cur > math.MaxInt64 {
		return math.MaxInt64
	}
	return int64(limit.Cur / 2)
}

// Limiter makes a Limiter for an address. The name appears in logs and metrics.
func (g *Group) Limiter(name string, c Config) *Limiter {
	c = c.withDefaults()
	l := &Limiter{Config: c, name: name, group: g, peers: map[string]int{}, rejected: map[string]uint64{}}
	l.report.counts = map[string]uint64{}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.limiters[l] = struct{}{}
	return l
}

// Stats returns the figures of all Limiters, ordered by name.
func (g *Group) Stats() []Stats {
	g.mu.Lock()
	defer g.mu.Unlock()
	all := make([]Stats, 0, len(g.limiters))
	for l := range g.limiters {
		all = append(all, l.Stats())
	}
	slices.SortFunc(all, func(a, b Stats) int { return cmp.Compare(a.Name, b.Name) })
	return all
}

// take takes the given number of descriptors from the budget. If fewer are left, it takes none and returns false.
func (g *Group) take(files int) bool {
	if g.held.Add(int64(files)) <= g.budget() {
		return true
	}
	g.release(files)
	return false
}

func (g *Group) release(files int) { g.held.Add(-int64(files)) }
