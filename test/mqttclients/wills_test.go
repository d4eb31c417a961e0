package mqttclients

import (
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// withWill connects a client with a will to topic "will" through a cable, and a subscriber.
func (c *check) withWill(w will, o options) (*cable, *client, *client) {
	c.Helper()
	w.Topic, w.Payload, w.QoS = c.topic("will"), "the will", 1
	o.Will = &w
	line := newCable(c, c.server.port)
	o.Port = line.port()
	return line, c.connect("owner", o), c.clean("sub", c.all())
}

// checkWill: the will is published when the connection is cut.
func checkWill(c *check) {
	line, _, sub := c.withWill(will{}, options{Clean: true})
	assert.Empty(c, payloads(c.mark(sub, sub)))
	line.sever()
	sub.until(c, "the will")
	assert.Equal(c, []message{{Topic: c.topic("will"), Payload: "the will", QoS: 1}}, to(c.topic("will"), sub.all()))
}

// checkWillRetained: a retained will reaches later subscribers, too.
func checkWillRetained(c *check) {
	line, _, sub := c.withWill(will{Retain: true}, options{Clean: true})
	line.sever()
	sub.until(c, "the will")
	late := c.clean("late", c.all())
	late.until(c, "the will")
	assert.Equal(c, []message{{Topic: c.topic("will"), Payload: "the will", QoS: 1, Retain: true}}, late.all())
	sub.send(message{Topic: c.topic("will"), QoS: 1, Retain: true})
}

// checkWillDiscarded: DISCONNECT discards the will.
func checkWillDiscarded(c *check) {
	_, owner, sub := c.withWill(will{}, options{Clean: true})
	owner.end()
	elapse(quiet)
	assert.Empty(c, payloads(c.mark(sub, sub)))
}

// checkWillOnDisconnect: DISCONNECT with reason code 4 publishes the will.
func checkWillOnDisconnect(c *check) {
	_, owner, sub := c.withWill(will{}, options{Clean: true})
	owner.ended = true
	require.NoError(c, owner.disconnect(patient(c), true))
	sub.until(c, "the will")
}

// elapse lets time pass that is the subject itself: an interval of MQTT that has to be over, or in which nothing may happen.
func elapse(d time.Duration) { time.Sleep(d) } // pacing: the interval is the subject

// quiet is the time in which a message that must not arrive would arrive.
const quiet = 300 * time.Millisecond

// delay is that of wills, in seconds. mosquitto looks for them once a second.
const delay = 2

// checkWillDelay: the will is published after its delay.
func checkWillDelay(c *check) {
	line, _, sub := c.withWill(will{Delay: delay}, options{Clean: true, Expiry: 3600})
	start := time.Now()
	line.sever()
	sub.until(c, "the will")
	took := time.Since(start)
	assert.GreaterOrEqual(c, took, delay*time.Second-1100*time.Millisecond)
}

// checkWillDelayReconnected: a client that is back before the delay has passed has left no will.
func checkWillDelayReconnected(c *check) {
	line, owner, sub := c.withWill(will{Delay: delay}, options{Expiry: 3600})
	line.cut()
	owner.reconnected(c, 2)
	elapse((delay + 1) * time.Second)
	assert.Empty(c, payloads(c.mark(sub, sub)))
}
