package artifact

import (
	"bytes"
	"fmt"
	"slices"
	"strings"

	"google.golang.org/protobuf/reflect/protoreflect"
)

// qjsMarker is part of every component made by componentize-qjs, which passes integers to JavaScript as numbers. Such
// numbers are exact only up to 2^53 (README of componentize-qjs, "Type Mappings").
var qjsMarker = []byte("componentize_qjs")

// exactMessages are messages whose only 64-bit field, the seconds, is always exact: its values are far below 2^53.
var exactMessages = map[protoreflect.FullName]bool{"google.protobuf.Timestamp": true, "google.protobuf.Duration": true}

// Warnings returns warnings about a valid component that serves the given methods. It warns if the component's language
// cannot exactly represent the methods' 64-bit fields.
func Warnings(wasm []byte, methods []protoreflect.MethodDescriptor) []string {
	if !bytes.Contains(wasm, qjsMarker) {
		return nil
	}
	var wide []string
	seen := map[protoreflect.FullName]bool{}
	for _, m := range methods {
		wide = append(wide, wideFields(m.Input(), seen)...)
		wide = append(wide, wideFields(m.Output(), seen)...)
	}
	if len(wide) == 0 {
		return nil
	}
	slices.Sort(wide)
	return []string{fmt.Sprintf("this component's JavaScript silently rounds 64-bit integers beyond 2^53: %s. "+
		"If values can be that large, make the field a string", strings.Join(wide, ", "))}
}

// wideFields returns the 64-bit integer fields of a message and of its nested messages.
func wideFields(m protoreflect.MessageDescriptor, seen map[protoreflect.FullName]bool) (wide []string) {
	if seen[m.FullName()] || exactMessages[m.FullName()] {
		return nil
	}
	seen[m.FullName()] = true
	for i := range m.Fields().Len() {
		switch f := m.Fields().Get(i); f.Kind() {
		case protoreflect.Int64Kind, protoreflect.Sint64Kind, protoreflect.Sfixed64Kind, protoreflect.Uint64Kind, protoreflect.Fixed64Kind:
			wide = append(wide, string(f.FullName()))
		case protoreflect.MessageKind, protoreflect.GroupKind:
			wide = append(wide, wideFields(f.Message(), seen)...)
		}
	}
	return wide
}
