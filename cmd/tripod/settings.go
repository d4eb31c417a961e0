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

func (s *settings) load() (*config.Config, error) {
	return loadConfig(s.file, func(c *config.Config) map[*string]string {
		return map[*string]string{&c.Root: s.root, &c.State: s.state, &c.GRPC.Socket: s.socket, &c.Log.Level: s.logLevel}
	})
}

// loadConfig reads the file, overrides fields with flags that are not empty, and validates the result.
func loadConfig(file string, overrides func(*config.Config) map[*string]string) (*config.Config, error) {
	c, err := config.Load(file)
	if err != nil {
		return nil, err
	}
	for field, flag := range overrides(c) {
		if flag != "" {
			*field = flag
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
