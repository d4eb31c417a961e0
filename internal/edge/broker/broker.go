package broker

import (
	"context"
	"log/slog"
	"time"

	"github.com/tripod-run/tripod/internal/connlimit"
)

// Broker is a running MQTT broker. New starts the embedded one; one of another's is only a URL, and needs no Broker.
type Broker interface {
	// URL is how a client on this machine reaches it: mqtt://HOST:PORT, or mqtts:// when it listens for TLS only.
	URL() string
	// Addresses are those that it listens at: Config.Address and Config.TLSAddress, with the ports that they got.
	Addresses() []string
	// Stats returns the counters.
	Stats() Stats
	// Close disconnects all clients, without publishing their wills, and stores what is not stored. It waits for that within
	// ctx. Sessions and retained messages are there again when a broker is started on the same Path.
	Close(ctx context.Context) error
}

// Config says how the embedded broker is to run.
type Config struct {
	// Address is HOST:PORT for MQTT in the clear; empty: none. Port 0 takes a free one.
	Address string
	// TLSAddress is HOST:PORT for MQTT over TLS with Certificate and Key (files, PEM; renewed ones are taken up by the next
	// connection). With ClientCA every client must show a certificate of these authorities, and its common name is a user name
	// without a password.
	TLSAddress       string
	Certificate, Key string
	ClientCA         string

	// Path is the file (bbolt) with sessions and retained messages. Empty: in memory only.
	Path string

	// Users are those who may come in. None: everybody may do everything.
	Users []User

	// MaxPacket bounds a packet, in bytes; 16 MiB by default. A client that sends a larger one is disconnected.
	MaxPacket int64
	// MaxClients bounds the connections; 1024 by default.
	MaxClients int
	// MaxQueued bounds the messages with QoS 1 and 2 that wait for one client; 4096 by default. Then the newest are dropped and
	// counted.
	MaxQueued int
	// MaxQueuedBytes bounds the topics and payloads of those that wait for one client with a session who is away; 256 MiB by
	// default.
	MaxQueuedBytes int64
	// SessionExpiry is how long the session of a client that is away is kept at most; 7 days by default.
	SessionExpiry time.Duration
	// WriteTimeout is after how long a client that does not read is disconnected; 20 s by default.
	WriteTimeout time.Duration
	// Connections bounds those of each address, counting those that are not clients yet; nil: room for a quarter more
	// than MaxClients, so that a client over that limit gets a reason code.
	Connections *connlimit.Limiter

	Log *slog.Logger
}

// User is one who may come in. %u in a filter stands for the user name, %c for the client identifier.
type User struct {
	Name string
	// PasswordFile holds the password, or its bcrypt hash ("$2…"). Empty: the name alone is enough, as for the public peers,
	// which send an empty password.
	PasswordFile string
	// Realms are first levels of topics below which the user may read and write everything.
	Realms []string
	// Read and Write are filters of topics that he may subscribe to, and publish to, besides.
	Read, Write []string
}

// Stats are counters since the start, and gauges.
type Stats struct {
	Clients       int    // connected now
	Sessions      int    // known now, connected or not
	Subscriptions int    // made now
	Retained      int    // retained messages now, without $SYS
	Inflight      int    // messages with QoS 1 and 2 that wait for clients now
	Received      uint64 // messages from clients
	Sent          uint64 // messages to clients
	Dropped       uint64 // messages for a client that were not kept: he is slow, or away and his queue is full
	Refused       uint64 // connections refused: user, password, certificate, limits
	Denied        uint64 // subscriptions and messages to topics that are not open to the user
	StoreErrors   uint64 // writes to the disk that failed; they are tried again
}

func (c Config) withDefaults() Config {
	if c.MaxPacket <= 0 {
		c.MaxPacket = 16 << 20
	}
	if c.MaxClients <= 0 {
		c.MaxClients = 1024
	}
	if c.MaxQueued <= 0 {
		c.MaxQueued = 4096
	}
	if c.MaxQueuedBytes <= 0 {
		c.MaxQueuedBytes = 256 << 20
	}
	if c.SessionExpiry <= 0 {
		c.SessionExpiry = 7 * 24 * time.Hour
	}
	if c.WriteTimeout <= 0 {
		c.WriteTimeout = 20 * time.Second
	}
	c.MaxPacket, c.MaxQueued = min(c.MaxPacket, 256<<20), min(c.MaxQueued, 8192)
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.Connections == nil {
		c.Connections = connlimit.NewGroup(c.Log).Limiter("broker", connlimit.Config{Max: c.MaxClients + c.MaxClients/4 + 1})
	}
	return c
}
