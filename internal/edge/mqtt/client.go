package mqtt

import (
	"context"
	"log/slog"
	"time"
)

// Client keeps a connection to a broker, and reconnects after a loss. New makes a Client. All methods may be called
// concurrently, even from the Handler and from OnConnect.
type Client interface {
	// Publish sends a message. The caller must not change the payload afterwards.
	//
	// With QoS 0 the message is written immediately; without a connection, Publish returns errdefs.ErrUnavailable.
	//
	// With QoS 1 or 2 Publish returns as soon as the message is queued; the client waits for the broker's
	// acknowledgement in the background, across reconnects. If the queue is full while the client is connected, Publish
	// waits for room until ctx ends. If the queue is full while the client is not connected, the oldest message is
	// dropped, counted in Stats.Dropped and logged with its topic. Publish returns errdefs.ErrInvalidArgument for a topic with a wildcard, a
	// QoS above 2 or a message over MaxPacket, and errdefs.ErrFailedPrecondition after Close.
	Publish(ctx context.Context, topic string, qos byte, retain bool, payload []byte) error
	// PublishThen is like Publish, but if settled is not nil, it waits for room without a connection, too. If it returns nil,
	// settled is called, unless it is nil, once the client no longer keeps the message: with QoS 0 at once, otherwise when the
	// broker has acknowledged it (delivered is set), or it was dropped. It is not called for a message that is still queued at
	// Close. It must neither block nor call the client.
	PublishThen(ctx context.Context, topic string, qos byte, retain bool, payload []byte, settled func(delivered bool)) error
	// Subscribe subscribes to a filter; Config.Handler gets the messages. The client renews the subscription after each
	// reconnect, until Unsubscribe. Without a connection, Subscribe only records the filter and returns nil. If the
	// broker refuses the subscription, Subscribe returns errdefs.ErrPermissionDenied and drops the filter. Subscribing
	// to the same filter again replaces its QoS and its options.
	Subscribe(ctx context.Context, filter string, qos byte, opts SubscribeOptions) error
	// Unsubscribe removes a subscription. If there is no such subscription, Unsubscribe returns nil.
	Unsubscribe(ctx context.Context, filter string) error
	// Connected reports whether the client is connected and has renewed its subscriptions.
	Connected() bool
	// WaitConnected waits until Connected returns true. If ctx ends first, WaitConnected returns the error of ctx
	// together with the error of the last attempt. The latter is errdefs.ErrPermissionDenied if the broker refused the
	// client.
	WaitConnected(ctx context.Context) error
	// Stats returns the counters.
	Stats() Stats
	// Close waits for a running Handler and for the acknowledgement of queued messages, until ctx ends or the connection
	// is lost. It then sends a DISCONNECT, so that the broker does not publish the will.
	Close(ctx context.Context) error
}

// Message is a received message.
type Message struct {
	Topic   string
	Payload []byte
	QoS     byte
	// Retain is true for a retained message that the broker sends to a new subscriber. Over a connection with the bridge
	// bit, it can also be true for a message that has just been published as retained.
	Retain bool
}

// SubscribeOptions are the options of MQTT 5.0 §3.8.3.1. MQTT 3.1.1 has no such options; its subscriptions behave as
// with the zero value.
type SubscribeOptions struct {
	// SkipRetained suppresses retained messages at the time of the subscription.
	SkipRetained bool
}

// Will is the message that the broker publishes when the connection ends without a DISCONNECT.
type Will struct {
	Topic   string
	Payload []byte
	QoS     byte
	Retain  bool
	// Delay is how long the broker waits for the client to reconnect before it publishes the will (MQTT 5.0 §3.1.3.2.2).
	// MQTT 3.1.1 has no delay.
	Delay time.Duration
}

// Config configures a Client.
type Config struct {
	// URL is mqtt://HOST[:1883] or mqtts://HOST[:8883].
	URL string
	// Protocol is 5 (the default) or 4, which is MQTT 3.1.1.
	Protocol int
	// ClientID names the session and must be unique at the broker. If empty, it is random, and the session ends with the
	// connection.
	ClientID string
	// Username needs no Password: the public peers of the edge protocol use an empty password.
	Username string
	Password string
	TLS      TLS
	// KeepAlive is the keep-alive of MQTT; 30 s by default. After at most 3/4 of this time without traffic, the client
	// sends a ping.
	KeepAlive time.Duration
	// SessionExpiry is how long the broker keeps the subscriptions and messages of a disconnected client; 0 means that
	// the broker keeps none. In MQTT 3.1.1, any other value lets the broker choose the time.
	SessionExpiry time.Duration
	// NoLocal stops the broker from sending the client its own messages.
	NoLocal bool
	Will    *Will

	// ConnectTimeout bounds one attempt, from dialing to CONNACK; 10 s by default.
	ConnectTimeout time.Duration
	// BackoffMin and BackoffMax bound the delay between attempts; 200 ms and 15 s by default. The delay doubles each
	// time, and has jitter.
	BackoffMin, BackoffMax time.Duration
	// WriteTimeout is the time after which the client disconnects from a broker that does not read; 20 s by default.
	WriteTimeout time.Duration

	// QueueMessages, QueueBytes and QueueTTL bound the messages with QoS 1 or 2 that wait for the broker: 10 000 messages,
	// 64 MiB of payload and topics, and one hour by default.
	QueueMessages int
	QueueBytes    int64
	QueueTTL      time.Duration
	// InboxMessages and InboxBytes bound the messages with QoS 0 that wait for the Handler: 10 000 messages and 64 MiB by
	// default. Messages with QoS 1 or 2 are bounded by the receive maximum (MQTT 5.0 §3.1.2.11.3), or by the broker's own
	// window in MQTT 3.1.1.
	InboxMessages int
	InboxBytes    int64
	// MaxPacket bounds a packet in either direction, in bytes; 16 MiB by default.
	MaxPacket int64

	// Handler is called for each message, one at a time, in the order of their arrival.
	Handler func(Message)
	// OnConnect is called in its own goroutine after each connect, once the subscriptions are renewed. Its context ends
	// with the connection. Calls do not overlap. resumed is set if the broker has kept the session (Session Present in the
	// CONNACK).
	OnConnect func(ctx context.Context, resumed bool)
	// OnTakenOver is called when another client with the same ClientID has probably connected: the broker says so, or it ends
	// one connection after the other without a reason. The client connects again when the call returns. The context ends
	// with Close.
	OnTakenOver func(ctx context.Context)
	// OnDisconnect is called when a connection is lost, but not when Close ends it.
	OnDisconnect func(err error)

	Log *slog.Logger
}

// TLS configures connections to mqtts:// URLs.
type TLS struct {
	// CA is a PEM file with the CA certificates for verifying the broker. By default, the system's CA certificates are
	// used.
	CA string
	// Cert and Key are PEM files with the client's certificate and key, for brokers that require them.
	Cert, Key string
	// ServerName is the expected name in the broker's certificate; the URL's host by default.
	ServerName string
}

// Stats holds counters since New, and two gauges.
type Stats struct {
	Connects  uint64 // connections that the broker accepted
	Published uint64 // messages sent with QoS 0, or acknowledged by the broker
	Received  uint64 // messages passed to the Handler
	Dropped   uint64 // queued messages that were dropped: no room, expired, refused by the broker, or still queued at Close
	Lost      uint64 // messages with QoS 0 that were dropped: published without a connection, or no room in the inbox
	Queued    int    // messages that wait for the broker
	Inbox     int    // messages that wait for the Handler
}
