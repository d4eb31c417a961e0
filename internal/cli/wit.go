package cli

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/containerd/errdefs"
	"github.com/spf13/cobra"

	"github.com/tripod-run/tripod/internal/component/protowit"
	"github.com/tripod-run/tripod/internal/component/protowit/protosource"
)

// WITCommand returns `tripod wit`, which needs no node.
func (a *App) WITCommand() *cobra.Command {
	c := &cobra.Command{Use: "wit", Short: "Component interfaces (WIT) of gRPC services"}
	c.AddCommand(a.witGenCommand(), a.witRawCommand())
	return c
}

func (a *App) witRawCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "raw",
		Short: "Print the WIT world for servers that keep their own protobuf code",
		Long: "Print the WIT world for servers that keep their own protobuf code: they get and send serialized messages, for\n" +
			"any service. The SDK for Go (github.com/tripod-run/tripod/sdk/go) implements it.",
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			_, err := fmt.Fprint(a.Stdout, protowit.RawDocument())
			return err
		},
	}
}

type witGen struct {
	imports  []string
	services []string
	dir      string
	force    bool
}

func (a *App) witGenCommand() *cobra.Command {
	var g witGen
	c := &cobra.Command{
		Use:   "gen FILE.proto...",
		Short: "Write the WIT world that a component with the services of these files implements",
		Long: "Write the WIT world that a component with the services of these files implements: a directory that\n" +
			"wit-bindgen, jco and wasm-tools accept. docs/wit.md describes the mapping of messages.",
		Example: "  tripod wit gen greet.proto            # to the standard output\n" +
			"  tripod wit gen -o wit -I . -I third_party greet.proto",
		Args: cobra.MinimumNArgs(1),
		RunE: func(c *cobra.Command, files []string) error {
			return a.witGen(c, files, &g)
		},
	}
	f := c.Flags()
	f.StringSliceVarP(&g.imports, "proto-path", "I", nil, "search path of imports (default: the files' directories)")
	f.StringSliceVar(&g.services, "service", nil, "full name of a service (default: all of the files)")
	f.StringVarP(&g.dir, "output", "o", "", "directory to write (default: one document, to the standard output)")
	f.BoolVarP(&g.force, "force", "f", false, "overwrite existing files")
	return c
}

func (a *App) witGen(c *cobra.Command, files []string, g *witGen) error {
	source, err := protosource.Compile(c.Context(), files, g.imports)
	if err != nil {
		return err
	}
	services := source.Services
	if len(g.services) > 0 {
		services = g.services
	}
	if len(services) == 0 {
		return fmt.Errorf("no service in %v: %w", files, errdefs.ErrInvalidArgument)
	}
	schema, err := protowit.Compile(source.Set, services...)
	if err != nil {
		return err
	}
	if g.dir != "" {
		return writeWIT(g, schema.WIT())
	}
	_, err = fmt.Fprint(a.Stdout, schema.Document())
	return err
}

// writeWIT checks all files before it writes the first one.
func writeWIT(g *witGen, files []protowit.File) error {
	for _, f := range files {
		path := filepath.Join(g.dir, f.Path)
		old, err := os.ReadFile(path)
		if err == nil && string(old) != f.Text && !g.force {
			return fmt.Errorf("%s exists and differs (--force overwrites it): %w", path, errdefs.ErrAlreadyExists)
		}
	}
	for _, f := range files {
		path := filepath.Join(g.dir, f.Path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, []byte(f.Text), 0o644); err != nil {
			return err
		}
	}
	return nil
}
