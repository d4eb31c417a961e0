package protowit

import (
	"fmt"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/encoding/protowire"
)

// Vimana, another node runtime for components, ships its own description of the services with the component. This is a
// message "Metadata" with a table of messages that refer to each other by index. This file parses the Metadata message
// by field numbers. metadata_descriptor.go converts it to descriptors, so that the rest of the package needs no special
// case.
//
//	Metadata      1 services: map<string, Service>   2 messages: list of Message
//	Service       2 methods: map<string, Method>
//	Method        1 function   2 arity (bit 0: the server streams, bit 1: the client)   3 request   4 response: indices
//	Message       1 fields: list of Field
//	Field         1 number   2 name   3 scalar coding   4 compound coding   5 message: index   6 variants: list of Field
//
// A scalar coding is 4*kind + mode. A compound coding is 4*{0 enum, 1 message} + mode, or 8 for a oneof. The modes are
// 0 implicit presence, 1 packed, 2 explicit presence, 3 expanded (repeated but not packed).

type metadata struct {
	services []metaService
	messages []metaMessage
}

type metaService struct {
	name    string
	methods []metaMethod
}

type metaMethod struct {
	name, function    string
	arity             uint64
	request, response uint64
}

type metaMessage struct{ fields []metaField }

type metaField struct {
	number           uint64
	name             string
	scalar, compound uint64
	isScalar         bool // the scalar coding came last, so it replaces the compound coding
	message          uint64
	variants         []metaField
}

// ParseMetadata is like [Parse], but reads Vimana's Metadata message.
func ParseMetadata(b []byte, services ...string) (*Schema, error) {
	var m metadata
	if err := m.parse(b); err != nil {
		return nil, fmt.Errorf("metadata: %v: %w", err, errdefs.ErrInvalidArgument)
	}
	set, err := m.descriptors()
	if err != nil {
		return nil, fmt.Errorf("metadata: %v: %w", err, errdefs.ErrInvalidArgument)
	}
	s, err := Compile(set, services...)
	if err != nil {
		return nil, fmt.Errorf("metadata: %w", err)
	}
	s.rename(&m)
	return s, nil
}

// rename gives the schema's methods the function names from the metadata.
func (s *Schema) rename(m *metadata) {
	for _, method := range s.Methods {
		for _, ms := range m.services {
			for _, mm := range ms.methods {
				if mm.function != "" && method.Procedure == "/"+ms.name+"/"+mm.name {
					method.Function = strings.TrimPrefix(mm.function, "%")
				}
			}
		}
	}
}

// fields calls the given function for every field of a message.
func fields(b []byte, each func(n protowire.Number, r record, payload []byte) error) error {
	for pos := 0; pos < len(b); {
		n, wire, after, err := tag(b, pos)
		if err != nil {
			return err
		}
		r, next, err := read(b, n, wire, after)
		if err != nil {
			return err
		}
		if err := each(n, r, b[r.start:r.end]); err != nil {
			return err
		}
		pos = next
	}
	return nil
}

func (m *metadata) parse(b []byte) error {
	err := fields(b, func(n protowire.Number, r record, payload []byte) error {
		switch {
		case n == 1 && r.wire == protowire.BytesType:
			name, body, err := mapEntry(payload)
			if err != nil {
				return err
			}
			s := metaService{name: name}
			if err := s.parse(body); err != nil {
				return fmt.Errorf("service %q: %w", name, err)
			}
			m.services = append(m.services, s)
		case n == 2 && r.wire == protowire.BytesType:
			var msg metaMessage
			if err := msg.parse(payload); err != nil {
				return fmt.Errorf("message %d: %w", len(m.messages), err)
			}
			m.messages = append(m.messages, msg)
		}
		return nil
	})
	// Maps have no order, so sort them.
	slices.SortFunc(m.services, func(a, b metaService) int { return strings.Compare(a.name, b.name) })
	return err
}

// mapEntry splits a map entry whose key is a string and whose value is a message.
func mapEntry(b []byte) (key string, body []byte, err error) {
	err = fields(b, func(n protowire.Number, r record, payload []byte) error {
		switch {
		case n == 1 && r.wire == protowire.BytesType:
			key = string(payload)
		case n == 2 && r.wire == protowire.BytesType:
			body = append(body, payload...)
		}
		return nil
	})
	return key, body, err
}

func (s *metaService) parse(b []byte) error {
	err := fields(b, func(n protowire.Number, r record, payload []byte) error {
		if n != 2 || r.wire != protowire.BytesType {
			return nil
		}
		name, body, err := mapEntry(payload)
		if err != nil {
			return err
		}
		m := metaMethod{name: name}
		if err := m.parse(body); err != nil {
			return fmt.Errorf("method %q: %w", name, err)
		}
		s.methods = append(s.methods, m)
		return nil
	})
	slices.SortFunc(s.methods, func(a, b metaMethod) int { return strings.Compare(a.name, b.name) })
	return err
}

func (m *metaMethod) parse(b []byte) error {
	return fields(b, func(n protowire.Number, r record, payload []byte) error {
		switch {
		case n == 1 && r.wire == protowire.BytesType:
			m.function = string(payload)
		case n == 2 && r.wire == protowire.VarintType:
			m.arity = r.bits
		case n == 3 && r.wire == protowire.VarintType:
			m.request = r.bits
		case n == 4 && r.wire == protowire.VarintType:
			m.response = r.bits
		case n == 3 || n == 4:
			return fmt.Errorf("a request or response is not an index into the table of messages (metadata of an older version?)")
		}
		return nil
	})
}

func (m *metaMessage) parse(b []byte) error {
	return fields(b, func(n protowire.Number, r record, payload []byte) error {
		if n != 1 || r.wire != protowire.BytesType {
			return nil
		}
		var f metaField
		if err := f.parse(payload, 0); err != nil {
			return fmt.Errorf("field %d: %w", len(m.fields), err)
		}
		m.fields = append(m.fields, f)
		return nil
	})
}

// parse reads a field. The parameter depth is the nesting depth of variants: a oneof has variants, and a variant can be
// an enum, which has variants too.
func (f *metaField) parse(b []byte, depth int) error {
	if depth > 2 {
		return fmt.Errorf("variants nested more than 2 deep")
	}
	return fields(b, func(n protowire.Number, r record, payload []byte) error {
		switch {
		case n == 1 && r.wire == protowire.VarintType:
			f.number = r.bits
		case n == 2 && r.wire == protowire.BytesType:
			f.name = strings.TrimPrefix(string(payload), "%")
		case n == 3 && r.wire == protowire.VarintType:
			f.scalar, f.isScalar = r.bits, true
		case n == 4 && r.wire == protowire.VarintType:
			f.compound, f.isScalar = r.bits, false
		case n == 5 && r.wire == protowire.VarintType:
			f.message = r.bits
		case n == 6 && r.wire == protowire.BytesType:
			var v metaField
			if err := v.parse(payload, depth+1); err != nil {
				return fmt.Errorf("variant %d: %w", len(f.variants), err)
			}
			f.variants = append(f.variants, v)
		}
		return nil
	})
}
