package orchestrator

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"github.com/tripod-run/tripod/internal/edge/mqtt"
	"github.com/tripod-run/tripod/internal/edge/twin"
	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/guard"
)

// Fail points of a transition.
var (
	pointDecided  = failpoint.New("orchestrator.transition.decided")
	pointRecorded = failpoint.New("orchestrator.transition.recorded")
	pointTold     = failpoint.New("orchestrator.transition.told")
)

// qos is the quality of service of all messages and subscriptions.
const qos = 2

// foundAgain is the time between two log lines about another orchestrator.
const foundAgain = time.Minute

// publishWait bounds the wait for room in the MQTT client's queue.
const publishWait = 10 * time.Second

// Orchestrator is a running orchestrator. Its methods may be called concurrently.
type Orchestrator struct {
	config Config
	log    *slog.Logger
	store  *store
	state  *state
	client mqtt.Client
	counts *counters
	twin   *twin.Guard
	uuid   string // the sender of messages to scene-scoped peers

	subscribed atomic.Bool

	deciding sync.Mutex // held during a whole transition, so that messages are sent in the order of the record
	own      own
	ledger   ledger

	mu         sync.Mutex
	beats      map[string]beat // by uuid of a manager or runtime
	brokerLost time.Time       // when the broker was last seen disconnected
	otherFound time.Time       // when another orchestrator was last reported

	stop context.CancelFunc
	done sync.WaitGroup
}

// Open reads the record, repeats the orders that an earlier process may not have sent, and handles messages until
// Close. It connects in the background, and does not wait for the broker.
func Open(ctx context.Context, c Config) (*Orchestrator, error) {
	c, err := c.complete()
	if err != nil {
		return nil, err
	}
	s, err := openStore(c.Path)
	if err != nil {
		return nil, err
	}
	o := &Orchestrator{config: c, log: c.Log, store: s, counts: newCounters(), uuid: uuid.NewString(), beats: map[string]beat{},
		ledger: ledger{noted: make(chan struct{}, 1)}}
	if o.state, err = load(s); err != nil {
		return nil, errors.Join(err, s.close())
	}
	if err := o.connect(ctx); err != nil {
		return nil, errors.Join(err, s.close())
	}
	ctx, o.stop = context.WithCancel(context.WithoutCancel(ctx))
	o.resume(ctx)
	o.done.Go(guard.Loop(o.log, "deadlines", func() { o.watch(ctx) }))
	return o, nil
}

func load(s *store) (*state, error) {
	st := newState()
	err := s.all(func(r *Record) error {
		st.apply(map[key]*Record{{r.Kind, r.UUID}: r})
		return nil
	})
	return st, err
}

// connect makes the client and its subscriptions. It does not wait for the broker.
func (o *Orchestrator) connect(ctx context.Context) error {
	b := o.config.Broker
	b.NoLocal, b.Log = true, o.log
	b.OnConnect = func(_ context.Context, resumed bool) {
		o.subscribed.Store(true)
		o.log.Info("connected to the broker", "url", b.URL, "resumed", resumed)
	}
	b.OnDisconnect = func(err error) {
		o.subscribed.Store(false)
		o.log.Warn("the connection to the broker is lost", "url", b.URL, "err", err)
	}
	// The name of an orchestrator's session names its realm: no other must be connected under this name.
	o.twin = twin.New(twin.Guard{
		Topic: o.config.Topics.Reg(b.ClientID), UUID: b.ClientID, Broker: b, Connect: o.config.Connect,
		Timeout: o.config.AnswerTimeout, Found: o.foundTwin, Log: o.log,
	})
	b.OnTakenOver = o.twin.Wait
	ready := make(chan struct{})
	defer close(ready)
	b.Handler = func(m mqtt.Message) {
		<-ready // until o.client is set
		o.receive(m)
	}
	client, err := o.config.Connect(b)
	if err != nil {
		return fmt.Errorf("the orchestrator's broker: %w", err)
	}
	o.client = client
	t := o.config.Topics
	for _, filter := range []string{t.Reg("+"), t.Control(), t.ControlOf("+"), t.Keepalive("+"),
		t.SceneRuntime("+", "+"), t.SceneModule("+/+", "+"), t.SceneControl("+/+", "+", "+")} {
		if err := client.Subscribe(ctx, filter, qos, mqtt.SubscribeOptions{SkipRetained: true}); err != nil {
			return errors.Join(fmt.Errorf("subscribe to %s: %w", filter, err), client.Close(ctx))
		}
	}
	return nil
}

