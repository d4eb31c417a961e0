package orchestrator

import (
	"context"
	"slices"
	"time"

	"github.com/tripod-run/tripod/internal/edge/wire"
	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/guard"
)

var pointSettled = failpoint.New("orchestrator.orders.settled")

const (
	orderTick    = 50 * time.Millisecond  // time between checks for the broker's acknowledgements
	deadlineTick = 250 * time.Millisecond // time between checks of deadlines
)

// beat is the last registration or keepalive of a manager or runtime.
type beat struct {
	at   time.Time
	data wire.ModuleData // of the peer's last keepalive; nil before the first one
}

// noteBeat records a beat in memory only. After a restart of the orchestrator, every peer has its full time again.
func (o *Orchestrator) noteBeat(uuid string, data wire.ModuleData) {
	o.mu.Lock()
	defer o.mu.Unlock()
	b := beat{at: o.config.Now(), data: data}
	if data == nil {
		b.data = o.beats[uuid].data
	}
	o.beats[uuid] = b
}

func (o *Orchestrator) lastBeat(uuid string) beat {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.beats[uuid]
}

// interval returns the time between keepalives of a manager or runtime, in seconds.
func (o *Orchestrator) interval(r *Record) int {
	if n, ok := number(r.Data, "ka_interval_sec"); ok && n > 0 && n <= maxInterval {
		return n
	}
	return max(1, int(o.config.KeepaliveInterval/time.Second))
}

// watch handles missing keepalives, due restarts and acknowledged orders until ctx ends.
func (o *Orchestrator) watch(ctx context.Context) {
	orders, deadlines := time.NewTicker(orderTick), time.NewTicker(deadlineTick)
	defer orders.Stop()
	defer deadlines.Stop()
	ticking := true
	for {
		select {
		case <-ctx.Done():
			return
		case <-o.ledger.noted:
			if !ticking {
				orders.Reset(orderTick)
				ticking = true
			}
		case <-orders.C:
			o.settleOrders(ctx, false)
			if ticking = o.ordered(); !ticking {
				orders.Stop()
			}
		case <-deadlines.C:
			o.checkDeadlines(ctx)
		}
	}
}

// checkDeadlines runs a transition if a deadline has passed.
func (o *Orchestrator) checkDeadlines(ctx context.Context) {
	if !o.Connected() {
		o.mu.Lock()
		o.brokerLost = o.config.Now()
		o.mu.Unlock()
	}
	if !o.due() {
		return
	}
	err := guard.Call(o.log, "deadlines", func() error { return o.transact(ctx, (*transition).timePasses) })
	if err != nil && ctx.Err() == nil {
		o.log.Error("deadlines not handled; retrying", "err", err)
	}
}

// due reports whether timePasses would do anything.
func (o *Orchestrator) due() bool {
	now := o.config.Now()
	silent := func(r *Record) bool { return o.silent(r, now) }
	restart := func(m *Record) bool { return m.RestartAt != nil && !m.RestartAt.After(now) }
	return o.state.any(Manager, silent) || o.state.any(Runtime, silent) || o.state.any(Module, restart) ||
		slices.ContainsFunc(kinds, o.tooManyDead)
}

func (o *Orchestrator) tooManyDead(kind Kind) bool {
	n := 0
	return o.state.any(kind, func(r *Record) bool {
		if r.removable() {
			n++
		}
		return n > o.config.KeepDead
	})
}

// silent reports whether a manager or runtime has missed too many keepalives. The time without a broker does not count.
func (o *Orchestrator) silent(r *Record, now time.Time) bool {
	if r.Status != Alive || !r.Beats {
		return false
	}
	limit := time.Duration(o.interval(r)*o.config.KeepaliveMissed) * time.Second
	o.mu.Lock()
	defer o.mu.Unlock()
	last := o.beats[r.UUID].at
	if o.brokerLost.After(last) {
		last = o.brokerLost
	}
	return now.Sub(last) > limit
}

// removable reports whether the record can be dropped when there are too many dead records.
func (r *Record) removable() bool { return r.Status == Dead && !r.Unconfirmed }

