package wire

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"slices"

	"github.com/containerd/errdefs"
)

// Types of envelopes. Later versions of the public peers ("later peers") use the last two, and our messages to such peers
// use them too.
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
	ActionLog         = "log" // a request to a manager, and its answer
)

// Envelope is a control message on MQTT.
type Envelope struct {
	ObjectID string
	Action   string // "" if it is missing, as in some responses
	Type     string
	From     string                     // uuid of the sender, in messages of scene-scoped peers; otherwise ""
	Data     json.RawMessage            // verbatim; nil if it is missing
	Extra    map[string]json.RawMessage // unknown fields, verbatim
}

// ParseEnvelope parses a control message, except its data. It returns errdefs.ErrInvalidArgument if the text is not a
// JSON object, a field has the wrong kind, or the type is unknown.
func ParseEnvelope(payload []byte) (Envelope, error) {
	fields, err := ParseObject(payload)
	if err != nil {
		return Envelope{}, fmt.Errorf("control message: %w", err)
	}
	var e Envelope
	for _, f := range []struct {
		name string
		to   *string
	}{{"object_id", &e.ObjectID}, {"action", &e.Action}, {"type", &e.Type}, {"from", &e.From}} {
		raw, ok := fields[f.name]
		if delete(fields, f.name); !ok || isNull(raw) {
			continue
		}
		if err := json.Unmarshal(raw, f.to); err != nil {
			return Envelope{}, fmt.Errorf("control message: %q is not a string: %w", f.name, errdefs.ErrInvalidArgument)
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
		return Envelope{}, fmt.Errorf("control message of type %q: want %s or %s: %w", e.Type, Request, Response, errdefs.ErrInvalidArgument)
	}
	return e, nil
}

// IsRequest reports whether the message is a request.
func (e Envelope) IsRequest() bool { return e.Type == Request || e.Type == RequestLater }

// IsResponse reports whether the message is a response.
func (e Envelope) IsResponse() bool { return e.Type == Response || e.Type == ResponseLater }

// Later reports whether the message has a type of later peers.
func (e Envelope) Later() bool { return e.Type == RequestLater || e.Type == ResponseLater }

// RequestType returns the type of requests to a peer.
func RequestType(later bool) string {
	if later {
		return RequestLater
	}
	return Request
}

// Answer returns the response to a request, with the request's object and action, and the type that the requester uses.
func (e Envelope) Answer(data json.RawMessage) Envelope {
	t := Response
	if e.Later() {
		t = ResponseLater
	}
	return Envelope{ObjectID: e.ObjectID, Action: e.Action, Type: t, Data: data}
}

// Bytes returns the encoded message: the known fields in the order of the protocol, then the unknown fields, sorted by
// name, all verbatim.
func (e Envelope) Bytes() []byte {
	b := []byte(`{"object_id":`)
	b = appendString(b, e.ObjectID)
	if e.Action != "" {
		b = appendString(append(b, `,"action":`...), e.Action)
	}
	b = appendString(append(b, `,"type":`...), e.Type)
	if e.From != "" {
		b = appendString(append(b, `,"from":`...), e.From)
	}
	if e.Data != nil {
		b = append(append(b, `,"data":`...), e.Data...)
	}
	for _, name := range slices.Sorted(maps.Keys(e.Extra)) {
		b = appendField(append(b, ','), name, e.Extra[name])
	}
	return append(b, '}')
}

// ParseObject parses a JSON object and keeps its values verbatim. It ignores NULs at the end, which C peers send. If
// the payload is anything else, ParseObject returns errdefs.ErrInvalidArgument.
func ParseObject(payload []byte) (map[string]json.RawMessage, error) {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(bytes.TrimRight(payload, "\x00"), &fields); err != nil {
		return nil, fmt.Errorf("%d bytes are not a JSON object: %w (%v)", len(payload), errdefs.ErrInvalidArgument, err)
	}
	if fields == nil {
		return nil, fmt.Errorf("null is not a JSON object: %w", errdefs.ErrInvalidArgument)
	}
	return fields, nil
}

// AppendObject appends an object with its fields sorted by name. Unlike encoding/json it keeps the values verbatim.
func AppendObject(b []byte, fields map[string]json.RawMessage) []byte {
	b = append(b, '{')
	for i, name := range slices.Sorted(maps.Keys(fields)) {
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

func isNull(raw json.RawMessage) bool {
	return len(raw) == 0 || bytes.Equal(bytes.TrimSpace(raw), []byte("null"))
}
