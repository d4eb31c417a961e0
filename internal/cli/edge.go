package cli

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/uuid"
	"github.com/spf13/cobra"

	"github.com/tripod-run/tripod/internal/edge/mqtt"
	"github.com/tripod-run/tripod/internal/edge/wire"
)

// Addresses of a broker and an orchestrator with the default configuration, and the environment variables that override
// them.
const (
	DefaultBroker        = "mqtt://127.0.0.1:1883"
	DefaultOrchestrator  = "http://127.0.0.1:8081"
	BrokerVariable       = "TRIPOD_EDGE_BROKER"
	OrchestratorVariable = "TRIPOD_EDGE_ORCHESTRATOR"
)

// edgeOptions are the flags of all commands below `tripod edge`.
type edgeOptions struct {
	broker, orchestrator string
	realm                string
	protocol             int
	user, passwordFile   string
	ca, cert, key        string
	timeout              time.Duration
}

// EdgeCommand returns `tripod edge`, a client of the edge protocol. The command needs no node. EdgeCommand calls wrap
// with each subcommand.
func (a *App) EdgeCommand(wrap func(*cobra.Command)) *cobra.Command {
	o := &edgeOptions{}
	c := &cobra.Command{
		Use: "edge", Short: "Run modules over MQTT, on any node that has registered with the orchestrator",
		Long: `These commands are a client of the edge protocol (docs/edge.md). Commands that change something send a message to the
broker; commands that list something ask the orchestrator's REST interface.`,
	}
	f := c.PersistentFlags()
	f.StringVar(&o.broker, "broker", cmp.Or(os.Getenv(BrokerVariable), DefaultBroker),
		"MQTT broker, mqtt:// or mqtts:// ($"+BrokerVariable+")")
	f.StringVar(&o.orchestrator, "orchestrator", cmp.Or(os.Getenv(OrchestratorVariable), DefaultOrchestrator),
		"REST interface of the orchestrator ($"+OrchestratorVariable+")")
	f.StringVar(&o.realm, "realm", "realm", "first level of the protocol's topics")
	f.IntVar(&o.protocol, "protocol", 5, "version of MQTT: 5, or 4 for 3.1.1")
	f.StringVar(&o.user, "user", "", "user at the broker")
	f.StringVar(&o.passwordFile, "password-file", "", "file with the user's password")
	f.StringVar(&o.ca, "ca", "", "file with the trusted authorities (PEM); default: the system's")
	f.StringVar(&o.cert, "cert", "", "file with a client certificate (PEM); see --key")
	f.StringVar(&o.key, "key", "", "file with the key of --cert")
	f.DurationVar(&o.timeout, "timeout", 30*time.Second, "how long to wait for an answer")
	a.outputFlag(c, f, formatTable, formatWide, formatJSON, formatYAML)
	for _, sub := range []*cobra.Command{
		a.edgeRun(o), a.edgePs(o), a.edgeRuntimes(o), a.edgeLogs(o), a.edgeStop(o), a.edgePub(o), a.edgeSub(o), a.edgeClients(o),
	} {
		wrap(sub)
		c.AddCommand(sub)
	}
	return c
}

func (o *edgeOptions) topics() wire.Topics { return wire.Topics{Realm: o.realm} }

// edgeClient is a connection to the broker. It delivers the received messages to a channel.
type edgeClient struct {
	mqtt.Client
	id       string
	messages chan mqtt.Message
	leave    context.CancelFunc // stops the delivery of messages
}

// connect connects to the broker and waits until the broker has accepted the client. The caller must close the client.
func (o *edgeOptions) connect(ctx context.Context) (*edgeClient, error) {
	if err := o.checkBroker(ctx); err != nil {
		return nil, err
	}
	password, err := readPassword(o.passwordFile)
	if err != nil {
		return nil, err
	}
	reading, leave := context.WithCancel(ctx)
	e := &edgeClient{id: "tripod-edge-" + uuid.NewString()[:8], messages: make(chan mqtt.Message), leave: leave}
	e.Client, err = mqtt.New(mqtt.Config{
		URL: o.broker, Protocol: o.protocol, ClientID: e.id, Username: o.user, Password: password,
		TLS: mqtt.TLS{CA: o.ca, Cert: o.cert, Key: o.key}, BackoffMax: time.Second,
		Handler: func(m mqtt.Message) {
			select {
			case e.messages <- m:
			case <-reading.Done():
			}
		},
	})
	if err != nil {
		leave()
		return nil, err
	}
	waiting, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	if err := e.WaitConnected(waiting); err != nil {
		e.close()
		return nil, fmt.Errorf("the broker %s did not accept this client within %s: are --user, --password-file, --cert and --protocol right? %w",
			o.broker, o.timeout, err)
	}
	return e, nil
}

// close waits up to five seconds for published messages to be sent, and disconnects.
func (e *edgeClient) close() {
	e.leave()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	_ = e.Close(ctx) // the caller notices a lost message by the missing answer
}

// checkBroker detects an invalid address and a broker that is not running. The client itself would retry forever.
func (o *edgeOptions) checkBroker(ctx context.Context) error {
	u, err := url.Parse(o.broker)
	if err != nil || u.Hostname() == "" || u.Scheme != "mqtt" && u.Scheme != "mqtts" {
		return fmt.Errorf("--broker %q is neither mqtt://HOST:PORT nor mqtts://HOST:PORT: %w", o.broker, errdefs.ErrInvalidArgument)
	}
	port := u.Port()
	if port == "" {
		port = map[string]string{"mqtt": "1883", "mqtts": "8883"}[u.Scheme]
	}
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", net.JoinHostPort(u.Hostname(), port))
	if err != nil {
		return fmt.Errorf("no broker answers at %s: is the daemon running with [edge] enabled, or another broker? Name it with --broker (%v): %w",
			o.broker, err, errdefs.ErrUnavailable)
	}
	return conn.Close()
}

func readPassword(file string) (string, error) {
	if file == "" {
		return "", nil
	}
	b, err := os.ReadFile(file)
	return strings.TrimRight(string(b), "\r\n"), err
}

// request publishes a message for the orchestrator and returns the message's object_id.
func (e *edgeClient) request(ctx context.Context, topics wire.Topics, action string, data []byte) (string, error) {
	id := uuid.NewString()
	m := wire.Envelope{ObjectID: id, Action: action, Type: wire.Request, Data: data}
	return id, e.Publish(ctx, topics.Control(), 2, false, m.Bytes())
}

// subscribe subscribes to all filters.
func (e *edgeClient) subscribe(ctx context.Context, qos byte, filters ...string) error {
	for _, f := range filters {
		if err := e.Subscribe(ctx, f, qos, mqtt.SubscribeOptions{}); err != nil {
			return fmt.Errorf("subscribe to %s: %w", f, err)
		}
	}
	return nil
}
