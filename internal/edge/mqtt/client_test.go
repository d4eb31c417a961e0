package mqtt_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/edge/broker"
	"github.com/tripod-run/tripod/internal/edge/mqtt"
	"github.com/tripod-run/tripod/test/mosquitto"
)

func serve(t *testing.T, address string) (broker.Broker, string) {
	b, err := broker.New(broker.Config{Address: address})
	require.NoError(t, err)
	t.Cleanup(func() { b.Close(patient(t)) })
	return b, b.URL()
}

// TestAwayAtStart: a client can be made, used and closed without a broker, and connects once there is one.
func TestAwayAtStart(t *testing.T) {
	address := mosquitto.FreeAddress(t)
	got, connected := make(chan mqtt.Message, 10), make(chan bool, 10)
	cfg := mqtt.Config{URL: "mqtt://" + address, Handler: func(m mqtt.Message) { got <- m },
		OnConnect: func(_ context.Context, resumed bool) { connected <- resumed }}
	c := start(t, cfg)
	ctx := patient(t)
	require.NoError(t, c.Subscribe(ctx, "a/#", 1, mqtt.SubscribeOptions{}))
	require.NoError(t, c.Subscribe(ctx, "b", 1, mqtt.SubscribeOptions{}))
	require.NoError(t, c.Unsubscribe(ctx, "b"))
	require.NoError(t, c.Unsubscribe(ctx, "never"))
	require.NoError(t, c.Publish(ctx, "b", 1, false, []byte("not subscribed")))
	require.NoError(t, c.Publish(ctx, "a/1", 2, false, []byte("early")))
	require.ErrorIs(t, c.Publish(ctx, "a/1", 0, false, nil), errdefs.ErrUnavailable)
	assert.False(t, c.Connected())
	assert.Equal(t, mqtt.Stats{Queued: 2, Lost: 1}, c.Stats())

	never := start(t, cfg)
	require.NoError(t, never.Publish(ctx, "a/1", 1, false, nil))
	require.NoError(t, never.Close(ctx))
	assert.Equal(t, uint64(1), never.Stats().Dropped)

	serve(t, address)
	assert.Equal(t, "early", string((<-got).Payload))
	assert.False(t, <-connected)
	assert.True(t, c.Connected())
}

// TestSlowHandler: with QoS 1 the broker waits and nothing is lost; with QoS 0 the oldest messages are dropped and
// counted. The connection survives for much longer than the keep-alive.
func TestSlowHandler(t *testing.T) {
	b, url := serve(t, "127.0.0.1:0")
	ctx := patient(t)
	free := make(chan struct{})
	var first atomic.Bool
	got := make(chan mqtt.Message, 5000)
	slow := start(t, mqtt.Config{URL: url, KeepAlive: 3 * time.Second, InboxMessages: 10, Handler: func(m mqtt.Message) {
		if first.CompareAndSwap(false, true) {
			<-free
		}
		got <- m
	}})
	require.NoError(t, slow.WaitConnected(ctx))
	require.NoError(t, slow.Subscribe(ctx, "t/+", 1, mqtt.SubscribeOptions{}))
	pub := start(t, mqtt.Config{URL: url})
	require.NoError(t, pub.WaitConnected(ctx))
	for i := range 2000 {
		require.NoError(t, pub.Publish(ctx, "t/1", 1, false, fmt.Append(nil, i)))
	}
	for i := range 50 {
		require.NoError(t, pub.Publish(ctx, "t/0", 0, false, fmt.Append(nil, i)))
	}
	blocked := time.Now()
	require.Eventually(t, func() bool { return slow.Stats().Inbox >= 1023 && time.Since(blocked) > 8*time.Second }, patience,
		10*time.Millisecond)
	assert.True(t, slow.Connected())
	assert.LessOrEqual(t, slow.Stats().Inbox, 1024+10, "bounded by the receive maximum and InboxMessages")
	close(free)
	next := 0
	for next < 2000 {
		select {
		case m := <-got:
			if m.QoS == 1 {
				require.Equal(t, fmt.Sprint(next), string(m.Payload))
				next++
			}
		case <-ctx.Done():
			require.Failf(t, "message did not come", "%d; subscriber %+v publisher %+v broker %+v", next, slow.Stats(), pub.Stats(), b.Stats())
		}
	}
	assert.Equal(t, uint64(1), slow.Stats().Connects)
	require.Eventually(t, func() bool { s := slow.Stats(); return s.Received+s.Lost == 2050 }, patience, time.Millisecond)
}

