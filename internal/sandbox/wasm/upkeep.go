package wasm

import (
	"context"
	"errors"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/code"
)

const (
	upkeepInterval = time.Minute
	// probeTime bounds the time that a worker can take to answer the simplest request, even on a busy node.
	probeTime = 30 * time.Second
	// maxIdleCode bounds the number of components without containers that a worker keeps loaded.
	maxIdleCode = 32
	// idleImage is how long an image without containers is held after its last use.
	idleImage = 10 * time.Minute
	// maxWorkerLog bounds the log of a worker, in bytes. Trimming keeps the last maxWorkerLog/4 bytes.
	maxWorkerLog = 8 << 20
)

// upkeep periodically renews certificates, reconnects pods to a dialer, removes unused code, kills hanging workers and
// trims the workers' logs, until ctx ends.
func (b *Backend) upkeep(ctx context.Context) {
	tick := time.NewTicker(upkeepInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		b.maintain(ctx)
	}
}

// maintain is one round of upkeep.
func (b *Backend) maintain(ctx context.Context) {
	b.renewDue(ctx, time.Now())
	b.reconnectSoon()
	if guard.IsClosed(b.recovered) { // before, the containers that need code are not known
		if err := b.sweep(ctx, time.Now().Add(-idleImage)); err != nil && ctx.Err() == nil {
			b.log.Warn("remove unused code failed", "err", err)
		}
	}
	b.probe(ctx, probeTime)
	for _, w := range b.keeper.All() {
		if err := process.TrimLog(w.LogFile(), maxWorkerLog, maxWorkerLog/4); err != nil && !errors.Is(err, os.ErrNotExist) {
			b.log.Warn("trim worker log failed", "worker", w.Name, "err", err)
		}
	}
}

// probe kills running workers that do not reply within the given time, because the pods of such a worker could not be
// stopped.
func (b *Backend) probe(ctx context.Context, limit time.Duration) {
	var probes sync.WaitGroup
	for _, w := range b.keeper.All() {
		probes.Go(func() {
			asking, cancel := context.WithTimeout(ctx, limit)
			defer cancel()
			_, err := w.Conn().Stats(asking, "none")
			if err == nil || asking.Err() == nil || ctx.Err() != nil || !w.Proc.Alive() {
				return // worker.watch handles broken connections
			}
			b.log.Error("worker does not respond; killing it", "worker", w.Name, "pid", w.Proc.Pid, "limit", limit)
			_ = w.Proc.Signal(unix.SIGKILL)
		})
	}
	probes.Wait()
}

// renewDue renews the certificates that are due for renewal.
func (b *Backend) renewDue(ctx context.Context, now time.Time) {
	for _, h := range b.ledger.All() {
		s, l := h.Snapshot()
		if l == nil || s.RenewAt.IsZero() || now.Before(s.RenewAt) {
			continue
		}
		if err := b.renew(ctx, h); err != nil {
			b.log.Error("renew certificate failed", "container", h.ID, "err", err)
		}
	}
}

// sweep removes what no container needs: it unloads unneeded code from the workers, releases the holds on unused images,
// and deletes unneeded code from the disk unless an image still contains the component. A hold on an image that was
// requested after the given time is kept.
func (b *Backend) sweep(ctx context.Context, since time.Time) error {
	loaded, inUse := map[string]bool{}, map[string]bool{}
	for _, h := range b.ledger.All() {
		if s, _ := h.Snapshot(); s.Artifact != nil {
			loaded[code.Name(b.cache.Source(ctx, s.Artifact), s.Description)] = true
			inUse[s.Artifact.ImageID] = true
		}
	}
	for _, w := range b.keeper.All() {
		w.UnloadIdle(ctx, loaded, maxIdleCode)
	}
	if err := b.catalog.Release(ctx, inUse, since); err != nil {
		return err
	}
	return b.collectCode(ctx)
}
