// Command tripod-wasm runs guests: it is the Wasm worker of a node, and the compiler of components. The daemon starts it.
//
//	tripod-wasm worker CONFIG      serve pods until SIGTERM
//	tripod-wasm compile CONFIG     compile the component on standard input to standard output
//	tripod-wasm fingerprint        print what compiled code depends on besides the component
//	tripod-wasm version
//
// It is the only program of the project with cgo.
package main

import (
	"os"

	"github.com/tripod-run/tripod/internal/sandbox/wasm/program"
)

// version is set by the linker.
var version = "dev"

func main() { os.Exit(program.Main(version, os.Args[1:])) }
