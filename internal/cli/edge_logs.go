package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/google/uuid"
	"github.com/spf13/cobra"

	"github.com/tripod-run/tripod/internal/edge/wire"
)

func (a *App) edgeLogs(o *edgeOptions) *cobra.Command {
	var follow, previous bool
	var tail int
	c := &cobra.Command{
		Use: "logs MODULE", Short: "Print a module's log: what its node keeps, or with -f from now on", Args: cobra.ExactArgs(1),
		ValidArgsFunction: a.completeEdge(o, "modules"),
		Long: `Print a module's log. Without -f, this is what the module's node keeps: the latest lines of the current run or, if the module has ended or
with --previous, of its last ended run. With -f, it is the log from now on, until the module ends.`,
		RunE: func(c *cobra.Command, args []string) error {
			if follow && (previous || tail != 0) || tail < 0 {
				return fmt.Errorf("--follow prints the log from now on, without --previous and --tail, and --tail is 0 or more: %w",
					errdefs.ErrInvalidArgument)
			}
			record, err := a.findModule(c.Context(), o, args[0])
			if err != nil {
				return err
			}
			if follow {
				return a.edgeFollow(c.Context(), o, record)
			}
			return a.keptLog(c.Context(), o, record, previous, tail)
		},
	}
	c.Flags().BoolVarP(&follow, "follow", "f", false, "follow the log until the module ends")
	c.Flags().BoolVarP(&previous, "previous", "p", false, "the log of the last run that has ended")
	c.Flags().IntVar(&tail, "tail", 0, "only the last lines, at most this many; 0: all that are kept")
	return c
}

// keptLog asks the module's node for the log that it keeps, and prints it.
func (a *App) keptLog(ctx context.Context, o *edgeOptions, record *edgeRecord, previous bool, tail int) error {
	runtime := record.parent()
	if runtime == "" {
		return fmt.Errorf("module %s is %s and has no runtime yet: %w", record.UUID, record.state(), errdefs.ErrFailedPrecondition)
	}
	data, err := json.Marshal(map[string]any{"type": "module", "uuid": record.UUID, "previous": previous, "tail": tail})
	if err != nil {
		return err
	}
	client, err := o.connect(ctx)
	if err != nil {
		return err
	}
	defer client.close()
	topics, nested := o.topics(), wire.Topics{Realm: o.realm, Nested: true}
	if err := client.subscribe(ctx, 1, topics.KeptLog(runtime, record.UUID), nested.KeptLog(runtime, record.UUID)); err != nil {
		return err
	}
	request := wire.Envelope{ObjectID: uuid.NewString(), Action: wire.ActionLog, Type: wire.Request, Data: data}
	if err := client.Publish(ctx, topics.LogRequest(runtime), 1, false, request.Bytes()); err != nil {
		return err
	}
	waiting, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	for {
		select {
		case m := <-client.messages:
			answer, err := wire.ParseEnvelope(m.Payload)
			if err != nil || answer.ObjectID != request.ObjectID || !answer.IsResponse() {
				continue // for another client
			}
			return a.printKept(record, answer.Data)
		case <-waiting.Done():
			if ctx.Err() != nil {
				return ctx.Err()
			}
			return fmt.Errorf("the node of module %s has not answered within %s: does its daemon run, and does it keep logs? %w", record.UUID,
				o.timeout, errdefs.ErrUnavailable)
		}
	}
}

// printKept prints a node's answer to a request for a log.
func (a *App) printKept(record *edgeRecord, answer json.RawMessage) error {
	var l struct {
		Cut   bool   `json:"cut"`
		Log   string `json:"log"`
		Error string `json:"error"`
	}
	if err := json.Unmarshal(answer, &l); err != nil {
		return fmt.Errorf("the answer of the node of module %s: %w", record.UUID, err)
	}
	if l.Error != "" {
		return fmt.Errorf("the node answers: %s: %w", strings.TrimSuffix(l.Error, ": "+errdefs.ErrNotFound.Error()), errdefs.ErrNotFound)
	}
	if !a.asTable() {
		return a.printItem(answer)
	}
	if l.Cut {
		fmt.Fprintln(a.Stderr, "tripod edge logs: the node does not have the beginning of this log")
	}
	if l.Log == "" {
		return nil
	}
	_, err := fmt.Fprintln(a.Stdout, l.Log)
	return err
}

func (a *App) edgeFollow(ctx context.Context, o *edgeOptions, record *edgeRecord) error {
	if record.Status == "D" {
		return fmt.Errorf("module %s is dead and logs nothing more; `tripod edge logs` without -f prints its last log: %w", record.UUID,
			errdefs.ErrFailedPrecondition)
	}
	client, err := o.connect(ctx)
	if err != nil {
		return err
	}
	defer client.close()
	seed, nested := o.topics(), wire.Topics{Realm: o.realm, Nested: true}
	if err := client.subscribe(ctx, 1, seed.ModuleLog("", record.UUID), nested.ModuleLog("+", record.UUID), seed.ControlOf("+")); err != nil {
		return err
	}
	w := newModuleWatch(seed, "", record.UUID)
	for {
		select {
		case m := <-client.messages:
			if len(wire.Cut(m.Topic, seed.Control())) > 0 {
				if ended, _ := w.handle(m); ended {
					return nil
				}
				continue
			}
			if err := a.printLog(m.Payload); err != nil {
				return err
			}
		case <-ctx.Done():
			return nil
		}
	}
}

// printLog prints a log message and adds a line break if it has none.
func (a *App) printLog(payload []byte) error {
	_, text := wire.ParseLog(payload)
	if n := len(text); n == 0 || text[n-1] != '\n' {
		text = append(append([]byte(nil), text...), '\n')
	}
	_, err := a.Stdout.Write(text)
	return err
}
