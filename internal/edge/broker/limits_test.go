package broker_test

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/edge/broker"
)

// TestEachLimit: CONNACK announces the limits that it has fields for. Each limit that a client meets is counted, and is in
// the log with the key that raises it, but not each time.
func TestEachLimit(t *testing.T) {
	var lines bytes.Buffer // slog's handler writes one line at a time; it is read after the broker has ended
	s := embedded(t, broker.Config{
		MaxPacket: 5000, MaxClients: 3, MaxQueued: 2, MaxRetained: 2, MaxRetainedBytes: 3000, ReceiveMaximum: 3, TopicAliasMaximum: 4,
		SessionExpiry: time.Minute, Log: slog.New(slog.NewTextHandler(&lines, nil)),
	})
	watch, ack := login(t, s, 5, keeping("watch"))
	for property, value := range map[byte]int{maximumPacketSize: 5000, receiveMaximum: 3, topicAliasMaximum: 4, sessionExpiry: 60} {
		assert.Equal(t, value, ack.number(property, 0), "%#x", property)
	}
	watch.join(1, "queue")
	watch.conn.Close()
	require.Eventually(t, func() bool { return s.stats().Clients == 0 }, patience, time.Millisecond)

	c, _ := login(t, s, 5, hello{id: "queue"})
	for range 4 {
		assert.EqualValues(t, 0, c.publish(message{topic: "queue", qos: 1}).code)
	}
	c.leave()
	for range 2 {
		c, _ = login(t, s, 5, hello{id: "retained"})
		for _, try := range []struct {
			topic, payload string
			code           byte
		}{
			{"r/1", "1", 0}, {"r/1", strings.Repeat("1", 4000), 0x97}, {"r/2", "2", 0}, {"r/3", "3", 0x97}, {"r/2", "changed", 0}, {"r/3", "", 0},
		} {
			assert.Equal(t, try.code, c.publish(message{topic: try.topic, payload: try.payload, qos: 1, retain: true}).code, "%s %.10s", try.topic,
				try.payload)
		}
		c.leave()
	}
	for _, bad := range []struct {
		name string
		code byte
		send func(c *link)
	}{
		{"packet", 0x95, func(c *link) { c.send(message{topic: "t", payload: strings.Repeat("x", 5000)}.encode(5)) }},
		{"receive maximum", 0x93, func(c *link) {
			for id := range uint16(4) {
				c.send(message{topic: "t", qos: 2, id: id + 1}.encode(5))
			}
		}},
		{"topic alias", 0x94, func(c *link) { c.send(message{topic: "t", props: [][]byte{property(topicAlias, 5)}}.encode(5)) }},
	} {
		for range 2 {
			c, _ := login(t, s, 5, hello{id: bad.name})
			bad.send(c)
			before := c.closed()
			assert.Equal(t, bad.code, before[len(before)-1].code, bad.name)
		}
	}
	require.Eventually(t, func() bool { return s.stats().Clients == 0 }, patience, time.Millisecond)
	for _, id := range []string{"1", "2", "3"} {
		login(t, s, 5, hello{id: id})
	}
	for range 2 {
		assert.EqualValues(t, 0x97, dialLink(t, s, 5).connect(hello{id: "one too many"}).code)
	}

	st := s.stats()
	assert.Equal(t, map[string]uint64{"clients": 2, "packet": 2, "queue": 2, "receive_maximum": 2, "retained": 4, "topic_alias": 2}, st.Limits)
	assert.EqualValues(t, 2, st.Dropped)
	assert.EqualValues(t, 2, st.Refused)
	s.stop(t)
	for _, key := range []string{"connections.max", "max_message", "max_queued", "max_retained", "receive_maximum", "topic_alias_maximum"} {
		count := 0
		for line := range strings.Lines(lines.String()) {
			if strings.Contains(line, key) {
				count++
			}
		}
		assert.Equal(t, 1, count, "lines with %s in:\n%s", key, &lines)
	}
}

// TestLossesAreLogged checks that each dropped message is counted, and that a line of the log names its client and topic.
func TestLossesAreLogged(t *testing.T) {
	var lines bytes.Buffer // see TestEachLimit
	s := embedded(t, broker.Config{MaxQueued: 1, SessionExpiry: time.Minute, Log: slog.New(slog.NewTextHandler(&lines, nil))})
	absent := func() {
		require.Eventually(t, func() bool { return s.stats().Clients == 0 }, patience, time.Millisecond)
	}
	for _, id := range []string{"one", "two"} {
		c, _ := login(t, s, 5, keeping(id))
		c.join(1, "to/"+id)
		c.conn.Close()
	}
	absent()
	c, _ := login(t, s, 5, hello{id: "pub"})
	for range 3 {
		for _, topic := range []string{"to/one", "to/two"} {
			assert.EqualValues(t, 0, c.publish(message{topic: topic, qos: 1}).code)
		}
	}
	c.leave()
	require.EqualValues(t, 4, s.stats().Dropped)
	c, _ = login(t, s, 5, hello{id: "one"}) // ends the session, with the message in its queue
	c.leave()
	require.EqualValues(t, 5, s.stats().Dropped)
	small, _ := login(t, s, 5, hello{id: "small", props: [][]byte{property(maximumPacketSize, 100)}})
	small.join(1, "large")
	c, _ = login(t, s, 5, hello{id: "pub"})
	assert.EqualValues(t, 0, c.publish(message{topic: "large", payload: strings.Repeat("x", 200), qos: 1}).code)
	require.Eventually(t, func() bool { return s.stats().Dropped == 6 }, patience, time.Millisecond)
	s.stop(t)
	for _, want := range []string{
		`queue is full (broker.max_queued, broker.max_queued_bytes)" client=one topic=to/one messages=1`,
		`queue is full (broker.max_queued, broker.max_queued_bytes)" client=two topic=to/two messages=1`,
		`session of an absent client has ended" client=one topic=to/one messages=1`,
		`maximum packet size" client=small topic=large messages=1`,
	} {
		assert.Contains(t, lines.String(), want)
	}
}
