package main

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/tripod-run/tripod/internal/cli"
	"github.com/tripod-run/tripod/internal/cli/check"
	"github.com/tripod-run/tripod/internal/config"
	"github.com/tripod-run/tripod/internal/edge"
	"github.com/tripod-run/tripod/internal/sandbox/linux"
	"github.com/tripod-run/tripod/internal/sandbox/wasm"
)

func checkCommand() *cobra.Command {
	var s settings
	var format string
	var images bool
	c := &cobra.Command{
		Use: "check", Short: "Check what this host can do and how to fix what it cannot (exit code 1: it cannot run pods)", Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if format != "table" && format != "json" {
				return fmt.Errorf("output format %q is neither table nor json", format)
			}
			cfg, err := s.load()
			if err != nil {
				return err
			}
			findings := check.System(cfg).Findings(c.Context())
			for _, f := range linux.Doctor(c.Context(), linuxConfig(cfg)) {
				findings = append(findings, check.Finding(f))
			}
			findings = append(findings, checkWasm(c.Context(), cfg)...)
			findings = append(findings, checkVM(c.Context(), cfg)...)
			for _, f := range edge.Check(c.Context(), cfg) {
				findings = append(findings, check.Finding(f))
			}
			findings = append(findings, checkDaemon(c.Context(), cfg)...)
			if images {
				findings = append(findings, checkImages(c.Context(), cfg)...)
			}
			if format == "json" {
				out := json.NewEncoder(c.OutOrStdout())
				out.SetIndent("", "  ")
				err = out.Encode(findings)
			} else {
				err = check.Print(c.OutOrStdout(), findings)
			}
			if err == nil && check.Errors(findings) > 0 {
				err = &cli.ExitError{Code: 1}
			}
			return err
		},
	}
	s.flags(c)
	c.Flags().BoolVar(&images, "images", false, "have the daemon read all images and check their digests, as `tripod images verify` does")
	c.Flags().StringVarP(&format, "output", "o", "table", "table or json")
	return c
}

// checkWasm checks the requirements of components. Everything else works without tripod-wasm.
func checkWasm(ctx context.Context, c *config.Config) []check.Finding {
	if !c.Backends.Wasm {
		return nil
	}
	var findings []check.Finding
	for _, f := range wasm.Doctor(ctx, wasmConfig(c)) {
		findings = append(findings, check.Finding(f))
	}
	return findings
}
