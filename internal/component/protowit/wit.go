package protowit

import (
	"fmt"
	"slices"
	"strings"

	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/tripod-run/tripod/internal/component/wit"
	witfiles "github.com/tripod-run/tripod/sdk/wit"
)

// File is a file of a component's WIT directory, in the form that WebAssembly tools expect.
type File struct {
	Path string // "greet-v1.wit", "deps/tripod-grpc/grpc.wit"
	Text string
}

// WIT renders the packages of the schema's services. A single package becomes the root file of the directory. If there
// are several packages, the root file is a package "tripod:component". Its world "server" includes the worlds of all
// packages.
func (s *Schema) WIT() []File {
	files := []File{{"deps/tripod-grpc/grpc.wit", witfiles.Host}}
	if len(s.packages) == 1 {
		p := s.packages[0]
		return append(files, File{p.file() + ".wit", p.render()})
	}
	w := &writer{}
	w.line("package tripod:component;")
	w.line("")
	w.open("world %s", worldName)
	for _, p := range s.packages {
		files = append(files, File{"deps/proto-" + p.file() + "/" + p.file() + ".wit", p.render()})
		w.line("include %s/%s;", p.text(), worldName)
	}
	w.close()
	return append(files, File{"component.wit", w.String()})
}

// Document returns the text of [Schema.WIT] as one file. The packages below "deps" become nested packages, in braces.
func (s *Schema) Document() string {
	var root, deps strings.Builder
	for _, f := range s.WIT() {
		if !strings.HasPrefix(f.Path, "deps/") {
			root.WriteString(f.Text)
			continue
		}
		head, body, _ := strings.Cut(f.Text, ";\n")
		deps.WriteString("\n" + head + " {\n")
		for l := range strings.Lines(strings.TrimSpace(body)) {
			deps.WriteString(strings.TrimRight("  "+l, " \n") + "\n")
		}
		deps.WriteString("}\n")
	}
	return root.String() + deps.String()
}

func (p *witPackage) file() string { return strings.TrimPrefix(p.name, "proto:") }

// text returns the package's name as WIT text.
func (p *witPackage) text() string { return "proto:" + ident(p.file()) }

type writer struct {
	strings.Builder
	depth int
}

func (w *writer) line(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	if text != "" {
		w.WriteString(strings.Repeat("  ", w.depth))
	}
	w.WriteString(text + "\n")
}

func (w *writer) open(format string, args ...any) {
	w.line(format+" {", args...)
	w.depth++
}

func (w *writer) close() {
	w.depth--
	w.line("}")
}

// docs writes the comment that precedes a declaration in the .proto file, if the descriptors contain it.
func (w *writer) docs(d protoreflect.Descriptor) {
	if d == nil {
		return
	}
	text := strings.TrimSpace(d.ParentFile().SourceLocations().ByDescriptor(d).LeadingComments)
	if text == "" {
		return
	}
	for l := range strings.Lines(text) {
		w.WriteString(strings.TrimRight(strings.Repeat("  ", w.depth)+"/// "+strings.TrimSpace(printable(l)), " ") + "\n")
	}
}

// printable removes what WIT text must not contain: control characters, characters that change the writing direction,
// and characters that Unicode deprecates.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r == '\t':
			return ' '
		case r < ' ' || r == 0x7f || 0x80 <= r && r < 0xa0:
			return -1
		case 0x202a <= r && r <= 0x202e, 0x2066 <= r && r <= 0x2069, r == 0x149, r == 0x673, r == 0xf77, r == 0xf79,
			r == 0x17a3, r == 0x17a4, r == 0x17b4, r == 0x17b5:
			return -1
		}
		return r
	}, s)
}

func (p *witPackage) render() string {
	w := &writer{}
	w.line("package %s;", p.text())
	used := p.used()
	if len(used) > 0 {
		w.line("")
		w.open("interface %s", typesName)
		for i, t := range used {
			if i > 0 {
				w.line("")
			}
			p.renderType(w, t)
		}
		w.close()
	}
	for _, s := range p.services {
		p.renderStreams(w, s)
		p.renderService(w, s)
	}
	w.line("")
	w.open("world %s", worldName)
	w.line("import %s;", ResponseInterface)
	for _, s := range p.services {
		w.line("export %s;", ident(s.name))
	}
	w.close()
	return w.String()
}

// used returns the named types that the methods need, in the order in which they were planned.
func (p *witPackage) used() []witType {
	reached := make(map[*wit.Type]bool)
	for _, s := range p.services {
		for _, m := range s.methods {
			reach(m.Request.Type, reached)
			reach(m.Response.Type, reached)
		}
	}
	var used []witType
	for _, t := range p.order {
		if t.typ != nil && reached[t.typ] {
			used = append(used, t)
		}
	}
	return used
}

func reach(t *wit.Type, reached map[*wit.Type]bool) {
	if t == nil || reached[t] {
		return
	}
	reached[t] = true
	reach(t.Elem, reached)
	for _, f := range t.Fields {
		reach(f.Type, reached)
	}
	for _, c := range t.Cases {
		reach(c.Type, reached)
	}
}

