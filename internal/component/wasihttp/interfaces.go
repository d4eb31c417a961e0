package wasihttp

import (
	_ "embed"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/tripod-run/tripod/internal/component/wasi"
	"github.com/tripod-run/tripod/internal/component/wit"
)

//go:embed http.wit
var text string

// The names of the interfaces of wasi:http.
const (
	typesInterface    = "wasi:http/types@0.2.12"
	handlerInterface  = "wasi:http/incoming-handler@0.2.12"
	outgoingInterface = "wasi:http/outgoing-handler@0.2.12"
)

// httpInterfaces returns the interfaces of http.wit.
var httpInterfaces = sync.OnceValue(func() []*wasi.Interface {
	known, _ := wasi.Interfaces()
	own, err := wasi.ParseWIT(text, known...)
	if err != nil {
		panic(err) // impossible: a test parses the text
	}
	return own
})

func declaration(name string) *wasi.Interface {
	return httpInterfaces()[slices.IndexFunc(httpInterfaces(), func(i *wasi.Interface) bool { return i.Name == name })]
}

// interfaces returns all interfaces that guests can import, and the functions that implement them. The result includes
// the interfaces and functions of internal/component/wasi.
var interfaces = sync.OnceValues(func() ([]*wasi.Interface, []wasi.Bound) {
	known, bound := wasi.Interfaces()
	types := outgoingFuncs()
	for _, funcs := range []map[string]wasi.Func{fieldsFuncs, requestFuncs, responseFuncs} {
		maps.Copy(types, funcs)
	}
	all, bound := slices.Clone(known), slices.Clone(bound)
	for name, do := range map[string]map[string]wasi.Func{typesInterface: types, outgoingInterface: {"handle": send}} {
		funcs, err := wasi.Bind(declaration(name), do)
		if err != nil {
			panic(fmt.Errorf("http.wit: %w", err)) // impossible: a test binds all functions
		}
		all, bound = append(all, declaration(name)), append(bound, funcs...)
	}
	return all, bound
})

// handle returns the signature of handle, the function that the guest exports.
func handle() wasi.Signature { return declaration(handlerInterface).Funcs[0] }

// errorCodes returns the type of the variant error-code.
func errorCodes() *wit.Type { return declaration(typesInterface).Type("error-code") }

// caseOf returns the index of a case of error-code.
func caseOf(name string) int {
	return slices.IndexFunc(errorCodes().Cases, func(c wit.Case) bool { return c.Name == name })
}
