package main

import (
	"errors"
	"fmt"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/tripod-run/tripod/internal/cli"
	"github.com/tripod-run/tripod/internal/sandbox/vm"
)

func machineCommand(app *cli.App) *cobra.Command {
	c := &cobra.Command{Use: "vm", Short: "Attach disks to machines, and look after what the node keeps for them"}
	disks := app.DiskCommand()
	for _, runs := range disks.Commands() {
		interruptible(runs)
	}
	c.AddCommand(disks, templateCommand())
	return c
}

func templateCommand() *cobra.Command {
	c := &cobra.Command{Use: "template", Short: "List or remove the templates from which machines continue"}
	var list, remove settings
	ls := &cobra.Command{
		Use: "ls", Short: "List the templates of machines on this node", Args: cobra.NoArgs,
		Long: `List the templates of machines on this node, the one that was used last first. The handler vm-oci makes them: booted and stopped machines, from which
the machines of pods in the same namespace and of the same size continue.`,
		RunE: func(c *cobra.Command, _ []string) error {
			cfg, err := list.load()
			if err != nil {
				return err
			}
			templates, err := vm.Templates(ociConfig(cfg).Root)
			if err != nil {
				return err
			}
			w := tabwriter.NewWriter(c.OutOrStdout(), 0, 0, 3, ' ', 0)
			fmt.Fprintln(w, "TEMPLATE\tNAMESPACE\tCPUS\tMEMORY\tBYTES\tCREATED\tUSED")
			for _, t := range templates {
				fmt.Fprintf(w, "%s\t%s\t%d\t%d\t%d\t%s\t%s\n", t.Name, t.Namespace, t.Definition.CPUs, t.Definition.Memory, t.Size,
					t.CreatedAt.UTC().Format(time.RFC3339), t.UsedAt.UTC().Format(time.RFC3339))
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
				errs = append(errs, vm.RemoveTemplate(ociConfig(cfg).Root, name))
			}
			return errors.Join(errs...)
		},
	}
	remove.flags(rm)
	c.AddCommand(ls, rm)
	return c
}