func (p *witPackage) renderType(w *writer, t witType) {
	w.docs(t.from)
	w.open("%s %s", t.typ.Kind, ident(t.typ.Name))
	for i, f := range t.typ.Fields {
		w.docs(t.docs[i])
		w.note(t.docs[i])
		w.line("%s: %s,", ident(f.Name), typeText(f.Type))
	}
	for i, c := range t.typ.Cases {
		w.docs(t.docs[i])
		w.note(t.docs[i])
		if c.Type != nil {
			w.line("%s(%s),", ident(c.Name), typeText(c.Type))
		} else {
			w.line("%s,", ident(c.Name))
		}
	}
	w.close()
}

// note writes a comment about what the type alone does not show: the message in a recursive field, and the default of
// an absent field.
func (w *writer) note(d protoreflect.Descriptor) {
	fd, ok := d.(protoreflect.FieldDescriptor)
	if !ok {
		return
	}
	if md := contained(fd); md != nil && make(cycles).raw(fd.ContainingMessage(), md) {
		w.line("/// (%s, serialized)", md.FullName())
	}
	if fd.HasDefault() && fd.HasPresence() {
		w.line("/// (default: %s)", printable(fmt.Sprint(defaultText(fd))))
	}
}

func defaultText(fd protoreflect.FieldDescriptor) string {
	if v := fd.DefaultEnumValue(); v != nil {
		return string(v.Name())
	}
	if fd.Kind() == protoreflect.BytesKind || fd.Kind() == protoreflect.StringKind {
		return fmt.Sprintf("%q", fd.Default().Interface())
	}
	return fmt.Sprint(fd.Default().Interface())
}

// typeText returns a reference to a type: its name if it has one, otherwise its shape.
func typeText(t *wit.Type) string {
	switch {
	case t == nil:
		return "_"
	case t.Name != "" && t.Kind != wit.Own && t.Kind != wit.Borrow:
		return ident(t.Name)
	case t.Kind == wit.List || t.Kind == wit.Option:
		return fmt.Sprintf("%s<%s>", t.Kind, typeText(t.Elem))
	case t.Kind == wit.Tuple:
		parts := make([]string, len(t.Fields))
		for i, f := range t.Fields {
			parts[i] = typeText(f.Type)
		}
		return "tuple<" + strings.Join(parts, ", ") + ">"
	}
	return t.Kind.String()
}

func (p *witPackage) renderStreams(w *writer, s *witService) {
	var resources, messages []string
	for _, st := range slices.Concat(s.readers, s.writers) {
		resources = append(resources, st.Resource)
		messages = append(messages, st.Message.Type.Name)
	}
	if len(resources) == 0 {
		return
	}
	u := newLocalNames(resources)
	w.line("")
	w.line("/// The streams of %s.", s.desc.FullName())
	w.open("interface %s", ident(s.streams))
	u.use(w, TypesInterface, []string{"status"}, "-of-call")
	u.use(w, typesName, messages, "-message")
	status := u.ref(TypesInterface, "status")
	for _, st := range s.readers {
		w.line("")
		w.open("resource %s", st.Resource)
		w.line("/// Returns the next message, or none after the last one. Blocks until a message arrives.")
		w.line("next: func() -> result<option<%s>, %s>;", u.typ(st.Message), status)
		w.close()
	}
	for _, st := range s.writers {
		w.line("")
		w.open("resource %s", st.Resource)
		w.line("/// Sends a message. Blocks while the client does not read.")
		w.line("send: func(message: %s) -> result<_, %s>;", u.typ(st.Message), status)
		w.close()
	}
	w.close()
}

func (p *witPackage) renderService(w *writer, s *witService) {
	var functions, host, resources, messages []string
	for _, m := range s.methods {
		functions = append(functions, m.Function)
		host = []string{"context", "status"}
		if m.Reader == nil {
			messages = append(messages, m.Request.Type.Name)
		}
		if m.Writer == nil {
			messages = append(messages, m.Response.Type.Name)
		}
	}
	for _, st := range slices.Concat(s.readers, s.writers) {
		resources = append(resources, st.Resource)
	}
	u := newLocalNames(functions)
	w.line("")
	w.docs(s.desc)
	w.open("interface %s", ident(s.name))
	u.use(w, TypesInterface, host, "-of-call")
	u.use(w, ident(s.streams), resources, "-stream")
	u.use(w, typesName, messages, "-message")
	for _, m := range s.methods {
		w.line("")
		w.docs(m.Desc)
		w.line("%s: %s;", ident(m.Function), u.function(m, ident(s.streams)))
	}
	w.close()
}

// function returns the WIT text of the type that witPackage.sign has given to a method.
func (u *localNames) function(m *Method, streams string) string {
	param, ok := "request: ", u.typ(m.Response)
	if m.Reader != nil {
		param = fmt.Sprintf("requests: borrow<%s>", u.ref(streams, m.Reader.Resource))
	} else {
		param += u.typ(m.Request)
	}
	if m.Writer != nil {
		param += fmt.Sprintf(", replies: borrow<%s>", u.ref(streams, m.Writer.Resource))
		ok = "_"
	}
	return fmt.Sprintf("func(context: %s, %s) -> result<%s, %s>", u.ref(TypesInterface, "context"), param, ok,
		u.ref(TypesInterface, "status"))
}
