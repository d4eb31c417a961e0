package broker

import (
	"cmp"
	"context"
	"log/slog"
	"time"

	"github.com/tripod-run/tripod/internal/connlimit"
)

// Broker is a running MQTT broker. New starts the embedded broker. For an external broker there is no Broker; its URL
// is enough.
type Broker interface {
	// URL returns the broker's URL for a client on this machine: mqtt://HOST:PORT, or mqtts:// if it listens for TLS only.
	URL() string
	// Addresses returns the listening addresses with their actual ports, in the order of Config: Address, TLSAddress,
	// WebSocketAddress, WebSocketTLSAddress.
	Addresses() []string
	// Stats returns the counters.
	Stats() Stats
	// Close disconnects all clients without publishing their wills, and writes pending changes to disk. It stops waiting
	// when ctx ends. A broker that is later started with the same Path has the same sessions and retained messages.
	Close(ctx context.Context) error
}

// Config configures the embedded broker.
type Config struct {
	// Address is HOST:PORT for MQTT without TLS; empty means none. Port 0 means a free port.
	Address string
	// TLSAddress is HOST:PORT for MQTT over TLS with Certificate and Key, which are PEM files. Both files are read
	// again for each connection. If ClientCA names a PEM file, every client needs a certificate signed by one of the
	// CAs in that file. The certificate's common name is then a user name that needs no password.
	TLSAddress       string
	Certificate, Key string
	ClientCA         string
	// WebSocketAddress and WebSocketTLSAddress are HOST:PORT for MQTT over WebSocket, without and with TLS; empty means
	// none. TLS is that of TLSAddress. The paths are / and /mqtt.
	WebSocketAddress, WebSocketTLSAddress string
	// WebSocketOrigins are the web pages that may connect from a browser, as package origin describes them. In addition,
	// pages may connect whose host is an IP address or localhost, and the same as the broker's.
	WebSocketOrigins []string

	// Path is the bbolt file with sessions and retained messages. If Path is empty, sessions and retained messages are
	// kept only in memory.
	Path string

	// Users may connect. Without users, everybody may connect, publish and subscribe to anything.
	Users []User

	// MaxPacket bounds a packet, in bytes; 16 MiB by default. A client that sends a larger packet is disconnected. A
	// CONNECT has at most 1 MiB.
	MaxPacket int64
	// MaxClients bounds the connections; 1024 by default. There are at most a hundred times as many sessions.
	MaxClients int
	// MaxQueued bounds the queue of messages with QoS 1 and 2 for one client; 4096 by default. Beyond the limit, new
	// messages are dropped and counted.
	MaxQueued int
	// MaxQueuedBytes bounds the topics and payloads that are queued for one persistent session; 256 MiB by default.
	MaxQueuedBytes int64
	// MaxRetained and MaxRetainedBytes bound the retained messages, and the bytes of their topics and payloads; 1 000 000
	// messages and 1 GiB by default. Beyond a limit, a message that is to be retained is refused with the reason code 0x97.
	MaxRetained      int
	MaxRetainedBytes int64
	// ReceiveMaximum bounds the messages with QoS 1 and 2 from a client that are not acknowledged; 1024 by default.
	ReceiveMaximum int
	// TopicAliasMaximum bounds the topic aliases in each direction; 64 by default.
	TopicAliasMaximum int
	// SessionExpiry bounds how long the session of a disconnected client is kept; 7 days by default.
	SessionExpiry time.Duration
	// WriteTimeout is the time after which a client that does not read is disconnected; 20 s by default.
	WriteTimeout time.Duration
	// Connections limits the connections to each address, including those that have not sent a CONNECT yet. By default
	// it allows a quarter more than MaxClients, so that a client above MaxClients gets a reason code.
	Connections *connlimit.Limiter

	Log *slog.Logger
}

// User is a user who may connect. In filters, %u stands for the user name and %c for the client identifier.
type User struct {
	Name string
	// PasswordFile is a file that contains the password or its bcrypt hash ("$2…"). Without PasswordFile, no password
	// is checked; the public peers of the edge protocol send an empty password.
	PasswordFile string
	// Realms are topic prefixes below which the user may read and write everything.
	Realms []string
	// Read and Write hold filters of further topics. The user may subscribe to those in Read, and publish to those in
	// Write.
	Read, Write []string
}

// Stats holds gauges, and counters since the start.
type Stats struct {
	Clients       int // connected clients
	Sessions      int // of connected and disconnected clients
	Subscriptions int
	Retained      int    // retained messages, without $SYS
	Inflight      int    // messages with QoS 1 and 2 that clients have not acknowledged
	Received      uint64 // messages from clients
	Sent          uint64 // messages to clients
	Dropped       uint64 // messages dropped because a client is slow or its queue is full
	Refused       uint64 // connections refused because of a user, password, certificate or limit
	Denied        uint64 // subscriptions and messages that the user's rights do not allow
	StoreErrors   uint64 // failed writes to disk, which are retried
	// Limits counts how often clients have met a limit: clients (refused), packet, receive_maximum and topic_alias
	// (disconnected), queue (messages dropped), retained (messages refused).
	Limits map[string]uint64
}

func (c Config) withDefaults() Config {
	c.MaxPacket = min(cmp.Or(max(c.MaxPacket, 0), 16<<20), 256<<20)
	c.MaxClients = cmp.Or(max(c.MaxClients, 0), 1024)
	c.MaxQueued = cmp.Or(max(c.MaxQueued, 0), 4096)
	c.MaxQueuedBytes = cmp.Or(max(c.MaxQueuedBytes, 0), 256<<20)
	c.MaxRetained = cmp.Or(max(c.MaxRetained, 0), 1_000_000)
	c.MaxRetainedBytes = cmp.Or(max(c.MaxRetainedBytes, 0), 1<<30)
	c.ReceiveMaximum = min(cmp.Or(max(c.ReceiveMaximum, 0), 1024), 65_535)
	c.TopicAliasMaximum = min(cmp.Or(max(c.TopicAliasMaximum, 0), 64), 65_535)
	c.SessionExpiry = cmp.Or(max(c.SessionExpiry, 0), 7*24*time.Hour)
	c.WriteTimeout = cmp.Or(max(c.WriteTimeout, 0), 20*time.Second)
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.Connections == nil {
		c.Connections = connlimit.NewGroup(c.Log).Limiter("broker", connlimit.Config{Max: c.MaxClients + c.MaxClients/4 + 1})
	}
	return c
}
