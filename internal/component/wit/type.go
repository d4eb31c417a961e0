package wit

import (
	"fmt"
	"strings"
)

// Kind is the kind of a type. The numbers are part of the format of [Program].
type Kind uint8

// The kinds, in the order of the enum in tw.h.
const (
	Bool Kind = iota
	S8
	U8
	S16
	U16
	S32
	U32
	S64
	U64
	F32
	F64
	Char
	String
	List
	Record
	Tuple
	Variant
	Enum
	Option
	Result
	Flags
	Own
	Borrow
)

var kindNames = [...]string{
	"bool", "s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64", "f32", "f64", "char", "string",
	"list", "record", "tuple", "variant", "enum", "option", "result", "flags", "own", "borrow",
}

// String returns the WIT keyword of the kind.
func (k Kind) String() string {
	if int(k) < len(kindNames) {
		return kindNames[k]
	}
	return fmt.Sprintf("kind(%d)", uint8(k))
}

// Type is a type of the component model. Types form an acyclic graph, since the component model has no recursive types.
// Types may share parts. A Type must not change once it is in use.
type Type struct {
	Kind Kind
	// Name is the WIT name of a named type (record, variant, enum, flags), or "". For Own and Borrow, it is the
	// resource's name in the form INTERFACE#NAME ("proto:greet-v1/greeter-streams#hello-request-reader").
	Name string
	Elem *Type // List, Option
	// Fields are the fields of a Record or a Tuple; a tuple's fields have no names.
	Fields []Field
	// Cases are the cases of a Variant or Enum, or the flags of Flags. A case with a nil type has no payload.
	Cases []Case
	// Ok and Err are the types of a Result; nil means no payload.
	Ok, Err *Type
}

// Field is a field of a record or tuple.
type Field struct {
	Name string
	Type *Type
}

// Case is a case of a variant or enum, or one of the flags.
type Case struct {
	Name string
	Type *Type
}

// String formats the type as in WIT: by its name if it has one, otherwise by its shape.
func (t *Type) String() string {
	switch {
	case t == nil:
		return "_"
	case t.Kind == Own || t.Kind == Borrow:
		return fmt.Sprintf("%s<%s>", t.Kind, t.Name)
	case t.Name != "":
		return t.Name
	}
	return t.shape()
}

func (t *Type) shape() string {
	var parts []string
	switch t.Kind {
	case List, Option:
		parts = append(parts, t.Elem.String())
	case Tuple:
		for _, f := range t.Fields {
			parts = append(parts, f.Type.String())
		}
	case Result:
		return resultShape(t)
	case Record:
		for _, f := range t.Fields {
			parts = append(parts, f.Name+": "+f.Type.String())
		}
		return "record { " + strings.Join(parts, ", ") + " }"
	case Variant, Enum, Flags:
		for _, c := range t.Cases {
			if c.Type != nil {
				parts = append(parts, c.Name+"("+c.Type.String()+")")
			} else {
				parts = append(parts, c.Name)
			}
		}
		return t.Kind.String() + " { " + strings.Join(parts, ", ") + " }"
	default:
		return t.Kind.String()
	}
	return t.Kind.String() + "<" + strings.Join(parts, ", ") + ">"
}

func resultShape(t *Type) string {
	switch {
	case t.Ok == nil && t.Err == nil:
		return "result"
	case t.Err == nil:
		return "result<" + t.Ok.String() + ">"
	}
	return "result<" + t.Ok.String() + ", " + t.Err.String() + ">"
}

// Payloads returns the payload types of the cases of a variant, enum, option or result, with nil for a case without
// payload. For other kinds it returns nil.
func (t *Type) Payloads() []*Type {
	switch t.Kind {
	case Option:
		return []*Type{nil, t.Elem}
	case Result:
		return []*Type{t.Ok, t.Err}
	case Variant, Enum:
		all := make([]*Type, len(t.Cases))
		for i, c := range t.Cases {
			all[i] = c.Type
		}
		return all
	}
	return nil
}
