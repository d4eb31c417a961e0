package wasihttp

import (
	_ "embed"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/tripod-run/tripod/internal/wasm/value"
	"github.com/tripod-run/tripod/internal/wasm/wasi"
)

//go:embed http.wit
var text string

// The interfaces of wasi:http.
const (
	typesInterface   = "wasi:http/types@0.2.12"
	handlerInterface = "wasi:http/incoming-handler@0.2.12"
)

// interfaces are all that a guest is offered, those of internal/wasm/wasi included, and their functions.
var interfaces = sync.OnceValues(func() ([]*wasi.Interface, []wasi.Bound) {
	known, bound := wasi.Interfaces()
	own, err := wasi.ParseWIT(text, known...)
	if err != nil {
		panic(err) // embedded in the program; a test reads it
	}
	types := outgoingFuncs()
	for _, funcs := range []map[string]wasi.Func{fieldsFuncs, requestFuncs, responseFuncs} {
		maps.Copy(types, funcs)
	}
	all, bound := slices.Clone(known), slices.Clone(bound)
	for _, i := range own {
		if i.Name == handlerInterface {
			continue // the guest's
		}
		do := types
		if i.Name != typesInterface {
			do = map[string]wasi.Func{"handle": deny}
		}
		funcs, err := wasi.Bind(i, do)
		if err != nil {
			panic(fmt.Errorf("http.wit: %w", err))
		}
		all, bound = append(all, i), append(bound, funcs...)
	}
	return all, bound
})

// handle is the function that the guest exports.
var handle = sync.OnceValue(func() wasi.Signature {
	known, _ := wasi.Interfaces()
	own, err := wasi.ParseWIT(text, known...)
	if err != nil {
		panic(err)
	}
	return own[slices.IndexFunc(own, func(i *wasi.Interface) bool { return i.Name == handlerInterface })].Funcs[0]
})

// errorCodes is the variant error-code.
var errorCodes = sync.OnceValue(func() *value.Type {
	all, _ := interfaces()
	return all[slices.IndexFunc(all, func(i *wasi.Interface) bool { return i.Name == typesInterface })].Type("error-code")
})

// caseOf is the number of an error-code.
func caseOf(name string) int {
	return slices.IndexFunc(errorCodes().Cases, func(c value.Case) bool { return c.Name == name })
}
