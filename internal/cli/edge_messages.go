package cli

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"time"
	"unicode/utf8"

	"github.com/containerd/errdefs"
	"github.com/spf13/cobra"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/edge/mqtt"
)

func (a *App) edgePub(o *edgeOptions) *cobra.Command {
	var qos int
	var retain, lines bool
	c := &cobra.Command{
		Use: "pub TOPIC [MESSAGE|-]", Short: "Publish a message to a topic, from the argument or standard input", Args: cobra.RangeArgs(1, 2),
		RunE: func(c *cobra.Command, args []string) error {
			if err := validMessage(qos, channel.ValidTopic(args[0])); err != nil {
				return err
			}
			ctx := c.Context()
			client, err := o.connect(ctx)
			if err != nil {
				return err
			}
			defer client.close()
			return a.eachMessage(args[1:], lines, func(message []byte) error {
				return client.Publish(ctx, args[0], byte(qos), retain, message)
			})
		},
	}
	c.Flags().IntVarP(&qos, "qos", "q", 0, "quality of service: 0, 1 or 2")
	c.Flags().BoolVarP(&retain, "retain", "R", false, "retain the message at the broker for later subscribers; an empty message ends this")
	c.Flags().BoolVarP(&lines, "lines", "l", false, "publish each line of standard input as a message")
	return c
}

func validMessage(qos int, topic error) error {
	if qos < 0 || qos > 2 {
		return fmt.Errorf("--qos %d is not 0, 1 or 2: %w", qos, errdefs.ErrInvalidArgument)
	}
	return topic
}

// eachMessage calls publish with each message: the argument, all of standard input, or each line of standard input.
func (a *App) eachMessage(args []string, lines bool, publish func([]byte) error) error {
	if lines {
		if len(args) > 0 && args[0] != "-" {
			return fmt.Errorf("--lines takes messages from standard input, not from the argument: %w", errdefs.ErrInvalidArgument)
		}
		scanner := bufio.NewScanner(a.Stdin)
		scanner.Buffer(nil, channel.DefaultMaxFrame)
		for scanner.Scan() {
			if err := publish(append([]byte(nil), scanner.Bytes()...)); err != nil {
				return err
			}
		}
		return scanner.Err()
	}
	if len(args) == 1 && args[0] != "-" {
		return publish([]byte(args[0]))
	}
	message, err := io.ReadAll(io.LimitReader(a.Stdin, channel.DefaultMaxFrame))
	if err != nil {
		return err
	}
	return publish(message)
}

func (a *App) edgeSub(o *edgeOptions) *cobra.Command {
	var qos, count int
	var verbose bool
	c := &cobra.Command{
		Use: "sub FILTER...", Short: "Print the messages of topics until interrupted; + and # are wildcards", Args: cobra.MinimumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			for _, filter := range args {
				if err := validMessage(qos, channel.ValidFilter(filter)); err != nil {
					return err
				}
			}
			client, err := o.connect(c.Context())
			if err != nil {
				return err
			}
			defer client.close()
			if err := client.subscribe(c.Context(), byte(qos), args...); err != nil {
				return err
			}
			return a.printMessages(c.Context(), client, verbose, count)
		},
	}
	c.Flags().IntVarP(&qos, "qos", "q", 0, "quality of service to ask for: 0, 1 or 2")
	c.Flags().IntVarP(&count, "count", "n", 0, "end after this many messages; 0: never")
	c.Flags().BoolVarP(&verbose, "verbose", "v", false, "prefix each message with its topic")
	return c
}

// printMessages prints messages until ctx ends or the given number of messages has been printed.
func (a *App) printMessages(ctx context.Context, client *edgeClient, verbose bool, count int) error {
	for n := 1; ; n++ {
		select {
		case m := <-client.messages:
			if err := a.printMessage(m, verbose); err != nil {
				return err
			}
			if n == count {
				return nil
			}
		case <-ctx.Done():
			return nil
		}
	}
}

// messageJSON is a message in the output of -o json, one per line. A payload that is not UTF-8 is in base64.
type messageJSON struct {
	Time    time.Time `json:"time"`
	Topic   string    `json:"topic"`
	QoS     byte      `json:"qos"`
	Retain  bool      `json:"retain,omitempty"`
	Payload *string   `json:"payload,omitempty"`
	Base64  []byte    `json:"payload_base64,omitempty"`
}

func (a *App) printMessage(m mqtt.Message, verbose bool) error {
	if !a.asTable() {
		j := messageJSON{Time: time.Now(), Topic: m.Topic, QoS: m.QoS, Retain: m.Retain}
		if text := string(m.Payload); utf8.ValidString(text) {
			j.Payload = &text
		} else {
			j.Base64 = m.Payload
		}
		return a.printItem(j)
	}
	line := append([]byte(nil), m.Payload...)
	if verbose {
		line = append([]byte(m.Topic+" "), line...)
	}
	_, err := a.Stdout.Write(append(line, '\n'))
	return err
}
