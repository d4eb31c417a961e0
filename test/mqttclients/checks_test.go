package mqttclients

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// clients are the client implementations, with the versions of the protocol that they have.
var clients = []struct {
	name      string
	start     func(t testing.TB) program
	protocols []int
	webSocket bool
}{
	{"MQTT.js", startMQTTjs, []int{5, 4}, false},
	{"MQTT.js-ws", startMQTTjs, []int{5, 4}, true},
	{"paho-mqtt", startPaho, []int{5, 4}, false},
	{"paho-mqtt-ws", startPaho, []int{5, 4}, true},
	{"aiomqtt", startAiomqtt, []int{5, 4}, false},
	{"paho.golang", startPahoGo, []int{5}, false},
	{"paho.golang-ws", startPahoGo, []int{5}, true},
	{"mosquitto_sub", startTools, []int{5, 4}, false},
}

// skips are the checks that a client cannot express, or at which a client or mosquitto 2.0.11 is at fault with a correct peer.
var skips = []struct {
	test   *regexp.Regexp // client/broker/protocol/check
	reason string
}{
	{regexp.MustCompile(`^mosquitto_sub/.*/NoLocal$`), "mosquitto_pub and mosquitto_sub are different clients"},
	{regexp.MustCompile(`^mosquitto_sub/.*/RetainHandling$`), "mosquitto_sub has no such option"},
	{regexp.MustCompile(`^mosquitto_sub/.*/5/WillDiscarded$`), "mosquitto_sub disconnects with the reason code that publishes the will"},
	{regexp.MustCompile(`^aiomqtt/.*/WillOnDisconnect$`), "aiomqtt has no reason code for disconnecting"},
	{regexp.MustCompile(`^mosquitto_sub/embedded/5/Restart$`),
		"mosquitto_sub ends at any DISCONNECT of a server, also at 0x8b, server shutting down"},
	{regexp.MustCompile(`^mosquitto_sub/mosquitto/5/(Shared|Session|ReceiveMaximum|CutAtLeastOnce|Restart|Burst)$`),
		"mosquitto sends more than the receive maximum of mosquitto_sub, which ends with a protocol error"},
	{regexp.MustCompile(`^MQTT.js(-ws)?/mosquitto/5/ReceiveMaximum$`),
		"mosquitto sends more than the receive maximum, and MQTT.js disconnects"},
	{regexp.MustCompile(`^mosquitto_sub/.*/CutOnce`), "mosquitto_sub loses the message whose PUBCOMP it cannot send"},
	{regexp.MustCompile(`/mosquitto/.*/CutOnceAgain$`), "mosquitto sends PUBLISH again after PUBREC if the connection is lost twice"},
}

// checks are the promises of a broker to its users, with the first version of the protocol that has them.
var checks = []struct {
	name    string
	minimum int
	run     func(*check)
}{
	{"Properties", 4, checkProperties},
	{"Identifier", 5, checkIdentifier},
	{"NoLocal", 5, checkNoLocal},
	{"RetainAsPublished", 5, checkRetainAsPublished},
	{"RetainHandling", 5, checkRetainHandling},
	{"Shared", 4, checkShared},
	{"Retained", 4, checkRetained},
	{"Will", 4, checkWill},
	{"WillRetained", 4, checkWillRetained},
	{"WillDiscarded", 4, checkWillDiscarded},
	{"WillOnDisconnect", 5, checkWillOnDisconnect},
	{"WillDelay", 5, checkWillDelay},
	{"WillDelayReconnected", 5, checkWillDelayReconnected},
	{"MessageExpiry", 5, checkMessageExpiry},
	{"Session", 4, checkSession},
	{"SessionExpiry", 5, checkSessionExpiry},
	{"ReceiveMaximum", 5, checkReceiveMaximum},
	{"CutAtLeastOnce", 4, func(c *check) { checkCut(c, 1, 3) }},
	{"CutOnce", 4, func(c *check) { checkCut(c, 2, 1) }},
	{"CutOnceAgain", 4, func(c *check) { checkCut(c, 2, 3) }},
	{"Restart", 4, checkRestart},
	{"Burst", 4, checkBurst},
}

