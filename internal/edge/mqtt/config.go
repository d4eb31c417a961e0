package mqtt

import (
	"cmp"
	"crypto/rand"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/tlsfile"
)

// maxPacketLimit is the largest remaining length that MQTT can encode (MQTT 5.0 §1.5.5), in bytes.
const maxPacketLimit = 268_435_455

// withDefaults validates the fields, and sets missing fields to their defaults.
func (c Config) withDefaults() (Config, error) {
	if _, _, err := c.address(); err != nil {
		return c, err
	}
	if c.Protocol == 0 {
		c.Protocol = 5
	}
	if c.Protocol != 4 && c.Protocol != 5 {
		return c, fmt.Errorf("mqtt: protocol %d is neither 5 nor 4 (MQTT 3.1.1): %w", c.Protocol, errdefs.ErrInvalidArgument)
	}
	if c.Handler == nil {
		c.Handler = func(Message) {}
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.ClientID == "" {
		var id [8]byte
		_, _ = rand.Read(id[:]) // never fails (crypto/rand)
		c.ClientID, c.SessionExpiry = "tripod-"+hex.EncodeToString(id[:]), 0
	}
	c.KeepAlive = cmp.Or(max(c.KeepAlive, 0), 30*time.Second)
	c.ConnectTimeout = cmp.Or(max(c.ConnectTimeout, 0), 10*time.Second)
	c.WriteTimeout = cmp.Or(max(c.WriteTimeout, 0), 20*time.Second)
	c.BackoffMin = cmp.Or(max(c.BackoffMin, 0), 200*time.Millisecond)
	c.BackoffMax = max(cmp.Or(max(c.BackoffMax, 0), 15*time.Second), c.BackoffMin)
	c.QueueTTL = cmp.Or(max(c.QueueTTL, 0), time.Hour)
	c.QueueMessages = cmp.Or(max(c.QueueMessages, 0), 10_000)
	c.QueueBytes = cmp.Or(max(c.QueueBytes, 0), 64<<20)
	c.InboxMessages = cmp.Or(max(c.InboxMessages, 0), 10_000)
	c.InboxBytes = cmp.Or(max(c.InboxBytes, 0), 64<<20)
	c.MaxPacket = min(cmp.Or(max(c.MaxPacket, 0), 16<<20), maxPacketLimit)
	if w := c.Will; w != nil {
		if err := checkTopic(w.Topic, w.QoS); err != nil {
			return c, fmt.Errorf("mqtt: last will: %w", err)
		}
		if len(w.Payload) > 65_535 {
			return c, fmt.Errorf("mqtt: the last will's payload has %d bytes, more than 65535: %w", len(w.Payload), errdefs.ErrInvalidArgument)
		}
	}
	return c, nil
}

// address returns the URL's host and port, and whether the URL asks for TLS.
func (c Config) address() (hostport string, secure bool, err error) {
	u, err := url.Parse(c.URL)
	if err != nil || u.Hostname() == "" {
		return "", false, fmt.Errorf("mqtt: broker %q is not a URL like mqtt://HOST:1883 or mqtts://HOST:8883: %w", c.URL,
			errdefs.ErrInvalidArgument)
	}
	port, known := map[string]string{"mqtt": "1883", "mqtts": "8883"}[u.Scheme]
	if !known {
		return "", false, fmt.Errorf("mqtt: broker %q: unknown scheme %q; use mqtt:// or mqtts://: %w", c.URL, u.Scheme,
			errdefs.ErrInvalidArgument)
	}
	return net.JoinHostPort(u.Hostname(), cmp.Or(u.Port(), port)), u.Scheme == "mqtts", nil
}

// config returns the TLS configuration. It is called at each connect, so renewed certificates take effect without a
// restart.
func (t TLS) config(host string) (*tls.Config, error) {
	conf, err := tlsfile.Pair{Certificate: t.Cert, Key: t.Key}.Client(t.CA)
	if err != nil {
		return nil, fmt.Errorf("mqtt: %w", err)
	}
	conf.ServerName = cmp.Or(t.ServerName, host)
	return conf, nil
}

// checkTopic checks the topic and the QoS of a message (MQTT 5.0 §3.3.2.1, §4.7).
func checkTopic(topic string, qos byte) error {
	return errors.Join(channel.ValidTopic(topic), checkQoS(qos))
}

// checkFilter checks the filter and the QoS of a subscription (MQTT 5.0 §4.7.1).
func checkFilter(filter string, qos byte) error {
	return errors.Join(channel.ValidFilter(filter), checkQoS(qos))
}

func checkQoS(qos byte) error {
	if qos > 2 {
		return fmt.Errorf("QoS %d is not 0, 1 or 2: %w", qos, errdefs.ErrInvalidArgument)
	}
	return nil
}
