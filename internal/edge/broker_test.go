package edge

import (
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/config"
	"github.com/tripod-run/tripod/internal/connlimit"
	"github.com/tripod-run/tripod/internal/edge/packet"
)

// TestBrokerSettings: the settings of [broker] reach the embedded broker.
func TestBrokerSettings(t *testing.T) {
	c := config.Default()
	c.Connections.Max = 1
	b := &c.Broker
	b.Address, b.WebSocketAddress, b.WebSocketOrigins = "127.0.0.1:0", "127.0.0.1:0", []string{"https://app.example"}
	b.MaxMessage, b.ReceiveMaximum, b.TopicAliasMaximum, b.SessionExpiry = 5000, 5, 6, config.Duration(7*time.Second)
	b.MaxQueued, b.MaxQueuedBytes, b.MaxRetained, b.MaxRetainedBytes = 1, 5000, 1, 5000
	services := Services{Logger: slog.New(slog.DiscardHandler), Connections: connlimit.NewGroup(slog.New(slog.DiscardHandler)),
		Limits: connlimit.Config{Max: 4}}
	server, err := services.newBroker(c, filepath.Join(t.TempDir(), "broker"))
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, closeBroker(server)) })

	client, err := net.Dial("tcp", server.Addresses()[0])
	require.NoError(t, err)
	t.Cleanup(func() { client.Close() })
	require.NoError(t, client.SetDeadline(time.Now().Add(time.Minute)))
	send := func(p packet.Packet) {
		_, err := client.Write(packet.Append(nil, p, 5))
		require.NoError(t, err)
	}
	receive := func() packet.Packet {
		head := make([]byte, 2)
		_, err := io.ReadFull(client, head)
		require.NoError(t, err)
		body := make([]byte, head[1])
		_, err = io.ReadFull(client, body)
		require.NoError(t, err)
		p, err := packet.Decode(head[0], body, 5)
		require.NoError(t, err)
		return p
	}
	send(&packet.Connect{Level: 5, ClientID: "c", Properties: (&packet.Properties{}).SetNumber(packet.SessionExpiry, 3600)})
	ack := receive().(*packet.Connack)
	for id, want := range map[packet.PropertyID]uint32{packet.MaximumPacketSize: 5000, packet.ReceiveMaximum: 5, packet.TopicAliasMaximum: 6,
		packet.SessionExpiry: 7} {
		assert.Equal(t, want, ack.Properties.Number(id), fmt.Sprint(id))
	}
	for i, code := range []packet.Code{packet.Success, packet.QuotaExceeded} { // one retained message
		send(&packet.Publish{Topic: fmt.Sprint("r/", i), QoS: 1, ID: 1, Retain: true, Payload: []byte("x")})
		assert.Equal(t, code, receive().(*packet.Ack).Code, "message %d", i)
	}

	url := "http://" + server.Addresses()[1] + "/mqtt"
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	require.NoError(t, err)
	for origin, status := range map[string]int{"https://app.example": http.StatusSwitchingProtocols,
		"https://other.example": http.StatusForbidden} {
		request.Header = http.Header{
			"Connection": {"Upgrade"}, "Upgrade": {"websocket"}, "Sec-Websocket-Version": {"13"}, "Sec-Websocket-Key": {"AAAAAAAAAAAAAAAAAAAAAA=="},
			"Sec-Websocket-Protocol": {"mqtt"}, "Origin": {origin},
		}
		response, err := http.DefaultClient.Do(request)
		require.NoError(t, err)
		response.Body.Close()
		assert.Equal(t, status, response.StatusCode, origin)
	}

	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(brokerFigures{server})
	families, err := registry.Gather()
	require.NoError(t, err)
	limits := map[string]float64{}
	for _, f := range families {
		if f.GetName() != "tripod_edge_broker_limits_met_total" {
			continue
		}
		for _, m := range f.GetMetric() {
			limits[m.GetLabel()[0].GetValue()] = m.GetCounter().GetValue()
		}
	}
	assert.Equal(t, map[string]float64{"clients": 0, "packet": 0, "queue": 0, "receive_maximum": 0, "retained": 1, "topic_alias": 0}, limits)
}
