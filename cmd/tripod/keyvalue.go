package main

import (
	"errors"
	"fmt"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/tripod-run/tripod/internal/sandbox/wasm"
)

func keyvalueCommand() *cobra.Command {
	c := &cobra.Command{Use: "keyvalue", Short: "List or remove the pairs that the node keeps for components"}
	var list, remove settings
	ls := &cobra.Command{
		Use: "ls", Short: "List the namespaces that have pairs on this node", Args: cobra.NoArgs,
		Long: `List the namespaces that have pairs on this node, with the size of their files, which includes free space.`,
		RunE: func(c *cobra.Command, _ []string) error {
			cfg, err := list.load()
			if err != nil {
				return err
			}
			stores, err := wasm.Stores(wasmRoot(cfg))
			if err != nil {
				return err
			}
			w := tabwriter.NewWriter(c.OutOrStdout(), 0, 0, 3, ' ', 0)
			fmt.Fprintln(w, "NAMESPACE\tBYTES\tCHANGED")
			for _, s := range stores {
				fmt.Fprintf(w, "%s\t%d\t%s\n", s.Namespace, s.Bytes, s.Changed.UTC().Format(time.RFC3339))
			}
			return w.Flush()
		},
	}
	list.flags(ls)
	rm := &cobra.Command{
		Use: "rm NAMESPACE...", Short: "Remove all pairs of namespaces", Args: cobra.MinimumNArgs(1),
		Long: `Remove all pairs of namespaces. Pods that use them find none, and can go on. The daemon need not run.`,
		RunE: func(c *cobra.Command, namespaces []string) error {
			cfg, err := remove.load()
			if err != nil {
				return err
			}
			var errs []error
			for _, namespace := range namespaces {
				errs = append(errs, wasm.RemoveStore(c.Context(), wasmRoot(cfg), namespace))
			}
			return errors.Join(errs...)
		},
	}
	remove.flags(rm)
	interruptible(rm)
	c.AddCommand(ls, rm)
	return c
}
