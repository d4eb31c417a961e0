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
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/cri"
)

const (
	// confirmTimeout is how long a runtime can take to say that it remembers events. Some others say nothing.
	confirmTimeout = 10 * time.Second
	// resubscribeDelay is the time between the end of a stream of events and the next subscription.
	resubscribeDelay = time.Second
)

var errNoMemory = errors.New("this runtime does not remember events; use -w to follow new ones")

func (a *App) eventsCommand() *cobra.Command {
	var watch bool
	c := &cobra.Command{
		Use: "events [-w]", Short: "Print the latest events of pods, containers and compilations (-w: and new ones until interrupted)",
		Args: cobra.NoArgs,
		Long: `Print the events that the node remembers: the latest 512 since the daemon started, without those of delegates' pods.
The compilation of an image's component has events of its own: compiling, compiled, and failed with the reason.
The event fallback says that a component runs slower than it could, and why.
The event restored names firewall rules of pods that something else had removed and the node has made again.
With -w, go on with new events until interrupted, also those of delegates. If the daemon restarts, the command follows it again
and says that events may be missing. With -o json each event is one line.`,
		RunE: func(c *cobra.Command, _ []string) error {
			return a.withClient(c, func(ctx context.Context, client *Client) error {
				p, err := a.newEventPrinter(ctx, client)
				if err != nil {
					return err
				}
				if watch {
					return a.watchEvents(ctx, client, p)
				}
				return a.recentEvents(ctx, client, p)
			})
		},
	}
	c.Flags().BoolVarP(&watch, "watch", "w", false, "go on with new events")
	a.OutputFlag(c)
	return c
}

