package wire

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"

	"github.com/containerd/errdefs"
)

// Types of envelopes: the seed's, which are sent, and those of later peers, which are answered in kind.
const (
	Request       = "arts_req"
	Response      = "arts_resp"
	RequestLater  = "req"
	ResponseLater = "resp"
)

// Actions of envelopes.
const (
	ActionCreate      = "create"
	ActionDelete      = "delete"
	ActionCreateBatch = "create_batch"
	ActionExited      = "exited"
	ActionUpdate      = "update"
	ActionError       = "error"
)

// Envelope is a control message on MQTT (Seed 4).
type Envelope struct {
	ObjectID string
	Action   string // may be missing in a response
	Type     string
	Data     json.RawMessage            // verbatim; nil if it is missing
	Extra    map[string]json.RawMessage // fields that the protocol does not know, verbatim
}

// ParseEnvelope reads a control message. What is no JSON object, or has a field of the wrong kind or an unknown type, is
// ErrInvalidArgument; what is in Data is not looked at.
func ParseEnvelope(payload []byte) (Envelope, error) {
	fields, err := ParseObject(payload)
	if err != nil {
		return Envelope{}, fmt.Errorf("a control message: %w", err)
	}
	var e Envelope
	for _, f := range []struct {
		name string
		to   *string
	}{{"object_id", &e.ObjectID}, {"action", &e.Action}, {"type", &e.Type}} {
		raw, ok := fields[f.name]
		if delete(fields, f.name); !ok || isNull(raw) {
			continue
		}
		if err := json.Unmarshal(raw, f.to); err != nil {
			return Envelope{}, fmt.Errorf("a control message: %q is not a string: %w", f.name, errdefs.ErrInvalidArgument)
		}
	}
	if raw, ok := fields["data"]; ok {
		e.Data = raw
		delete(fields, "data")
	}
	if len(fields) > 0 {
		e.Extra = fields
	}
	if !e.IsRequest() && !e.IsResponse() {
		return Envelope{}, fmt.Errorf("a control message of type %q: want %s or %s: %w", e.Type, Request, Response, errdefs.ErrInvalidArgument)
	}
	return e, nil
}

// IsRequest tells whether the message asks for something.
func (e Envelope) IsRequest() bool { return e.Type == Request || e.Type == RequestLater }

// IsResponse tells whether the message answers.
func (e Envelope) IsResponse() bool { return e.Type == Response || e.Type == ResponseLater }

// Answer is the response to a request: its object and action, and the type in the requester's words.
func (e Envelope) Answer(data json.RawMessage) Envelope {
	t := Response
	if e.Type == RequestLater || e.Type == ResponseLater {
		t = ResponseLater
	}
	return Envelope{ObjectID: e.ObjectID, Action: e.Action, Type: t, Data: data}
}

// Bytes is the message as it is sent: the known fields in the seed's order, then the unknown ones by name, all verbatim.
func (e Envelope) Bytes() []byte {
	b := []byte(`{"object_id":`)
	b = appendString(b, e.ObjectID)
	if e.Action != "" {
		b = appendString(append(b, `,"action":`...), e.Action)
	}
	b = appendString(append(b, `,"type":`...), e.Type)
	if e.Data != nil {
		b = append(append(b, `,"data":`...), e.Data...)
	}
	for _, name := range sorted(e.Extra) {
		b = appendField(append(b, ','), name, e.Extra[name])
	}
	return append(b, '}')
}

// ParseObject reads a JSON object, its values verbatim; anything else is ErrInvalidArgument. NULs at the end are C's.
func ParseObject(payload []byte) (map[string]json.RawMessage, error) {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(bytes.TrimRight(payload, "\x00"), &fields); err != nil {
		return nil, fmt.Errorf("%d bytes that should be a JSON object: %w (%v)", len(payload), errdefs.ErrInvalidArgument, err)
	}
	if fields == nil {
		return nil, fmt.Errorf("null, and not a JSON object: %w", errdefs.ErrInvalidArgument)
	}
	return fields, nil
}

// AppendObject appends the object: its fields by name, their values verbatim (encoding/json would rewrite them).
func AppendObject(b []byte, fields map[string]json.RawMessage) []byte {
	b = append(b, '{')
	for i, name := range sorted(fields) {
		if i > 0 {
			b = append(b, ',')
		}
		b = appendField(b, name, fields[name])
	}
	return append(b, '}')
}

func appendField(b []byte, name string, value json.RawMessage) []byte {
	b = append(appendString(b, name), ':')
	if len(value) == 0 {
		return append(b, "null"...)
	}
	return append(b, value...)
}

func appendString(b []byte, s string) []byte {
	quoted, err := json.Marshal(s)
	if err != nil { // a string always has a JSON form
		panic(err)
	}
	return append(b, quoted...)
}

func sorted(m map[string]json.RawMessage) []string {
	names := make([]string, 0, len(m))
	for name := range m {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

func isNull(raw json.RawMessage) bool {
	return len(raw) == 0 || bytes.Equal(bytes.TrimSpace(raw), []byte("null"))
}
