package scaffold

import (
	"fmt"
	"slices"
	"strings"

	"github.com/tripod-run/tripod/internal/component/protowit"
	"github.com/tripod-run/tripod/internal/component/wit"
)

// pythonNames are the names that the interfaces, methods and messages of a schema have in Python. componentize-py names
// interfaces by what else is in the world, so flags give it fixed names; what is in an interface has the names of the rules below.
type pythonNames struct {
	services []pythonService
	// call is the module of the context and the status of a call.
	call string
	// used are the modules that the server imports, sorted.
	used []string
	// flags are those of componentize-py for the names of interfaces.
	flags []string

	modules map[string]string // by WIT interface
	taken   map[string]bool   // names of modules
}

type pythonService struct {
	Class, Doc string
	Methods    []pythonMethod
}

type pythonMethod struct {
	rpc
	Function, Doc  string
	Request, Reply string // their types
	// Reader and Writer are the types of the streams, or "".
	Reader, Writer string
	// Value is the reply of a new server: the request, or a reply without content.
	Value string
}

func newPythonNames(schema *protowit.Schema) *pythonNames {
	n := &pythonNames{modules: map[string]string{}, taken: map[string]bool{}}
	for _, name := range strings.Fields("exports self context request requests replies str bool float bytes int") {
		n.taken[name] = true // in the server
	}
	n.call = n.module(protowit.TypesInterface, "tripod-grpc")
	n.module(protowit.ResponseInterface, "response")
	classes, byInterface := map[string]bool{"context": true, "status": true, "err": true}, map[string]int{}
	for _, m := range schema.Methods {
		i, known := byInterface[m.Interface]
		if !known {
			i = len(n.services)
			byInterface[m.Interface] = i
			_, name, _ := strings.Cut(m.Interface, "/")
			name = unique(classes, name)
			n.flags = append(n.flags, "--export-interface-name", m.Interface+"="+name)
			n.services = append(n.services, pythonService{Class: pythonClass(name), Doc: docstring(commentLines(m.Desc.Parent()), "    ")})
		}
		n.services[i].Methods = append(n.services[i].Methods, n.method(m))
	}
	slices.Sort(n.used)
	return n
}

// module returns the Python module of an imported WIT interface.
func (n *pythonNames) module(iface, wanted string) string {
	if name, ok := n.modules[iface]; ok {
		return name
	}
	wanted = unique(n.taken, wanted)
	n.flags = append(n.flags, "--import-interface-name", iface+"="+wanted)
	n.modules[iface] = pythonVariable(wanted)
	return n.modules[iface]
}

func (n *pythonNames) method(m *protowit.Method) pythonMethod {
	pkg, _, _ := strings.Cut(m.Interface, "/")
	p := pythonMethod{
		rpc: rpc{m.Desc}, Function: pythonVariable(m.Function), Doc: docstring(commentLines(m.Desc), "        "),
		Request: n.typ(pkg, m.Request.Type), Reply: n.typ(pkg, m.Response.Type),
	}
	p.Reader, p.Writer, p.Value = n.stream(m.Reader), n.stream(m.Writer), "request"
	echo := m.Request == m.Response && p.Kind() != "client"
	if !echo {
		p.Value = n.value(pkg, m.Response.Type)
	}
	if p.Reader == "" {
		n.use(pkg, m.Request.Type)
	}
	if p.Writer == "" || !echo {
		n.use(pkg, m.Response.Type)
	}
	return p
}

// use notes that the server mentions a type, if it is in a module.
func (n *pythonNames) use(pkg string, t *wit.Type) {
	if module, _, qualified := strings.Cut(n.typ(pkg, t), "."); qualified {
		n.used = addOnce(n.used, module)
	}
}

// stream returns the class of a stream, or "".
func (n *pythonNames) stream(s *protowit.Stream) string {
	if s == nil {
		return ""
	}
	_, name, _ := strings.Cut(s.Interface, "/")
	module := n.module(s.Interface, name)
	n.used = addOnce(n.used, module)
	return module + "." + pythonClass(s.Resource)
}

// typ returns the Python type of a message. Messages of a package are in the interface types of its WIT package.
func (n *pythonNames) typ(pkg string, t *wit.Type) string {
	if t.Name != "" {
		return n.module(pkg+"/types", strings.TrimPrefix(pkg, "proto:")) + "." + pythonClass(t.Name)
	}
	switch t.Kind {
	case wit.String:
		return "str"
	case wit.Bool:
		return "bool"
	case wit.F32, wit.F64:
		return "float"
	case wit.List:
		return "bytes" // of a wrapper; other lists are in records
	default:
		return "int"
	}
}

// value returns an expression for a value without content: in protobuf, all fields are absent.
func (n *pythonNames) value(pkg string, t *wit.Type) string {
	switch t.Kind {
	case wit.Option:
		return "None"
	case wit.List:
		if t.Elem.Kind == wit.U8 {
			return `b""`
		}
		return "[]"
	case wit.String:
		return `""`
	case wit.Bool:
		return "False"
	case wit.F32, wit.F64:
		return "0.0"
	case wit.Enum:
		return n.typ(pkg, t) + "." + strings.ToUpper(strings.ReplaceAll(t.Cases[0].Name, "-", "_"))
	case wit.Variant: // an enum: all cases but the last have no value
		return fmt.Sprintf("%s_%s()", n.typ(pkg, t), pythonClass(t.Cases[0].Name))
	case wit.Record:
		fields := make([]string, len(t.Fields))
		for i, f := range t.Fields {
			fields[i] = pythonVariable(f.Name) + "=" + n.value(pkg, f.Type)
		}
		return fmt.Sprintf("%s(%s)", n.typ(pkg, t), strings.Join(fields, ", "))
	default:
		return "0"
	}
}

// pythonVariable returns the name of a function, field or module for a WIT name.
func pythonVariable(name string) string { return notKeyword(strings.ReplaceAll(name, "-", "_")) }

// pythonClass returns the name of a class for a WIT name.
func pythonClass(name string) string {
	words := strings.Split(name, "-")
	for i, w := range words {
		words[i] = strings.ToUpper(w[:1]) + w[1:]
	}
	return notKeyword(strings.Join(words, ""))
}

// pythonKeywords are the words to which componentize-py appends an underscore.
var pythonKeywords = strings.Fields(`False None True and as assert async await break class continue def del elif else except finally for from global if import
	in is lambda nonlocal not or pass raise return try while with yield`)

func notKeyword(name string) string {
	if slices.Contains(pythonKeywords, name) {
		return name + "_"
	}
	return name
}
