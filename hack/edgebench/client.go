package main

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/tripod-run/tripod/internal/edge/mqtt"
	"github.com/tripod-run/tripod/internal/edge/wire"
)

// bench is a client of the orchestrator. It follows the states of the modules that it creates.
type bench struct {
	mqtt.Client
	topics       wire.Topics
	dir, runtime string
	uuid         string // the runtime's UUID
	messages     chan mqtt.Message
}

// dial connects to the broker and subscribes to all messages about modules.
func dial(ctx context.Context, url string) (*bench, error) {
	b := &bench{topics: wire.Topics{Realm: "realm"}, messages: make(chan mqtt.Message, 1<<16)}
	client, err := connect(ctx, url, func(m mqtt.Message) { b.messages <- m })
	if err != nil {
		return nil, err
	}
	b.Client = client
	for _, filter := range []string{b.topics.Reported("+"), b.topics.Errors(), b.topics.ControlOf("+"), b.topics.RuntimeLog("+")} {
		if err := client.Subscribe(ctx, filter, 1, mqtt.SubscribeOptions{}); err != nil {
			return nil, err
		}
	}
	return b, nil
}

func connect(ctx context.Context, url string, handler func(mqtt.Message)) (mqtt.Client, error) {
	client, err := mqtt.New(mqtt.Config{URL: url, ClientID: "edgebench-" + uuid.NewString()[:8], Handler: handler, QueueMessages: 1 << 20,
		InboxMessages: 1 << 20})
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	return client, client.WaitConnected(ctx)
}

func closeClient(c mqtt.Client) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	_ = c.Close(ctx) // errors no longer matter, because the measurement is done
}

func (b *bench) close() { closeClient(b.Client) }

// module returns the UUID of a new module, and the data of the order that creates it from an example.
func (b *bench) module(example, in, out string, args ...string) (string, map[string]any) {
	id := uuid.NewString()
	return id, map[string]any{
		"type": "module", "uuid": id, "name": example, "parent": b.runtime, "filename": filepath.Join(b.dir, example+"-c", example+".wasm"),
		"args":     append([]string{example}, args...),
		"channels": []map[string]string{{"name": "in", "topic": in, "mode": "r"}, {"name": "out", "topic": out, "mode": "w:1"}},
	}
}

func (b *bench) order(ctx context.Context, action string, data any) error {
	return b.orderAt(ctx, b.topics.Control(), action, data)
}

func (b *bench) orderAt(ctx context.Context, topic, action string, data any) error {
	raw, err := json.Marshal(data)
	if err != nil {
		return err
	}
	e := wire.Envelope{ObjectID: uuid.NewString(), Action: action, Type: wire.Request, Data: raw}
	return b.Publish(ctx, topic, 2, false, e.Bytes())
}

// create makes a module by sending an order to the given topic, and waits until the module runs. It returns how long
// this took.
func (b *bench) create(ctx context.Context, topic, id string, data any) (time.Duration, error) {
	begin := time.Now()
	if err := b.orderAt(ctx, topic, wire.ActionCreate, data); err != nil {
		return 0, err
	}
	err := b.await(ctx, "a module runs", func(m mqtt.Message) bool {
		if b.states(m)[id] != "running" {
			return false
		}
		b.uuid = m.Topic[strings.LastIndexByte(m.Topic, '/')+1:]
		return true
	})
	return time.Since(begin), err
}

// remove deletes modules and waits until they have ended.
func (b *bench) remove(ctx context.Context, ids ...string) error {
	left := map[string]bool{}
	for _, id := range ids {
		left[id] = true
		if err := b.order(ctx, wire.ActionDelete, map[string]string{"type": "module", "uuid": id}); err != nil {
			return err
		}
	}
	return b.await(ctx, "modules have ended", func(m mqtt.Message) bool {
		delete(left, exited(m))
		return len(left) == 0
	})
}

// await receives messages until one of them satisfies the given predicate. If the orchestrator reports an error, await
// returns it.
func (b *bench) await(ctx context.Context, what string, is func(mqtt.Message) bool) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for {
		select {
		case m := <-b.messages:
			if m.Topic == b.topics.Errors() {
				return fmt.Errorf("%s: the orchestrator reports %s", what, m.Payload)
			}
			if is(m) {
				return nil
			}
		case <-ctx.Done():
			return fmt.Errorf("%s: %w", what, ctx.Err())
		}
	}
}

// states returns the states that a manager's report gives for its modules, by UUID.
func (b *bench) states(m mqtt.Message) map[string]string {
	var report struct {
		Modules []struct {
			UUID  string `json:"uuid"`
			State string `json:"state"`
		} `json:"modules"`
	}
	if !strings.Contains(m.Topic, "/reported/") || json.Unmarshal(m.Payload, &report) != nil {
		return nil
	}
	states := map[string]string{}
	for _, r := range report.Modules {
		states[r.UUID] = r.State
	}
	return states
}

// exited returns the UUID of the module if the message says that a module has exited, and otherwise "".
func exited(m mqtt.Message) string {
	e, err := wire.ParseEnvelope(m.Payload)
	if err != nil || e.Action != wire.ActionExited {
		return ""
	}
	var data struct {
		UUID string `json:"uuid"`
	}
	_ = json.Unmarshal(e.Data, &data) // fails if the message is not about a module
	return data.UUID
}
