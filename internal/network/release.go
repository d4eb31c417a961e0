package network

import (
	"sync"
	"time"

	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/network/builtin"
)

const (
	// releaseBatch limits how many networks are released together. The kernel deletes their interfaces at once, and
	// meanwhile a Setup waits: 60 ms for 32 pairs, where the first takes 30 ms.
	releaseBatch = 32
	// releasePatience limits how long a batch gives way to Setups, so that addresses become free on a busy node too.
	releasePatience = 250 * time.Millisecond
	// releaseQuiet is how long no Setup must have been under way, because one often follows another. releasePause is the
	// pause between two checks.
	releaseQuiet, releasePause = 20 * time.Millisecond, 5 * time.Millisecond
)

// backlog holds the networks to be released in the background, whose chains run in this process:
//
//	Teardown, GC ─► waiting ─► batch, once no Setup is under way ─┬─► interfaces, all at once
//	                                                              └─► each pod: DEL, namespace, record
type backlog struct {
	mu      sync.Mutex
	waiting []release
	pending int  // waiting or under way
	working bool // a goroutine takes batches

	// open is held for reading by each release.
	open sync.RWMutex
}

// release is the release of one pod's network. It holds the lock of the pod.
type release struct {
	rec  *record
	done func(error) // unlocks the pod; the error is detach's
}

// PendingReleases returns the number of networks whose release in the background is not complete.
func (m *Manager) PendingReleases() int {
	m.backlog.mu.Lock()
	defer m.backlog.mu.Unlock()
	return m.backlog.pending
}

// releaseInBackground does the work of Teardown in the background, and then calls r.done. It returns false, and does
// nothing, if the Manager is closed.
func (m *Manager) releaseInBackground(r release) bool {
	b := &m.backlog
	if !b.open.TryRLock() {
		return false
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.working && !m.inBackground(m.workOffBacklog) {
		b.open.RUnlock()
		return false
	}
	b.working = true
	b.waiting = append(b.waiting, r)
	b.pending++
	return true
}

// workOffBacklog releases networks until none waits. After the end of m.life it fails for all that wait; the next daemon
// continues.
func (m *Manager) workOffBacklog() {
	for {
		m.giveWay()
		batch := m.backlog.next()
		if batch == nil {
			return
		}
		m.releaseTogether(batch)
	}
}

// giveWay waits until no Setup is under way, or until the patience or m.life ends.
func (m *Manager) giveWay() {
	for end := time.Now().Add(releasePatience); time.Now().Before(end) && !m.setups.quiet(releaseQuiet); {
		if guard.Sleep(m.life, releasePause) != nil {
			return
		}
	}
}

// next takes the next batch. If there is none, the caller must stop to work.
func (b *backlog) next() []release {
	b.mu.Lock()
	defer b.mu.Unlock()
	n := min(len(b.waiting), releaseBatch)
	if n == 0 {
		b.waiting, b.working = nil, false
		return nil
	}
	batch := b.waiting[:n]
	b.waiting = b.waiting[n:]
	return batch
}

func (m *Manager) releaseTogether(batch []release) {
	if len(batch) > 1 {
		pods := make([]builtin.Interface, len(batch))
		for i, r := range batch {
			pods[i] = builtin.Interface{Netns: m.netnsPath(r.rec.key), Name: r.rec.Interface}
		}
		if err := builtin.DeletePairs(m.life, pods); err != nil {
			m.cfg.Logger.Debug("interfaces cannot be deleted together", "err", err)
		}
	}
	// The namespaces go after all DELs, because their end takes the kernel's lock as well.
	failures := make([]error, len(batch))
	confined := func(work func() error) error { return guard.Call(m.cfg.Logger, "release of a network", work) }
	together(batch, func(i int, r release) {
		failures[i] = confined(func() error { return m.del(m.life, r.rec) })
	})
	together(batch, func(i int, r release) {
		if failures[i] == nil {
			failures[i] = confined(func() error { return m.forget(m.life, r.rec.key) })
		}
		m.backlog.completed()
		r.done(failures[i])
	})
}

func together(batch []release, do func(int, release)) {
	var all sync.WaitGroup
	for i, r := range batch {
		all.Go(func() { do(i, r) })
	}
	all.Wait()
}

func (b *backlog) completed() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.pending--
	b.open.RUnlock()
}

// tally counts the Setups under way.
type tally struct {
	mu    sync.Mutex
	n     int
	moved time.Time // when n changed last
}

// begin counts a Setup until the returned function is called.
func (t *tally) begin() (end func()) {
	t.add(1)
	return func() { t.add(-1) }
}

func (t *tally) add(n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.n += n
	t.moved = time.Now()
}

// quiet reports whether no Setup has been under way for the given time.
func (t *tally) quiet(since time.Duration) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.n == 0 && time.Since(t.moved) >= since
}
