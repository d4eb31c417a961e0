package cli

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/stream"
)

// The state of a followed container is polled at these intervals, which double.
const firstInterval, watchInterval = 10 * time.Millisecond, 320 * time.Millisecond

func (a *App) logsCommand() *cobra.Command {
	var follow, timestamps bool
	var tail int
	var since, container string
	c := &cobra.Command{
		Use: "logs [-f] CONTAINER|POD [-c NAME]", Short: "Print a container's log", Args: cobra.ExactArgs(1),
		ValidArgsFunction: a.completion(containerWords),
		RunE: func(c *cobra.Command, args []string) error {
			from, err := parseSince(since, time.Now())
			if err != nil {
				return err
			}
			o := stream.LogOptions{Follow: follow, Timestamps: timestamps, Since: from, Tail: tail, TailSet: c.Flags().Changed("tail")}
			if o.TailSet && tail < 0 {
				return fmt.Errorf("--tail %d is negative", tail)
			}
			return a.withClient(c, func(ctx context.Context, client *Client) error {
				id, err := client.ContainerIn(ctx, args[0], container)
				if err != nil {
					return err
				}
				return a.logs(ctx, client, id, o)
			})
		},
	}
	containerFlag(c, &container)
	c.Flags().BoolVarP(&follow, "follow", "f", false, "follow the log until the container ends")
	c.Flags().BoolVarP(&timestamps, "timestamps", "t", false, "prefix each line with its time")
	c.Flags().IntVar(&tail, "tail", 0, "only this many lines from the end")
	c.Flags().StringVar(&since, "since", "", "only lines after this time (RFC 3339) or within this duration (10m)")
	return c
}

func (a *App) logs(ctx context.Context, client *Client, id string, o stream.LogOptions) error {
	resp, err := client.ContainerStatus(ctx, id, false)
	if err != nil {
		return err
	}
	path := resp.GetStatus().GetLogPath()
	if path == "" {
		return fmt.Errorf("container %s has no log: it was created without log_path", shortID(id))
	}
	if o.Follow {
		ended := make(chan struct{})
		o.Ended = ended
		go func() {
			defer close(ended)
			waitForEnd(ctx, client, id)
		}()
	}
	o.Notice = func(err error) { fmt.Fprintf(a.Stderr, "tripod logs: lines are skipped: %s\n", Explain(err)) }
	err = stream.ReadLogs(ctx, path, o, a.Stdout, a.Stderr)
	if ctx.Err() != nil {
		return nil // interrupted, the usual end of following
	}
	return err
}

// waitForEnd returns once the container writes no more output. While the daemon is away, for example because it restarts,
// the container can still write.
func waitForEnd(ctx context.Context, client *Client, id string) {
	for wait := firstInterval; ; wait = min(2*wait, watchInterval) {
		resp, err := client.ContainerStatus(ctx, id, false)
		away := status.Code(err) == codes.Unavailable || status.Code(err) == codes.DeadlineExceeded
		if err != nil && !away {
			return // the container is gone
		}
		switch resp.GetStatus().GetState() {
		case runtimeapi.ContainerState_CONTAINER_CREATED, runtimeapi.ContainerState_CONTAINER_RUNNING:
		default:
			if !away {
				return
			}
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return
		}
	}
}

func parseSince(text string, now time.Time) (time.Time, error) {
	if text == "" {
		return time.Time{}, nil
	}
	if d, err := time.ParseDuration(text); err == nil {
		return now.Add(-d), nil
	}
	t, err := time.Parse(time.RFC3339Nano, text)
	if err != nil {
		return t, fmt.Errorf("--since %q is neither a duration such as 10m nor a time such as 2026-01-31T12:00:00Z", text)
	}
	return t, nil
}
