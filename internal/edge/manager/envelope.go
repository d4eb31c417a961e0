package manager

import (
	"encoding/json"
	"fmt"

	"github.com/google/uuid"

	"github.com/tripod-run/tripod/internal/edge/wire"
)

func newID() string { return uuid.NewString() }

// request is a message of the manager, with an id of its own.
func (m *Manager) request(action string, data json.RawMessage) wire.Envelope {
	return wire.Envelope{ObjectID: newID(), Action: action, Type: wire.Request, Data: data}
}

// identity is what a manager registers by (Seed 4; the recorded session).
func (m *Manager) identity() json.RawMessage {
	return object(map[string]any{"type": "manager", "uuid": m.config.UUID, "name": m.config.Name})
}

// identity names the runtime.
func (h *host) identity() json.RawMessage {
	return object(map[string]any{"type": "runtime", "uuid": h.info.UUID, "name": h.info.Name})
}

// registration is what the runtime registers by: what it said at its start, and what the manager knows, which wins.
func (h *host) registration(said map[string]any) json.RawMessage {
	apis := h.info.APIs
	if apis == nil {
		apis = []string{}
	}
	fields := map[string]any{}
	for name, value := range said {
		fields[name] = value
	}
	for name, value := range map[string]any{
		"type": "runtime", "uuid": h.info.UUID, "name": h.info.Name, "parent": h.m.config.UUID,
		"runtime_type": h.info.Type, "apis": apis, "max_nmodules": h.info.MaxModules,
	} {
		fields[name] = value
	}
	return object(fields)
}

// object is a JSON object; values that are JSON already stay as they are.
func object(fields map[string]any) json.RawMessage {
	raw := make(map[string]json.RawMessage, len(fields))
	for name, value := range fields {
		switch v := value.(type) {
		case json.RawMessage:
			raw[name] = v
		default:
			text, err := json.Marshal(v)
			if err != nil { // what a runtime's registration has that is no JSON
				text, _ = json.Marshal(fmt.Sprint(v))
			}
			raw[name] = text
		}
	}
	return wire.AppendObject(nil, raw)
}
