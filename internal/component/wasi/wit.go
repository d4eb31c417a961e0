package wasi

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"

	"github.com/tripod-run/tripod/internal/component/wit"
)

// Interface is a WIT interface read by ParseWIT.
type Interface struct {
	// Name is the full name, such as "wasi:io/poll@0.2.12".
	Name      string
	Resources []string
	Funcs     []Signature

	types map[string]*wit.Type // by local name; the name of a resource stands for the type of its owned handles
}

// Type returns the type that the interface declares or uses under the given name, or nil.
func (i *Interface) Type(name string) *wit.Type { return i.types[name] }

// Signature is a function of an Interface. Its name is spelled as in the component model ("[method]pollable.ready").
// The first parameter of a method is self, as a borrowed handle.
type Signature struct {
	Name   string
	Params []*wit.Type
	Result *wit.Type // nil if there is none
}

// ParseWIT reads interfaces from WIT. It supports the subset that WASI's texts need once annotations are removed: one
// package with interfaces, `use` by full name, and no type used before its declaration (except resources). The text can
// use the given known interfaces. The grammar is described in
// https://github.com/WebAssembly/component-model/blob/main/design/mvp/WIT.md.
func ParseWIT(text string, known ...*Interface) (all []*Interface, err error) {
	p := &parser{tokens: tokens(text), known: slices.Clone(known)}
	defer func() {
		if bad, ok := recover().(syntaxError); ok {
			err = bad
		}
	}()
	p.expect("package")
	pkg, version, _ := strings.Cut(p.next(), "@")
	p.expect(";")
	for len(p.tokens) > 0 {
		p.expect("interface")
		i := p.interfaceBody(pkg + "/" + p.next() + "@" + version)
		p.known, all = append(p.known, i), append(all, i)
	}
	return all, nil
}

// token matches one token. A name can include a package and a version, so a colon that is not part of the name must
// have a space before it. The pre-release identifiers of a version can be numbers after the first one, so that a final
// dot is not part of the version.
var token = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`%?[A-Za-z_][A-Za-z0-9-]*(:[a-z-]+(/[a-z-]+)?(@[0-9]+\.[0-9]+\.[0-9]+(-[a-z0-9]+(\.[0-9]+)*)?)?)?|->|[{}()<>,;:=.]`)
})

func tokens(text string) []string {
	var all []string
	for line := range strings.Lines(text) {
		code, _, _ := strings.Cut(line, "//")
		all = append(all, token().FindAllString(code, -1)...)
	}
	return all
}

type syntaxError string

func (e syntaxError) Error() string { return "WIT: " + string(e) }

// parser consumes tokens. If it finds an unexpected token, it panics with a syntaxError.
type parser struct {
	tokens []string
	known  []*Interface
	i      *Interface // being parsed
	// declared are the resources of i whose declarations have been parsed. Other resources have only been mentioned.
	declared []string
}

func (p *parser) fail(format string, args ...any) { panic(syntaxError(fmt.Sprintf(format, args...))) }

func (p *parser) peek() string {
	if len(p.tokens) == 0 {
		return ""
	}
	return p.tokens[0]
}

func (p *parser) next() string {
	t := p.peek()
	if t == "" {
		p.fail("unexpected end of the text")
	}
	p.tokens = p.tokens[1:]
	return strings.TrimPrefix(t, "%")
}

func (p *parser) accept(t string) bool {
	if p.peek() != t {
		return false
	}
	p.tokens = p.tokens[1:]
	return true
}

func (p *parser) expect(t string) {
	if got := p.next(); got != t {
		p.fail("found %q, expected %q", got, t)
	}
}

// list parses items separated by commas, up to the closing token.
func (p *parser) list(closing string, item func()) {
	for !p.accept(closing) {
		item()
		if !p.accept(",") {
			p.expect(closing)
			return
		}
	}
}

func (p *parser) interfaceBody(name string) *Interface {
	p.i, p.declared = &Interface{Name: name, types: map[string]*wit.Type{}}, nil
	p.expect("{")
	for !p.accept("}") {
		switch word := p.next(); word {
		case "use":
			p.use()
		case "type":
			name := p.next()
			p.expect("=")
			p.i.types[name] = p.typ()
			p.expect(";")
		case "record", "variant", "enum", "flags":
			p.define(word, p.next())
		case "resource":
			p.resource(p.next())
		default:
			p.function(word, "")
		}
	}
	for _, name := range p.i.Resources {
		if !slices.Contains(p.declared, name) {
			p.fail("interface %s has no type %s", p.i.Name, name)
		}
	}
	return p.i
}