// TestClients runs each check with each client, with each version of the protocol, against each broker.
func TestClients(t *testing.T) {
	for _, c := range clients {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			p := c.start(t)
			for _, b := range brokers {
				t.Run(b.name, func(t *testing.T) {
					start := func(t testing.TB) *server { return b.start(t, c.webSocket) }
					s := start(t)
					for _, protocol := range c.protocols {
						t.Run(map[int]string{4: "3.1.1", 5: "5"}[protocol], func(t *testing.T) {
							for _, k := range checks {
								if protocol < k.minimum {
									continue
								}
								t.Run(k.name, func(t *testing.T) {
									t.Parallel()
									for _, s := range skips {
										if s.test.MatchString(strings.TrimPrefix(t.Name(), "TestClients/")) {
											t.Skip(s.reason)
										}
									}
									prefix := fmt.Sprint("check", number.Add(1))
									k.run(&check{T: t, program: p, server: s, newServer: start, webSocket: c.webSocket, protocol: protocol, prefix: prefix})
								})
							}
						})
					}
				})
			}
		})
	}
}

// number makes the names of checks unique.
var number atomic.Int64

// check is a running check. Its topics and client identifiers begin with its prefix.
type check struct {
	*testing.T
	program   program
	server    *server                    // shared with other checks
	newServer func(t testing.TB) *server // starts one for this check only
	webSocket bool
	protocol  int
	prefix    string
}

// topic returns a topic of the check, or a filter.
func (c *check) topic(name string) string { return c.prefix + "/" + name }

// client is a connected client.
type client struct {
	*inbox
	connection
	check *check
	ended bool
}

// connect makes a client with a name, and by default with a clean session on the shared broker. It is disconnected when
// the test ends.
func (c *check) connect(name string, o options) *client {
	c.Helper()
	o.Client, o.Protocol, o.Port, o.WebSocket = c.prefix+"-"+name, c.protocol, cmp.Or(o.Port, c.server.port), c.webSocket
	in := newInbox()
	connection, err := c.program.connect(c.T, o, in)
	result := &client{in, connection, c, false}
	c.Cleanup(func() {
		if connection != nil && !result.ended {
			result.end()
		}
	})
	require.NoError(c, err, name)
	return result
}

func (c *check) clean(name string, subscriptions ...subscription) *client {
	c.Helper()
	return c.connect(name, options{Clean: true, Subscriptions: subscriptions})
}

// persistent returns the options of a session that outlives its connections.
func persistent(subscriptions ...subscription) options {
	return options{Expiry: 3600, Subscriptions: subscriptions}
}

// all subscribes to all topics of the check with QoS 2.
func (c *check) all() subscription { return subscription{Filter: c.topic("#"), QoS: 2} }

func (c *client) send(messages ...message) {
	c.check.Helper()
	require.NoError(c.check, c.publish(patient(c.check), messages...))
}

// end disconnects before the test ends.
func (c *client) end() {
	c.check.Helper()
	c.ended = true
	require.NoError(c.check, c.disconnect(patient(c.check), false))
}

// mark publishes a message that ends a sequence, and returns what the receiver has got before it.
func (c *check) mark(from *client, to *client) []message {
	c.Helper()
	payload := fmt.Sprint("mark ", number.Add(1))
	from.send(message{Topic: c.topic("mark"), Payload: payload, QoS: 2})
	return to.until(c, payload)
}

// numbered returns messages to a topic with the payloads from first on.
func numbered(topic string, qos byte, first, count int) (messages []message) {
	for i := range count {
		messages = append(messages, message{Topic: topic, QoS: qos, Payload: fmt.Sprint(first + i)})
	}
	return messages
}

// to returns the messages to a topic.
func to(topic string, messages []message) (result []message) {
	for _, m := range messages {
		if m.Topic == topic {
			result = append(result, m)
		}
	}
	return result
}