// timePasses handles all deadlines that have passed. If there are more dead records of a kind than Config.KeepDead, it
// removes the oldest of them.
func (t *transition) timePasses() error {
	for _, kind := range []Kind{Manager, Runtime} {
		for _, r := range t.list(kind, func(r *Record) bool { return t.o.silent(r, t.now) }) {
			t.o.log.Warn("keepalives missing; marked dead", "type", r.Kind, "uuid", r.UUID, "name", r.Name,
				"silent", t.now.Sub(t.o.lastBeat(r.UUID).at).Round(time.Second))
			if err := t.loseAll(r); err != nil {
				return err
			}
		}
	}
	if err := t.restartDue(); err != nil {
		return err
	}
	for _, kind := range kinds {
		dead := t.list(kind, (*Record).removable)
		for _, r := range dead[:max(0, len(dead)-t.o.config.KeepDead)] {
			t.drop(r)
		}
	}
	return nil
}

// ledger lists the orders that may not have reached the broker. Orchestrator.deciding guards it.
type ledger struct {
	open    map[string]bool // uuids of modules whose record is Unconfirmed
	failed  bool            // the client has refused an order
	dropped uint64          // Stats.Dropped of the client at the last check
	noted   chan struct{}   // receives after an order was added to open
}

func (l *ledger) note(changes map[key]*Record) {
	for k, r := range changes {
		if r != nil && r.Unconfirmed {
			if l.open == nil {
				l.open = map[string]bool{}
			}
			l.open[k.uuid] = true
			select {
			case l.noted <- struct{}{}:
			default:
			}
		}
	}
}

// resume restarts all keepalive deadlines, and repeats the orders that an earlier process may not have sent. An order
// is sent twice only if that process died between the broker's acknowledgement and the write to the record. Both
// messages then have the same object_id.
func (o *Orchestrator) resume(ctx context.Context) {
	o.deciding.Lock()
	defer o.deciding.Unlock()
	for _, kind := range []Kind{Manager, Runtime} {
		for _, r := range o.state.list(kind) {
			o.noteBeat(r.UUID, nil)
		}
	}
	for _, m := range o.state.list(Module) {
		o.own.add(m.Order)
		if m.Unconfirmed {
			o.ledger.note(map[key]*Record{{Module, m.UUID}: m})
			o.repeatOrder(ctx, m)
		}
	}
}

// repeatOrder sends the last order about a module again.
func (o *Orchestrator) repeatOrder(ctx context.Context, m *Record) {
	action := wire.ActionDelete
	if m.Status == Alive {
		action = wire.ActionCreate
	}
	r := o.state.get(key{Runtime, m.Parent})
	if r == nil {
		return
	}
	topic, e := o.orderTo(m, r, action)
	e.ObjectID = m.Order
	o.publish(ctx, message{topic: topic, id: e.ObjectID, payload: e.Bytes()})
}

// ordered reports whether orders may not have reached the broker.
func (o *Orchestrator) ordered() bool {
	o.deciding.Lock()
	defer o.deciding.Unlock()
	return len(o.ledger.open) > 0
}

// settleOrders records orders as confirmed once the broker has acknowledged all messages. If the client has dropped
// messages, settleOrders sends all unconfirmed orders again. If the client is closed, the next process sends these
// orders.
func (o *Orchestrator) settleOrders(ctx context.Context, closed bool) {
	o.deciding.Lock()
	defer o.deciding.Unlock()
	l := &o.ledger
	stats := o.client.Stats()
	if len(l.open) == 0 || stats.Queued > 0 || !closed && !o.client.Connected() {
		return
	}
	confirmed := !l.failed && stats.Dropped == l.dropped
	if closed && !confirmed {
		return
	}
	l.failed, l.dropped = false, stats.Dropped
	t := o.begin()
	for id := range l.open {
		m := t.get(key{Module, id})
		switch {
		case m == nil || !m.Unconfirmed:
			delete(l.open, id)
		case confirmed:
			t.edit(m).Unconfirmed = false
			delete(l.open, id)
		default:
			o.repeatOrder(ctx, m)
		}
	}
	if err := o.commit(ctx, t); err != nil {
		o.log.Error("record not written; the next start repeats orders", "err", err)
		return
	}
	if err := pointSettled.Hit(ctx); err != nil {
		o.log.Error("fail point", "err", err)
	}
}
