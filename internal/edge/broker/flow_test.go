package broker_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"testing"
	"time"

	"github.com/eclipse/paho.golang/paho"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/edge/broker"
	"github.com/tripod-run/tripod/internal/edge/mqtt"
)

// peer returns a plain paho client with a receive maximum, and its messages; receiving one from the channel
// acknowledges it.
func peer(t testing.TB, s *server, id string, window uint16) (*paho.Client, chan string) {
	c, err := net.Dial("tcp", s.address)
	require.NoError(t, err)
	got := make(chan string)
	client := paho.NewClient(paho.ClientConfig{Conn: c,
		OnPublishReceived: []func(paho.PublishReceived) (bool, error){func(m paho.PublishReceived) (bool, error) {
			got <- fmt.Sprintf("q%d %s", m.Packet.QoS, m.Packet.Payload)
			return true, nil
		}}})
	expiry := uint32(3600)
	_, err = client.Connect(patient(t),
		&paho.Connect{ClientID: id, KeepAlive: 60, Properties: &paho.ConnectProperties{ReceiveMaximum: &window, SessionExpiryInterval: &expiry}})
	require.NoError(t, err)
	return client, got
}

// TestReceiveMaximum: a client with a receive maximum of three gets many messages completely and in order, while it is
// connected, and from the queue after it reconnects.
func TestReceiveMaximum(t *testing.T) {
	for _, qos := range []byte{1, 2} {
		t.Run(fmt.Sprint("qos ", qos), func(t *testing.T) {
			t.Parallel()
			s := embedded(t, broker.Config{})
			ctx := patient(t)
			sub, got := peer(t, s, "slow", 3)
			_, err := sub.Subscribe(ctx, &paho.Subscribe{Subscriptions: []paho.SubscribeOptions{{Topic: "t", QoS: qos}}})
			require.NoError(t, err)
			pub, _ := connect(t, s, mqtt.Config{})
			next := 0
			publish := func(n int) {
				for range n {
					require.NoError(t, pub.Publish(ctx, "t", qos, false, fmt.Append(nil, next)))
					next++
				}
				require.Eventually(t, func() bool { return pub.Stats().Queued == 0 }, patience, time.Millisecond)
			}
			publish(100)
			for i := range 50 {
				require.Equal(t, fmt.Sprintf("q%d %d", qos, i), <-got)
			}
			sub.TerminateConnectionForTest()
			go func(got chan string) {
				for range got { // what it had taken, and had not yet acknowledged
				}
			}(got)
			<-sub.Done()
			publish(100)
			sub, got = peer(t, s, "slow", 3)
			first := <-got
			var start int
			_, err = fmt.Sscanf(first, fmt.Sprintf("q%d %%d", qos), &start)
			require.NoError(t, err)
			assert.InDelta(t, 50, start, 5, "it goes on about there")
			publish(100)
			for i := start + 1; i < next; i++ {
				require.Equal(t, fmt.Sprintf("q%d %d", qos, i), <-got)
			}
			require.Eventually(t, func() bool { return s.stats().Inflight == 0 }, patience, time.Millisecond)
			require.NoError(t, sub.Disconnect(&paho.Disconnect{}))
		})
	}
}

// TestQueueBound: the queue of a disconnected client keeps the first messages up to the limit; the others are counted.
func TestQueueBound(t *testing.T) {
	for name, cfg := range map[string]broker.Config{"messages": {MaxQueued: 10}, "bytes": {MaxQueuedBytes: 10*1000 + 500}} {
		t.Run(name, func(t *testing.T) { checkQueueBound(t, cfg) })
	}
}

func checkQueueBound(t *testing.T, limits broker.Config) {
	s := embedded(t, limits)
	ctx := patient(t)
	cfg := mqtt.Config{ClientID: "away", SessionExpiry: time.Hour}
	c, _ := connect(t, s, cfg)
	require.NoError(t, c.Subscribe(ctx, "t", 1, mqtt.SubscribeOptions{}))
	require.NoError(t, c.Close(ctx))
	pub, _ := connect(t, s, mqtt.Config{})
	for i := range 25 {
		require.NoError(t, pub.Publish(ctx, "t", 1, false, fmt.Appendf(nil, "%0999dm%d", 0, i)))
	}
	require.Eventually(t, func() bool { return s.stats().Dropped == 15 && pub.Stats().Queued == 0 }, patience, time.Millisecond)
	s.stop(t)
	s.start(t)
	_, in := connect(t, s, cfg)
	in.wait(t, "m9")
	require.Eventually(t, func() bool { return s.stats().Inflight == 0 }, patience, time.Millisecond)
	require.NoError(t, pub.Publish(ctx, "t", 1, false, []byte("end")))
	assert.Len(t, in.wait(t, "end"), 11)
}