// recentEvents prints the remembered events.
func (a *App) recentEvents(ctx context.Context, client *Client, p *eventPrinter) error {
	ctx, cancel := context.WithTimeout(ctx, a.timeout)
	defer cancel()
	stream, err := client.openEvents(ctx, cri.HeaderEventsRecent)
	if err != nil {
		return err
	}
	silent := time.AfterFunc(confirmTimeout, cancel)
	header, err := stream.Header()
	if !silent.Stop() || err == nil && len(header.Get(cri.HeaderEvents)) == 0 {
		return errNoMemory
	}
	if err == nil {
		err = p.printAll(stream)
	}
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// watchEvents prints the remembered events and then new ones until ctx ends, also after a restart of the daemon.
func (a *App) watchEvents(ctx context.Context, client *Client, p *eventPrinter) error {
	for {
		stream, err := client.openEvents(ctx, cri.HeaderEventsAll)
		if err == nil {
			err = p.printAll(stream)
		}
		if ctx.Err() != nil {
			return nil // interrupted, the usual end of watching
		}
		if code := status.Code(err); !errors.Is(err, io.EOF) && code != codes.Unavailable && code != codes.ResourceExhausted {
			return err
		}
		fmt.Fprintf(a.Stderr, "tripod events: the stream of events ended (%s); events may be missing until the node answers again\n",
			Explain(err))
		p.skip = p.last
		select {
		case <-time.After(resubscribeDelay):
		case <-ctx.Done():
			return nil
		}
	}
}

// openEvents subscribes to events. It waits until the node answers.
func (c *Client) openEvents(ctx context.Context, which string) (runtimeapi.RuntimeService_GetContainerEventsClient, error) {
	ctx = metadata.AppendToOutgoingContext(ctx, cri.HeaderEvents, which)
	return runtimeapi.NewRuntimeServiceClient(c.conn).GetContainerEvents(ctx, &runtimeapi.GetEventsRequest{}, grpc.WaitForReady(true))
}

// eventPrinter prints events and remembers the containers' names, which the event of a removal does not have.
type eventPrinter struct {
	app   *App
	names map[string]string
	began bool
	last  int64 // time of the latest printed event
	skip  int64 // events until this time have been printed by an earlier stream
}

func (a *App) newEventPrinter(ctx context.Context, client *Client) (*eventPrinter, error) {
	containers, err := client.ListContainers(ctx, nil)
	if err != nil {
		return nil, err
	}
	p := &eventPrinter{app: a, names: map[string]string{}}
	for _, k := range containers {
		p.names[k.GetId()] = k.GetMetadata().GetName()
	}
	return p, nil
}

// printAll prints a stream's events until it ends, and returns why: io.EOF at its regular end.
func (p *eventPrinter) printAll(stream runtimeapi.RuntimeService_GetContainerEventsClient) error {
	for {
		e, err := stream.Recv()
		if err == nil {
			err = p.print(e)
		}
		if err != nil {
			return err
		}
	}
}

func (p *eventPrinter) print(e *runtimeapi.ContainerEventResponse) error {
	for _, s := range e.GetContainersStatuses() {
		p.names[s.GetId()] = s.GetMetadata().GetName()
	}
	if e.GetContainerEventType() == cri.CompilationEvent {
		return p.printCompilation(e)
	}
	if e.GetContainerEventType() == cri.RestoredEvent {
		return p.printRow(e, "restored", "-", e.GetContainersStatuses()[0].GetMessage())
	}
	container := "-"
	if id := e.GetContainerId(); id != e.GetPodSandboxStatus().GetId() {
		container = cmp.Or(p.names[id], shortID(id))
	}
	if e.GetContainerEventType() == runtimeapi.ContainerEventType_CONTAINER_DELETED_EVENT {
		delete(p.names, e.GetContainerId())
	}
	pod := e.GetPodSandboxStatus()
	kind := strings.TrimSuffix(strings.TrimPrefix(e.GetContainerEventType().String(), "CONTAINER_"), "_EVENT")
	if e.GetContainerEventType() == cri.FallbackEvent {
		kind = "fallback"
		for _, s := range e.GetContainersStatuses() {
			container += ": " + s.GetMessage()
		}
	}
	return p.printRow(e, strings.ToLower(kind), pod.GetMetadata().GetNamespace()+"/"+pod.GetMetadata().GetName(), container)
}

// printCompilation prints the image in the place of the pod, and the reason of a failure in that of the container.
func (p *eventPrinter) printCompilation(e *runtimeapi.ContainerEventResponse) error {
	var image, kind, reason string
	for _, s := range e.GetContainersStatuses() {
		image, kind, reason = s.GetImage().GetImage(), s.GetReason(), s.GetMessage()
	}
	return p.printRow(e, kind, image, cmp.Or(reason, "-"))
}

// printRow prints a row of a table, whose columns have fixed widths because later rows are not known. It does not print
// events that an earlier stream had.
func (p *eventPrinter) printRow(e *runtimeapi.ContainerEventResponse, kind, pod, container string) error {
	if e.GetCreatedAt() <= p.skip {
		return nil
	}
	p.last = max(p.last, e.GetCreatedAt())
	if !p.app.asTable() {
		return p.app.printItem(e)
	}
	if !p.began {
		p.began = true
		if err := p.row("TIME", "TYPE", "POD", "CONTAINER", "POD ID", "CONTAINER ID"); err != nil {
			return err
		}
	}
	return p.row(time.Unix(0, e.GetCreatedAt()).Format("2006-01-02T15:04:05.000Z07:00"), kind, pod, container,
		e.GetPodSandboxStatus().GetId(), e.GetContainerId())
}

// row prints the cells; the IDs only in the wide format.
func (p *eventPrinter) row(at, kind, pod, container, podID, containerID string) error {
	line := fmt.Sprintf("%-29s  %-9s  %-40s  %-20s", at, kind, printable(pod), printable(container))
	if p.app.format == formatWide {
		line += fmt.Sprintf("  %-64s  %s", podID, containerID)
	}
	_, err := fmt.Fprintln(p.app.Stdout, strings.TrimRight(line, " "))
	return err
}
