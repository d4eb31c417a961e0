// The edge-runtime program is the scripted runtime of internal/edge/edgetest for tests that know Tripod from outside only: a
// command for a [[edge.runtime]].
package main

import (
	"os"

	"github.com/tripod-run/tripod/internal/edge/edgetest"
)

func main() { os.Exit(edgetest.Program(os.Getenv(edgetest.EnvScript), os.Args)) }
