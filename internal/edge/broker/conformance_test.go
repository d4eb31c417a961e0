package broker_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/edge/broker"
	"github.com/tripod-run/tripod/internal/edge/mqtt"
)

// TestBothBrokers holds our client, in both versions, and both brokers to the same checks.
func TestBothBrokers(t *testing.T) {
	for name, start := range map[string]func(t testing.TB) *server{
		"embedded":  func(t testing.TB) *server { return embedded(t, broker.Config{}) },
		"mosquitto": mosquittoServer,
	} {
		for _, protocol := range []int{5, 4} {
			for _, check := range []struct {
				name string
				run  func(t *testing.T, s *server, protocol int)
			}{
				{"qos", checkQoS}, {"no local", checkNoLocal}, {"retained", checkRetained}, {"will", checkWill}, {"session", checkSession},
				{"large", checkLarge}, {"flap", checkFlap}, {"take over", checkTakeOver}, {"wildcards", checkWildcards}, {"restart", checkRestart},
			} {
				t.Run(fmt.Sprintf("%s/%d/%s", name, protocol, check.name), func(t *testing.T) {
					t.Parallel()
					check.run(t, start(t), protocol)
				})
			}
		}
	}
}

func checkQoS(t *testing.T, s *server, protocol int) {
	ctx := patient(t)
	sub, in := connect(t, s, mqtt.Config{Protocol: protocol})
	pub, _ := connect(t, s, mqtt.Config{Protocol: protocol})
	for granted := range byte(3) {
		require.NoError(t, sub.Subscribe(ctx, fmt.Sprintf("q/%d", granted), granted, mqtt.SubscribeOptions{}))
		for qos := range byte(3) {
			require.NoError(t, pub.Publish(ctx, fmt.Sprintf("q/%d", granted), qos, false, fmt.Appendf(nil, "%d to %d", qos, granted)))
			in.wait(t, fmt.Sprintf("q/%d q%d %d to %d", granted, min(qos, granted), qos, granted))
		}
	}
	require.NoError(t, pub.Publish(ctx, "q/2", 2, false, nil))
	assert.Len(t, in.wait(t, "q/2 q2 "), 10, "each came once")
	require.NoError(t, sub.Unsubscribe(ctx, "q/1"))
	require.NoError(t, pub.Publish(ctx, "q/1", 1, false, []byte("nobody")))
	require.NoError(t, pub.Publish(ctx, "q/2", 1, false, []byte("end")))
	assert.Len(t, in.wait(t, "end"), 11)
	assert.Zero(t, pub.Stats().Dropped+pub.Stats().Lost)
}

func checkNoLocal(t *testing.T, s *server, protocol int) {
	ctx := patient(t)
	node, in := connect(t, s, mqtt.Config{Protocol: protocol, NoLocal: true})
	other, theirs := connect(t, s, mqtt.Config{Protocol: 9 - protocol})
	for _, c := range []mqtt.Client{node, other} {
		require.NoError(t, c.Subscribe(ctx, "app/#", 1, mqtt.SubscribeOptions{}))
	}
	require.NoError(t, node.Publish(ctx, "app/x", 1, false, []byte("mine")))
	theirs.wait(t, "app/x q1 mine")
	require.NoError(t, other.Publish(ctx, "app/x", 1, false, []byte("theirs")))
	assert.Equal(t, []string{"app/x q1 theirs"}, in.wait(t, "theirs"), "its own message does not come back")
}

func checkRetained(t *testing.T, s *server, protocol int) {
	ctx := patient(t)
	pub, _ := connect(t, s, mqtt.Config{Protocol: protocol})
	require.NoError(t, pub.Publish(ctx, "r/kept", 1, true, []byte("kept")))
	require.NoError(t, pub.Publish(ctx, "r/gone", 1, true, []byte("gone")))
	require.NoError(t, pub.Publish(ctx, "r/gone", 1, true, nil))
	retained := make(chan mqtt.Message, 10)
	sub, _ := connect(t, s, mqtt.Config{Protocol: protocol, Handler: func(m mqtt.Message) { retained <- m }})
	require.Eventually(t, func() bool { return pub.Stats().Queued == 0 }, patience, time.Millisecond)
	for range 2 { // subscribing again asks for them again
		require.NoError(t, sub.Subscribe(ctx, "r/#", 1, mqtt.SubscribeOptions{}))
		assert.Equal(t, mqtt.Message{Topic: "r/kept", Payload: []byte("kept"), QoS: 1, Retain: true}, <-retained)
	}
	require.NoError(t, pub.Publish(ctx, "r/live", 1, false, []byte("live")))
	assert.Equal(t, mqtt.Message{Topic: "r/live", Payload: []byte("live"), QoS: 1}, <-retained)
}

