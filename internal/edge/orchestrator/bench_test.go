package orchestrator

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tripod-run/tripod/internal/edge/mqtt"
	"github.com/tripod-run/tripod/internal/edge/wire"
)

// link is a client whose broker is the test: it records published messages, and the test passes messages to its
// handler.
type link struct {
	config mqtt.Config
	mu     sync.Mutex
	sent   []mqtt.Message
	stats  mqtt.Stats
	away   bool
	fails  error
	panics bool // once
}

func (l *link) Publish(_ context.Context, topic string, qos byte, retain bool, payload []byte) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.panics {
		l.panics = false
		panic("a mistake")
	}
	if l.fails == nil {
		l.sent = append(l.sent, mqtt.Message{Topic: topic, QoS: qos, Retain: retain, Payload: payload})
	}
	return l.fails
}
func (l *link) PublishThen(ctx context.Context, topic string, qos byte, retain bool, payload []byte, _ func(bool)) error {
	return l.Publish(ctx, topic, qos, retain, payload)
}
func (l *link) Subscribe(context.Context, string, byte, mqtt.SubscribeOptions) error { return nil }
func (l *link) Unsubscribe(context.Context, string) error                            { return nil }
func (l *link) WaitConnected(context.Context) error                                  { return nil }
func (l *link) Close(context.Context) error                                          { return nil }
func (l *link) Connected() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return !l.away
}
func (l *link) Stats() mqtt.Stats {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.stats
}
func (l *link) set(f func(*link)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f(l)
}

// clock is a clock that the test sets.
type clock struct {
	mu  sync.Mutex
	now time.Time
}

func (c *clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *clock) pass(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

// bench is an orchestrator under test; the test plays its peers.
type bench struct {
	*Orchestrator
	t     testing.TB
	link  *link
	clock *clock
	path  string
}

func open(t testing.TB, change ...func(*Config)) *bench {
	t.Helper()
	b := &bench{t: t, path: filepath.Join(t.TempDir(), "record"), clock: &clock{now: time.Unix(1_700_000_000, 0)}}
	b.start(change...)
	t.Cleanup(b.end)
	return b
}

func (b *bench) start(change ...func(*Config)) {
	b.t.Helper()
	c := Config{
		Path: b.path, Topics: wire.Topics{Realm: "realm"}, Now: b.clock.Now, Log: slog.New(slog.DiscardHandler),
		Connect: func(c mqtt.Config) (mqtt.Client, error) {
			b.link = &link{config: c}
			c.OnConnect(context.Background(), false)
			return b.link, nil
		},
	}
	for _, f := range change {
		f(&c)
	}
	o, err := Open(context.Background(), c)
	if err != nil {
		b.t.Fatal(err)
	}
	b.Orchestrator = o
}

func (b *bench) end() {
	if b.Orchestrator == nil {
		return
	}
	if err := b.Close(context.Background()); err != nil {
		b.t.Error(err)
	}
	b.Orchestrator = nil
}

// say passes a message to the orchestrator, and returns once it is processed.
func (b *bench) say(topic, payload string) {
	b.link.config.Handler(mqtt.Message{Topic: topic, Payload: []byte(payload)})
}

// said is a message from the orchestrator, with its data as a map.
type said struct {
	Topic    string
	ObjectID string         `json:"object_id"`
	Action   string         `json:"action"`
	Type     string         `json:"type"`
	Data     map[string]any `json:"data"`
}

func (s said) String() string { return fmt.Sprintf("%s %s %v", s.Topic, s.Action, s.Data) }

// hear returns the messages that the orchestrator has published since the last call.
func (b *bench) hear() []said {
	b.t.Helper()
	var all []said
	b.link.set(func(l *link) {
		for _, m := range l.sent {
			all = append(all, saidOf(b.t, m))
		}
		l.sent = nil
	})
	return all
}

func saidOf(t testing.TB, m mqtt.Message) said {
	t.Helper()
	s := said{Topic: m.Topic}
	if err := json.Unmarshal(m.Payload, &s); err != nil || m.QoS != 2 || m.Retain {
		t.Errorf("published %s with QoS %d, retain %v: %v", m.Payload, m.QoS, m.Retain, err)
	}
	return s
}

// hears compares the published messages with "topic action" lines.
func (b *bench) hears(want ...string) []said {
	b.t.Helper()
	all := b.hear()
	var got []string
	for _, s := range all {
		line := strings.TrimPrefix(s.Topic, "realm/proc/") + " " + s.Action
		if id, ok := s.Data["uuid"]; ok {
			line += fmt.Sprint(" ", id)
		}
		got = append(got, line)
	}
	if !slices.Equal(got, want) {
		b.t.Fatalf("published\n\t%s\nwant\n\t%s\nfull: %v", strings.Join(got, "\n\t"), strings.Join(want, "\n\t"), all)
	}
	return all
}

func envelope(action, data string) string {
	return fmt.Sprintf(`{"object_id":"id-%s","action":%q,"type":"arts_req","data":%s}`, action, action, data)
}

// node registers a manager m and its runtimes, each with the given number of slots.
func (b *bench) node(slots int, runtimes ...string) {
	b.t.Helper()
	b.say("realm/proc/reg/m", envelope("create", `{"type":"manager","uuid":"m","name":"node"}`))
	for _, r := range runtimes {
		b.register(r, slots)
	}
	b.hear()
}

func (b *bench) register(r string, slots int) {
	b.say("realm/proc/reg/"+r, envelope("create", fmt.Sprintf(
		`{"type":"runtime","uuid":%q,"name":"name-%s","runtime_type":"t","apis":["wasm","wasi"],"parent":"m","max_nmodules":%d}`, r, r, slots)))
}

// create asks for a module; more has further fields and begins with a comma.
func (b *bench) create(module, parent, more string) {
	if parent != "" {
		more += fmt.Sprintf(`,"parent":%q`, parent)
	}
	b.say("realm/proc/control",
		envelope("create", fmt.Sprintf(`{"type":"module","uuid":%q,"name":"n-%s","filename":"/f.wasm"%s}`, module, module, more)))
}

func (b *bench) delete(module string) {
	b.say("realm/proc/control", envelope("delete", fmt.Sprintf(`{"type":"module","uuid":%q}`, module)))
}

func (b *bench) exited(runtime, module, status string) {
	b.say("realm/proc/control/"+runtime, envelope("exited", fmt.Sprintf(`{"type":"module","uuid":%q,"status":%s}`, module, status)))
}

// states returns the states of all modules, for example "a:A b:Q".
func (b *bench) states() string {
	var all []string
	for _, m := range b.state.list(Module) {
		all = append(all, m.UUID+":"+string(m.Status))
	}
	return strings.Join(all, " ")
}

func (b *bench) wantStates(want string) {
	b.t.Helper()
	if got := b.states(); got != want {
		b.t.Fatalf("modules are %q, want %q", got, want)
	}
}

// refusal returns the description of the error answer, which must be the only published message.
func (b *bench) refusal() string {
	b.t.Helper()
	all := b.hears("log/orchestrator error")
	return fmt.Sprint(all[0].Data["desc"])
}
