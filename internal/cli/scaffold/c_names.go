package scaffold

import (
	"fmt"
	"regexp"
	"strings"

	"github.com/tripod-run/tripod/internal/component/protowit"
)

// cMethod is a method with the names and types that the header of wit-bindgen declares.
type cMethod struct {
	rpc
	Comment   []string // lines
	Signature string   // of the function to write, without the ;
	Echo      bool     // the reply is the request
	// Pointer says that the request is passed by a pointer. Free is the function that frees it, or "".
	Pointer bool
	Free    string
	// Next reads an Option, the next request. Send writes a Reply, by a pointer if ReplyPointer.
	Next, Option string
	Send, Reply  string
	ReplyPointer bool
}

func newCMethod(m *protowit.Method, header string) (*cMethod, error) {
	c := &cMethod{rpc: rpc{m.Desc}, Echo: m.Request == m.Response, Comment: commentLines(m.Desc)}
	for i, line := range c.Comment {
		c.Comment[i] = strings.TrimRight(line, `\ `) // not a continuation
	}
	function := "exports_" + cName(m.Interface) + "_" + cName(m.Function)
	params, err := c.declared(header, function)
	if err != nil {
		return nil, err
	}
	c.Signature = "bool " + function + "(\n    " + strings.Join(params, ",\n    ") + ")"
	var typ string
	if m.Reader == nil {
		typ, c.Pointer = cType(params[1])
	} else {
		c.Next = cName(m.Reader.Interface) + "_method_" + cName(m.Reader.Resource) + "_next"
		if params, err = c.declared(header, c.Next); err != nil {
			return nil, err
		}
		c.Option, _ = cType(params[1])
		typ = c.Option
	}
	if free := strings.TrimSuffix(typ, "_t") + "_free"; strings.Contains(header, "void "+free+"(") {
		c.Free = free
	}
	if m.Writer != nil {
		c.Send = cName(m.Writer.Interface) + "_method_" + cName(m.Writer.Resource) + "_send"
		if params, err = c.declared(header, c.Send); err != nil {
			return nil, err
		}
		c.Reply, c.ReplyPointer = cType(params[1])
	}
	return c, nil
}

// declared returns the parameters of a function that the header declares.
func (c *cMethod) declared(header, function string) ([]string, error) {
	found := regexp.MustCompile(`\bbool ` + function + `\(([^)]*)\);`).FindStringSubmatch(header)
	if found == nil {
		return nil, fmt.Errorf("wit-bindgen declares no %s for %s", function, c.Procedure())
	}
	params := strings.Split(found[1], ", ")
	if len(params) < 3 {
		return nil, fmt.Errorf("wit-bindgen declares %s with %d parameters", function, len(params))
	}
	return params, nil
}

// cType returns the type of a parameter without its pointer.
func cType(param string) (name string, pointer bool) {
	name, param, _ = strings.Cut(param, " ")
	return name, strings.HasPrefix(param, "*")
}

// cName returns the part of a name in C for a WIT name.
func cName(name string) string {
	return strings.NewReplacer("-", "_", ":", "_", "/", "_").Replace(name)
}