func checkWill(t *testing.T, s *server, protocol int) {
	ctx := patient(t)
	watch, in := connect(t, s, mqtt.Config{Protocol: protocol})
	require.NoError(t, watch.Subscribe(ctx, "reg/+", 2, mqtt.SubscribeOptions{}))
	will := func(name string) mqtt.Config {
		return mqtt.Config{Protocol: protocol, ClientID: name, Will: &mqtt.Will{Topic: "reg/" + name, Payload: []byte("delete"), QoS: 2}}
	}
	polite, _ := connect(t, s, will("polite"))
	require.NoError(t, polite.Close(ctx))
	killed := dialRaw(t, s.address)
	killed.send(connectPacket(byte(protocol), 0x02|0x04|2<<3, "killed", "reg/killed", "delete"))
	killed.read(t)
	killed.conn.Close()
	assert.Equal(t, []string{"reg/killed q2 delete"}, in.wait(t, "delete"), "only the killed client's will is published")
	empty := dialRaw(t, s.address)
	empty.send(connectPacket(byte(protocol), 0x02|0x04|1<<3, "empty", "reg/empty", ""))
	empty.read(t)
	empty.conn.Close()
	in.wait(t, "reg/empty q1 ")
}

func checkSession(t *testing.T, s *server, protocol int) {
	ctx := patient(t)
	cfg := mqtt.Config{Protocol: protocol, ClientID: "node", SessionExpiry: time.Hour}
	first, _ := connect(t, s, cfg)
	require.NoError(t, first.Subscribe(ctx, "control/node/+", 2, mqtt.SubscribeOptions{}))
	require.NoError(t, first.Close(ctx))
	pub, _ := connect(t, s, mqtt.Config{Protocol: protocol})
	var want []string
	for i := range 50 {
		qos := byte(2 - i/25) // between messages of different QoS there is no order (MQTT 5.0 §4.6)
		require.NoError(t, pub.Publish(ctx, fmt.Sprintf("control/node/%d", qos), qos, false, fmt.Appendf(nil, "%02d", i)))
		want = append(want, fmt.Sprintf("control/node/%d q%d %02d", qos, qos, i))
	}
	require.Eventually(t, func() bool { return pub.Stats().Queued == 0 }, patience, time.Millisecond)
	_, in := connect(t, s, cfg)
	in.wait(t, "24")
	in.wait(t, "49")
	got := in.all()
	slices.SortStableFunc(got, func(a, b string) int { return strings.Compare(b[:len("control/node/2")], a[:len("control/node/2")]) })
	assert.Equal(t, want, got, "in their order, each once")
}

func checkLarge(t *testing.T, s *server, protocol int) {
	ctx := patient(t)
	sizes := make(chan int, 3)
	sub, _ := connect(t, s, mqtt.Config{Protocol: protocol, Handler: func(m mqtt.Message) { sizes <- len(m.Payload) }})
	require.NoError(t, sub.Subscribe(ctx, "big", 2, mqtt.SubscribeOptions{}))
	pub, _ := connect(t, s, mqtt.Config{Protocol: protocol})
	for qos := range byte(3) {
		require.NoError(t, pub.Publish(ctx, "big", qos, false, make([]byte, 1<<20)))
		require.Equal(t, 1<<20, <-sizes)
	}
	require.Error(t, pub.Publish(ctx, "big", 1, false, make([]byte, 17<<20)))
	require.True(t, pub.Connected())
}

