package broker_test

import (
	"context"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/eclipse/paho.golang/packets"
	"github.com/eclipse/paho.golang/paho"
	paho3 "github.com/eclipse/paho.mqtt.golang"
	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/edge/broker"
	"github.com/tripod-run/tripod/internal/edge/mqtt"
)

// pair is a publisher and a subscriber with the same client library. publish returns once the library has the message.
type pair struct {
	name    string
	publish func(qos byte, payload []byte) error
}

// BenchmarkClients measures the messages of 64 bytes per second from publisher to subscriber through the embedded
// broker, with our client and with paho's in their default configuration. "of-paho" is our rate divided by the better
// of paho's, in the same run.
func BenchmarkClients(b *testing.B) {
	s := embedded(b, broker.Config{})
	var delivered atomic.Int64
	pairs := []pair{paho5Pair(b, s, &delivered), paho3Pair(b, s, &delivered), ourPair(b, s, 5, &delivered), ourPair(b, s, 4, &delivered)}
	for qos, name := range []string{"qos0", "qos1"} {
		b.Run(name, func(b *testing.B) {
			took := make([]time.Duration, len(pairs))
			payload := make([]byte, 64)
			// In turns, so that other load on the machine affects all of them.
			for left := b.N; left > 0; left -= 1000 {
				for i, p := range pairs {
					began, want := time.Now(), delivered.Load()
					for range min(left, 1000) {
						require.NoError(b, p.publish(byte(qos), payload))
						want++
					}
					for delivered.Load() < want {
						time.Sleep(50 * time.Microsecond)
					}
					took[i] += time.Since(began)
				}
			}
			for i, p := range pairs {
				b.ReportMetric(float64(b.N)/took[i].Seconds(), p.name+"-msg/s")
			}
			b.ReportMetric(min(took[0], took[1]).Seconds()/took[2].Seconds(), "of-paho")
			b.ReportMetric(0, "ns/op")
		})
	}
}

func ourPair(b *testing.B, s *server, protocol int, delivered *atomic.Int64) pair {
	topic := "bench/ours/" + string(rune('0'+protocol))
	sub, _ := connect(b, s, mqtt.Config{Protocol: protocol, Handler: func(mqtt.Message) { delivered.Add(1) }})
	pub, _ := connect(b, s, mqtt.Config{Protocol: protocol})
	require.NoError(b, sub.Subscribe(patient(b), topic, 1, mqtt.SubscribeOptions{}))
	return pair{"ours" + string(rune('0'+protocol)), func(qos byte, payload []byte) error {
		return pub.Publish(context.Background(), topic, qos, false, payload)
	}}
}

func paho5Pair(b *testing.B, s *server, delivered *atomic.Int64) pair {
	connect := func(id string) *paho.Client {
		c, err := net.Dial("tcp", s.address)
		require.NoError(b, err)
		client := paho.NewClient(paho.ClientConfig{Conn: packets.NewThreadSafeConn(c),
			OnPublishReceived: []func(paho.PublishReceived) (bool, error){func(paho.PublishReceived) (bool, error) {
				delivered.Add(1)
				return true, nil
			}}})
		_, err = client.Connect(patient(b), &paho.Connect{ClientID: id, KeepAlive: 60, CleanStart: true})
		require.NoError(b, err)
		return client
	}
	pub, sub := connect("p5"), connect("s5")
	_, err := sub.Subscribe(patient(b), &paho.Subscribe{Subscriptions: []paho.SubscribeOptions{{Topic: "bench/paho5", QoS: 1}}})
	require.NoError(b, err)
	return pair{"paho5", func(qos byte, payload []byte) error {
		_, err := pub.PublishWithOptions(context.Background(), &paho.Publish{Topic: "bench/paho5", QoS: qos, Payload: payload},
			paho.PublishOptions{Method: paho.PublishMethod_AsyncSend})
		return err
	}}
}

func paho3Pair(b *testing.B, s *server, delivered *atomic.Int64) pair {
	connect := func(id string) paho3.Client {
		client := paho3.NewClient(paho3.NewClientOptions().AddBroker("tcp://" + s.address).SetClientID(id).SetProtocolVersion(4))
		token := client.Connect()
		require.True(b, token.WaitTimeout(patience))
		require.NoError(b, token.Error())
		return client
	}
	pub, sub := connect("p3"), connect("s3")
	token := sub.Subscribe("bench/paho3", 1, func(paho3.Client, paho3.Message) { delivered.Add(1) })
	require.True(b, token.WaitTimeout(patience))
	window := make(chan struct{}, 1000) // the broker disconnects clients with more unacknowledged messages
	return pair{"paho3", func(qos byte, payload []byte) error {
		window <- struct{}{}
		token := pub.Publish("bench/paho3", qos, false, payload)
		go func() {
			<-token.Done()
			<-window
		}()
		return nil
	}}
}
