package mqtt

import (
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/edge/packet"
)

func TestConfig(t *testing.T) {
	for name, bad := range map[string]Config{
		"no URL":       {},
		"no host":      {URL: "mqtt://"},
		"other scheme": {URL: "http://localhost"},
		"no scheme":    {URL: "localhost:1883"},
		"protocol":     {URL: "mqtt://localhost", Protocol: 3},
		"will's topic": {URL: "mqtt://localhost", Will: &Will{Topic: "a/#"}},
		"will's size":  {URL: "mqtt://localhost", Will: &Will{Topic: "a", Payload: make([]byte, 70_000)}},
	} {
		_, err := New(bad)
		assert.ErrorIs(t, err, errdefs.ErrInvalidArgument, name)
	}
	for url, want := range map[string]string{
		"mqtt://h": "h:1883", "mqtts://h": "h:8883", "mqtt://[::1]:99": "[::1]:99", "mqtts://10.0.0.1:1": "10.0.0.1:1",
	} {
		got, secure, err := Config{URL: url}.address()
		require.NoError(t, err)
		assert.Equal(t, want, got)
		assert.Equal(t, url[4] == 's', secure)
	}
}

// TestConnectPacket checks the bytes of the CONNECT in each version.
func TestConnectPacket(t *testing.T) {
	for name, test := range map[string]struct {
		cfg  Config
		want string
	}{
		"bridge bit, user name alone": {
			Config{Protocol: 4, NoLocal: true, Username: "cli", ClientID: "n", SessionExpiry: time.Hour},
			"\x10\x12\x00\x04MQTT\x84\x80\x00\x1e\x00\x01n\x00\x03cli",
		},
		"3.1.1, will, password": {
			Config{Protocol: 4, Username: "u", Password: "p", ClientID: "n", Will: &Will{Topic: "w", Payload: []byte("d"), QoS: 2}},
			"\x10\x19\x00\x04MQTT\x04\xd6\x00\x1e\x00\x01n\x00\x01w\x00\x01d\x00\x01u\x00\x01p",
		},
		"5.0": {
			Config{Protocol: 5, NoLocal: true, ClientID: "n", SessionExpiry: time.Minute},
			"\x10\x1b\x00\x04MQTT\x05\x00\x00\x1e\x0d\x11\x00\x00\x00\x3c\x21\x04\x00\x27\x01\x00\x00\x00\x00\x01n",
		},
	} {
		test.cfg.URL = "mqtt://h"
		cfg, err := test.cfg.withDefaults()
		require.NoError(t, err)
		assert.Equal(t, test.want, string(packet.Append(nil, connectPacket(cfg), byte(cfg.Protocol))), name)
	}
}

func TestBackoff(t *testing.T) {
	c := &client{cfg: Config{BackoffMin: 100 * time.Millisecond, BackoffMax: time.Second}}
	for attempt, limit := range []time.Duration{100, 200, 400, 800, 1000, 1000} {
		d := c.backoff(attempt)
		assert.LessOrEqual(t, d, limit*time.Millisecond)
		assert.GreaterOrEqual(t, d, limit*time.Millisecond/2)
	}
	assert.LessOrEqual(t, c.backoff(1000), time.Second)
}
