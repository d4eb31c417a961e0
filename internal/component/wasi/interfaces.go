package wasi

import (
	"embed"
	"fmt"
	"io"
	"slices"
	"strings"
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
	"wasi:clocks/wall-clock@0.2.12":         wallClockFuncs,
	"wasi:random/random@0.2.12":             {"get-random-bytes": randomBytes, "get-random-u64": randomU64},
	"wasi:random/insecure@0.2.12":           {"get-insecure-random-bytes": randomBytes, "get-insecure-random-u64": randomU64},
	"wasi:random/insecure-seed@0.2.12":      {"insecure-seed": insecureSeed},
	"wasi:cli/environment@0.2.12":           environmentFuncs,
	"wasi:cli/exit@0.2.12":                  {"exit": exit},
	"wasi:cli/terminal-stdin@0.2.12":        {"get-terminal-stdin": noTerminal},
	"wasi:cli/terminal-stdout@0.2.12":       {"get-terminal-stdout": noTerminal},
	"wasi:cli/terminal-stderr@0.2.12":       {"get-terminal-stderr": noTerminal},
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
	"wasi:config/store@0.2.0-rc.1":          configFuncs,
	"wasi:logging/logging@0.1.0-draft":      loggingFuncs,
	"wasi:blobstore/types@0.2.0-draft":      blobTypeFuncs,
	"wasi:blobstore/container@0.2.0-draft":  containerFuncs,
	"wasi:blobstore/blobstore@0.2.0-draft":  blobstoreFuncs,
	"wasi:messaging/types@0.2.0-draft":      messageFuncs,
	"wasi:messaging/producer@0.2.0-draft":   {"send": sendMessage},
	"wasi:keyvalue/store@0.2.0-draft":       storeDraft,
	"wasi:keyvalue/atomics@0.2.0-draft":     atomicsDraft,
	"wasi:keyvalue/batch@0.2.0-draft":       batchDraft,
	"wasi:keyvalue/store@0.2.0-draft2":      storeDraft2,
	"wasi:keyvalue/atomics@0.2.0-draft2":    atomicsDraft2,
	"wasi:keyvalue/batch@0.2.0-draft2":      batchDraft2,
}

// Interfaces returns the interfaces of this package, and the functions of all these interfaces.
var Interfaces = sync.OnceValues(func() ([]*Interface, []Bound) {
	var known []*Interface
	var bound []Bound
	for _, name := range []string{"io", "clocks", "random", "cli", "filesystem", "sockets", "config", "logging", "blobstore", "messaging",
		"keyvalue-draft", "keyvalue-draft2"} {
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

// Drafts returns the names of the interfaces that are proposals: not part of a release of WASI. Versions of a proposal
// are not compatible with each other.
var Drafts = sync.OnceValue(func() []string {
	var names []string
	known, _ := Interfaces()
	for _, i := range known {
		if IsDraft(i.Name) {
			names = append(names, i.Name)
		}
	}
	return names
})

// ModuleDrafts returns the Drafts whose functions core modules can call. Those of wasi:blobstore need the streams of
// WASI 0.2, which core modules do not have.
func ModuleDrafts() []string {
	return slices.DeleteFunc(slices.Clone(Drafts()), func(name string) bool { return strings.HasPrefix(name, "wasi:blobstore/") })
}

// IsDraft reports whether the name of an interface has a pre-release version (https://semver.org, 9).
func IsDraft(name string) bool {
	_, version, _ := strings.Cut(name, "@")
	return strings.Contains(version, "-")
}