// assertOnce compares messages with what numbered returns from 0 on, in any order. A failure lists what is missing or arrived
// twice.
func assertOnce(t testing.TB, count int, got []message) {
	t.Helper()
	times := map[string]int{}
	for _, m := range got {
		times[m.Payload]++
	}
	var faults []string
	for n := range count {
		if k := times[strconv.Itoa(n)]; k != 1 {
			faults = append(faults, fmt.Sprintf("%d arrived %d times", n, k))
		}
	}
	assert.Empty(t, faults)
	assert.Len(t, times, count)
}

// assertInOrder is like assertOnce, and compares the order.
func assertInOrder(t testing.TB, count int, got []message) {
	t.Helper()
	assertOnce(t, count, got)
	var faults []string
	for n := 1; n < len(got); n++ {
		a, _ := strconv.Atoi(got[n-1].Payload) // assertOnce has compared the payloads
		if b, _ := strconv.Atoi(got[n].Payload); a > b {
			faults = append(faults, fmt.Sprintf("%d after %d", b, a))
		}
	}
	assert.Empty(t, faults)
}

// payloads returns the payloads in one string, which is readable in a failure.
func payloads(messages []message) string {
	var all []string
	for _, m := range messages {
		all = append(all, m.Payload)
	}
	return strings.Join(all, " ")
}

// checkProperties: a message arrives with the QoS, payload and properties with which it was published.
func checkProperties(c *check) {
	sub := c.clean("sub", c.all())
	pub := c.clean("pub")
	for qos := range byte(3) {
		sent := message{Topic: c.topic(fmt.Sprint("q", qos)), Payload: "grüße, 世界", QoS: qos}
		if c.protocol == 5 {
			sent.User = map[string]string{"key": "value", "städte": "köln"}
			sent.ContentType, sent.ResponseTopic, sent.Correlation = "text/plain", c.topic("reply"), "request 7"
			sent.Expiry, sent.UTF8 = 3600, true
		}
		pub.send(sent)
		pub.send(message{Topic: c.topic(fmt.Sprint("plain", qos)), Payload: fmt.Sprint("end ", qos), QoS: qos})
		got := to(sent.Topic, sub.until(c, fmt.Sprint("end ", qos)))
		require.Len(c, got, 1)
		if c.protocol == 5 {
			assert.InDelta(c, sent.Expiry, got[0].Expiry, 30)
			got[0].Expiry = sent.Expiry
		}
		assert.Equal(c, sent, got[0])
	}
	want := []message{{Topic: c.topic("plain2"), Payload: "end 2", QoS: 2}}
	assert.Equal(c, want, to(c.topic("plain2"), sub.all()), "no properties of another message")
}

// checkIdentifier: each message has the identifier of the subscription that it matches.
func checkIdentifier(c *check) {
	sub := c.clean("sub", subscription{Filter: c.topic("a/#"), QoS: 2, Identifier: 268_435_455})
	pub := c.clean("pub")
	pub.send(message{Topic: c.topic("a/1"), Payload: "end", QoS: 1})
	sub.until(c, "end")
	assert.Equal(c, 268_435_455, sub.all()[0].Identifier)
}

// checkNoLocal: a client does not get its own messages by a subscription with No Local.
func checkNoLocal(c *check) {
	both := c.clean("both", subscription{Filter: c.topic("#"), QoS: 2, NoLocal: true})
	other := c.clean("other")
	both.send(message{Topic: c.topic("x"), Payload: "own", QoS: 2})
	assert.Empty(c, payloads(c.mark(other, both)))
}

// checkRetainAsPublished: by default a message to an existing subscription is not marked as retained.
func checkRetainAsPublished(c *check) {
	plain := c.clean("plain", c.all())
	as := c.clean("as", subscription{Filter: c.topic("#"), QoS: 2, RetainAsPublished: true})
	pub := c.clean("pub")
	pub.send(message{Topic: c.topic("x"), Payload: "end", QoS: 1, Retain: true})
	plain.until(c, "end")
	as.until(c, "end")
	assert.False(c, plain.all()[0].Retain)
	assert.True(c, as.all()[0].Retain)
	pub.send(message{Topic: c.topic("x"), QoS: 1, Retain: true})
}