// foundTwin is called when another process is an orchestrator of this realm with the same name.
func (o *Orchestrator) foundTwin(other twin.Process) {
	o.counts.messages.WithLabelValues("reg", "twin").Inc()
	o.log.Error("another orchestrator of this realm runs: only one of them can be connected; stop one, or give one another realm",
		"host", other.Host, "session", other.UUID, "connected", !other.Question)
}

// foundOther is called for an answer to a registration that this orchestrator has not sent.
func (o *Orchestrator) foundOther(topic string) {
	o.counts.messages.WithLabelValues("reg", "foreign").Inc()
	o.mu.Lock()
	soon := o.config.Now().Sub(o.otherFound) < foundAgain
	if !soon {
		o.otherFound = o.config.Now()
	}
	o.mu.Unlock()
	if soon {
		return
	}
	o.log.Error("another orchestrator answers registrations of this realm: both will place modules; stop one, or give one another realm",
		"topic", topic)
}

// Close sends the messages in flight, unless ctx ends first. Then it disconnects and closes the record. Modules keep
// running.
func (o *Orchestrator) Close(ctx context.Context) error {
	o.stop()
	o.done.Wait()
	err := o.client.Close(ctx)
	o.settleOrders(context.WithoutCancel(ctx), true)
	o.deciding.Lock() // wait for a handler that the client's Close did not wait for
	defer o.deciding.Unlock()
	return errors.Join(err, o.store.close())
}

// Connected reports whether the orchestrator is connected to the broker and has its subscriptions.
func (o *Orchestrator) Connected() bool { return o.subscribed.Load() && o.client.Connected() }

// transact calls decide, and then commits the changes and publishes the messages of the transition.
func (o *Orchestrator) transact(ctx context.Context, decide func(*transition) error) error {
	o.deciding.Lock()
	defer o.deciding.Unlock()
	t := o.begin()
	if err := decide(t); err != nil {
		return err
	}
	if err := o.commit(ctx, t); err != nil {
		return err
	}
	for _, m := range t.out {
		o.publish(ctx, m)
	}
	o.ledger.note(t.changes)
	return pointTold.Hit(ctx)
}

// commit writes the changes to disk, then applies them in memory.
func (o *Orchestrator) commit(ctx context.Context, t *transition) error {
	if err := pointDecided.Hit(ctx); err != nil {
		return err
	}
	if len(t.changes) > 0 {
		if err := o.store.write(t.changes); err != nil {
			return fmt.Errorf("write the orchestrator's record: %w", err)
		}
	}
	o.state.apply(t.changes)
	for k, r := range t.changes {
		if r != nil {
			o.log.Debug("recorded", "type", k.kind, "uuid", k.uuid, "status", r.Status, "parent", r.Parent)
		}
	}
	return pointRecorded.Hit(ctx)
}

// publish passes a message to the MQTT client. If that fails and the message is an order, the order stays unconfirmed
// in the record.
func (o *Orchestrator) publish(ctx context.Context, m message) {
	ctx, cancel := context.WithTimeout(ctx, publishWait)
	defer cancel()
	o.own.add(m.id)
	if err := o.client.Publish(ctx, m.topic, qos, false, m.payload); err != nil {
		o.ledger.failed = true
		o.counts.published.WithLabelValues("failed").Inc()
		o.log.Error("message not sent", "topic", m.topic, "err", err)
		return
	}
	o.counts.published.WithLabelValues("queued").Inc()
}
