package network

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/tripod-run/tripod/internal/failpoint"
	"golang.org/x/sync/errgroup"
)

// rollbackTimeout bounds what is undone at once of a Setup that failed, after the caller's context has ended too.
// What is not done by then is repeated in the background.
const rollbackTimeout = 10 * time.Second

var (
	setupNetns = failpoint.New("network.setup.netns")
	setupAdd   = failpoint.New("network.setup.add")
)

// Setup gives the pod its network: the namespace, and in it what the CNI chain makes. A repeat of the same request
// returns the same result; one that differs, or follows an interrupted Setup, starts over.
//
// When it fails or ctx ends, everything is undone before it returns, or, should a plugin refuse that, in the
// background until it is. Errors: ErrInvalidArgument for the request, ErrFailedPrecondition for a node that is not
// configured, ErrUnavailable (also a *PluginError) for plugins that failed.
func (m *Manager) Setup(ctx context.Context, a Attachment) (*Result, error) {
	if err := a.validate(); err != nil {
		return nil, err
	}
	unlock, err := m.locks.lock(ctx, keyOf(a.ID))
	if err != nil {
		return nil, err
	}
	defer unlock()

	c, err := m.currentChain()
	if err != nil {
		return nil, err
	}
	rec, err := newRecord(a, c)
	if err != nil {
		return nil, err
	}
	if missing := c.unserved(rec.Capabilities); len(missing) > 0 {
		m.cfg.Logger.Warn("the CNI configuration has no plugin for what the pod asks; a network agent may do it",
			"pod", a.ID, "configuration", c.source, "capabilities", missing)
	}
	if result, err := m.reuseOrUndo(ctx, rec); result != nil || err != nil {
		return result, err
	}
	if err := m.masquerading.ensure(ctx, c.masqueraded); err != nil {
		return nil, fmt.Errorf("network of pod %s: %w", a.ID, err)
	}
	result, err := m.attach(ctx, rec)
	if err != nil {
		return nil, fmt.Errorf("network of pod %s by %s: %w", a.ID, c.source, m.rollback(ctx, rec, err))
	}
	return result, nil
}

// previous deals with an earlier Setup of the same ID: its result, when it was complete and asked for the same;
// else it is torn down.
func (m *Manager) reuseOrUndo(ctx context.Context, rec *record) (*Result, error) {
	key := rec.key
	old, err := m.records.get(key)
	if err == nil && old == nil {
		return nil, nil
	}
	if err == nil && old.sameRequest(rec) && isNetns(m.netnsPath(key)) {
		added, err := m.cni.GetNetworkListCachedResult(old.list, old.runtimeConf(m.netnsPath(key)))
		if err == nil && added != nil {
			m.claim(key)
			return m.result(key, added)
		}
	}
	if err := m.detach(ctx, key); err != nil {
		return nil, fmt.Errorf("network of pod %s: undo an earlier attempt: %w", rec.ID, err)
	}
	return nil, nil
}

// CNIResult is what the last plugin of the chain returned for a pod, in the format of CNI 1.0; nil when there is none.
func (m *Manager) CNIResult(id string) (json.RawMessage, error) {
	key := keyOf(id)
	rec, err := m.records.get(key)
	if err != nil || rec == nil {
		return nil, err
	}
	added, err := m.cni.GetNetworkListCachedResult(rec.list, rec.runtimeConf(m.netnsPath(key)))
	if err != nil || added == nil {
		return nil, err
	}
	result, err := m.result(key, added)
	if err != nil {
		return nil, err
	}
	return result.Raw, nil
}

// attach does the work of Setup. The record is written while the namespace is made: both must be there before ADD.
func (m *Manager) attach(ctx context.Context, rec *record) (*Result, error) {
	m.claim(rec.key)
	var both errgroup.Group
	both.Go(func() error { return m.records.put(rec) })
	both.Go(func() error { return createNetns(m.netnsPath(rec.key)) })
	if err := both.Wait(); err != nil {
		return nil, err
	}
	if err := setupNetns.Hit(ctx); err != nil {
		return nil, err
	}
	added, err := m.add(ctx, rec)
	if err != nil {
		return nil, err
	}
	if err := setupAdd.Hit(ctx); err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil { // nobody waits for the result any more
		return nil, context.Cause(ctx)
	}
	return m.result(rec.key, added)
}

func (m *Manager) add(ctx context.Context, rec *record) (types.Result, error) {
	defer m.excludeGC()()
	return m.cni.AddNetworkList(ctx, rec.list, rec.runtimeConf(m.netnsPath(rec.key)))
}

// rollback undoes a Setup that failed with cause, whatever its context says, and returns the error for the caller.
func (m *Manager) rollback(ctx context.Context, rec *record, cause error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), min(rollbackTimeout, m.cfg.PluginTimeout))
	defer cancel()
	err := m.detach(ctx, rec.key)
	if err == nil {
		return cause
	}
	m.retry(rec)
	return errors.Join(cause, fmt.Errorf("its roll-back is repeated in the background: %w", err))
}

// Delays between attempts to roll back: doubled from the first to the last.
const firstRetry, lastRetry = time.Second, time.Minute

// retry repeats the roll-back of rec until it succeeds, something else takes over the ID, or the daemon ends; then
// the next daemon's GC finds the record.
func (m *Manager) retry(rec *record) {
	m.inBackground(func() {
		for delay := firstRetry; ; delay = min(2*delay, lastRetry) {
			select {
			case <-m.life.Done():
				return
			case <-time.After(delay):
			}
			if m.rollbackAgain(rec) {
				return
			}
		}
	})
}

// rollbackAgain is one more attempt; true when there is nothing left to do.
func (m *Manager) rollbackAgain(rec *record) bool {
	ctx, cancel := context.WithTimeout(m.life, rollbackTimeout)
	defer cancel()
	unlock, err := m.locks.lock(ctx, rec.key)
	if err != nil {
		return false
	}
	defer unlock()
	now, err := m.records.get(rec.key)
	if err == nil && (now == nil || !now.Created.Equal(rec.Created)) {
		return true
	}
	if err := m.detach(ctx, rec.key); err != nil {
		m.cfg.Logger.Warn("the network of a pod that failed to start cannot be given back yet", "pod", rec.ID, "err", err)
		return false
	}
	return true
}