// checkRetainHandling: 2 means that no retained messages are sent on subscribing, 1 only for a new subscription.
func checkRetainHandling(c *check) {
	pub := c.clean("pub")
	pub.send(message{Topic: c.topic("x"), Payload: "kept", QoS: 1, Retain: true})
	never := c.clean("never", subscription{Filter: c.topic("#"), QoS: 2, RetainHandling: 2})
	assert.Empty(c, payloads(c.mark(pub, never)))
	twice := subscription{Filter: c.topic("#"), QoS: 2, RetainHandling: 1}
	fresh := c.clean("new", twice, twice)
	fresh.until(c, "kept")
	assert.Equal(c, "kept", payloads(c.mark(pub, fresh)))
	pub.send(message{Topic: c.topic("x"), QoS: 1, Retain: true})
}

// checkShared: each message reaches one of the clients of a shared subscription, and each client gets some.
func checkShared(c *check) {
	shared := subscription{Filter: "$share/group/" + c.topic("#"), QoS: 2}
	mark := subscription{Filter: c.topic("mark"), QoS: 2}
	a, b := c.clean("a", shared, mark), c.clean("b", shared, mark)
	pub := c.clean("pub")
	const count = 200
	pub.send(numbered(c.topic("x"), 2, 0, count)...)
	c.mark(pub, a)
	c.mark(pub, b)
	gotA, gotB := to(c.topic("x"), a.all()), to(c.topic("x"), b.all())
	assertOnce(c, count, append(slices.Clone(gotA), gotB...))
	assert.NotEmpty(c, gotA)
	assert.NotEmpty(c, gotB)
}

// checkRetained: a later subscriber gets the last retained message, marked as such, until an empty one clears it.
func checkRetained(c *check) {
	pub := c.clean("pub")
	for _, payload := range []string{"first", "second"} {
		pub.send(message{Topic: c.topic("x"), Payload: payload, QoS: 1, Retain: true})
	}
	early := c.clean("early", c.all())
	early.until(c, "second")
	got := c.mark(pub, early)
	require.Equal(c, "second", payloads(got))
	assert.True(c, got[0].Retain)
	assert.Equal(c, byte(1), got[0].QoS)
	pub.send(message{Topic: c.topic("x"), QoS: 1, Retain: true})
	got = to(c.topic("x"), c.mark(pub, early))
	require.Len(c, got, 2, "the empty message reaches the subscriber")
	assert.False(c, got[1].Retain)
	assert.Empty(c, got[1].Payload)
	late := c.clean("late", c.all())
	assert.Empty(c, payloads(c.mark(pub, late)))
}

// checkMessageExpiry: a message that has expired is not sent to a session that resumes.
func checkMessageExpiry(c *check) {
	away := c.connect("away", persistent(c.all()))
	away.end()
	pub := c.clean("pub")
	pub.send(message{Topic: c.topic("x"), Payload: "short", QoS: 1, Expiry: 1})
	pub.send(message{Topic: c.topic("x"), Payload: "long", QoS: 1, Expiry: 3600})
	elapse(2500 * time.Millisecond)
	back := c.connect("away", persistent(c.all()))
	back.until(c, "long")
	got := c.mark(pub, back)
	require.Equal(c, "long", payloads(got))
	assert.Less(c, got[0].Expiry, uint32(3600), "without the time in the queue")
	assert.Greater(c, got[0].Expiry, uint32(3500))
}

// checkSession: a persistent session gets what was published while its client was away, in order. With QoS 2, each
// message arrives once.
func checkSession(c *check) {
	o := persistent(c.all())
	before := c.connect("away", o)
	assertSession(c, false, before.reconnected(c, 1))
	before.end()
	pub := c.clean("pub")
	const count = 50
	for qos := range byte(2) {
		pub.send(numbered(c.topic(fmt.Sprint("q", qos+1)), qos+1, 0, count)...)
	}
	o.Subscriptions = nil
	back := c.connect("away", o)
	assertSession(c, true, back.reconnected(c, 1))
	got := c.mark(pub, back)
	for qos := range byte(2) {
		topic := c.topic(fmt.Sprint("q", qos+1))
		assertInOrder(c, count, to(topic, got))
	}
}

