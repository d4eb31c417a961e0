package main

import (
	"context"
	"slices"

	"github.com/spf13/cobra"

	"github.com/tripod-run/tripod/internal/cli"
	"github.com/tripod-run/tripod/internal/cli/check"
	"github.com/tripod-run/tripod/internal/config"
	"github.com/tripod-run/tripod/internal/edge"
	"github.com/tripod-run/tripod/internal/health"
	"github.com/tripod-run/tripod/internal/sandbox/linux"
	"github.com/tripod-run/tripod/internal/sandbox/vm"
	"github.com/tripod-run/tripod/internal/sandbox/vm/oci"
	"github.com/tripod-run/tripod/internal/sandbox/vm/templates"
	"github.com/tripod-run/tripod/internal/sandbox/wasm"
)

func checkCommand(app *cli.App) *cobra.Command {
	var s settings
	var images bool
	var component cli.ComponentCheck
	c := &cobra.Command{
		Use: "check [FILE|DIRECTORY|IMAGE]", Args: cobra.MaximumNArgs(1),
		Short: "Check what this host can do and how to fix what it cannot (exit code 1: it cannot run pods), or how nodes run a component",
		Long: "Without an argument, check what this host can do, and how to fix what it cannot. The exit code is 1 if it cannot run pods.\n\n" +
			"With a .wasm FILE, a DIRECTORY with a gRPC server in Go or JavaScript, or an IMAGE in a registry, say how nodes run this component:\n" +
			"on the core path (fast, in workers that pods share) or the component path, with or without snapshots, with which\n" +
			"optional interfaces, and why. This needs no node. The exit code is 1 if no node runs it.",
		Example: "  tripod check\n" +
			"  tripod check app.wasm --proto greeter.proto\n" +
			"  tripod check registry.example/greeter:1",
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) == 1 {
				return component.Run(c.Context(), app, args[0])
			}
			if err := component.Unused(c.Flags()); err != nil {
				return err
			}
			cfg, err := s.load()
			if err != nil {
				return err
			}
			findings := check.System(cfg, checkForwarding(cfg)).Findings(c.Context())
			findings = append(findings, checkBackends(c.Context(), cfg)...)
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
	component.Flags(c.Flags())
	c.Flags().BoolVar(&images, "images", false, "have the daemon read all images and check their digests, as `tripod images verify` does")
	app.OutputFlag(c)
	return c
}

// checkBackends checks what the enabled backends need. The one for OCI containers may be missing if components can run.
func checkBackends(ctx context.Context, cfg *config.Config) (findings []health.Finding) {
	var components []health.Finding
	if cfg.Backends.Wasm { // everything else works without tripod-wasm
		components = wasm.Doctor(ctx, wasmConfig(cfg))
	}
	if cfg.Backends.Linux {
		run := slices.ContainsFunc(components, func(f health.Finding) bool { return f.Subject == wasm.ProgramName && f.OK })
		findings = linux.Doctor(ctx, linuxConfig(cfg), run)
	}
	findings = append(findings, components...)
	if cfg.Backends.VM {
		findings = append(findings, vm.Check(ctx, vmConfig(cfg), oci.Check(ctx, vmConfig(cfg)))...)
		for _, handler := range machineHandlers {
			findings = append(findings, templates.Check(handler.name, handler.config(cfg).Root)...)
		}
	}
	return findings
}
