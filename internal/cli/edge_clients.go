package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"time"

	"github.com/containerd/errdefs"
	"github.com/spf13/cobra"

	"github.com/tripod-run/tripod/internal/edge/broker"
)

// brokerVersions names the protocol levels of MQTT.
var brokerVersions = map[byte]string{3: "3.1", 4: "3.1.1", 5: "5.0"}

func (a *App) edgeClients(o *edgeOptions) *cobra.Command {
	return &cobra.Command{
		Use: "clients", Short: "List the sessions of the embedded broker, with the messages that wait in each", Args: cobra.NoArgs,
		Long: `The list comes from the topic ` + broker.SessionsTopic +
			`, which only the embedded broker has. With users, the user needs the right to read it.`,
		RunE: func(c *cobra.Command, _ []string) error {
			sessions, err := o.sessions(c.Context())
			if err != nil {
				return err
			}
			return a.Print(sessions, func(wide bool) error {
				header := []string{"CLIENT", "USER", "STATE", "SUBSCRIPTIONS", "QUEUED", "BYTES"}
				if wide {
					header = append(header, "ADDRESS", "MQTT", "EXPIRES AFTER")
				}
				t := newTable(a.Stdout, header...)
				for _, s := range sessions {
					state := "connected"
					if !s.Connected {
						state = "left " + age(s.Since.UnixNano())
					}
					row := []string{s.Client, cmp.Or(s.User, "-"), state, strconv.Itoa(s.Subscriptions), strconv.Itoa(s.Queued),
						size(uint64(s.QueuedBytes))}
					if wide {
						row = append(row, cmp.Or(s.Address, "-"), cmp.Or(brokerVersions[s.Level], "-"), s.Expiry.Round(time.Second).String())
					}
					t.row(row...)
				}
				return t.flush()
			})
		},
	}
}

// sessions asks the embedded broker for its sessions, without that of this command.
func (o *edgeOptions) sessions(ctx context.Context) ([]broker.Session, error) {
	client, err := o.connect(ctx)
	if err != nil {
		return nil, err
	}
	defer client.close()
	if err := client.subscribe(ctx, 0, broker.SessionsTopic); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	select {
	case m := <-client.messages:
		var all, others []broker.Session
		if err := json.Unmarshal(m.Payload, &all); err != nil {
			return nil, fmt.Errorf("the broker's list of sessions: %w", err)
		}
		for _, s := range all {
			if s.Client != client.id {
				others = append(others, s)
			}
		}
		return others, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("the broker %s has no list of sessions; only the embedded broker of tripod has one: %w", o.broker,
			errdefs.ErrUnavailable)
	}
}