// assertSession compares whether the broker had a session, if the client reports it.
func assertSession(t testing.TB, want bool, got *bool) {
	t.Helper()
	if got != nil {
		assert.Equal(t, want, *got, "session present")
	}
}

// checkSessionExpiry: a session ends when its client is away for longer than its expiry.
func checkSessionExpiry(c *check) {
	away := c.connect("away", options{Expiry: 1, Subscriptions: []subscription{c.all()}})
	away.end()
	pub := c.clean("pub")
	pub.send(message{Topic: c.topic("x"), Payload: "lost", QoS: 1})
	elapse(3500 * time.Millisecond) // mosquitto looks for expired sessions once a second
	back := c.connect("away", persistent(c.all()))
	assertSession(c, false, back.reconnected(c, 1))
	assert.Empty(c, payloads(c.mark(pub, back)))
}

// checkReceiveMaximum: a client that accepts few messages at a time gets all, those of its session and new ones. Some clients
// end the connection if they get more at a time.
func checkReceiveMaximum(c *check) {
	o := persistent(c.all())
	o.ReceiveMaximum = 5
	away := c.connect("away", o)
	away.end()
	pub := c.clean("pub")
	const count = 100
	x := c.topic("x")
	pub.send(numbered(x, 2, 0, count)...)
	back := c.connect("away", o)
	pub.send(numbered(x, 2, count, count)...)
	assertInOrder(c, 2*count, c.mark(pub, back))
}

// checkCut: with a persistent session, each message arrives with QoS 1, and arrives once with QoS 2, although the connection
// is cut while they arrive. Most clients deliver on PUBREL, so their order depends on what was on the way.
func checkCut(c *check, qos byte, cuts int) {
	line := newCable(c, c.server.port)
	o := persistent(c.all())
	o.Port = line.port()
	sub := c.connect("sub", o)
	pub := c.clean("pub")
	const batch, part = 300, 30
	for n := range cuts {
		before := len(sub.all())
		sent := make(chan error, 1)
		go func() { sent <- pub.publish(patient(c), numbered(c.topic("x"), qos, n*batch, batch)...) }()
		sub.wait(c, "a part of the messages", func(messages []message, _ []*bool) bool { return len(messages) >= before+part })
		line.cut()
		assertSession(c, true, sub.reconnected(c, n+2))
		require.NoError(c, <-sent)
	}
	c.mark(pub, sub)
	var got []message
	seen := map[string]bool{}
	for _, m := range to(c.topic("x"), sub.all()) {
		if qos == 2 || !seen[m.Payload] {
			got = append(got, m)
		}
		seen[m.Payload] = true
	}
	assertOnce(c, cuts*batch, got)
}

// checkRestart: when the broker is restarted, clients reconnect by themselves, and sessions continue, also those of clients
// that are away. Retained messages stay.
func checkRestart(c *check) {
	c.server = c.newServer(c)
	pub := c.connect("pub", persistent())
	away := c.connect("away", persistent(c.all()))
	away.end()
	sub := c.connect("sub", persistent(c.all()))
	const count = 20
	x := c.topic("x")
	pub.send(numbered(x, 2, 0, count)...)
	pub.send(message{Topic: c.topic("kept"), Payload: "kept", QoS: 1, Retain: true})
	sub.until(c, "kept")
	c.server.restart(c)
	assertSession(c, true, sub.reconnected(c, 2))
	pub.reconnected(c, 2)
	pub.send(numbered(x, 2, count, count)...)
	assertInOrder(c, 2*count, to(x, c.mark(pub, sub)))
	back := c.connect("away", persistent())
	assertSession(c, true, back.reconnected(c, 1))
	assertInOrder(c, 2*count, to(x, c.mark(pub, back)))
	late := c.clean("late", c.all())
	late.until(c, "kept")
}

// checkBurst: a thousand messages with QoS 2 that are published without waiting arrive once each, in order.
func checkBurst(c *check) {
	sub := c.clean("sub", c.all())
	pub := c.clean("pub")
	const count = 1000
	pub.send(numbered(c.topic("x"), 2, 0, count)...)
	assertInOrder(c, count, c.mark(pub, sub))
}
