// Command edge-runtime is the scripted runtime of test/edgetest. Tests that use Tripod only from the outside configure
// it as the command of an [[edge.runtime]].
package main

import (
	"os"

	"github.com/tripod-run/tripod/test/edgetest"
)

func main() { os.Exit(edgetest.Program(os.Getenv(edgetest.EnvScript), os.Args)) }
