package scaffold

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/tripod-run/tripod/internal/component/protowit"
)

// rustCode is the code of a src/lib.rs, with the names and types of the bindings that wit-bindgen has written.
type rustCode struct {
	Uses   []string // paths below bindings
	Traits []*rustTrait
}

// rustTrait is a service.
type rustTrait struct {
	Module  string // has the trait and its types
	Methods []*rustMethod
}

// rustMethod is a method of a trait.
type rustMethod struct {
	rpc
	Comment   []string // lines
	Signature string   // from fn to {
	Echo      bool     // the reply is the request
	Send      string   // what a writer gets
}

func newRustCode(methods []*protowit.Method, bindings string) (*rustCode, error) {
	c := &rustCode{}
	traits := map[string]*rustTrait{} // by interface
	taken := map[string]bool{"bindings": true}
	for _, m := range methods {
		t := traits[m.Interface]
		if t == nil {
			path, err := rustModule(m.Interface, bindings)
			if err != nil {
				return nil, err
			}
			t = &rustTrait{Module: path[strings.LastIndex(path, ":")+1:]}
			if taken[t.Module] {
				t.Module = strings.ReplaceAll(strings.TrimPrefix(path, "exports::proto::"), "::", "_")
				for taken[t.Module] {
					t.Module += "_"
				}
				path += " as " + t.Module
			}
			taken[t.Module], traits[m.Interface] = true, t
			c.Uses, c.Traits = append(c.Uses, path), append(c.Traits, t)
		}
		method, err := newRustMethod(m, t.Module, bindings)
		if err != nil {
			return nil, err
		}
		t.Methods = append(t.Methods, method)
	}
	slices.Sort(c.Uses)
	return c, nil
}

// rustModule returns the path of the module of an interface that the component exports.
func rustModule(name, bindings string) (string, error) {
	found := regexp.MustCompile(`\bexports((?:\s*::\s*\w+)+?)\s*::\s*__export_` + cName(name) + `_cabi!`).FindStringSubmatch(bindings)
	if found == nil {
		return "", fmt.Errorf("wit-bindgen exports no %s", name)
	}
	return "exports" + strings.Join(strings.Fields(found[1]), ""), nil
}

func newRustMethod(m *protowit.Method, module, bindings string) (*rustMethod, error) {
	r := &rustMethod{rpc: rpc{m.Desc}, Echo: m.Request == m.Response, Comment: commentLines(m.Desc)}
	name, params, result, err := r.declared(m, bindings)
	if err != nil {
		return nil, err
	}
	for i, param := range params {
		params[i] = rustType(param, module)
	}
	params[0] = "_" + params[0] // the context, until it is used
	if m.Reader == nil && !r.Echo {
		params[1] = "_" + params[1]
	}
	r.Signature = rustSignature(name, params, rustType(result, module))
	if m.Writer == nil {
		return r, nil
	}
	if r.Send, err = r.sent(m.Writer, bindings); err != nil {
		return nil, err
	}
	return r, nil
}

// rustSignature breaks lines as rustfmt does it.
func rustSignature(name string, params []string, result string) string {
	const indent, width = "    ", 100
	if line := fmt.Sprintf("fn %s(%s) -> %s {", name, strings.Join(params, ", "), result); len(indent+line) <= width {
		return line
	}
	result = ") -> " + result
	if len(indent+result+" {") > width {
		result += "\n" + indent + "{"
	} else {
		result += " {"
	}
	return fmt.Sprintf("fn %s(\n        %s,\n    %s", name, strings.Join(params, ",\n        "), result)
}

// declared returns what the trait of an interface declares for a method. The parameters are names with types.
func (r *rustMethod) declared(m *protowit.Method, bindings string) (name string, params []string, result string, _ error) {
	trait, _, _ := strings.Cut(bindings, "macro_rules! __export_"+cName(m.Interface)+"_cabi")
	trait = trait[max(0, strings.LastIndex(trait, "pub trait Guest")):]
	// A name that is a word of the language gets a _.
	found := regexp.MustCompile(`\bfn (` + cName(m.Function) + `_?)\(\s*(context: [^)]*?),?\s*\)\s*->\s*([^;]*);`).FindStringSubmatch(trait)
	if found == nil {
		return "", nil, "", fmt.Errorf("wit-bindgen declares no function for %s", r.Procedure())
	}
	params = regexp.MustCompile(`,\s*`).Split(found[2], -1)
	if len(params) < 2 {
		return "", nil, "", fmt.Errorf("wit-bindgen declares the function for %s with %d parameters", r.Procedure(), len(params))
	}
	return found[1], params, found[3], nil
}

// rustType writes the types of wit-bindgen in the usual form. Those without a path are in the module.
func rustType(text, module string) string {
	text = regexp.MustCompile(`[\w:]*\b[A-Z]\w*`).ReplaceAllStringFunc(text, func(path string) string {
		name := path[strings.LastIndex(path, ":")+1:]
		if name != path || name == "Context" || name == "Status" { // of Rust itself, or of all services
			return name
		}
		return module + "::" + name
	})
	return regexp.MustCompile(`\s+`).ReplaceAllString(text, " ")
}

// sent returns what a method gives to the send of a writer, which takes a type that is not copied by reference.
func (r *rustMethod) sent(w *protowit.Stream, bindings string) (string, error) {
	message := "request"
	if !r.Echo {
		message = "Default::default()"
	}
	imported := regexp.MustCompile(`wasm_import_module = "` + w.Interface + `"\)\]\s*extern "C" \{\s*#\[link_name = "\[method\]` + w.Resource +
		`\.send"`).FindStringIndex(bindings)
	if imported == nil {
		return "", fmt.Errorf("wit-bindgen imports no %s for %s", w.Resource, r.Procedure())
	}
	before := bindings[:imported[0]]
	found := regexp.MustCompile(`^pub fn send\(\s*&self,\s*message: (&?)(\[|str\b)?`).FindStringSubmatch(before[max(0,
		strings.LastIndex(before, "pub fn send(")):])
	switch {
	case found == nil:
		return "", fmt.Errorf("wit-bindgen declares no send of %s for %s", w.Resource, r.Procedure())
	case !r.Echo && found[2] != "": // a slice has a default itself
		return message, nil
	default:
		return found[1] + message, nil
	}
}
