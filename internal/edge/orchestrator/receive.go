package orchestrator

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"unicode/utf8"

	"github.com/containerd/errdefs"
	"github.com/google/uuid"

	"github.com/tripod-run/tripod/internal/edge/mqtt"
	"github.com/tripod-run/tripod/internal/edge/wire"
	"github.com/tripod-run/tripod/internal/guard"
)

// errIgnored marks a message that needs no action, such as a response, a message of our own, or a retained message.
var errIgnored = errors.New("ignored")

// maxEcho is the maximum number of bytes of a bad message that the answer repeats.
const maxEcho = 4 << 10

// receive handles one message. It answers a bad message on the error topic.
func (o *Orchestrator) receive(m mqtt.Message) {
	ctx := context.Background()
	e, envelopeErr := wire.ParseEnvelope(m.Payload)
	err := envelopeErr
	scene, isScene := o.config.Topics.ParseScene(m.Topic)
	switch {
	case isScene && err != nil: // a message between others
		err = errIgnored
	case m.Retain: // the broker would send it again after every connect
		err = errIgnored
	case err == nil:
		err = guard.Call(o.log, "MQTT message", func() error {
			if isScene {
				return o.scene(ctx, scene, e)
			}
			return o.act(ctx, m.Topic, e)
		})
	}
	kind := topicKind(o.config.Topics, m.Topic)
	switch {
	case err == nil:
		o.counts.messages.WithLabelValues(kind, "done").Inc()
	case errors.Is(err, errIgnored):
		o.counts.messages.WithLabelValues(kind, "ignored").Inc()
		o.log.Debug("message ignored", "topic", m.Topic, "retained", m.Retain)
	default:
		o.counts.messages.WithLabelValues(kind, "refused").Inc()
		o.log.Warn("message refused", "topic", m.Topic, "object", e.ObjectID, "action", e.Action, "err", err)
		data := e.Data
		if envelopeErr != nil {
			data = m.Payload
		}
		if isScene {
			o.refuseScene(ctx, scene, e, err)
			return
		}
		o.refuse(ctx, e, data, err)
	}
}

// act dispatches a message by its topic.
func (o *Orchestrator) act(ctx context.Context, topic string, e wire.Envelope) error {
	if e.IsResponse() {
		o.response(ctx, topic, e)
		return errIgnored
	}
	parts := wire.Cut(topic, o.config.Topics.Realm+"/proc")
	switch {
	case len(parts) == 1 && parts[0] == "control":
		return o.clientRequest(ctx, e)
	case len(parts) == 2 && parts[0] == "control":
		return o.managerReport(ctx, parts[1], e)
	case len(parts) == 2 && parts[0] == "reg":
		return o.registration(ctx, parts[1], e)
	case len(parts) == 2 && parts[0] == "keepalive":
		if e.Action != wire.ActionUpdate {
			return unknownAction(e)
		}
		return o.transact(ctx, func(t *transition) error { return t.heartbeat(parts[1], e.Data) })
	}
	return errIgnored
}

// response handles a response, which another orchestrator must have sent: with No Local, a broker sends none of our own.
func (o *Orchestrator) response(ctx context.Context, topic string, e wire.Envelope) {
	if answer := o.twin.Hear(e.Bytes()); answer != nil {
		o.deciding.Lock()
		defer o.deciding.Unlock()
		o.publish(ctx, message{topic: topic, payload: answer})
		return
	}
	var a struct {
		Result string `json:"result"`
	}
	if len(wire.Cut(topic, o.config.Topics.Realm+"/proc/reg")) == 1 && json.Unmarshal(e.Data, &a) == nil && a.Result != "" {
		o.foundOther(topic)
	}
}

// clientRequest handles a message on the topic for requests from clients.
func (o *Orchestrator) clientRequest(ctx context.Context, e wire.Envelope) error {
	switch e.Action {
	case wire.ActionCreate:
		return o.transact(ctx, func(t *transition) error { return t.create(e.Data, "", Dialect{Later: e.Later()}) })
	case wire.ActionDelete:
		return o.transact(ctx, func(t *transition) error { return t.remove(e.Data) })
	case wire.ActionCreateBatch:
		return o.createBatch(ctx, e)
	case wire.ActionExited: // from a manager of later peers
		return o.transact(ctx, func(t *transition) error { return t.exited("", e.Data) })
	}
	return unknownAction(e)
}

