package edge

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tripod-run/tripod/internal/config"
	"github.com/tripod-run/tripod/internal/edge/broker"
	"github.com/tripod-run/tripod/internal/edge/mqtt"
)

// brokerClose is how long the embedded broker may take to store its state when it closes.
const brokerClose = 5 * time.Second

// brokerSettings are the broker settings of [edge] or [orchestrator].
type brokerSettings struct {
	section                                string
	url, user, passwordFile, ca, cert, key string
	protocol                               int
	store                                  string // file of the embedded broker
}

// connect returns the configuration for a client of the broker. If the broker is embedded and does not run yet, connect
// also starts it and returns it; otherwise the second result is nil.
func (s Services) connect(c *config.Config, b brokerSettings, log *slog.Logger) (mqtt.Config, broker.Broker, error) {
	client := mqtt.Config{
		URL: b.url, Protocol: b.protocol, Username: b.user, TLS: mqtt.TLS{CA: b.ca, Cert: b.cert, Key: b.key},
		SessionExpiry: time.Hour, Log: log,
	}
	var err error
	if client.Password, err = readPassword(b.passwordFile); err != nil {
		return client, nil, fmt.Errorf("%s.password_file: %w", b.section, err)
	}
	if b.url != config.EmbeddedBroker {
		return client, nil, nil
	}
	if s.running != nil {
		client.URL = s.running.URL()
		return client, nil, nil
	}
	embedded, err := s.newBroker(c, b.store)
	if err != nil {
		return client, nil, fmt.Errorf("%s.broker: %w; [broker] configures the embedded broker; %[1]s.broker can name an external one", b.section,
			err)
	}
	client.URL = embedded.URL()
	return client, embedded, nil
}

// readPassword reads a password file. No file means no password.
func readPassword(file string) (string, error) {
	if file == "" {
		return "", nil
	}
	password, err := os.ReadFile(file)
	return strings.TrimRight(string(password), "\r\n"), err
}

// newBroker starts the embedded broker, which stores sessions and retained messages in the given file.
func (s Services) newBroker(c *config.Config, file string) (broker.Broker, error) {
	b := c.Broker
	users := make([]broker.User, len(b.Users))
	for i, u := range b.Users {
		users[i] = broker.User(u)
	}
	limits := s.Limits
	limits.Max += limits.Max / 4 // more than MaxClients, so that a client above MaxClients gets a reason code
	limiter := s.Connections.Limiter("broker", limits)
	embedded, err := broker.New(broker.Config{
		Address: b.Address, TLSAddress: b.TLSAddress, Certificate: b.Certificate, Key: b.Key, ClientCA: b.ClientCA,
		WebSocketAddress: b.WebSocketAddress, WebSocketTLSAddress: b.WebSocketTLSAddress, WebSocketOrigins: b.WebSocketOrigins,
		Path: file, Users: users, MaxPacket: int64(b.MaxMessage), MaxClients: c.Connections.Max,
		MaxQueued: b.MaxQueued, MaxQueuedBytes: b.MaxQueuedBytes, MaxRetained: b.MaxRetained, MaxRetainedBytes: b.MaxRetainedBytes,
		ReceiveMaximum: b.ReceiveMaximum, TopicAliasMaximum: b.TopicAliasMaximum, SessionExpiry: time.Duration(b.SessionExpiry),
		Connections: limiter, Log: s.Logger.With("part", "broker"),
	})
	if err != nil {
		limiter.Close()
	}
	return embedded, err
}

// closeBroker closes the embedded broker, if b is not nil.
func closeBroker(b broker.Broker) error {
	if b == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), brokerClose)
	defer cancel()
	return b.Close(ctx)
}

// brokerFigures exports a broker's counters to Prometheus.
type brokerFigures struct{ broker.Broker }

var brokerDescs = []struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
	of   func(broker.Stats) float64
}{
	{brokerDesc("clients", "Connected clients."), prometheus.GaugeValue, func(s broker.Stats) float64 { return float64(s.Clients) }},
	{brokerDesc("sessions", "Sessions of connected and of absent clients."), prometheus.GaugeValue,
		func(s broker.Stats) float64 { return float64(s.Sessions) }},
	{brokerDesc("subscriptions", "Subscriptions."), prometheus.GaugeValue, func(s broker.Stats) float64 { return float64(s.Subscriptions) }},
	{brokerDesc("retained_messages", "Retained messages."), prometheus.GaugeValue,
		func(s broker.Stats) float64 { return float64(s.Retained) }},
	{brokerDesc("inflight_messages", "Messages of QoS 1 and 2 that clients have not acknowledged."), prometheus.GaugeValue,
		func(s broker.Stats) float64 { return float64(s.Inflight) }},
	{brokerDesc("received_messages_total", "Messages from clients."), prometheus.CounterValue,
		func(s broker.Stats) float64 { return float64(s.Received) }},
	{brokerDesc("sent_messages_total", "Messages to clients."), prometheus.CounterValue,
		func(s broker.Stats) float64 { return float64(s.Sent) }},
	{brokerDesc("dropped_messages_total", "Messages dropped for clients that were slow or absent too long."), prometheus.CounterValue,
		func(s broker.Stats) float64 { return float64(s.Dropped) }},
	{brokerDesc("refused_connections_total", "Connections refused because of their user, password, certificate or a limit."),
		prometheus.CounterValue, func(s broker.Stats) float64 { return float64(s.Refused) }},
	{brokerDesc("denied_requests_total", "Subscriptions and messages that the user's rights do not allow."), prometheus.CounterValue,
		func(s broker.Stats) float64 { return float64(s.Denied) }},
	{brokerDesc("store_errors_total", "Failed writes to disk."), prometheus.CounterValue,
		func(s broker.Stats) float64 { return float64(s.StoreErrors) }},
}

var brokerLimitsDesc = brokerDesc("limits_met_total",
	"How often MQTT clients have met a limit of the embedded broker: clients, packet, queue, receive_maximum, retained, topic_alias.", "limit")

func brokerDesc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("tripod_edge_broker_"+name, help, labels, nil)
}

func (b brokerFigures) Describe(to chan<- *prometheus.Desc) {
	for _, d := range brokerDescs {
		to <- d.desc
	}
	to <- brokerLimitsDesc
}

func (b brokerFigures) Collect(to chan<- prometheus.Metric) {
	s := b.Stats()
	for _, d := range brokerDescs {
		to <- prometheus.MustNewConstMetric(d.desc, d.kind, d.of(s))
	}
	for name, count := range s.Limits {
		to <- prometheus.MustNewConstMetric(brokerLimitsDesc, prometheus.CounterValue, float64(count), name)
	}
}