// TestReconnect: many subscriptions are renewed, except those removed meanwhile; OnConnect is called for each
// connection, one at a time, with a context that ends with the connection.
func TestReconnect(t *testing.T) {
	b, url := serve(t, mosquitto.FreeAddress(t))
	ctx := patient(t)
	got := make(chan string, 1000)
	ended := make(chan struct{}, 10)
	var running atomic.Int32
	lost := make(chan error, 10)
	c := start(t, mqtt.Config{
		URL: url, ClientID: "n", SessionExpiry: time.Hour,
		Handler: func(m mqtt.Message) { got <- m.Topic },
		OnConnect: func(ctx context.Context, _ bool) {
			assert.Equal(t, int32(1), running.Add(1))
			<-ctx.Done()
			running.Add(-1)
			ended <- struct{}{}
		},
		OnDisconnect: func(err error) { lost <- err },
	})
	require.NoError(t, c.WaitConnected(ctx))
	const filters = 300
	for i := range filters {
		require.NoError(t, c.Subscribe(ctx, fmt.Sprint("f/", i), 1, mqtt.SubscribeOptions{}))
	}
	for range 3 {
		require.Eventually(t, func() bool { return running.Load() == 1 }, patience, time.Millisecond)
		require.NoError(t, b.Close(ctx))
		<-lost
		<-ended
		require.NoError(t, c.Unsubscribe(ctx, "f/0"))
		require.NoError(t, c.Subscribe(ctx, "f/1", 2, mqtt.SubscribeOptions{}))
		b, _ = serve(t, b.Addresses()[0]) // in memory, so the session is lost
		require.NoError(t, c.WaitConnected(ctx))
		assert.Equal(t, filters-1, b.Stats().Subscriptions)
	}
	for i := range filters {
		require.NoError(t, c.Publish(ctx, fmt.Sprint("f/", i), 1, false, nil))
	}
	for i := 1; i < filters; i++ {
		assert.Equal(t, fmt.Sprint("f/", i), <-got)
	}
	assert.Equal(t, uint64(4), c.Stats().Connects)
}

// TestLossesAreLogged checks that a line of the log names the topic of dropped messages.
func TestLossesAreLogged(t *testing.T) {
	var log bytes.Buffer // read only after Close
	c, err := mqtt.New(mqtt.Config{URL: "mqtt://" + mosquitto.FreeAddress(t), ClientID: "n", QueueMessages: 1, Handler: func(mqtt.Message) {},
		Log: slog.New(slog.NewTextHandler(&log, nil))})
	require.NoError(t, err)
	ctx := patient(t)
	for _, topic := range []string{"t/1", "t/2"} {
		require.NoError(t, c.Publish(ctx, topic, 1, false, nil))
	}
	require.NoError(t, c.Close(ctx))
	assert.Equal(t, uint64(2), c.Stats().Dropped)
	for topic, reason := range map[string]string{"t/1": "the queue for the broker is full",
		"t/2": "still in the queue when the client was closed"} {
		assert.Contains(t, log.String(), fmt.Sprintf("client=n topic=%s messages=1 reason=%q", topic, reason))
	}
}

// TestCloseFlushes: queued messages are sent before the DISCONNECT.
func TestCloseFlushes(t *testing.T) {
	_, url := serve(t, "127.0.0.1:0")
	ctx := patient(t)
	got := make(chan struct{}, 1000)
	sub := start(t, mqtt.Config{URL: url, Handler: func(mqtt.Message) { got <- struct{}{} }})
	require.NoError(t, sub.WaitConnected(ctx))
	require.NoError(t, sub.Subscribe(ctx, "t", 2, mqtt.SubscribeOptions{}))
	for _, protocol := range []int{4, 5} {
		pub := start(t, mqtt.Config{URL: url, Protocol: protocol})
		require.NoError(t, pub.WaitConnected(ctx))
		for i := range 300 {
			require.NoError(t, pub.Publish(ctx, "t", byte(i%3), false, nil))
		}
		require.NoError(t, pub.Close(ctx))
		assert.Equal(t, mqtt.Stats{Connects: 1, Published: 300}, pub.Stats())
	}
	for range 600 {
		<-got
	}
}
