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

// connected does what is to be done with a new connection: exits that nobody may have heard of are told again, then the
// manager registers, then each runtime whenever it is up. It is never given up, and returns with the connection's end.
//
// Where there was a connection before, and the broker has kept nothing of it, the manager first says what its last will may have
// failed to say (a broker that died with it has none): what was sent to it meanwhile is lost, and an orchestrator that takes its
// modules for lost creates them again. Those that live are the same modules then.
func (m *Manager) connected(ctx context.Context, resumed bool) {
	<-m.ready
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(m.ctx, cancel)()
	m.subscribeAll(ctx)
	m.exits.tell(m)
	if m.before.Swap(true) && !resumed {
		for _, h := range m.hosts {
			h.allowRepeats()
		}
		m.publish(ctx, m.config.Topics.Reg(m.config.UUID), 2, false, m.request(wire.ActionDelete, m.identity()).Bytes())
	}
	if !m.register(ctx, m.config.UUID, m.identity, nil) {
		return
	}
	m.registered.Store(true)
	m.log.Info("edge: registered", "uuid", m.config.UUID)
	var wg sync.WaitGroup
	for _, h := range m.hosts {
		wg.Go(func() { h.stayRegistered(ctx) })
	}
	wg.Wait()
}

// subscribeAll asks for the manager's own topics; the client renews what it has by itself. Where the broker refuses, it is asked
// again, for it may be told better.
func (m *Manager) subscribeAll(ctx context.Context) {
	for _, filter := range m.config.filters() {
		try := func() error {
			err := m.client.Subscribe(ctx, filter, 2, mqtt.SubscribeOptions{})
			if err != nil && ctx.Err() == nil {
				m.refuse("subscribe", "the broker refuses a subscription", "filter", filter, "err", err)
			}
			return err
		}
		if try() != nil {
			m.wg.Go(func() { m.retry(ctx, try) })
		}
	}
}

// filters are the manager's own topics.
func (c *Config) filters() []string {
	filters := []string{c.Topics.Reg(c.UUID)}
	for _, rt := range c.Runtimes {
		uuid := rt.Info().UUID
		filters = append(filters, c.Topics.Reg(uuid), c.Topics.ControlOf(uuid)+"/#", c.Topics.Desired(uuid))
	}
	return filters
}

// register registers once, as often as it takes; false: the context has ended before.
func (m *Manager) register(ctx context.Context, id string, data func() json.RawMessage, done func(details json.RawMessage)) bool {
	return m.retry(ctx, func() error {
		e := m.request(wire.ActionCreate, data())
		answer := m.answers.expect(e.ObjectID)
		defer m.answers.forget(e.ObjectID)
		wait, cancel := context.WithTimeout(ctx, m.config.RegisterTimeout)
		defer cancel()
		if err := m.client.Publish(wait, m.config.Topics.Reg(id), 2, false, e.Bytes()); err != nil {
			return err
		}
		again := time.NewTicker(registerAgain)
		defer again.Stop()
		for {
			select {
			case a := <-answer:
				return m.answered(id, a, done)
			case <-again.C: // an orchestrator that has come meanwhile has not heard of it
				m.publish(wait, m.config.Topics.Reg(id), 2, false, e.Bytes())
			case <-wait.Done():
				err := fmt.Errorf("no answer to the registration of %s within %s: %w", id, m.config.RegisterTimeout, errdefs.ErrUnavailable)
				if ctx.Err() == nil {
					m.refuse("registration", "no orchestrator answers", "uuid", id, "err", err)
				}
				return err
			}
		}
	})
}

// answered takes the orchestrator's answer to a registration.
func (m *Manager) answered(id string, a answer, done func(details json.RawMessage)) error {
	if a.Result != "ok" {
		err := fmt.Errorf("the orchestrator answers the registration of %s with %q: %w", id, a.Result, errdefs.ErrFailedPrecondition)
		m.refuse("registration", "the orchestrator refuses a registration", "uuid", id, "err", err)
		return err
	}
	if done != nil {
		done(a.Details)
	}
	return nil
}

// registerAgain is after how long a registration is sent again while its answer is waited for.
const registerAgain = 2 * time.Second

// retry repeats try, with delays that grow, until it succeeds; false: the context has ended before.
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

// backoff makes delays that double, with jitter.
type backoff struct{ min, max, next time.Duration }

// delay is the next one.
func (b *backoff) delay() time.Duration {
	if b.next == 0 {
		b.next = b.min
	}
	d := b.next
	b.next = min(2*b.next, b.max)
	return d/2 + rand.N(d/2+1)
}

// wait waits for the next delay, or the context.
func (b *backoff) wait(ctx context.Context) { sleep(ctx, b.delay()) }

func sleep(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// answer is the data of an orchestrator's response.
type answer struct {
	Result  string          `json:"result"`
	Details json.RawMessage `json:"details"`
}

// answers are the registrations under way, by the id of their message.
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

// take gives a message on a registration's topic to the one who waits. Requests there are the manager's own or another's.
func (a *answers) take(m *Manager, payload []byte) {
	e, err := wire.ParseEnvelope(payload)
	if err != nil {
		m.refuse("bad-json", "a registration's topic has what is no control message", "err", err)
		return
	}
	if !e.IsResponse() {
		return
	}
	var got answer
	if err := json.Unmarshal(e.Data, &got); err != nil {
		m.refuse("bad-json", "the answer to a registration cannot be read", "err", err)
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if to := a.waiting[e.ObjectID]; to != nil {
		select {
		case to <- got:
		default: // a second answer
		}
	}
}
