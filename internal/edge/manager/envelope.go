package manager

import (
	"encoding/json"
	"fmt"
	"maps"

	"github.com/google/uuid"

	"github.com/tripod-run/tripod/internal/edge/wire"
)

func newID() string { return uuid.NewString() }

// request makes a request with a new id, in the dialect of the orchestrator.
func (m *Manager) request(action string, data json.RawMessage) wire.Envelope {
	return wire.Envelope{ObjectID: newID(), Action: action, Type: wire.RequestType(m.later.Load()), Data: data}
}

// identity returns the data of the manager's registration.
func (m *Manager) identity() json.RawMessage {
	return object(map[string]any{"type": "manager", "uuid": m.config.UUID, "name": m.config.Name})
}

// identity returns the data of the runtime's deregistration.
func (h *host) identity() json.RawMessage {
	return object(map[string]any{"type": "runtime", "uuid": h.info.UUID, "name": h.info.Name})
}

// registration returns the data of the runtime's registration: the fields that Start returned, overridden by the fields
// that the manager knows.
func (h *host) registration(extra map[string]any) json.RawMessage {
	apis := h.info.APIs
	if apis == nil {
		apis = []string{}
	}
	fields := map[string]any{}
	maps.Copy(fields, extra)
	maps.Copy(fields, map[string]any{
		"type": "runtime", "uuid": h.info.UUID, "name": h.info.Name, "parent": h.m.config.UUID,
		"runtime_type": h.info.Type, "apis": apis, "max_nmodules": h.info.MaxModules, "scenes": true,
	})
	return object(fields)
}

// object returns a JSON object. Values that are json.RawMessage stay verbatim.
func object(fields map[string]any) json.RawMessage {
	raw := make(map[string]json.RawMessage, len(fields))
	for name, value := range fields {
		switch v := value.(type) {
		case json.RawMessage:
			raw[name] = v
		default:
			text, err := json.Marshal(v)
			if err != nil { // the value, from a runtime's registration, has no JSON form
				text, _ = json.Marshal(fmt.Sprint(v))
			}
			raw[name] = text
		}
	}
	return wire.AppendObject(nil, raw)
}
