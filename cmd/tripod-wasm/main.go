// Command tripod-wasm runs guests, as a node's Wasm worker, and compiles components. The daemon starts it.
//
//	tripod-wasm worker CONFIG      serve pods until SIGTERM
//	tripod-wasm compile CONFIG     compile the component on standard input to standard output
//	tripod-wasm fingerprint        print what compiled code depends on besides the component
//	tripod-wasm version
//
// It is the project's only program that uses cgo.
package main

import (
	"os"

	"github.com/tripod-run/tripod/internal/sandbox/wasm/program"
)

// version is set by the linker.
var version = "dev"

func main() { os.Exit(program.Main(version, os.Args[1:])) }
