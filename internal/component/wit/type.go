package wit

import (
	"fmt"
	"strings"
)

// Kind is the constructor of a type. The numbers are part of the format of [Program].
type Kind uint8

// The kinds, in the order the C side knows.
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

// String is the word that WIT has for the kind.
func (k Kind) String() string {
	if int(k) < len(kindNames) {
		return kindNames[k]
	}
	return fmt.Sprintf("kind(%d)", uint8(k))
}

// Type is a type of the component model. Types form a graph without cycles (the component model knows none); parts may
// be shared, and are never changed once they are in use.
type Type struct {
	Kind Kind
	// Name is the WIT name of a named type (record, variant, enum, flags), "" if it has none. For Own and Borrow it is the
	// resource: its interface, '#', its name ("proto:greet-v1/greeter-streams#hello-request-reader").
	Name string
	Elem *Type // List, Option
	// Fields are those of a Record, or of a Tuple (whose names are empty).
	Fields []Field
	// Cases are those of a Variant, an Enum or Flags; a nil type has no payload.
	Cases []Case
	// Ok and Err belong to a Result; nil has no payload.
	Ok, Err *Type
}

// Field is a part of a record or tuple.
type Field struct {
	Name string
	Type *Type
}

// Case is an alternative of a variant or enum, or one of the flags.
type Case struct {
	Name string
	Type *Type
}

// String renders the type as WIT would: by name if it has one, else by its shape.
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

// Payloads are the types of the cases of anything that is flat-encoded as a case and a payload (variant, enum, option,
// result), nil where there is none; nil for all other kinds.
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
