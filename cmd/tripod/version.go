package main

import (
	"fmt"
	"runtime"

	"github.com/spf13/cobra"

	"github.com/tripod-run/tripod/internal/cli"
)

// version is set by the linker: -X main.version=1.2.3. The CRI requires SemVer 2.0.
var version = "0.1.0-dev"

// versionInfo is the output of `tripod version -o json`.
type versionInfo struct {
	Version  string `json:"version"`
	CRI      string `json:"cri"`
	Go       string `json:"go"`
	Platform string `json:"platform"`
}

func versionCommand(app *cli.App) *cobra.Command {
	c := &cobra.Command{
		Use: "version", Short: "Print the version", Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			v := versionInfo{version, "v1", runtime.Version(), runtime.GOOS + "/" + runtime.GOARCH}
			return app.Print(v, func(bool) error {
				_, err := fmt.Fprintf(app.Stdout, "tripod %s (CRI %s, %s, %s)\n", v.Version, v.CRI, v.Go, v.Platform)
				return err
			})
		},
	}
	app.OutputFlag(c)
	return c
}
