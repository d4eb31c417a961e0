package wasi

import (
	"embed"
	"fmt"
	"io"
	"strings"
	"sync"
)

//go:embed wit
var texts embed.FS

// functions are the Go implementations of the functions of each interface, except for wasi:sockets (see refuse).
var functions = map[string]map[string]Func{
	"wasi:io/error@0.2.12":               errorFuncs,
	"wasi:io/poll@0.2.12":                pollFuncs,
	"wasi:io/streams@0.2.12":             streamFuncs,
	"wasi:clocks/monotonic-clock@0.2.12": clockFuncs,
	"wasi:cli/stdin@0.2.12":              {"get-stdin": stdin},
	"wasi:cli/stdout@0.2.12":             {"get-stdout": stdout(func(o Options) io.Writer { return o.Stdout })},
	"wasi:cli/stderr@0.2.12":             {"get-stderr": stdout(func(o Options) io.Writer { return o.Stderr })},
	"wasi:filesystem/types@0.2.12":       fileFuncs,
	"wasi:filesystem/preopens@0.2.12":    preopenFuncs,
}

// Interfaces returns the interfaces of this package, and the functions of all these interfaces.
var Interfaces = sync.OnceValues(func() ([]*Interface, []Bound) {
	var known []*Interface
	var bound []Bound
	for _, name := range []string{"io", "clocks", "cli", "filesystem", "sockets"} {
		text, err := texts.ReadFile("wit/" + name + ".wit")
		if err != nil {
			panic(err) // impossible: the file is embedded
		}
		interfaces, err := ParseWIT(string(text), known...)
		if err != nil {
			panic(fmt.Errorf("%s.wit: %w", name, err)) // impossible: a test parses all files
		}
		for _, i := range interfaces {
			funcs, err := Bind(i, implementations(i))
			if err != nil {
				panic(err)
			}
			bound = append(bound, funcs...)
		}
		known = append(known, interfaces...)
	}
	return known, bound
})

func implementations(i *Interface) map[string]Func {
	if !strings.HasPrefix(i.Name, "wasi:sockets/") {
		return functions[i.Name]
	}
	refused := map[string]Func{}
	for _, f := range i.Funcs {
		refused[f.Name] = refuse(f)
	}
	return refused
}
