// The edge-runtime program is the scripted runtime of test/edgetest for tests that know Tripod from outside only: a
// command for a [[edge.runtime]].
package main

import (
	"os"

	"github.com/tripod-run/tripod/test/edgetest"
)

func main() { os.Exit(edgetest.Program(os.Getenv(edgetest.EnvScript), os.Args)) }
