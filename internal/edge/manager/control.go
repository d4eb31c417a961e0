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

// actionStop stops a runtime.
const actionStop = "stop"

// control obeys a message on the runtime's control topic. It returns only when the order is recorded. The message is
// acknowledged after that, so the broker delivers an unrecorded order again.
func (h *host) control(msg mqtt.Message) {
	m := h.m
	if len(msg.Payload) == 0 {
		return // a retained message was cleared
	}
	e, err := wire.ParseEnvelope(msg.Payload)
	if err != nil {
		m.fail("bad-json", wire.Envelope{}, excerpt(msg.Payload), err)
		return
	}
	if e.IsResponse() || e.Action == wire.ActionExited || e.Action == wire.ActionUpdate {
		m.counts.ignored.Inc() // the manager's own message from a broker without No Local, or a message for another peer
		return
	}
	if h.recent.isRepeat(e.ObjectID, msg.Payload, time.Now()) {
		m.counts.ignored.Inc()
		return
	}
	if msg.Retain {
		m.fail("retained", e, e.Data,
			fmt.Errorf("%s on %s is a retained message, which the broker would repeat after every connect: %w", e.Action, msg.Topic,
				errdefs.ErrInvalidArgument))
		return
	}
	if reason, err := h.obey(e); err != nil {
		m.fail(reason, e, e.Data, err)
	}
}

// obey executes a request. The first result is the metric label of the error.
func (h *host) obey(e wire.Envelope) (reason string, err error) {
	data, err := wire.ParseModuleData(e.Data)
	if err != nil {
		return "missing-field", err
	}
	switch kind := data.Kind(e.Action); e.Action + " " + kind {
	case "create module":
		return h.createFor(e, data)
	case "delete module":
		return reasonFor(h.delete(data.UUID(), ""))
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
		return "unknown-action",
			fmt.Errorf("action %q for a %q: want create, delete or stop for a module or runtime: %w", e.Action, kind, errdefs.ErrInvalidArgument)
	}
}

// createFor creates a module. On failure it also reports the module as exited, so that nobody waits for the module. It
// makes no such report if another module has the uuid.
func (h *host) createFor(e wire.Envelope, data wire.ModuleData) (reason string, err error) {
	reason, err = reasonFor(h.create(e.ObjectID, fromControl, data))
	if err != nil && reason != "duplicate" && wire.ValidName("uuid", data.UUID()) == nil {
		payload := status(wire.CodeNotCreated, "exited", err.Error())
		h.m.publish(h.m.ctx, h.m.config.Topics.ControlOf(h.info.UUID), 2, false,
			h.m.request(wire.ActionExited, h.exitedData(data.UUID(), payload)).Bytes())
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

// excerpt returns the beginning of an unreadable message as text.
func excerpt(payload []byte) string {
	const most = 1024
	if len(payload) > most {
		payload = payload[:most]
	}
	return string(bytes.ToValidUTF8(payload, []byte("\uFFFD")))
}

func trimNUL(payload []byte) []byte { return bytes.TrimRight(payload, "\x00") }

// Bounds of recentMessages. Repeats occur because a broker can deliver a message once for each matching filter, and a
// module can have a channel on a control topic.
const (
	repeatTime = 5 * time.Second
	repeatMost = 4096 // messages in each half
)

// recentMessages remembers hashes of the latest control messages in two halves. The older half is dropped as a whole.
// Only one goroutine uses it.
type recentMessages struct {
	seed     maphash.Seed
	now, old map[uint64]bool
	since    time.Time // when the newer half was started
}

func newRecentMessages() *recentMessages {
	return &recentMessages{seed: maphash.MakeSeed(), now: map[uint64]bool{}}
}

// isRepeat reports whether the same message arrived within about repeatTime, and remembers the message. A message
// without an ID is never a repeat.
func (r *recentMessages) isRepeat(id string, payload []byte, now time.Time) bool {
	if id == "" {
		return false
	}
	if now.Sub(r.since) > repeatTime || len(r.now) >= repeatMost {
		if now.Sub(r.since) > 2*repeatTime {
			r.now = nil
		}
		r.old, r.now, r.since = r.now, map[uint64]bool{}, now
	}
	sum := maphash.Bytes(r.seed, payload)
	repeat := r.now[sum] || r.old[sum]
	r.now[sum] = true
	return repeat
}
