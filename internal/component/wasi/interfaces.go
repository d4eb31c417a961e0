package wasi

import (
	"embed"
	"fmt"
	"io"
	"sync"
)

//go:embed wit
var texts embed.FS

// functions are the Go implementations of the functions of each interface.
var functions = map[string]map[string]Func{
	"wasi:io/error@0.2.12":                  errorFuncs,
	"wasi:io/poll@0.2.12":                   pollFuncs,
	"wasi:io/streams@0.2.12":                streamFuncs,
	"wasi:clocks/monotonic-clock@0.2.12":    clockFuncs,
	"wasi:cli/stdin@0.2.12":                 {"get-stdin": stdin},
	"wasi:cli/stdout@0.2.12":                {"get-stdout": stdout(func(o Options) io.Writer { return o.Stdout })},
	"wasi:cli/stderr@0.2.12":                {"get-stderr": stdout(func(o Options) io.Writer { return o.Stderr })},
	"wasi:filesystem/types@0.2.12":          fileFuncs,
	"wasi:filesystem/preopens@0.2.12":       preopenFuncs,
	"wasi:sockets/instance-network@0.2.12":  {"instance-network": instanceNetwork},
	"wasi:sockets/network@0.2.12":           {"network-error-code": networkErrorCode},
	"wasi:sockets/ip-name-lookup@0.2.12":    lookupFuncs,
	"wasi:sockets/tcp-create-socket@0.2.12": {"create-tcp-socket": createTCP},
	"wasi:sockets/tcp@0.2.12":               tcpFuncs,
	"wasi:sockets/udp-create-socket@0.2.12": {"create-udp-socket": createUDP},
	"wasi:sockets/udp@0.2.12":               udpFuncs,
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
			funcs, err := Bind(i, functions[i.Name])
			if err != nil {
				panic(err)
			}
			bound = append(bound, funcs...)
		}
		known = append(known, interfaces...)
	}
	return known, bound
})
