package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/tripod-run/tripod/internal/config"
)

// settings are the flags that override the configuration file. An empty flag overrides nothing.
type settings struct{ file, root, state, socket, logLevel string }

func (s *settings) flags(c *cobra.Command) {
	f := c.Flags()
	f.StringVar(&s.file, "config", "", "configuration file (default "+config.DefaultPath+", if it exists)")
	f.StringVar(&s.root, "root", "", "override root: directory of the record and the images")
	f.StringVar(&s.state, "state", "", "override state: directory of run-time files")
	f.StringVar(&s.socket, "socket", "", "override grpc.socket: the CRI socket")
	f.StringVar(&s.logLevel, "log-level", "", "override log.level: debug, info, warn, error")
}

// load reads the file, applies the flags and validates the result.
func (s *settings) load() (*config.Config, error) {
	c, err := config.Load(s.file)
	if err != nil {
		return nil, err
	}
	for _, o := range []struct{ from, to *string }{
		{&s.root, &c.Root}, {&s.state, &c.State}, {&s.socket, &c.GRPC.Socket}, {&s.logLevel, &c.Log.Level},
	} {
		if *o.from != "" {
			*o.to = *o.from
		}
	}
	if err := c.Complete(); err != nil {
		return nil, fmt.Errorf("invalid configuration:\n%w", err)
	}
	return c, nil
}

func configCommand() *cobra.Command {
	c := &cobra.Command{Use: "config", Short: "Print or check the configuration"}
	c.AddCommand(&cobra.Command{
		Use: "default", Short: "Print every key with its default and what it means", Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			_, err := fmt.Fprint(c.OutOrStdout(), config.DefaultTOML())
			return err
		},
	})
	var show, check settings
	showCommand := &cobra.Command{
		Use: "show", Short: "Print the effective configuration: defaults, file and flags", Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			cfg, err := show.load()
			if err != nil {
				return err
			}
			text, err := cfg.TOML()
			if err == nil {
				_, err = c.OutOrStdout().Write(text)
			}
			return err
		},
	}
	show.flags(showCommand)
	checkCommand := &cobra.Command{
		Use: "check", Short: "Check the configuration and print all errors", Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if _, err := check.load(); err != nil {
				return err
			}
			_, err := fmt.Fprintln(c.OutOrStdout(), "the configuration is valid")
			return err
		},
	}
	check.flags(checkCommand)
	c.AddCommand(showCommand, checkCommand)
	return c
}
