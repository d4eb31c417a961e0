//go:build failpoints

package main

import (
	"fmt"
	"log/slog"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/tripod-run/tripod/internal/config"
	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/test/fake"
)

// The test build has fail points and the fake backend. A release build has release.go instead of this file.

// testCommands returns the command that lists the fail points, for the crash matrix.
func testCommands() []*cobra.Command {
	return []*cobra.Command{{
		Use: "failpoints", Hidden: true, Short: "Print the names of the fail points", Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			for _, name := range failpoint.Names() {
				if _, err := fmt.Fprintln(c.OutOrStdout(), name); err != nil {
					return err
				}
			}
			return nil
		},
	}}
}

// checkTestBuild returns an error if the environment arms fail points that do not exist.
func checkTestBuild() error { return failpoint.Check() }

func fakeDir(c *config.Config, handler string) string { return filepath.Join(c.State, handler) }

// fakeTraces returns the fake backends' directories that contain an entry for each pod.
func fakeTraces(c *config.Config) []string {
	return []string{fakeDir(c, "fake"), fakeDir(c, "fake-unit")}
}

// openFake adds the fake backends to the map, whose keys are RuntimeClass handlers.
func openFake(c *config.Config, backends map[string]sandbox.Backend, log *slog.Logger) error {
	for handler, can := range map[string]sandbox.Capabilities{
		"fake":      {HostNetwork: true},
		"fake-unit": {MaxContainers: 1, Components: true},
	} {
		f, err := fake.New(fake.Config{Dir: fakeDir(c, handler), Capabilities: can, Logger: log.With("part", handler)})
		if err != nil {
			return err
		}
		backends[handler] = f
	}
	return nil
}
