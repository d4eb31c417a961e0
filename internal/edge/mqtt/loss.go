package mqtt

import (
	"time"

	"github.com/tripod-run/tripod/internal/loglimit"
)

// lossInterval is the minimum time between two log lines for the same loss, so that messages cannot fill the disk.
const lossInterval = 10 * time.Second

// loss says which messages were dropped, and why.
type loss struct{ topic, reason string }

// Reasons of losses.
const (
	noRoom  = "the queue for the broker is full"
	tooOld  = "waited longer for the broker than the queue keeps messages"
	refused = "refused by the broker, or in flight at each of the last disconnects"
	closing = "still in the queue when the client was closed"
	unread  = "received with QoS 0, and the handler is slow"
)

// reportLoss logs dropped messages, if the limit of the lines allows.
func (c *client) reportLoss(l loss, messages int) {
	l.topic = loglimit.Text(l.topic)
	if messages = c.losses.Add(l, messages, time.Now()); messages > 0 {
		c.cfg.Log.Warn("mqtt: messages dropped", "client", c.cfg.ClientID, "topic", l.topic, "messages", messages, "reason", l.reason)
	}
}
