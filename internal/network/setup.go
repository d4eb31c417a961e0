package network

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/spans"
)

// rollbackTimeout limits how long a failed Setup works on its roll-back before it returns. The roll-back continues even
// if the caller's context ends. A roll-back that takes longer is retried in the background.
const rollbackTimeout = 10 * time.Second

var (
	setupNetns = failpoint.New("network.setup.netns")
	setupAdd   = failpoint.New("network.setup.add")
)

// Setup creates the pod's network namespace and runs ADD of the CNI chain in it. A repeated request returns the same
// result. A different request for the same pod, or a request after an interrupted Setup, starts over.
//
// If Setup fails or ctx ends, it rolls back before it returns. If a plugin's DEL fails, the roll-back continues in the
// background until it succeeds. Errors: ErrInvalidArgument for a bad request, ErrFailedPrecondition for a node that is
// not configured, ErrUnavailable (also a *PluginError) for a plugin that failed.
func (m *Manager) Setup(ctx context.Context, a Attachment) (*Result, error) {
	if err := a.validate(); err != nil {
		return nil, err
	}
	unlock, err := m.locks.lock(ctx, keyOf(a.ID))
	if err != nil {
		return nil, err
	}
	defer unlock()
	defer m.setups.begin()()

	c, err := m.currentChain()
	if err != nil {
		return nil, err
	}
	rec, err := newRecord(a, c)
	if err != nil {
		return nil, err
	}
	if missing := c.unserved(rec.Capabilities); len(missing) > 0 { // not an error: a network agent may serve them
		m.cfg.Logger.Warn("no plugin of the CNI configuration has these capabilities of the pod",
			"pod", a.ID, "configuration", c.source, "capabilities", missing)
	}
	if result, err := m.reuseOrUndo(ctx, rec); result != nil || err != nil {
		return result, err
	}
	if err := m.firewall.ensure(ctx, c.masqueraded); err != nil {
		return nil, fmt.Errorf("network of pod %s: %w", a.ID, err)
	}
	result, err := m.attach(ctx, rec, a.MakeNetns)
	if err != nil {
		return nil, fmt.Errorf("network of pod %s with %s: %w", a.ID, c.source, m.rollback(ctx, rec, err))
	}
	if rules := m.portRules(rec); rules != nil {
		m.firewall.ports.Store(rec.key, rules)
	}
	return result, nil
}

// reuseOrUndo returns the result of an earlier Setup of the same pod if that Setup was complete and had the same
// request. Otherwise it tears down what the earlier Setup left, and returns nil.
func (m *Manager) reuseOrUndo(ctx context.Context, rec *record) (*Result, error) {
	key := rec.key
	old, err := m.records.get(key)
	if err == nil && old == nil {
		return nil, nil
	}
	if err == nil && old.sameRequest(rec) && isNetns(m.netnsPath(key)) {
		added, err := m.cni.GetNetworkListCachedResult(old.list, old.runtimeConf(m.netnsPath(key)))
		if err == nil && added != nil {
			m.claims.Store(key, true)
			return m.result(key, added)
		}
	}
	if err := m.detach(ctx, key); err != nil {
		return nil, fmt.Errorf("network of pod %s: undo an earlier attempt: %w", rec.ID, err)
	}
	return nil, nil
}

// CNIResult returns the result of the chain's last plugin for a pod, converted to the latest CNI version, or nil if
// there is no result.
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

// attach does the work of Setup. It writes the record and makes the namespace in parallel; ADD needs both. If makeNetns
// is not nil, it makes the namespace.
func (m *Manager) attach(ctx context.Context, rec *record, makeNetns func(pin string) error) (*Result, error) {
	m.claims.Store(rec.key, true)
	var both guard.Group
	both.Go(func() error { return m.records.put(rec) })
	both.Go(func() error { return createNetns(m.netnsPath(rec.key), makeNetns) })
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
	if err := ctx.Err(); err != nil { // the caller no longer waits for the result
		return nil, context.Cause(ctx)
	}
	return m.result(rec.key, added)
}

func (m *Manager) add(ctx context.Context, rec *record) (types.Result, error) {
	defer m.excludeGC()()
	ctx, end := spans.Start(ctx, "cni.add", spans.String("cni.network", rec.list.Name))
	result, err := m.cni.AddNetworkList(ctx, rec.list, rec.runtimeConf(m.netnsPath(rec.key)))
	end(err)
	return result, err
}

// rollback undoes a failed Setup, even if ctx has ended. It returns the error for Setup's caller, which contains the
// given cause.
func (m *Manager) rollback(ctx context.Context, rec *record, cause error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), min(rollbackTimeout, m.cfg.PluginTimeout))
	defer cancel()
	err := m.detach(ctx, rec.key)
	if err == nil {
		return cause
	}
	m.retry(rec)
	return errors.Join(cause, fmt.Errorf("roll-back failed and is retried in the background: %w", err))
}

// firstRetry is the first delay between two attempts to roll back. Each delay is twice as long as the one before, up to
// lastRetry.
const firstRetry, lastRetry = time.Second, time.Minute

// retry repeats the roll-back of rec until it succeeds, a Setup or Teardown of the same pod makes it unnecessary, or
// the daemon ends. After a restart, GC finds the record.
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

// rollbackAgain makes another attempt at the roll-back. It reports whether nothing is left to do.
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
		m.cfg.Logger.Warn("roll-back of a pod's network failed, will retry", "pod", rec.ID, "err", err)
		return false
	}
	return true
}
