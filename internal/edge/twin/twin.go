// Package twin keeps two processes with one identity apart, such as the managers of a node and of a clone of its disk, or
// two orchestrators of a realm. A broker lets only one client with a name be connected and disconnects the older one, so
// that the two would disconnect each other for ever.
//
//	older ── another client took the session over ──▶ Wait ── question, under another name ──▶ topic of the identity
//	         connects again without an answer         ◀───────────── answer ────────────────── Hear ── younger
//
// The older one stays away as long as the younger one answers. Each of them logs the other's name and host.
//
// Start reading at Guard.
package twin

import (
	"context"
	"encoding/json"
	"log/slog"
	"os"
	"time"

	"github.com/google/uuid"

	"github.com/tripod-run/tripod/internal/edge/mqtt"
	"github.com/tripod-run/tripod/internal/edge/wire"
)

// action is that of questions and answers. They have the type of a response, which orchestrators do not act on.
const action = "identity"

// Guard belongs to one process. The fields do not change.
type Guard struct {
	// Topic is that of the identity, UUID is the identity, and Name, which can be empty, is for people.
	Topic, UUID, Name string
	// Broker is the configuration of the process' own client. Connect makes a second one.
	Broker  mqtt.Config
	Connect func(mqtt.Config) (mqtt.Client, error)
	// Timeout bounds the wait for an answer. A process that stays away asks again after twice that time.
	Timeout time.Duration
	// Found is called when the guard hears of a process with the same identity.
	Found func(other Process)
	Log   *slog.Logger

	instance string
}

// Process describes a process with the identity.
type Process struct {
	UUID     string `json:"uuid"`
	Name     string `json:"name"`
	Host     string `json:"host"`
	Instance string `json:"instance"` // differs for each process
	Question bool   `json:"question,omitempty"`
}

// New completes a guard.
func New(g Guard) *Guard {
	g.instance = uuid.NewString()
	return &g
}

func (g *Guard) message(question bool) []byte {
	host, _ := os.Hostname() // without one, the name must do
	data, err := json.Marshal(Process{UUID: g.UUID, Name: g.Name, Host: host, Instance: g.instance, Question: question})
	if err != nil { // strings have a JSON form
		panic(err)
	}
	return wire.Envelope{ObjectID: uuid.NewString(), Action: action, Type: wire.Response, Data: data}.Bytes()
}

// parse returns the process that a message describes. It reports false for other messages and for the guard's own.
func (g *Guard) parse(payload []byte) (other Process, ok bool) {
	e, err := wire.ParseEnvelope(payload)
	if err != nil || e.Action != action || json.Unmarshal(e.Data, &other) != nil {
		return Process{}, false
	}
	return other, other.Instance != g.instance && other.UUID == g.UUID
}

// Hear handles a message on the topic of the identity. If it is the question of another process, Hear returns the answer,
// and otherwise nil.
func (g *Guard) Hear(payload []byte) (answer []byte) {
	other, ok := g.parse(payload)
	if !ok || !other.Question {
		return nil
	}
	g.Found(other)
	return g.message(false)
}

// Wait returns when no other process answers, or when ctx ends. The client of the process calls it when another client has
// taken its session over (mqtt.Config.OnTakenOver).
func (g *Guard) Wait(ctx context.Context) {
	answers := make(chan Process, 1)
	c := g.Broker
	c.ClientID, c.Will, c.SessionExpiry, c.OnConnect, c.OnDisconnect, c.OnTakenOver = "tripod-twin-"+g.instance, nil, 0, nil, nil, nil
	c.Handler = func(m mqtt.Message) {
		if other, ok := g.parse(m.Payload); ok && !other.Question {
			select {
			case answers <- other:
			default:
			}
		}
	}
	client, err := g.Connect(c)
	if err == nil {
		err = client.Subscribe(ctx, g.Topic, 1, mqtt.SubscribeOptions{SkipRetained: true})
	}
	if err != nil {
		g.Log.Warn("edge: another process has this identity, and cannot be asked", "err", err)
		pause(ctx, 2*g.Timeout)
		return
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), g.Timeout)
		defer cancel()
		if err := client.Close(ctx); err != nil {
			g.Log.Debug("edge: the second client did not end in time", "err", err)
		}
	}()
	for ctx.Err() == nil {
		if client.WaitConnected(ctx) != nil {
			return
		}
		if err := client.Publish(ctx, g.Topic, 1, false, g.message(true)); err != nil {
			return
		}
		select {
		case other := <-answers:
			g.Found(other)
			pause(ctx, 2*g.Timeout)
		case <-time.After(g.Timeout):
			if client.Connected() {
				return
			}
		case <-ctx.Done():
		}
	}
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}
