package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/containerd/errdefs"
	"github.com/spf13/cobra"

	"github.com/tripod-run/tripod/internal/edge/wire"
)

func (a *App) edgeStop(o *edgeOptions) *cobra.Command {
	return &cobra.Command{
		Use: "stop MODULE...", Short: "Delete modules and wait until they have ended",
		Long: "Delete modules and wait until they have ended. A module that has already ended is no error.", Args: cobra.MinimumNArgs(1),
		ValidArgsFunction: a.completeEdge(o, "modules"),
		RunE: func(c *cobra.Command, args []string) error {
			ctx := c.Context()
			client, err := o.connect(ctx)
			if err != nil {
				return err
			}
			defer client.close()
			if err := client.subscribe(ctx, 2, o.topics().Errors(), o.topics().ControlOf("+")); err != nil {
				return err
			}
			var record *edgeRecord
			return a.each(args, func(arg string) (id string, err error) {
				if record, err = o.find(ctx, "modules", arg); err != nil {
					return "", err
				}
				return record.UUID, nil
			}, func(module string) error {
				if record.Status == "D" {
					fmt.Fprintf(a.Stderr, "tripod edge stop: module %s is already stopped\n", module)
					return nil
				}
				return o.stopModule(ctx, client, module)
			})
		},
	}
}

// stopModule asks the orchestrator to delete a module and waits until the module's record says that it is dead.
func (o *edgeOptions) stopModule(ctx context.Context, client *edgeClient, module string) error {
	data, err := json.Marshal(map[string]string{"type": "module", "uuid": module})
	if err != nil {
		return err
	}
	object, err := client.request(ctx, o.topics(), wire.ActionDelete, data)
	if err != nil {
		return err
	}
	w := newModuleWatch(o.topics(), object, module)
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	tick := time.NewTicker(statePoll)
	defer tick.Stop()
	state := ""
	for {
		select {
		case m := <-client.messages:
			if m.Topic != w.topics.Errors() {
				continue // a message about the exit can arrive before the record changes
			}
			if refused, err := w.handleError(m.Payload); refused {
				return err
			}
		case <-tick.C:
			r, err := o.find(ctx, "modules", module)
			if errdefs.IsNotFound(err) || err == nil && r.Status == "D" {
				return nil
			}
			if err == nil {
				state = r.state()
			}
		case <-ctx.Done():
			if errors.Is(ctx.Err(), context.Canceled) {
				return ctx.Err()
			}
			return fmt.Errorf("module %s has not ended after %s, it is %s: is its node running? %w", module, o.timeout, state,
				errdefs.ErrUnavailable)
		}
	}
}
