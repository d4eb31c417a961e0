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
	// tendPause is the time between two rounds of what is done without an order.
	tendPause = time.Minute
	// probeTime is how long a worker may take for the simplest of answers, on a node that is busy.
	probeTime = 30 * time.Second
	// spareCode is how many components that no container needs a worker keeps loaded for the next.
	spareCode = 32
	// idleImage is how long an image is held after it was last asked for, without a container of it.
	idleImage = 10 * time.Minute
	// maxWorkerLog is how large the log of a worker may grow; the end of it that is kept is a quarter.
	maxWorkerLog = 8 << 20
)

// tend renews certificates, lets go of code that nobody needs, ends workers that hang, and keeps their logs in bounds.
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
			b.log.Warn("remove compiled code that nobody needs", "err", err)
		}
		b.probe(ctx, probeTime)
		for _, w := range b.keeper.all() {
			if err := trimLog(w.logFile()); err != nil && !errors.Is(err, os.ErrNotExist) {
				b.log.Warn("trim the log of a worker", "worker", w.name, "err", err)
			}
		}
	}
}

// probe ends workers that live and do not answer: nothing in them could be stopped any more.
func (b *Backend) probe(ctx context.Context, limit time.Duration) {
	var probes sync.WaitGroup
	for _, w := range b.keeper.all() {
		probes.Go(func() {
			asking, cancel := context.WithTimeout(ctx, limit)
			defer cancel()
			_, err := w.conn().Stats(asking, "none")
			if err == nil || asking.Err() == nil || ctx.Err() != nil || !w.proc.Alive() {
				return // a connection that broke is made anew by who watches it
			}
			b.log.Error("a worker does not answer; ending it", "worker", w.name, "pid", w.proc.Pid, "limit", limit)
			_ = w.proc.Signal(unix.SIGKILL)
		})
	}
	probes.Wait()
}

// renewDue gives new certificates to the containers whose own are due.
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

// sweep lets go of code: in the workers of what no container needs, and on the disk of what belongs to no image and no
// container; and of the images that are held for containers that are gone. What was asked for after since stays.
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
		w.spare(ctx, loaded, spareCode)
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
			continue // gone meanwhile, or none after all
		}
		if err != nil {
			return err // without knowing all, nothing is thrown away
		}
		wanted[a.Wasm.Digest.String()] = true
	}
	return b.cache.evict(wanted)
}

// trimLog keeps the end of a log that has grown too large. The worker appends, so it goes on behind what is left.
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
