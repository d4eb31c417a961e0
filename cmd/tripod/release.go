//go:build !failpoints

package main

import (
	"errors"
	"log/slog"

	"github.com/spf13/cobra"

	"github.com/tripod-run/tripod/internal/config"
	"github.com/tripod-run/tripod/internal/sandbox"
)

// A release build has these functions. The test build has those in testbuild.go instead.

func testCommands() []*cobra.Command { return nil }

func checkTestBuild() error { return nil }

func fakeTraces(*config.Config) []string { return nil }

func openFake(*config.Config, map[string]sandbox.Backend, *slog.Logger) error {
	return errors.New("backends.fake: only a build with -tags failpoints has the fake backend; set it to false")
}
