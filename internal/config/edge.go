package config

import (
	"cmp"
	"fmt"
	"net/url"
	"strings"
	"time"

	"github.com/google/uuid"
)

// EmbeddedBroker is the value of edge.broker and orchestrator.broker that selects the broker inside the same process.
const EmbeddedBroker = "embedded"

// DefaultBroker is the broker of the program `tripod orchestrator` if orchestrator.broker is empty.
const DefaultBroker = "mqtt://127.0.0.1:1883"

// Edge configures the manager of the edge protocol on this node, and the manager's runtimes.
type Edge struct {
	Enabled           bool          `toml:"enabled"`
	Orchestrator      bool          `toml:"orchestrator"`
	Broker            string        `toml:"broker"`
	Protocol          int           `toml:"protocol"`
	User              string        `toml:"user"`
	PasswordFile      string        `toml:"password_file"`
	CA                string        `toml:"ca"`
	Certificate       string        `toml:"certificate"`
	Key               string        `toml:"key"`
	Realm             string        `toml:"realm"`
	Topics            string        `toml:"topics"`
	Name              string        `toml:"name"`
	UUID              string        `toml:"uuid"`
	KeepaliveInterval Duration      `toml:"keepalive_interval"`
	QueueMessages     int           `toml:"queue_messages"`
	QueueTTL          Duration      `toml:"queue_ttl"`
	MaxFrame          int           `toml:"max_frame"`
	ModuleRoots       []string      `toml:"module_roots"`
	DirRoots          []string      `toml:"dir_roots"`
	SocketDir         string        `toml:"socket_dir"`
	Wasm              EdgeWasm      `toml:"wasm"`
	Runtimes          []EdgeRuntime `toml:"runtime"`
	Limits            EdgeLimits    `toml:"limits"`
}

// EdgeLimits are the limits for each module.
type EdgeLimits struct {
	Messages          int     `toml:"messages"`
	Bytes             int     `toml:"bytes"`
	MessagesPerSecond float64 `toml:"messages_per_second"`
	BytesPerSecond    float64 `toml:"bytes_per_second"`
}

// EdgeWasm configures the built-in runtime, tripod/wasm.
type EdgeWasm struct {
	Enabled    bool   `toml:"enabled"`
	Name       string `toml:"name"`
	MaxModules int    `toml:"max_modules"`
}

// EdgeRuntime is one [[edge.runtime]]: a program that speaks SLSocket.
type EdgeRuntime struct {
	Name       string   `toml:"name"`
	UUID       string   `toml:"uuid"`
	Command    string   `toml:"command"`
	Type       string   `toml:"type"`
	APIs       []string `toml:"apis"`
	MaxModules int      `toml:"max_modules"`
}

// Broker configures the MQTT broker that is embedded in the daemon or the orchestrator.
type Broker struct {
	Address             string       `toml:"address"`
	TLSAddress          string       `toml:"tls_address"`
	WebSocketAddress    string       `toml:"websocket_address"`
	WebSocketTLSAddress string       `toml:"websocket_tls_address"`
	WebSocketOrigins    []string     `toml:"websocket_origins"`
	Certificate         string       `toml:"certificate"`
	Key                 string       `toml:"key"`
	ClientCA            string       `toml:"client_ca"`
	MaxMessage          int          `toml:"max_message"`
	MaxQueued           int          `toml:"max_queued"`
	MaxQueuedBytes      int64        `toml:"max_queued_bytes"`
	MaxRetained         int          `toml:"max_retained"`
	MaxRetainedBytes    int64        `toml:"max_retained_bytes"`
	ReceiveMaximum      int          `toml:"receive_maximum"`
	TopicAliasMaximum   int          `toml:"topic_alias_maximum"`
	SessionExpiry       Duration     `toml:"session_expiry"`
	Users               []BrokerUser `toml:"user"`
}

// BrokerUser is one [[broker.user]]. Without users, the broker allows everything to everybody.
type BrokerUser struct {
	Name         string   `toml:"name"`
	PasswordFile string   `toml:"password_file"`
	Realms       []string `toml:"realms"`
	Read         []string `toml:"read"`
	Write        []string `toml:"write"`
}

// Orchestrator configures the orchestrator: the program `tripod orchestrator`, or the one in the daemon.
type Orchestrator struct {
	// Broker may be empty. What that means depends on the program, see ForDaemon.
	Broker            string   `toml:"broker"`
	Protocol          int      `toml:"protocol"`
	User              string   `toml:"user"`
	PasswordFile      string   `toml:"password_file"`
	CA                string   `toml:"ca"`
	Certificate       string   `toml:"certificate"`
	Key               string   `toml:"key"`
	Realm             string   `toml:"realm"`
	Topics            string   `toml:"topics"`
	Address           string   `toml:"address"`
	Root              string   `toml:"root"`
	KeepaliveInterval Duration `toml:"keepalive_interval"`
	KeepaliveMissed   int      `toml:"keepalive_missed"`
}