// createBatch creates many modules in one transition. Each refused module gets its own answer.
func (o *Orchestrator) createBatch(ctx context.Context, e wire.Envelope) error {
	list, err := batch(e.Data)
	if err != nil {
		return err
	}
	refused := map[int]error{}
	err = o.transact(ctx, func(t *transition) error {
		for i, raw := range list {
			if err := t.create(raw, "", Dialect{Later: e.Later()}); err != nil {
				refused[i] = err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	for i, raw := range list {
		if err := refused[i]; err != nil {
			o.log.Warn("module of a batch refused", "object", e.ObjectID, "module", i, "err", err)
			o.refuse(ctx, e, raw, err)
		}
	}
	return nil
}

// batch parses the data of create_batch: a list of modules, or an object with that list in the field "modules".
func batch(raw json.RawMessage) ([]json.RawMessage, error) {
	var list []json.RawMessage
	var object struct {
		Modules []json.RawMessage `json:"modules"`
	}
	if json.Unmarshal(raw, &list) != nil && json.Unmarshal(raw, &object) == nil {
		list = object.Modules
	}
	if len(list) == 0 {
		return nil, fmt.Errorf(`data of create_batch: want a list of modules, or {"modules": [...]}: %w`, errdefs.ErrInvalidArgument)
	}
	return list, nil
}

// managerReport handles a message on the topic that the orchestrator shares with a manager: the manager's report about
// a module, or an order that a client sent directly to the manager.
func (o *Orchestrator) managerReport(ctx context.Context, runtime string, e wire.Envelope) error {
	if o.own.has(e.ObjectID) {
		return errIgnored
	}
	switch e.Action {
	case wire.ActionExited:
		return o.transact(ctx, func(t *transition) error { return t.exited(runtime, e.Data) })
	case wire.ActionCreate:
		return o.transact(ctx, func(t *transition) error { return t.adopt(runtime, e, Dialect{Later: e.Later()}) })
	case wire.ActionDelete:
		return o.transact(ctx, func(t *transition) error { return t.removed(e.Data) })
	}
	return unknownAction(e)
}

// registration handles registrations and deregistrations.
func (o *Orchestrator) registration(ctx context.Context, id string, e wire.Envelope) error {
	switch e.Action {
	case wire.ActionCreate:
		return o.transact(ctx, func(t *transition) error { return t.register(id, e, "") })
	case wire.ActionDelete:
		return o.transact(ctx, func(t *transition) error { return t.unregister(id, e.Data) })
	}
	return unknownAction(e)
}

func unknownAction(e wire.Envelope) error {
	return fmt.Errorf("unknown action %q; request ignored: %w", e.Action, errdefs.ErrNotImplemented)
}

// refuse answers a refused message on the error topic. The answer repeats the data, as text if they are not JSON.
func (o *Orchestrator) refuse(ctx context.Context, e wire.Envelope, data []byte, err error) {
	o.deciding.Lock()
	defer o.deciding.Unlock()
	answer := e.Answer(complaint(data, err).Bytes())
	answer.Action = wire.ActionError
	if answer.ObjectID == "" {
		answer.ObjectID = uuid.NewString()
	}
	o.publish(ctx, message{topic: o.config.Topics.Errors(), payload: answer.Bytes()})
}

// complaint returns the description of an error, with the data that caused it.
func complaint(data []byte, err error) wire.ModuleData {
	d := wire.ModuleData{"data": data}
	switch {
	case len(data) == 0:
		d["data"] = json.RawMessage("null")
	case len(data) > maxEcho || !json.Valid(data) || !utf8.Valid(data):
		d.Set("data", strings.ToValidUTF8(string(data[:min(len(data), maxEcho)]), "\uFFFD"))
	}
	d.Set("desc", describe(err))
	return d
}

// describe returns an error's text for peers, without the errdefs class.
func describe(err error) string {
	text := err.Error()
	for _, class := range []error{
		errdefs.ErrInvalidArgument, errdefs.ErrNotFound, errdefs.ErrAlreadyExists, errdefs.ErrUnavailable, errdefs.ErrNotImplemented,
		errdefs.ErrFailedPrecondition, errdefs.ErrResourceExhausted, errdefs.ErrInternal,
	} {
		text = strings.TrimSuffix(text, ": "+class.Error())
		text = strings.ReplaceAll(text, ": "+class.Error()+" (", " (")
	}
	return text
}

// topicKind returns the label of a topic in the metrics.
func topicKind(t wire.Topics, topic string) string {
	if _, ok := t.ParseScene(topic); ok {
		return "scene"
	}
	parts := wire.Cut(topic, t.Realm+"/proc")
	if len(parts) == 0 {
		return "other"
	}
	switch parts[0] {
	case "reg", "keepalive", "control":
		return parts[0]
	}
	return "other"
}

// own remembers the latest requests that the orchestrator has sent. The broker can send them back, because managers,
// clients and the orchestrator share topics.
type own struct {
	mu   sync.Mutex
	ids  map[string]bool
	ring [4096]string
	next int
}

func (s *own) add(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if id == "" || s.ids[id] {
		return
	}
	if s.ids == nil {
		s.ids = map[string]bool{}
	}
	delete(s.ids, s.ring[s.next])
	s.ids[id], s.ring[s.next] = true, id
	s.next = (s.next + 1) % len(s.ring)
}

func (s *own) has(id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ids[id]
}
