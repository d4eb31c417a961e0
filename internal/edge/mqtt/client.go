package mqtt

import (
	"context"
	"log/slog"
	"time"
)

// Client is a connection to a broker that is made again whenever it is lost. New makes one. All methods may be called from many
// goroutines, also from the Handler and from OnConnect.
type Client interface {
	// Publish sends one message. The payload must not be changed afterwards.
	//
	// With QoS 0 it is written at once; errdefs.ErrUnavailable when there is no connection.
	//
	// With QoS 1 or 2 it returns as soon as the message is queued; the broker's acknowledgement is waited for in the
	// background, over reconnects. With the queue full it waits for room (or ctx) while the broker is there; while the broker is
	// away the oldest message makes room and is counted in Stats.Dropped. A wildcard in the topic, a QoS above 2 or a message
	// over MaxPacket is errdefs.ErrInvalidArgument. After Close it is errdefs.ErrFailedPrecondition.
	Publish(ctx context.Context, topic string, qos byte, retain bool, payload []byte) error
	// Subscribe asks for the messages of a filter; they come to Config.Handler. The subscription is made again after each
	// reconnect, until Unsubscribe. While the broker is away it is only remembered and nil is returned. A broker that refuses
	// is errdefs.ErrPermissionDenied, and the filter is forgotten. The same filter again replaces QoS and options.
	Subscribe(ctx context.Context, filter string, qos byte, opts SubscribeOptions) error
	// Unsubscribe takes a subscription back. A filter that is not subscribed is nil.
	Unsubscribe(ctx context.Context, filter string) error
	// Connected tells whether the broker has accepted this client and the connection is up.
	Connected() bool
	// WaitConnected returns when the client is connected and has made its subscriptions, or with the error of ctx, and that of
	// the last attempt: errdefs.ErrPermissionDenied when the broker refuses the client.
	WaitConnected(ctx context.Context) error
	// Stats returns the counters.
	Stats() Stats
	// Close waits, as long as ctx allows and the broker is there, until what is queued is acknowledged, and ends with a
	// DISCONNECT, so the broker does not publish the will. A Handler that runs is waited for, within ctx too.
	Close(ctx context.Context) error
}

// Message is one message that has arrived.
type Message struct {
	Topic   string
	Payload []byte
	QoS     byte
	// Retain is true for a message that the broker has kept for new subscribers. Over a connection with the bridge bit it may
	// also be true for a message that has just been published as retained.
	Retain bool
}

// SubscribeOptions are the options of MQTT 5.0 §3.8.3.1. A broker of MQTT 3.1.1 knows none of them: it acts as for the zero
// value.
type SubscribeOptions struct {
	// SkipRetained asks for no retained messages when the subscription is made.
	SkipRetained bool
}

// Will is the message that the broker publishes for a client that has gone without a DISCONNECT.
type Will struct {
	Topic   string
	Payload []byte
	QoS     byte
	Retain  bool
	// Delay is how long the broker waits for the client to come back first (MQTT 5.0 §3.1.3.2.2; none for MQTT 3.1.1).
	Delay time.Duration
}

// Config says which broker a Client uses, and how.
type Config struct {
	// URL is mqtt://HOST[:1883] or mqtts://HOST[:8883].
	URL string
	// Protocol is 5 (the default) or 4, which is MQTT 3.1.1.
	Protocol int
	// ClientID names the session at the broker; it must be unique there. Empty: made up, and the session does not survive.
	ClientID string
	// Username may stand alone: the public peers use one with an empty password.
	Username string
	Password string
	TLS      TLS
	// KeepAlive is the time of silence after which a ping is sent; 30 s by default.
	KeepAlive time.Duration
	// SessionExpiry is how long the broker keeps subscriptions and messages of a client that is away. Zero: not at all. For
	// MQTT 3.1.1, which knows no time, anything else means: as long as the broker likes.
	SessionExpiry time.Duration
	// NoLocal keeps the client's own messages from coming back to it.
	NoLocal bool
	Will    *Will

	// ConnectTimeout bounds one attempt, from dialing to CONNACK; 10 s by default.
	ConnectTimeout time.Duration
	// BackoffMin and BackoffMax bound the delay between attempts, which doubles, with jitter; 200 ms and 15 s by default.
	BackoffMin, BackoffMax time.Duration
	// WriteTimeout is after how long a broker that does not read is taken for gone; 20 s by default.
	WriteTimeout time.Duration

	// QueueMessages, QueueBytes and QueueTTL bound what waits for the broker with QoS 1 or 2: 10 000 messages, 64 MiB of
	// payload and topics, one hour by default.
	QueueMessages int
	QueueBytes    int64
	QueueTTL      time.Duration
	// InboxMessages and InboxBytes bound what waits for the Handler with QoS 0: 10 000 messages, 64 MiB by default. What comes
	// with QoS 1 or 2 is bounded by the receive maximum (MQTT 5.0 §3.1.2.11.3), or by the broker's own window for MQTT 3.1.1.
	InboxMessages int
	InboxBytes    int64
	// MaxPacket bounds one packet, both ways, in bytes; 16 MiB by default.
	MaxPacket int64

	// Handler is called for each message, one at a time, in the order of their arrival.
	Handler func(Message)
	// OnConnect is called in a goroutine of its own after each connect, when the subscriptions are made. Its context ends with
	// that connection; the next call comes only when the one before has returned. resumed says that the broker has kept the
	// session (CONNACK, Session Present).
	OnConnect func(ctx context.Context, resumed bool)
	// OnDisconnect is called when a connection is lost, not for Close.
	OnDisconnect func(err error)

	Log *slog.Logger
}

// TLS says how mqtts:// is spoken.
type TLS struct {
	// CA is a file with the certificates (PEM) that the broker's is checked against; the system's by default.
	CA string
	// Cert and Key are files with the client's own certificate and key (PEM), for a broker that asks for one.
	Cert, Key string
	// ServerName is the name that the broker's certificate must carry; the URL's host by default.
	ServerName string
}

// Stats are counters since New, and two gauges.
type Stats struct {
	Connects  uint64 // connections that the broker accepted
	Published uint64 // messages handed to the broker; with QoS 1 and 2, acknowledged by it
	Received  uint64 // messages given to the Handler
	Dropped   uint64 // messages with QoS 1 or 2 dropped from the queue: no room, too old, refused by the broker, or left at Close
	Lost      uint64 // messages with QoS 0 that found no broker, and such that found no room in the inbox
	Queued    int    // messages that wait for the broker now
	Inbox     int    // messages that wait for the Handler now
}
