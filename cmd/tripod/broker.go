package main

import (
	"context"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tripod-run/tripod/internal/config"
	"github.com/tripod-run/tripod/internal/connlimit"
	"github.com/tripod-run/tripod/internal/edge/broker"
)

// brokerClose is how long the embedded broker may take to store its state at the end.
const brokerClose = 5 * time.Second

// newBroker starts the embedded broker, which stores sessions and retained messages in file.
func newBroker(c *config.Config, file string, connections *connlimit.Group, log *slog.Logger) (broker.Broker, error) {
	b := c.Broker
	users := make([]broker.User, len(b.Users))
	for i, u := range b.Users {
		users[i] = broker.User(u)
	}
	return broker.New(broker.Config{
		Address: b.Address, TLSAddress: b.TLSAddress, Certificate: b.Certificate, Key: b.Key, ClientCA: b.ClientCA,
		Path: file, Users: users, MaxPacket: int64(b.MaxMessage), MaxClients: c.Connections.Max,
		Connections: connections.Limiter("broker", brokerLimits(c.Connections)), Log: log,
	})
}

// brokerLimits allow a quarter more connections than clients, so that a client over the limit gets a reason code.
func brokerLimits(c config.Connections) connlimit.Config {
	l := limits(c)
	l.Max += l.Max / 4
	return l
}

func closeBroker(b broker.Broker) error {
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
	{brokerDesc("sessions", "Sessions of connected and of absent clients."), prometheus.GaugeValue, func(s broker.Stats) float64 { return float64(s.Sessions) }},
	{brokerDesc("subscriptions", "Subscriptions."), prometheus.GaugeValue, func(s broker.Stats) float64 { return float64(s.Subscriptions) }},
	{brokerDesc("retained_messages", "Retained messages."), prometheus.GaugeValue, func(s broker.Stats) float64 { return float64(s.Retained) }},
	{brokerDesc("inflight_messages", "Messages of QoS 1 and 2 that clients have not acknowledged."), prometheus.GaugeValue, func(s broker.Stats) float64 { return float64(s.Inflight) }},
	{brokerDesc("received_messages_total", "Messages from clients."), prometheus.CounterValue, func(s broker.Stats) float64 { return float64(s.Received) }},
	{brokerDesc("sent_messages_total", "Messages to clients."), prometheus.CounterValue, func(s broker.Stats) float64 { return float64(s.Sent) }},
	{brokerDesc("dropped_messages_total", "Messages dropped for clients that were slow or absent too long."), prometheus.CounterValue, func(s broker.Stats) float64 { return float64(s.Dropped) }},
	{brokerDesc("refused_connections_total", "Connections refused because of their user, password, certificate or a limit."), prometheus.CounterValue, func(s broker.Stats) float64 { return float64(s.Refused) }},
	{brokerDesc("denied_requests_total", "Subscriptions and messages that the user's rights do not allow."), prometheus.CounterValue, func(s broker.Stats) float64 { return float64(s.Denied) }},
	{brokerDesc("store_errors_total", "Failed writes to disk."), prometheus.CounterValue, func(s broker.Stats) float64 { return float64(s.StoreErrors) }},
}

func brokerDesc(name, help string) *prometheus.Desc {
	return prometheus.NewDesc("tripod_edge_broker_"+name, help, nil, nil)
}

func (b brokerFigures) Describe(to chan<- *prometheus.Desc) {
	for _, d := range brokerDescs {
		to <- d.desc
	}
}

func (b brokerFigures) Collect(to chan<- prometheus.Metric) {
	s := b.Stats()
	for _, d := range brokerDescs {
		to <- prometheus.MustNewConstMetric(d.desc, d.kind, d.of(s))
	}
}
