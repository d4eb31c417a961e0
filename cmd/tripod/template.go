package main

import (
	"errors"
	"fmt"
	"text/tabwriter"
	"time"

	"github.com/containerd/errdefs"
	"github.com/spf13/cobra"

	"github.com/tripod-run/tripod/internal/cli"
	"github.com/tripod-run/tripod/internal/config"
	"github.com/tripod-run/tripod/internal/sandbox/vm"
	"github.com/tripod-run/tripod/internal/sandbox/vm/templates"
)

func machineCommand(app *cli.App) *cobra.Command {
	c := &cobra.Command{Use: "vm", Short: "Attach disks to machines, and look after what the node keeps for them"}
	disks := app.DiskCommand()
	for _, runs := range disks.Commands() {
		interruptible(runs)
	}
	c.AddCommand(disks, templateCommand(app))
	return c
}

func templateCommand(app *cli.App) *cobra.Command {
	c := &cobra.Command{Use: "template", Short: "Make, list or remove the templates from which machines continue"}
	var list, remove settings
	ls := &cobra.Command{
		Use: "ls", Short: "List the templates of machines on this node", Args: cobra.NoArgs,
		Long: `List the templates of machines on this node, for each handler the one that was used last first. They are booted and stopped machines, from which
the machines of pods in the same namespace and of the same kind continue. The daemon need not run.`,
		RunE: func(c *cobra.Command, _ []string) error {
			cfg, err := list.load()
			if err != nil {
				return err
			}
			w := tabwriter.NewWriter(c.OutOrStdout(), 0, 0, 3, ' ', 0)
			fmt.Fprintln(w, "TEMPLATE\tHANDLER\tNAMESPACE\tCPUS\tMEMORY\tBYTES\tCREATED\tUSED")
			for _, handler := range machineHandlers {
				found, err := templates.List(handler.config(cfg).Root)
				if err != nil {
					return err
				}
				for _, t := range found {
					fmt.Fprintf(w, "%s\t%s\t%s\t%d\t%d\t%d\t%s\t%s\n", t.Name, handler.name, t.Namespace, t.Definition.CPUs, t.Definition.Memory, t.Size,
						t.CreatedAt.UTC().Format(time.RFC3339), t.UsedAt.UTC().Format(time.RFC3339))
				}
			}
			return w.Flush()
		},
	}
	list.flags(ls)
	rm := &cobra.Command{
		Use: "rm TEMPLATE...", Short: "Remove templates of machines", Args: cobra.MinimumNArgs(1),
		Long: `Remove templates of machines. The next machine of that kind boots, and the node makes a new template. The daemon need not run.`,
		RunE: func(_ *cobra.Command, names []string) error {
			cfg, err := remove.load()
			if err != nil {
				return err
			}
			var errs []error
			for _, name := range names {
				errs = append(errs, removeTemplate(cfg, name))
			}
			return errors.Join(errs...)
		},
	}
	remove.flags(rm)
	create := app.CreateTemplateCommand()
	interruptible(create)
	c.AddCommand(create, ls, rm)
	return c
}

// machineHandlers are the handlers whose machines can continue from templates.
var machineHandlers = []struct {
	name   string
	config func(*config.Config) vm.Config
}{{"vm", vmConfig}, {"vm-oci", ociConfig}}

// removeTemplate removes the template of any handler.
func removeTemplate(cfg *config.Config, name string) (err error) {
	for _, handler := range machineHandlers {
		if err = templates.Remove(handler.config(cfg).Root, name); !errdefs.IsNotFound(err) {
			break
		}
	}
	return err
}
