package manager

import (
	"bytes"
	"fmt"
	"hash/maphash"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/edge/mqtt"
	"github.com/tripod-run/tripod/internal/edge/wire"
)

// actionStop stops a runtime; the seed has the frame, and no word for it.
const actionStop = "stop"

// control does what a message on the runtime's control topic asks for (Seed 4, "Create Module" and the following). It returns when
// what is to be done is recorded, so that a broker that redelivers loses nothing of it.
func (h *host) control(msg mqtt.Message) {
	m := h.m
	if len(msg.Payload) == 0 {
		return // somebody clears a retained message
	}
	e, err := wire.ParseEnvelope(msg.Payload)
	if err != nil {
		m.fail("bad-json", wire.Envelope{}, excerpt(msg.Payload), err)
		return
	}
	if e.IsResponse() || e.Action == wire.ActionExited || e.Action == wire.ActionUpdate {
		m.counts.ignored.Inc() // the manager's own, from a broker that sends them back, or another's
		return
	}
	if h.heard.again(e.ObjectID, msg.Payload, time.Now()) {
		m.counts.ignored.Inc()
		return
	}
	if msg.Retain {
		m.fail("retained", e, e.Data, fmt.Errorf("%s on %s is a retained message: it would be obeyed again with each connection: %w", e.Action, msg.Topic, errdefs.ErrInvalidArgument))
		return
	}
	if reason, err := h.obey(e); err != nil {
		m.fail(reason, e, e.Data, err)
	}
}

// obey does what a request asks for; reason is the label under which an error is counted.
func (h *host) obey(e wire.Envelope) (reason string, err error) {
	data, err := wire.ParseModuleData(e.Data)
	if err != nil {
		return "missing-field", err
	}
	switch kind := text(data, "type"); e.Action + " " + kind {
	case "create module":
		return h.createFor(e, data)
	case "delete module":
		return reasonFor(h.delete(data.UUID()))
	case "create runtime":
		h.resume()
		return "", nil
	case "delete runtime", actionStop + " runtime":
		h.halt()
		return "", nil
	default:
		if kind == "" {
			return "missing-field", fmt.Errorf("%s: %q is missing: want module or runtime: %w", e.Action, "type", errdefs.ErrInvalidArgument)
		}
		return "unknown-action", fmt.Errorf("the action %q of a %q: want create, delete or stop, of a module or runtime: %w", e.Action, kind, errdefs.ErrInvalidArgument)
	}
}

// createFor creates a module. One that cannot be is told exited too, so that nobody waits for it, unless its uuid is another's.
func (h *host) createFor(e wire.Envelope, data wire.ModuleData) (reason string, err error) {
	reason, err = reasonFor(h.create(e.ObjectID, fromControl, data))
	if err != nil && reason != "duplicate" && wire.ValidName("uuid", data.UUID()) == nil {
		payload := status(codeNotCreated, "exited", err.Error())
		h.m.publish(h.m.ctx, h.m.config.Topics.ControlOf(h.info.UUID), 2, false, h.m.request(wire.ActionExited, h.exitedData(data.UUID(), payload)).Bytes())
	}
	return reason, err
}

func reasonFor(err error) (string, error) {
	switch {
	case errdefs.IsAlreadyExists(err):
		return "duplicate", err
	case errdefs.IsResourceExhausted(err):
		return "capacity", err
	case errdefs.IsNotFound(err):
		return "unknown-module", err
	case errdefs.IsInvalidArgument(err):
		return "missing-field", err
	}
	return "failed", err
}

// excerpt is the beginning of what could not be read, as text.
func excerpt(payload []byte) string {
	const most = 1024
	if len(payload) > most {
		payload = payload[:most]
	}
	return string(bytes.ToValidUTF8(payload, []byte("\uFFFD")))
}

func trimNUL(payload []byte) []byte { return bytes.TrimRight(payload, "\x00") }

// heardTime is how long a control message is remembered. A broker delivers a message once for each filter that matches, and a
// module may have a channel on the control topics.
const heardTime = 5 * time.Second

// heardMost bounds how many are: a flood forgets what came before.
const heardMost = 4096

// heard are the latest control messages, in two halves, the older of which is forgotten. One goroutine uses it.
type heard struct {
	seed     maphash.Seed
	now, old map[uint64]bool
	since    time.Time // when now began
}

func newHeard() *heard { return &heard{seed: maphash.MakeSeed(), now: map[uint64]bool{}} }

// again tells whether this very message came a moment ago. Messages without an id are never the same.
func (l *heard) again(id string, payload []byte, now time.Time) bool {
	if id == "" {
		return false
	}
	if now.Sub(l.since) > heardTime || len(l.now) >= heardMost {
		if now.Sub(l.since) > 2*heardTime {
			l.now = nil
		}
		l.old, l.now, l.since = l.now, map[uint64]bool{}, now
	}
	sum := maphash.Bytes(l.seed, payload)
	again := l.now[sum] || l.old[sum]
	l.now[sum] = true
	return again
}