// ForDaemon returns the settings of the orchestrator in a daemon with the given edge. If they name no broker, that is the
// edge's, with those of the edge's credentials that they do not have themselves.
func (o Orchestrator) ForDaemon(e *Edge) Orchestrator {
	if o.Broker != "" {
		return o
	}
	o.Broker, o.Protocol = e.Broker, e.Protocol
	if o.User == "" && o.PasswordFile == "" {
		o.User, o.PasswordFile = e.User, e.PasswordFile
	}
	if o.Certificate == "" {
		o.Certificate, o.Key = e.Certificate, e.Key
	}
	o.CA = cmp.Or(o.CA, e.CA)
	return o
}

const (
	// maxEdgeModules is the number of modules that SLSocket's narrow header can address.
	maxEdgeModules = 128
	// minFrame and maxFrame limit the configured sizes of frames and messages, in bytes.
	minFrame = 4 << 10
	maxFrame = 256 << 20
	// maxUint16 limits the fields of MQTT for the receive maximum and the topic alias maximum.
	maxUint16 = 1<<16 - 1
	// maxSessionExpiry is the largest Session Expiry Interval of MQTT 5 that ends.
	maxSessionExpiry = Duration((1<<32 - 2) * time.Second)
)

// validateEdge checks the sections edge, broker and orchestrator.
func (c *Config) validateEdge(v *validator) {
	v.broker("edge", c.Edge.Broker, c.Edge.Protocol, c.Edge.Realm, c.Edge.Topics)
	v.credentials("edge", c.Edge.PasswordFile, c.Edge.CA, c.Edge.Certificate, c.Edge.Key)
	e := c.Edge
	v.optionalUUID("edge.uuid", e.UUID)
	v.positive("edge.keepalive_interval", e.KeepaliveInterval)
	v.check(e.QueueMessages >= 1, "edge.queue_messages", "%d is not at least 1", e.QueueMessages)
	v.positive("edge.queue_ttl", e.QueueTTL)
	v.check(e.MaxFrame >= minFrame && e.MaxFrame <= maxFrame, "edge.max_frame", "%d is not between %d and %d bytes", e.MaxFrame, minFrame,
		maxFrame)
	v.directories("edge.module_roots", e.ModuleRoots)
	v.directories("edge.dir_roots", e.DirRoots)
	v.absolute("edge.socket_dir", e.SocketDir)
	v.check(len(e.SocketDir)+len("/7f.s") <= maxSocketPath, "edge.socket_dir", "%q is too long for sockets in it", e.SocketDir)
	v.check(e.Limits.Messages >= 1, "edge.limits.messages", "%d is not at least 1", e.Limits.Messages)
	v.check(e.Limits.Bytes >= 1, "edge.limits.bytes", "%d is not at least 1", e.Limits.Bytes)
	v.check(e.Limits.MessagesPerSecond >= 0, "edge.limits.messages_per_second", "%v is negative", e.Limits.MessagesPerSecond)
	v.check(e.Limits.BytesPerSecond >= 0, "edge.limits.bytes_per_second", "%v is negative", e.Limits.BytesPerSecond)
	names := map[string]bool{}
	if e.Wasm.Enabled {
		v.notEmpty("edge.wasm.name", e.Wasm.Name)
		v.check(e.Wasm.MaxModules >= 1 && e.Wasm.MaxModules <= maxEdgeModules, "edge.wasm.max_modules", "%d is not between 1 and %d",
			e.Wasm.MaxModules, maxEdgeModules)
		names[e.Wasm.Name] = true
	}
	for i, r := range e.Runtimes {
		v.runtime(fmt.Sprintf("edge.runtime[%d]", i), r, names)
		names[r.Name] = true
	}
	c.validateBroker(v)
	c.validateOrchestrator(v)
}

func (v *validator) runtime(key string, r EdgeRuntime, taken map[string]bool) {
	v.check(r.Name != "" && !strings.ContainsAny(r.Name, "/+#"), key+".name", "%q is not a name without /, + and #", r.Name)
	v.check(!taken[r.Name], key+".name", "two runtimes have the name %q", r.Name)
	v.optionalUUID(key+".uuid", r.UUID)
	v.check(strings.HasPrefix(r.Command, "/"), key+".command", "%q does not begin with the absolute path of a program", r.Command)
	v.check(r.MaxModules >= 0 && r.MaxModules <= maxEdgeModules, key+".max_modules", "%d is not between 0 (the default) and %d", r.MaxModules,
		maxEdgeModules)
}

