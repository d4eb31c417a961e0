package wasm

import (
	"context"
	"errors"
	"io"
	"os"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/process"
)

const (
	// tendPause is the time between two rounds of upkeep.
	tendPause = time.Minute
	// probeTime is how long a worker may take for the simplest answer on a busy node.
	probeTime = 30 * time.Second
	// maxIdleCode is how many components without a container a worker keeps loaded.
	maxIdleCode = 32
	// idleImage is how long an image is held after it was last asked for, without a container of it.
	idleImage = 10 * time.Minute
	// maxWorkerLog is how large the log of a worker may grow, in bytes. Trimming keeps the last quarter.
	maxWorkerLog = 8 << 20
)

// tend renews certificates, removes unused code, kills workers that hang, and trims their logs.
func (b *Backend) tend(ctx context.Context) {
	tick := time.NewTicker(tendPause)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		b.renewDue(ctx, time.Now())
		if err := b.sweep(ctx, time.Now().Add(-idleImage)); err != nil && ctx.Err() == nil {
			b.log.Warn("remove unused compiled code", "err", err)
		}
		b.probe(ctx, probeTime)
		for _, w := range b.keeper.all() {
			if err := trimLog(w.logFile()); err != nil && !errors.Is(err, os.ErrNotExist) {
				b.log.Warn("trim the log of a worker", "worker", w.name, "err", err)
			}
		}
	}
}

// probe kills workers that live and do not answer: their pods could not be stopped.
func (b *Backend) probe(ctx context.Context, limit time.Duration) {
	var probes sync.WaitGroup
	for _, w := range b.keeper.all() {
		probes.Go(func() {
			asking, cancel := context.WithTimeout(ctx, limit)
			defer cancel()
			_, err := w.conn().Stats(asking, "none")
			if err == nil || asking.Err() == nil || ctx.Err() != nil || !w.proc.Alive() {
				return // worker.watch replaces a connection that broke
			}
			b.log.Error("a worker does not answer; ending it", "worker", w.name, "pid", w.proc.Pid, "limit", limit)
			_ = w.proc.Signal(unix.SIGKILL)
		})
	}
	probes.Wait()
}

// renewDue renews the certificates that are due.
func (b *Backend) renewDue(ctx context.Context, now time.Time) {
	for _, h := range b.ledger.All() {
		s, l := h.Snapshot()
		if l == nil || s.RenewAt.IsZero() || now.Before(s.RenewAt) {
			continue
		}
		if err := b.renew(ctx, h); err != nil {
			b.log.Error("renew a certificate", "container", h.ID, "err", err)
		}
	}
}

// sweep unloads code that no container needs from the workers, deletes code without an image or a container from the
// disk, and releases the images of containers that are gone, except those that were requested after since.
func (b *Backend) sweep(ctx context.Context, since time.Time) error {
	loaded, wanted, inUse := map[string]bool{}, map[string]bool{}, map[string]bool{}
	for _, h := range b.ledger.All() {
		if s, _ := h.Snapshot(); s.Artifact != nil {
			loaded[codeName(s.Artifact, s.Description)] = true
			wanted[s.Artifact.Wasm.Digest.String()] = true
			inUse[s.Artifact.ImageID] = true
		}
	}
	for _, w := range b.keeper.all() {
		w.unloadIdle(ctx, loaded, maxIdleCode)
	}
	if err := b.catalog.release(ctx, inUse, since); err != nil {
		return err
	}
	images, err := b.cfg.Images.List(ctx)
	if err != nil {
		return err
	}
	for _, img := range images {
		if img.Component == nil {
			continue
		}
		a, err := b.cfg.Images.Component(ctx, img.ID)
		if errdefs.IsNotFound(err) || errdefs.IsInvalidArgument(err) {
			continue // removed meanwhile, or no component after all
		}
		if err != nil {
			return err // with an incomplete list, nothing is deleted
		}
		wanted[a.Wasm.Digest.String()] = true
	}
	return b.cache.evict(wanted)
}

// trimLog cuts a log that is too large down to its end. The worker opened it for appending and continues behind that.
func trimLog(path string) error {
	info, err := os.Stat(path)
	if err != nil || info.Size() <= maxWorkerLog {
		return err
	}
	end := process.LogTail(path, maxWorkerLog/4)
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := f.Truncate(0); err != nil {
		return err
	}
	if n, err := f.Write(end); err != nil || n < len(end) {
		return errors.Join(err, io.ErrShortWrite)
	}
	return nil
}
