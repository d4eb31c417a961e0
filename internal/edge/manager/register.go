package manager

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/edge/mqtt"
	"github.com/tripod-run/tripod/internal/edge/wire"
)

// connected serves a new connection. It sends the exits that were not sent before, and registers the manager. Then it
// registers each runtime whenever that runtime is up. It keeps trying until the connection ends.
//
// If the broker has lost the session of an earlier connection, orders and the last will may have been lost with that
// session. In that case, the manager unregisters before it registers, so that the orchestrator creates the modules
// again. The manager recognizes the modules that still run (allowRepeats).
func (m *Manager) connected(ctx context.Context, resumed bool) {
	<-m.ready
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(m.ctx, cancel)()
	m.subscribeAll(ctx)
	m.exits.sendAll(m)
	if m.reconnects.Swap(true) && !resumed {
		for _, h := range m.hosts {
			h.allowRepeats()
		}
		m.publish(ctx, m.config.Topics.Reg(m.config.UUID), 2, false, m.request(wire.ActionDelete, m.identity()).Bytes())
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	for _, h := range m.hosts {
		wg.Go(func() { h.stayAnnounced(ctx) })
	}
	if !m.register(ctx, m.config.UUID, m.identity, nil) {
		return
	}
	m.registered.Store(true)
	m.log.Info("edge: registered", "uuid", m.config.UUID)
	for _, h := range m.hosts {
		wg.Go(func() { h.stayRegistered(ctx) })
	}
}

// subscribeAll subscribes to the manager's own topics. The client renews the subscriptions. subscribeAll retries a
// refused subscription, because the broker's configuration may change.
func (m *Manager) subscribeAll(ctx context.Context) {
	for _, filter := range m.config.filters() {
		try := func() error {
			err := m.client.Subscribe(ctx, filter, 2, mqtt.SubscribeOptions{})
			if err != nil && ctx.Err() == nil {
				m.refuse("subscribe", "the broker refused a subscription", "filter", filter, "err", err)
			}
			return err
		}
		if try() != nil {
			m.wg.Go(func() { m.retry(ctx, try) })
		}
	}
}

// filters returns the filters of the manager's own topics.
func (c *Config) filters() []string {
	filters := []string{c.Topics.Reg(c.UUID)}
	for _, rt := range c.Runtimes {
		uuid := rt.Info().UUID
		filters = append(filters, c.Topics.Reg(uuid), c.Topics.ControlOf(uuid)+"/#", c.Topics.Desired(uuid), c.Topics.SceneRuntime("+", uuid))
	}
	if len(c.Runtimes) > 0 {
		filters = append(filters, c.Topics.SceneControl("+/+", "+", "+"))
	}
	return filters
}

// register retries a registration until it is accepted. It is in the seed's dialect, which orchestrators of both answer, each
// in its own. It reports false if the context ends first.
func (m *Manager) register(ctx context.Context, id string, data func() json.RawMessage, done func(details json.RawMessage)) bool {
	return m.retry(ctx, func() error {
		e := m.request(wire.ActionCreate, data())
		e.Type = wire.Request
		answer := m.answers.expect(e.ObjectID)
		defer m.answers.forget(e.ObjectID)
		wait, cancel := context.WithTimeout(ctx, m.config.RegisterTimeout)
		defer cancel()
		if err := m.client.Publish(wait, m.config.Topics.Reg(id), 2, false, e.Bytes()); err != nil {
			return err
		}
		resend := time.NewTicker(registerResend)
		defer resend.Stop()
		for {
			select {
			case a := <-answer:
				return m.answered(ctx, id, a, done)
			case <-resend.C: // an orchestrator may have started meanwhile
				m.publish(wait, m.config.Topics.Reg(id), 2, false, e.Bytes())
			case <-wait.Done():
				err := fmt.Errorf("no answer to the registration of %s within %s: %w", id, m.config.RegisterTimeout, errdefs.ErrUnavailable)
				if ctx.Err() == nil {
					m.refuse("registration", "no answer from an orchestrator", "uuid", id, "err", err)
				}
				return err
			}
		}
	})
}

// speak makes the manager use the dialect of the orchestrator that has answered a registration. If that is another one than
// before, exits are sent again, because the orchestrator has refused them; speak returns when the client has them.
func (m *Manager) speak(ctx context.Context, later bool) {
	if m.later.Swap(later) == later {
		return
	}
	m.log.Info("edge: the orchestrator speaks another dialect than before", "type", wire.RequestType(later))
	if err := m.store.Put(kindDialect, keyOrchestrator, []byte(wire.RequestType(later))); err != nil {
		m.refuse("record", "cannot record the orchestrator's dialect", "err", err)
	}
	m.exits.repeat(m)
	m.out.flush(ctx)
}

// answered handles the orchestrator's answer to a registration.
func (m *Manager) answered(ctx context.Context, id string, a answer, done func(details json.RawMessage)) error {
	m.speak(ctx, a.later)
	if a.Result != "ok" {
		err := fmt.Errorf("the orchestrator answered the registration of %s with %q: %w", id, a.Result, errdefs.ErrFailedPrecondition)
		m.refuse("registration", "the orchestrator refused a registration", "uuid", id, "err", err)
		return err
	}
	if done != nil {
		done(a.Details)
	}
	return nil
}

// registerResend is the interval at which an unanswered registration is sent again.
const registerResend = 2 * time.Second

// retry calls the given function, with growing delays, until a call succeeds. It reports false if the context ends
// first.
func (m *Manager) retry(ctx context.Context, try func() error) bool {
	delay := backoff{min: m.config.BackoffMin, max: m.config.BackoffMax}
	for ctx.Err() == nil {
		if try() == nil {
			return true
		}
		delay.wait(ctx)
	}
	return false
}

// backoff computes delays that double, with jitter.
type backoff struct{ min, max, next time.Duration }

// delay returns the next delay.
func (b *backoff) delay() time.Duration {
	if b.next == 0 {
		b.next = b.min
	}
	d := b.next
	b.next = min(2*b.next, b.max)
	return d/2 + rand.N(d/2+1)
}

// wait sleeps for the next delay, or until ctx ends.
func (b *backoff) wait(ctx context.Context) { pause(ctx, b.delay(), nil) }

// answer is the data of an orchestrator's response.
type answer struct {
	Result  string          `json:"result"`
	Details json.RawMessage `json:"details"`

	later bool // the response has the type of later peers
}

// answers holds the registrations in progress, by object_id.
type answers struct {
	mu      sync.Mutex
	waiting map[string]chan answer
}

func (a *answers) expect(id string) <-chan answer {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.waiting == nil {
		a.waiting = map[string]chan answer{}
	}
	a.waiting[id] = make(chan answer, 1)
	return a.waiting[id]
}

func (a *answers) forget(id string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.waiting, id)
}

// take handles a message on a registration topic. It passes a response to the register call that waits for it, and
// ignores requests.
func (a *answers) take(m *Manager, payload []byte) {
	e, err := wire.ParseEnvelope(payload)
	if err != nil {
		m.refuse("bad-json", "unreadable message on a registration topic", "err", err)
		return
	}
	if !e.IsResponse() {
		return
	}
	var got answer
	if err := json.Unmarshal(e.Data, &got); err != nil {
		m.refuse("bad-json", "unreadable answer to a registration", "err", err)
		return
	}
	got.later = e.Later()
	a.mu.Lock()
	defer a.mu.Unlock()
	if to := a.waiting[e.ObjectID]; to != nil {
		select {
		case to <- got:
		default: // a second answer
		}
	}
}
