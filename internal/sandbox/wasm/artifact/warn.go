package artifact

import (
	"bytes"
	"fmt"
	"slices"
	"strings"

	"google.golang.org/protobuf/reflect/protoreflect"
)

// numbersOnly is in each component that componentize-qjs makes: it hands JavaScript all integers as numbers, which are exact to
// 2^53 (its README, "Type Mappings").
var numbersOnly = []byte("componentize_qjs")

// moments are messages whose 64-bit integers are exact in any case: their seconds are far below 2^53.
var moments = map[protoreflect.FullName]bool{"google.protobuf.Timestamp": true, "google.protobuf.Duration": true}

// Warnings are what a component that can run does otherwise than its clients will think: values that it cannot hold. Methods are
// those that it serves.
func Warnings(wasm []byte, methods []protoreflect.MethodDescriptor) []string {
	if !bytes.Contains(wasm, numbersOnly) {
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
	return []string{fmt.Sprintf("64-bit integers are numbers in this component's JavaScript, and change in silence beyond 2^53: %s. "+
		"Where values can be that large, make the field a string", strings.Join(wide, ", "))}
}

// wideFields are the fields of a message, and of those in it, that are 64-bit integers.
func wideFields(m protoreflect.MessageDescriptor, seen map[protoreflect.FullName]bool) (wide []string) {
	if seen[m.FullName()] || moments[m.FullName()] {
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