func (p *parser) use() {
	name := p.next()
	k := slices.IndexFunc(p.known, func(i *Interface) bool { return i.Name == name })
	if k < 0 {
		p.fail("interface %s is not known", name)
	}
	p.expect(".")
	p.expect("{")
	p.list("}", func() {
		theirs := p.next()
		ours := theirs
		if p.accept("as") {
			ours = p.next()
		}
		if p.i.types[ours] = p.known[k].types[theirs]; p.i.types[ours] == nil {
			p.fail("%s has no type %s", name, theirs)
		}
	})
	p.expect(";")
}

func (p *parser) define(kind, name string) {
	t := &wit.Type{Name: name,
		Kind: map[string]wit.Kind{"record": wit.Record, "variant": wit.Variant, "enum": wit.Enum, "flags": wit.Flags}[kind]}
	p.expect("{")
	p.list("}", func() {
		part := p.next()
		switch {
		case kind == "record":
			p.expect(":")
			t.Fields = append(t.Fields, wit.Field{Name: part, Type: p.typ()})
		case p.accept("("):
			t.Cases = append(t.Cases, wit.Case{Name: part, Type: p.typ()})
			p.expect(")")
		default:
			t.Cases = append(t.Cases, wit.Case{Name: part})
		}
	})
	p.i.types[name] = t
}

func (p *parser) resource(name string) {
	p.own(name)
	p.declared = append(p.declared, name)
	if p.accept(";") {
		return
	}
	p.expect("{")
	for !p.accept("}") {
		p.function(p.next(), name)
	}
}

// own returns the type of owned handles to a resource of the interface. The resource may be declared later in the text.
func (p *parser) own(name string) *wit.Type {
	if p.i.types[name] == nil {
		p.i.types[name] = &wit.Type{Kind: wit.Own, Name: p.i.Name + "#" + name}
		p.i.Resources = append(p.i.Resources, name)
	}
	return p.i.types[name]
}

// function parses the rest of a function, or of a resource's constructor, method or static function. The name has been
// read already.
func (p *parser) function(name, resource string) {
	f := Signature{Name: name}
	switch {
	case resource != "" && name == "constructor":
		f.Name, f.Result = "[constructor]"+resource, p.own(resource)
	default:
		p.expect(":")
		if p.accept("static") {
			f.Name = "[static]" + resource + "." + name
		} else if resource != "" {
			f.Name = "[method]" + resource + "." + name
			f.Params = append(f.Params, &wit.Type{Kind: wit.Borrow, Name: p.own(resource).Name})
		}
		p.expect("func")
	}
	p.expect("(")
	p.list(")", func() {
		p.next()
		p.expect(":")
		f.Params = append(f.Params, p.typ())
	})
	if p.accept("->") {
		f.Result = p.typ()
	}
	p.expect(";")
	p.i.Funcs = append(p.i.Funcs, f)
}

var primitives = map[string]wit.Kind{
	"bool": wit.Bool, "s8": wit.S8, "u8": wit.U8, "s16": wit.S16, "u16": wit.U16, "s32": wit.S32, "u32": wit.U32,
	"s64": wit.S64, "u64": wit.U64, "f32": wit.F32, "f64": wit.F64, "char": wit.Char, "string": wit.String,
}

func (p *parser) typ() *wit.Type {
	name := p.next()
	if kind, ok := primitives[name]; ok {
		return &wit.Type{Kind: kind}
	}
	switch name {
	case "list":
		return &wit.Type{Kind: wit.List, Elem: p.arguments()[0]}
	case "option":
		return &wit.Type{Kind: wit.Option, Elem: p.arguments()[0]}
	case "borrow":
		return &wit.Type{Kind: wit.Borrow, Name: p.arguments()[0].Name}
	case "result":
		t := &wit.Type{Kind: wit.Result}
		if p.peek() == "<" {
			both := append(p.arguments(), nil)
			t.Ok, t.Err = both[0], both[1]
		}
		return t
	case "tuple":
		t := &wit.Type{Kind: wit.Tuple}
		for _, part := range p.arguments() {
			t.Fields = append(t.Fields, wit.Field{Type: part})
		}
		return t
	}
	if t := p.i.types[name]; t != nil {
		return t
	}
	return p.own(name) // a resource that is declared later
}

// arguments parses the types between angle brackets. For "_" the result contains nil.
func (p *parser) arguments() []*wit.Type {
	var all []*wit.Type
	p.expect("<")
	p.list(">", func() {
		if p.accept("_") {
			all = append(all, nil)
			return
		}
		all = append(all, p.typ())
	})
	return all
}