// checkFlap stops and starts the broker while messages are published.
func checkFlap(t *testing.T, s *server, protocol int) {
	ctx := patient(t)
	connected := make(chan bool, 10)
	sub, in := connect(t, s, mqtt.Config{Protocol: protocol, ClientID: "sub", SessionExpiry: time.Hour})
	require.NoError(t, sub.Subscribe(ctx, "flap", 1, mqtt.SubscribeOptions{}))
	pub, _ := connect(t, s,
		mqtt.Config{Protocol: protocol, ClientID: "pub", SessionExpiry: time.Hour,
			OnConnect: func(_ context.Context, resumed bool) { connected <- resumed }})
	<-connected
	for round := range 3 {
		require.NoError(t, pub.Publish(ctx, "flap", 1, false, fmt.Appendf(nil, "before %d", round)))
		in.wait(t, fmt.Sprintf("before %d", round))
		s.stop(t)
		require.Eventually(t, func() bool { return !pub.Connected() }, patience, time.Millisecond)
		for i := range 20 {
			require.NoError(t, pub.Publish(ctx, "flap", 1, false, fmt.Appendf(nil, "away %d %d", round, i)), "queued")
		}
		require.Error(t, pub.Publish(ctx, "flap", 0, false, []byte("lost")), "there is no broker, and QoS 0 is not queued")
		s.start(t)
		assert.True(t, <-connected, "the broker has kept the session")
		in.wait(t, fmt.Sprintf("away %d 19", round))
	}
	seen := map[string]bool{}
	for _, m := range in.all() {
		seen[m] = true
	}
	for round := range 3 {
		assert.True(t, seen[fmt.Sprintf("flap q1 before %d", round)], "before %d", round)
		for i := range 20 {
			assert.True(t, seen[fmt.Sprintf("flap q1 away %d %d", round, i)], "away %d %d", round, i)
		}
	}
	assert.Equal(t, uint64(3), pub.Stats().Lost)
	assert.Zero(t, pub.Stats().Dropped)
}

func checkTakeOver(t *testing.T, s *server, protocol int) {
	ctx := patient(t)
	lost := make(chan error, 10)
	one, _ := connect(t, s,
		mqtt.Config{Protocol: protocol, ClientID: "same", BackoffMin: time.Hour, OnDisconnect: func(err error) { lost <- err }})
	two, in := connect(t, s, mqtt.Config{Protocol: protocol, ClientID: "same"})
	require.Error(t, <-lost)
	require.NoError(t, one.Close(ctx))
	require.NoError(t, two.Subscribe(ctx, "x", 1, mqtt.SubscribeOptions{}))
	require.NoError(t, two.Publish(ctx, "x", 1, false, []byte("alive")))
	in.wait(t, "alive")
}

func checkWildcards(t *testing.T, s *server, protocol int) {
	ctx := patient(t)
	sub, in := connect(t, s, mqtt.Config{Protocol: protocol})
	require.NoError(t, sub.Subscribe(ctx, "w/+/a", 1, mqtt.SubscribeOptions{}))
	require.NoError(t, sub.Subscribe(ctx, "v/#", 1, mqtt.SubscribeOptions{}))
	for _, bad := range []string{"", "a#", "#/a", "a+/b", "a/#/b", "nul\x00", "\xff"} {
		require.Error(t, sub.Subscribe(ctx, bad, 1, mqtt.SubscribeOptions{}), "%q", bad)
	}
	for _, topic := range []string{"w/1/a", "w/1/b", "w/1/2/a", "v", "v/1/2", "x"} {
		require.NoError(t, sub.Publish(ctx, topic, 1, false, []byte("m")))
	}
	for _, bad := range []string{"", "w/+", "w/#", strings.Repeat("x", 70_000)} {
		require.Error(t, sub.Publish(ctx, bad, 1, false, nil), "%.10q", bad)
	}
	require.NoError(t, sub.Publish(ctx, "w/end/a", 1, false, []byte("end")))
	assert.Equal(t, []string{"w/1/a q1 m", "v q1 m", "v/1/2 q1 m", "w/end/a q1 end"}, in.wait(t, "end"))
	assert.True(t, sub.Connected(), "invalid topics were not sent to the broker")
}

// checkRestart checks that retained messages and the session of a disconnected client survive a restart of the broker.
func checkRestart(t *testing.T, s *server, protocol int) {
	ctx := patient(t)
	cfg := mqtt.Config{Protocol: protocol, ClientID: "node", SessionExpiry: time.Hour}
	node, _ := connect(t, s, cfg)
	require.NoError(t, node.Subscribe(ctx, "control/#", 2, mqtt.SubscribeOptions{}))
	require.NoError(t, node.Close(ctx))
	pub, _ := connect(t, s, mqtt.Config{Protocol: protocol})
	require.NoError(t, pub.Publish(ctx, "desired", 1, true, []byte("document")))
	require.NoError(t, pub.Publish(ctx, "control/node", 2, false, []byte("create")))
	require.NoError(t, pub.Close(ctx))
	s.stop(t)
	s.start(t)
	again, in := connect(t, s, cfg)
	in.wait(t, "control/node q2 create")
	require.NoError(t, again.Subscribe(ctx, "desired", 1, mqtt.SubscribeOptions{}))
	in.wait(t, "desired q1 document")
}
