package main

import (
	"github.com/spf13/cobra"

	"github.com/tripod-run/tripod/internal/cli"
	"github.com/tripod-run/tripod/internal/cli/check"
	"github.com/tripod-run/tripod/internal/edge"
	"github.com/tripod-run/tripod/internal/sandbox/linux"
	"github.com/tripod-run/tripod/internal/sandbox/vm"
	"github.com/tripod-run/tripod/internal/sandbox/wasm"
)

func checkCommand(app *cli.App) *cobra.Command {
	var s settings
	var images bool
	c := &cobra.Command{
		Use: "check", Short: "Check what this host can do and how to fix what it cannot (exit code 1: it cannot run pods)", Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			cfg, err := s.load()
			if err != nil {
				return err
			}
			findings := check.System(cfg).Findings(c.Context())
			findings = append(findings, linux.Doctor(c.Context(), linuxConfig(cfg))...)
			if cfg.Backends.Wasm { // everything else works without tripod-wasm
				findings = append(findings, wasm.Doctor(c.Context(), wasmConfig(cfg))...)
			}
			if cfg.Backends.VM {
				findings = append(findings, vm.Check(c.Context(), vmConfig(cfg))...)
			}
			findings = append(findings, edge.Check(c.Context(), cfg)...)
			findings = append(findings, checkDaemon(c.Context(), cfg)...)
			if images {
				findings = append(findings, checkImages(c.Context(), cfg)...)
			}
			err = app.Print(findings, func(bool) error { return check.Print(app.Stdout, findings) })
			if err == nil && check.Errors(findings) > 0 {
				err = &cli.ExitError{Code: 1}
			}
			return err
		},
	}
	s.flags(c)
	c.Flags().BoolVar(&images, "images", false, "have the daemon read all images and check their digests, as `tripod images verify` does")
	app.OutputFlag(c)
	return c
}
