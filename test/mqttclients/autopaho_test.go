package mqttclients

import (
	"context"
	"fmt"
	"net/url"
	"sync/atomic"
	"testing"
	"time"

	"github.com/eclipse/paho.golang/autopaho"
	queue "github.com/eclipse/paho.golang/autopaho/queue/memory"
	"github.com/eclipse/paho.golang/paho"
	"github.com/eclipse/paho.golang/paho/session/state"
	store "github.com/eclipse/paho.golang/paho/store/memory"

	"github.com/tripod-run/tripod/test/until"
)

// pahoGo is eclipse/paho.golang. Its autopaho keeps the connection up; the packets are those of paho.Client.
type pahoGo struct{}

func startPahoGo(testing.TB) program { return pahoGo{} }

// nonzero returns a pointer to v, or nil for zero, which is how paho leaves a property out.
func nonzero[T comparable](v T) *T {
	var zero T
	if v == zero {
		return nil
	}
	return &v
}

func value[T any](p *T) (v T) {
	if p != nil {
		v = *p
	}
	return v
}

func (pahoGo) connect(t testing.TB, o options, in *inbox) (connection, error) {
	c := &pahoGoConnection{waiting: queue.New(), unacknowledged: store.New()}
	server := &url.URL{Scheme: "mqtt", Host: fmt.Sprint("127.0.0.1:", o.Port)}
	if o.WebSocket {
		server.Scheme, server.Path = "ws", "/mqtt"
	}
	cfg := autopaho.ClientConfig{
		ServerUrls: []*url.URL{server},
		KeepAlive:  20, CleanStartOnInitialConnection: o.Clean, SessionExpiryInterval: o.Expiry,
		ReconnectBackoff:        autopaho.NewConstantBackoff(200 * time.Millisecond),
		Queue:                   c.waiting,
		DisconnectPacketBuilder: func() *paho.Disconnect { return &paho.Disconnect{ReasonCode: byte(c.reason.Load())} },
		OnConnectionUp:          func(_ *autopaho.ConnectionManager, ack *paho.Connack) { in.connected(&ack.SessionPresent) },
		ClientConfig: paho.ClientConfig{
			ClientID:      o.Client,
			PacketTimeout: patience,
			Session:       state.New(c.unacknowledged, store.New()),
			OnPublishReceived: []func(paho.PublishReceived) (bool, error){func(r paho.PublishReceived) (bool, error) {
				in.received(fromPaho(r.Packet))
				return true, nil
			}},
		},
	}
	if o.ReceiveMaximum > 0 {
		cfg.ConnectPacketBuilder = func(p *paho.Connect, _ *url.URL) (*paho.Connect, error) {
			p.Properties.ReceiveMaximum = &o.ReceiveMaximum // there are properties, because of the session's expiry
			return p, nil
		}
	}
	if w := o.Will; w != nil {
		cfg.WillMessage = &paho.WillMessage{Topic: w.Topic, Payload: []byte(w.Payload), QoS: w.QoS, Retain: w.Retain}
		cfg.WillProperties = &paho.WillProperties{WillDelayInterval: nonzero(w.Delay)}
	}
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	m, err := autopaho.NewConnection(ctx, cfg)
	if err != nil {
		return nil, err
	}
	c.manager = m
	if err := m.AwaitConnection(patient(t)); err != nil {
		return c, err
	}
	for _, s := range o.Subscriptions {
		_, err := m.Subscribe(patient(t), &paho.Subscribe{
			Properties: &paho.SubscribeProperties{SubscriptionIdentifier: nonzero(s.Identifier)},
			Subscriptions: []paho.SubscribeOptions{{
				Topic: s.Filter, QoS: s.QoS, NoLocal: s.NoLocal, RetainAsPublished: s.RetainAsPublished, RetainHandling: s.RetainHandling,
			}},
		})
		if err != nil {
			return c, err
		}
	}
	return c, nil
}

func fromPaho(p *paho.Publish) message {
	m := message{
		Topic: p.Topic, Payload: string(p.Payload), QoS: p.QoS, Retain: p.Retain,
		ContentType: p.Properties.ContentType, ResponseTopic: p.Properties.ResponseTopic, Correlation: string(p.Properties.CorrelationData),
		Expiry: value(p.Properties.MessageExpiry), UTF8: value(p.Properties.PayloadFormat) == 1,
		Identifier: value(p.Properties.SubscriptionIdentifier),
	}
	for _, u := range p.Properties.User {
		if m.User == nil {
			m.User = map[string]string{}
		}
		m.User[u.Key] = u.Value
	}
	return m
}

func toPaho(m message) *paho.Publish {
	p := &paho.PublishProperties{ContentType: m.ContentType, ResponseTopic: m.ResponseTopic, MessageExpiry: nonzero(m.Expiry)}
	if m.Correlation != "" {
		p.CorrelationData = []byte(m.Correlation)
	}
	if m.UTF8 {
		p.PayloadFormat = nonzero(byte(1))
	}
	for k, v := range m.User {
		p.User.Add(k, v)
	}
	return &paho.Publish{Topic: m.Topic, Payload: []byte(m.Payload), QoS: m.QoS, Retain: m.Retain, Properties: p}
}

// pahoGoConnection is a client of autopaho.
type pahoGoConnection struct {
	manager        *autopaho.ConnectionManager
	waiting        *queue.Queue // messages before their first transmission
	unacknowledged *store.Store
	reason         atomic.Uint32 // for DISCONNECT
}

// publish sends several messages by autopaho's queue, because Publish waits for each acknowledgement.
func (c *pahoGoConnection) publish(ctx context.Context, messages ...message) error {
	if len(messages) == 1 {
		_, err := c.manager.Publish(ctx, toPaho(messages[0]))
		return err
	}
	for _, m := range messages {
		if err := c.manager.PublishViaQueue(ctx, &autopaho.QueuePublish{Publish: toPaho(m)}); err != nil {
			return err
		}
	}
	select {
	case <-c.waiting.WaitForEmpty():
	case <-ctx.Done():
		return ctx.Err()
	}
	return until.Poll(patience, func() error {
		ids, err := c.unacknowledged.List()
		if err == nil && len(ids) > 0 {
			err = fmt.Errorf("%d messages are not acknowledged", len(ids))
		}
		return err
	})
}

func (c *pahoGoConnection) disconnect(ctx context.Context, wantWill bool) error {
	if wantWill {
		c.reason.Store(4)
	}
	return c.manager.Disconnect(ctx)
}
