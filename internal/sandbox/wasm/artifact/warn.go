package artifact

import (
	"bytes"
	"fmt"
	"slices"
	"strings"

	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/tripod-run/tripod/internal/component/wasmbin"
)

// exactMessages are messages whose only 64-bit field, the seconds, is always exact: its values are far below 2^53.
var exactMessages = map[protoreflect.FullName]bool{"google.protobuf.Timestamp": true, "google.protobuf.Duration": true}

// Warnings returns warnings about a valid component that serves the given methods. It warns if the component's language
// cannot exactly represent the methods' 64-bit fields, and if its random numbers repeat.
//
// componentize-qjs passes integers to JavaScript as numbers, which are exact only up to 2^53 (its README, "Type Mappings").
// It seeds the generator of Math.random when it builds the component, so the generator's state is the same in all instances.
func Warnings(wasm []byte, methods []protoreflect.MethodDescriptor) (warnings []string) {
	if wasmbin.InitializedBy(wasm) != wasmbin.ComponentizeQJS {
		return nil
	}
	if bytes.Contains(wasm, []byte("Math.random")) {
		warnings = append(warnings, "this component uses Math.random, which gives each new instance, and so each request, the same values, "+
			"because componentize-qjs has seeded it when it built the component. Import wasi:random/random")
	}
	var wide []string
	seen := map[protoreflect.FullName]bool{}
	for _, m := range methods {
		wide = append(wide, wideFields(m.Input(), seen)...)
		wide = append(wide, wideFields(m.Output(), seen)...)
	}
	if len(wide) > 0 {
		slices.Sort(wide)
		warnings = append(warnings, fmt.Sprintf("this component's JavaScript silently rounds 64-bit integers beyond 2^53: %s. "+
			"If values can be that large, make the field a string", strings.Join(wide, ", ")))
	}
	return warnings
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
