package cli

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/spf13/cobra"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"github.com/tripod-run/tripod/internal/cli/call"
	"github.com/tripod-run/tripod/internal/tlsfile"
)

// CallCommand returns `tripod call`, which needs no node.
func (a *App) CallCommand() *cobra.Command {
	var o callOptions
	c := &cobra.Command{
		Use:   "call ADDRESS [PACKAGE.SERVICE/METHOD [JSON]...]",
		Short: "Call a gRPC method, over HTTP/2 or HTTP/3, as described by the server",
		Long: "Call a method of a gRPC server with reflection, for instance a component. Messages are JSON, one per line. Requests come\n" +
			"from the arguments, or from standard input if the only one is -. Without a method, list the server's services.\n\n" +
			"The address is HOST:PORT. The connection is clear text (h2c) without --tls and --http3.",
		Example: "  tripod call 10.88.0.7:80 greet.v1.Greeter/SayHello '{\"name\": \"Ada\"}'\n" +
			"  tripod call --http3 --insecure 10.88.0.7:443 greet.v1.Greeter/Countdown '{\"from\": 3}'",
		Args: cobra.MinimumNArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			ctx, cancel := context.WithTimeout(c.Context(), o.timeout)
			defer cancel()
			return statusText(a.call(ctx, o, args))
		},
	}
	f := c.Flags()
	f.BoolVar(&o.http3, "http3", false, "use HTTP/3")
	f.BoolVar(&o.tls, "tls", false, "use HTTP/2 over TLS")
	f.BoolVar(&o.insecure, "insecure", false, "accept any certificate, such as a self-signed one of a pod")
	f.StringVar(&o.ca, "ca", "", "file with the certificates of trusted authorities (default: the system's)")
	f.StringVar(&o.cert, "cert", "", "file with a client certificate (see --key)")
	f.StringVar(&o.key, "key", "", "file with the key of --cert")
	f.StringVar(&o.name, "server-name", "", "name that the certificate must have (default: that of the address)")
	f.StringToStringVarP(&o.header, "header", "H", nil, "metadata KEY=VALUE to send")
	f.IntVar(&o.repeat, "repeat", 1, "repeat the call this many times on one connection and print durations")
	f.DurationVar(&o.timeout, "timeout", time.Minute, "timeout")
	return c
}

// statusText formats a gRPC status error with its code and details.
func statusText(err error) error {
	s, ok := status.FromError(err)
	if err == nil || !ok {
		return err
	}
	text := fmt.Sprintf("%s: %s", s.Code(), s.Message())
	for _, d := range s.Proto().GetDetails() {
		text += fmt.Sprintf("\n  %s: %d bytes", d.TypeUrl, len(d.Value))
	}
	return errors.New(text)
}

type callOptions struct {
	http3, tls, insecure bool
	ca, cert, key, name  string
	header               map[string]string
	repeat               int
	timeout              time.Duration
}

func (a *App) call(ctx context.Context, o callOptions, args []string) error {
	config, err := o.tlsConfig()
	if err != nil {
		return err
	}
	c, err := call.Dial(args[0], call.Options{HTTP3: o.http3, TLS: config})
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }() // nothing is left to report
	if len(args) == 1 {
		services, err := call.Services(ctx, c)
		for _, s := range services {
			fmt.Fprintln(a.Stdout, s)
		}
		return err
	}
	m, err := call.Method(ctx, c, args[1])
	if err != nil {
		return err
	}
	texts, err := a.messages(args[2:])
	if err != nil {
		return err
	}
	requests, err := call.Requests(m, texts)
	if err != nil {
		return err
	}
	took := make([]time.Duration, 0, o.repeat)
	for i := range max(1, o.repeat) {
		begin := time.Now()
		if _, err := call.Exchange(ctx, c, m, o.header, requests, a.reply(i == 0)); err != nil {
			return err
		}
		took = append(took, time.Since(begin))
	}
	if o.repeat > 1 {
		slices.Sort(took)
		fmt.Fprintf(a.Stderr, "%d calls: p50 %s, p99 %s, slowest %s\n", len(took), took[len(took)/2].Round(time.Microsecond),
			took[len(took)*99/100].Round(time.Microsecond), took[len(took)-1].Round(time.Microsecond))
	}
	return nil
}

// reply returns a function that prints a reply if print is set.
func (a *App) reply(print bool) func(proto.Message) error {
	return func(m proto.Message) error {
		if !print {
			return nil
		}
		text, err := protojson.MarshalOptions{EmitDefaultValues: true}.Marshal(m)
		if err != nil {
			return err
		}
		_, err = fmt.Fprintln(a.Stdout, string(text))
		return err
	}
}

// messages returns the arguments or, if the only argument is "-", the lines of standard input that are not empty.
func (a *App) messages(args []string) ([]string, error) {
	if len(args) != 1 || args[0] != "-" {
		return args, nil
	}
	var lines []string
	scanner := bufio.NewScanner(a.Stdin)
	scanner.Buffer(nil, 64<<20)
	for scanner.Scan() {
		if line := strings.TrimSpace(scanner.Text()); line != "" {
			lines = append(lines, line)
		}
	}
	return lines, scanner.Err()
}

// tlsConfig returns nil for clear text.
func (o *callOptions) tlsConfig() (*tls.Config, error) {
	if !o.tls && !o.http3 {
		if o.insecure || o.ca != "" || o.cert != "" || o.name != "" {
			return nil, fmt.Errorf("the certificate flags need --tls or --http3: %w", errdefs.ErrInvalidArgument)
		}
		return nil, nil
	}
	config, err := tlsfile.Pair{Certificate: o.cert, Key: o.key}.Client(o.ca)
	if err != nil {
		return nil, err
	}
	config.ServerName, config.InsecureSkipVerify = o.name, o.insecure
	return config, nil
}