func (c *Config) validateBroker(v *validator) {
	b := c.Broker
	v.address("broker.address", b.Address)
	v.address("broker.tls_address", b.TLSAddress)
	v.address("broker.websocket_address", b.WebSocketAddress)
	v.address("broker.websocket_tls_address", b.WebSocketTLSAddress)
	v.origins("broker.websocket_origins", b.WebSocketOrigins)
	v.credentials("broker", "", b.ClientCA, b.Certificate, b.Key)
	secure := b.TLSAddress != "" || b.WebSocketTLSAddress != ""
	v.check(!secure || b.Certificate != "", "broker.certificate",
		"is empty: broker.tls_address and broker.websocket_tls_address need a certificate")
	v.check(secure || b.ClientCA == "", "broker.client_ca", "needs broker.tls_address or broker.websocket_tls_address")
	v.check(b.MaxMessage >= minFrame && b.MaxMessage <= maxFrame, "broker.max_message", "%d is not between %d and %d bytes", b.MaxMessage,
		minFrame, maxFrame)
	v.check(b.MaxQueued >= 1, "broker.max_queued", "%d is not at least 1", b.MaxQueued)
	v.check(b.MaxQueuedBytes >= int64(b.MaxMessage), "broker.max_queued_bytes", "%d is less than broker.max_message", b.MaxQueuedBytes)
	v.check(b.MaxRetained >= 1, "broker.max_retained", "%d is not at least 1", b.MaxRetained)
	v.check(b.MaxRetainedBytes >= int64(b.MaxMessage), "broker.max_retained_bytes", "%d is less than broker.max_message", b.MaxRetainedBytes)
	v.check(b.ReceiveMaximum >= 1 && b.ReceiveMaximum <= maxUint16, "broker.receive_maximum", "%d is not between 1 and %d", b.ReceiveMaximum,
		maxUint16)
	v.check(b.TopicAliasMaximum >= 1 && b.TopicAliasMaximum <= maxUint16, "broker.topic_alias_maximum", "%d is not between 1 and %d",
		b.TopicAliasMaximum, maxUint16)
	v.check(b.SessionExpiry >= Duration(time.Second) && b.SessionExpiry <= maxSessionExpiry, "broker.session_expiry",
		"%q is not between 1s and %s", b.SessionExpiry, maxSessionExpiry)
	if c.Edge.Enabled && c.Edge.Broker == EmbeddedBroker || c.Orchestrator.Broker == EmbeddedBroker {
		v.check(b.Address != "" || b.TLSAddress != "", "broker.address",
			"is empty, and so is broker.tls_address: the node's own clients, which do not use WebSocket, cannot reach the embedded broker")
	}
	names := map[string]bool{}
	for i, u := range b.Users {
		key := fmt.Sprintf("broker.user[%d]", i)
		v.check(u.Name != "" && !names[u.Name], key+".name", "%q is empty or used twice", u.Name)
		names[u.Name] = true
		v.optional(key+".password_file", u.PasswordFile)
	}
}

func (c *Config) validateOrchestrator(v *validator) {
	o := c.Orchestrator
	v.broker("orchestrator", cmp.Or(o.Broker, DefaultBroker), o.Protocol, o.Realm, o.Topics)
	v.credentials("orchestrator", o.PasswordFile, o.CA, o.Certificate, o.Key)
	v.address("orchestrator.address", o.Address)
	v.absolute("orchestrator.root", o.Root)
	v.check(o.Root != c.Root, "orchestrator.root", "%q is the node's root: the orchestrator needs its own", o.Root)
	v.positive("orchestrator.keepalive_interval", o.KeepaliveInterval)
	if c.Edge.Orchestrator {
		v.check(c.Edge.Enabled, "edge.orchestrator", "needs edge.enabled")
		v.check(o.Realm == c.Edge.Realm, "orchestrator.realm", "%q is not edge.realm, %q: the daemon's own manager would have no orchestrator",
			o.Realm, c.Edge.Realm)
		v.check(o.Root != c.State, "orchestrator.root", "%q is the node's state directory: the orchestrator needs its own", o.Root)
	}
	v.check(o.KeepaliveMissed >= 1, "orchestrator.keepalive_missed", "%d is not at least 1", o.KeepaliveMissed)
}

// broker checks the settings that the sections edge and orchestrator share.
func (v *validator) broker(section, broker string, protocol int, realm, topics string) {
	if broker != EmbeddedBroker {
		u, err := url.Parse(broker)
		v.check(err == nil && (u.Scheme == "mqtt" || u.Scheme == "mqtts") && u.Hostname() != "" && (u.Path == "" || u.Path == "/") &&
			u.User == nil,
			section+".broker", "%q is neither %q nor mqtt://HOST:PORT or mqtts://HOST:PORT (user and password have their own keys)", broker,
			EmbeddedBroker)
	}
	v.check(protocol == 4 || protocol == 5, section+".protocol", "%d is neither 5 (MQTT 5.0) nor 4 (MQTT 3.1.1)", protocol)
	v.check(realm != "" && !strings.ContainsAny(realm, "+#\x00") && !strings.HasPrefix(realm, "$"), section+".realm",
		"%q is not the beginning of a topic: it is empty, has a wildcard or begins with $", realm)
	v.oneOf(section+".topics", topics, "seed", "nested")
}

// credentials checks the paths of optional files.
func (v *validator) credentials(section, password, ca, certificate, key string) {
	for _, f := range [][2]string{{"password_file", password}, {"ca", ca}, {"certificate", certificate}, {"key", key}} {
		v.optional(section+"."+f[0], f[1])
	}
	v.check((certificate == "") == (key == ""), section+".key", "certificate and key must be set together")
}

func (v *validator) optionalUUID(key, text string) {
	if text != "" {
		v.check(len(text) == 36 && uuid.Validate(text) == nil, key, "%q is not a UUID such as 22222222-0000-4000-8000-000000000001", text)
	}
}
