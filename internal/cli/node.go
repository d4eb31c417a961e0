package cli

import (
	"cmp"
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func (a *App) infoCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "info", Aliases: []string{"status"}, Short: "State of the node: conditions, handlers, features (exit code 1: not ready)",
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return a.withClient(c, func(ctx context.Context, client *Client) error {
				resp, err := client.Status(ctx, true)
				if err != nil {
					return err
				}
				if err := a.Print(resp, func(bool) error { return a.infoTable(ctx, client, resp) }); err != nil {
					return err
				}
				for _, condition := range resp.GetStatus().GetConditions() {
					// Only conditions whose names end in "Ready" can prevent pods from running.
					if !condition.GetStatus() && strings.HasSuffix(condition.GetType(), "Ready") {
						return &ExitError{Code: 1, Err: fmt.Errorf("%s is false: %s", condition.GetType(), condition.GetMessage())}
					}
				}
				return nil
			})
		},
	}
	a.formatFlags(c, "")
	return c
}

func (a *App) infoTable(ctx context.Context, client *Client, resp *runtimeapi.StatusResponse) error {
	version, err := client.Version(ctx, "v1")
	if err != nil {
		return err
	}
	fmt.Fprintf(a.Stdout, "Runtime   %s %s, CRI %s, at %s\n\n", version.GetRuntimeName(), version.GetRuntimeVersion(),
		version.GetRuntimeApiVersion(), client.Endpoint)
	t := newTable(a.Stdout, "CONDITION", "STATUS", "REASON", "MESSAGE")
	for _, c := range resp.GetStatus().GetConditions() {
		t.row(c.GetType(), fmt.Sprint(c.GetStatus()), cmp.Or(c.GetReason(), "-"), cmp.Or(c.GetMessage(), "-"))
	}
	if err := t.flush(); err != nil {
		return err
	}
	fmt.Fprintln(a.Stdout)
	t = newTable(a.Stdout, "HANDLER", "RECURSIVE READ-ONLY MOUNTS", "USER NAMESPACES")
	for _, h := range resp.GetRuntimeHandlers() {
		t.row(cmp.Or(h.GetName(), "(default)"), fmt.Sprint(h.GetFeatures().GetRecursiveReadOnlyMounts()),
			fmt.Sprint(h.GetFeatures().GetUserNamespaces()))
	}
	return t.flush()
}