// TestLimits: clients over the limit are refused, and those that do not read are disconnected.
func TestLimits(t *testing.T) {
	s := embedded(t, broker.Config{MaxClients: 2, WriteTimeout: time.Second})
	a, in := connect(t, s, mqtt.Config{})
	require.NoError(t, a.Subscribe(patient(t), "t", 1, mqtt.SubscribeOptions{}))
	r := dialRaw(t, s.address)
	r.send(connectPacket(4, 2, "lazy"))
	assert.Equal(t, []byte{0x20, 2, 0, 0}, r.read(t))
	r.send(packet(0x82, append([]byte{0, 1}, append(str("t"), 0)...)))
	r.read(t)
	third := dialRaw(t, s.address)
	third.send(connectPacket(4, 2, "third"))
	assert.Equal(t, []byte{0x20, 2, 0, 3}, third.read(t), "server unavailable")
	assert.Equal(t, uint64(1), s.stats().Refused)

	go func() {
		for err := error(nil); err == nil; time.Sleep(50 * time.Millisecond) { // pacing: what it says itself gives it no more time
			_, err = r.conn.Write(packet(0x30, append(str("busy"), 'x')))
		}
	}()
	payload := make([]byte, 1<<20)
	for range 64 { // far more than the sockets hold; lazy reads nothing
		require.NoError(t, a.Publish(patient(t), "t", 1, false, payload))
	}
	require.Eventually(t, func() bool { return s.stats().Clients == 1 }, patience, 10*time.Millisecond, "lazy is out")
	require.NoError(t, a.Publish(patient(t), "t", 1, false, []byte("end")))
	assert.Len(t, in.wait(t, "end"), 65)
}

// TestE2SlowConsumerHoldsUpNobody: clients that subscribe to everything and read nothing delay neither messages between
// others, nor a client that takes their session over, nor the broker's end.
func TestE2SlowConsumerHoldsUpNobody(t *testing.T) {
	s := embedded(t, broker.Config{WriteTimeout: time.Hour})
	deaf := func(id string) *raw {
		r := dialRaw(t, s.address)
		require.NoError(t, r.conn.(*net.TCPConn).SetReadBuffer(4096))
		r.send(connectPacket(4, 2, id))
		assert.Equal(t, []byte{0x20, 2, 0, 0}, r.read(t))
		return r
	}
	all := deaf("messages")
	all.send(packet(0x82, append([]byte{0, 1}, append(str("#"), 1)...)))
	assert.Equal(t, []byte{0x90, 3, 0, 1, 1}, all.read(t))
	answers := deaf("answers")
	ctx := patient(t)
	sub, in := connect(t, s, mqtt.Config{})
	require.NoError(t, sub.Subscribe(ctx, "t", 1, mqtt.SubscribeOptions{}))
	pub, _ := connect(t, s, mqtt.Config{})
	loud, _ := connect(t, s, mqtt.Config{})
	go func() {
		ask := bytes.Repeat(packet(0x32, append(str("ask"), 0, 1, 'x')), 1000)
		for err := error(nil); err == nil; {
			_, err = answers.conn.Write(ask)
		}
	}()
	payload := make([]byte, 1<<20)
	for i := range 32 { // far more than the sockets hold
		require.NoError(t, loud.Publish(ctx, "large", byte(i%2), false, payload))
		require.NoError(t, pub.Publish(ctx, "t", 1, false, fmt.Append(nil, "m", i)))
		in.wait(t, fmt.Sprint("m", i))
	}
	assert.Equal(t, 5, s.stats().Clients, "the deaf ones are still there")
	deaf("messages")
	require.Eventually(t, func() bool { return s.stats().Clients == 5 }, patience, time.Millisecond, "it has taken the session over")
	require.NoError(t, pub.Publish(ctx, "t", 1, false, []byte("end")))
	in.wait(t, "end")
	s.stop(t)
}

// TestCloseLate: a client that connects while the broker closes does not delay it.
func TestCloseLate(t *testing.T) {
	s := embedded(t, broker.Config{})
	late, before := dialRaw(t, s.address), dialRaw(t, s.address)
	before.send(connectPacket(4, 2, "before"))
	assert.Equal(t, []byte{0x20, 2, 0, 0}, before.read(t))
	go func() {
		_, _ = io.Copy(io.Discard, before.conn) // until those who are there are disconnected
		late.send(connectPacket(4, 2, "late"))
		for err := error(nil); err == nil; time.Sleep(10 * time.Millisecond) { // pacing: it wants to stay
			_, err = late.conn.Write([]byte{0xc0, 0})
		}
	}()
	s.stop(t)
}

// TestClose: clients get a reason code, wills are not published, and queued messages are kept for the next start.
func TestClose(t *testing.T) {
	s := embedded(t, broker.Config{})
	ctx := patient(t)
	lost := make(chan error, 1)
	watch := mqtt.Config{ClientID: "watch", SessionExpiry: time.Hour}
	w, _ := connect(t, s, watch)
	require.NoError(t, w.Subscribe(ctx, "#", 1, mqtt.SubscribeOptions{}))
	require.NoError(t, w.Close(ctx))
	up := make(chan bool, 2)
	c, _ := connect(t, s, mqtt.Config{Will: &mqtt.Will{Topic: "will", Payload: []byte("delete"), QoS: 1},
		OnDisconnect: func(err error) { lost <- err }, OnConnect: func(context.Context, bool) { up <- true }})
	<-up
	s.stop(t)
	assert.ErrorContains(t, <-lost, "0x8b", "server shutting down")
	s.start(t)
	<-up
	require.NoError(t, c.Publish(ctx, "x", 1, false, []byte("end")))
	_, in := connect(t, s, watch)
	assert.Equal(t, []string{"x q1 end"}, in.wait(t, "end"))

	_, err := broker.New(broker.Config{Address: s.address})
	require.ErrorContains(t, err, "in use")
	_, err = broker.New(broker.Config{})
	require.Error(t, err)
}
