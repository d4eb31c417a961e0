package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/encoding/protojson"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func (a *App) infoCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "info", Aliases: []string{"status"}, Short: "State of the node: conditions, handlers, features (exit code 1: not ready)", Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return a.withClient(c, func(ctx context.Context, client *Client) error {
				resp, err := client.Status(ctx, true)
				if err != nil {
					return err
				}
				if err := a.print(resp, func(bool) error { return a.infoTable(ctx, client, resp) }); err != nil {
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
		t.row(cmp.Or(h.GetName(), "(default)"), fmt.Sprint(h.GetFeatures().GetRecursiveReadOnlyMounts()), fmt.Sprint(h.GetFeatures().GetUserNamespaces()))
	}
	return t.flush()
}

func (a *App) eventsCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "events", Short: "Print events of pods and containers until interrupted", Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return a.withClient(c, func(ctx context.Context, client *Client) error { return a.events(ctx, client) })
		},
	}
	c.Flags().StringVarP(&a.format, "output", "o", "table", "table or json (one object per line)")
	return c
}

func (a *App) events(ctx context.Context, client *Client) error {
	if a.format != "table" && a.format != "json" {
		return fmt.Errorf("output format %q is neither table nor json", a.format)
	}
	events, failed := make(chan *runtimeapi.ContainerEventResponse), make(chan error, 1)
	go func() { failed <- client.GetContainerEvents(ctx, events, nil) }()
	for {
		select {
		case e := <-events:
			if err := a.printEvent(e); err != nil {
				return err
			}
		case err := <-failed:
			if errors.Is(err, io.EOF) {
				return errors.New("the node closed the stream of events")
			}
			return err
		case <-ctx.Done():
			return nil
		}
	}
}

func (a *App) printEvent(e *runtimeapi.ContainerEventResponse) error {
	if a.format == "json" {
		document, err := protojson.Marshal(e)
		if err == nil {
			_, err = fmt.Fprintf(a.Stdout, "%s\n", document)
		}
		return err
	}
	pod := e.GetPodSandboxStatus()
	what := "pod " + shortID(pod.GetId())
	if e.GetContainerId() != pod.GetId() {
		what = "container " + shortID(e.GetContainerId())
	}
	_, err := fmt.Fprintf(a.Stdout, "%s  %-8s %s  (%s/%s)\n", time.Unix(0, e.GetCreatedAt()).Format(time.RFC3339Nano),
		strings.ToLower(strings.TrimSuffix(strings.TrimPrefix(e.GetContainerEventType().String(), "CONTAINER_"), "_EVENT")),
		what, pod.GetMetadata().GetNamespace(), pod.GetMetadata().GetName())
	return err
}
