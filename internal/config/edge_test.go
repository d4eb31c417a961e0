package config

import (
	"strings"
	"testing"
)

func TestEdgeErrorsAreAllNamed(t *testing.T) {
	c, err := Parse([]byte(`
[edge]
enabled = true
broker = "tcp://host"
protocol = 3
password_file = "secret"
certificate = "/c.pem"
realm = "a/#"
topics = "flat"
uuid = "one"
keepalive_interval = "0s"
queue_messages = 0
queue_ttl = "-1s"
max_frame = 1
module_roots = ["modules"]
dir_roots = ["/"]
[edge.wasm]
name = ""
max_modules = 129
[edge.limits]
messages = 0
bytes = 0
messages_per_second = -1
bytes_per_second = -0.5
[[edge.runtime]]
name = "a/b"
command = "run"
max_modules = 1000
[[edge.runtime]]
name = "wasm"
command = "/bin/run"
[[edge.runtime]]
name = "wasm"
command = "/bin/run"
uuid = "22222222-0000-4000-8000-00000000000x"
[broker]
address = "1883"
tls_address = ":8883"
websocket_address = "8083"
websocket_tls_address = "8084"
websocket_origins = ["https://app.example/"]
max_message = 0
max_queued = 0
max_queued_bytes = -1
max_retained = -1
max_retained_bytes = -1
receive_maximum = 65536
topic_alias_maximum = 0
session_expiry = "999ms"
[[broker.user]]
name = ""
password_file = "relative"
[orchestrator]
broker = "mqtt://user:password@host:1883"
protocol = 6
realm = ""
topics = ""
address = "x"
keepalive_interval = "0s"
keepalive_missed = 0
root = "/var/lib/tripod"
`), "test")
	if err != nil {
		t.Fatal(err)
	}
	err = c.Complete()
	for _, key := range []string{"edge.broker:", "edge.protocol:", "edge.password_file:", "edge.key:", "edge.realm:", "edge.limits.messages:",
		"edge.limits.bytes:", "edge.limits.messages_per_second:", "edge.limits.bytes_per_second:", "edge.topics:", "edge.uuid:",
		"edge.keepalive_interval:", "edge.queue_messages:", "edge.queue_ttl:", "edge.max_frame:", "edge.module_roots[0]:", "edge.dir_roots[0]:",
		"edge.wasm.name:", "edge.wasm.max_modules:", "edge.runtime[0].name:", "edge.runtime[0].command:", "edge.runtime[0].max_modules:",
		"edge.runtime[2].name:", "edge.runtime[2].uuid:", "broker.address:", "broker.certificate:",
		"broker.max_queued:", "broker.max_queued_bytes:", "broker.max_retained:", "broker.max_retained_bytes:",
		"broker.receive_maximum:", "broker.topic_alias_maximum:", "broker.session_expiry:", "broker.websocket_address:",
		"broker.websocket_tls_address:", "broker.websocket_origins:", "broker.max_message:", "broker.user[0].name:",
		"broker.user[0].password_file:", "orchestrator.broker:", "orchestrator.protocol:", "orchestrator.realm:", "orchestrator.topics:",
		"orchestrator.address:", "orchestrator.keepalive_interval:", "orchestrator.keepalive_missed:", "orchestrator.root:"} {
		if err == nil || !strings.Contains(err.Error(), key) {
			t.Errorf("error does not name %s: %v", key, err)
		}
	}
}

// TestHostedOrchestrator checks the settings of an orchestrator in a daemon.
func TestHostedOrchestrator(t *testing.T) {
	for text, want := range map[string]string{
		"orchestrator = true":                 "edge.orchestrator: needs edge.enabled",
		"enabled = true\norchestrator = true": "",
		"enabled = true\norchestrator = true\n[orchestrator]\nrealm = \"other\"":      "orchestrator.realm:",
		"enabled = true\norchestrator = true\n[orchestrator]\nroot = \"/run/tripod\"": "orchestrator.root:",
		"enabled = true\n[orchestrator]\nrealm = \"other\"":                           "", // the program's
	} {
		c, err := Parse([]byte("[edge]\n"+text), "test")
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Complete(); (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %v, want %q", text, err, want)
		}
	}
}

// TestOrchestratorForDaemon checks that an orchestrator in the daemon uses the daemon's broker with the daemon's
// credentials, unless [orchestrator] has others. The program that reads the same file gets none of them.
func TestOrchestratorForDaemon(t *testing.T) {
	type broker struct{ url, user, password, ca, certificate, key string }
	const (
		credentials = "user = \"node\"\npassword_file = \"/n/password\"\nca = \"/n/ca\"\ncertificate = \"/n/crt\"\nkey = \"/n/key\"\nprotocol = 4\n"
		hub         = "broker = \"mqtts://hub:8883\"\n"
	)
	for _, c := range []struct {
		name, edge, orchestrator string
		want                     broker
		protocol                 int
	}{
		{"embedded", "", "", broker{url: EmbeddedBroker}, 5},
		{"the edge's", hub + credentials, "", broker{"mqtts://hub:8883", "node", "/n/password", "/n/ca", "/n/crt", "/n/key"}, 4},
		{"another broker", credentials, "broker = \"mqtt://other:1883\"", broker{url: "mqtt://other:1883"}, 5},
		{"another user", hub + credentials, "user = \"o\"", broker{"mqtts://hub:8883", "o", "", "/n/ca", "/n/crt", "/n/key"}, 4},
		{"another certificate", hub + credentials, "ca = \"/o/ca\"\ncertificate = \"/o/crt\"\nkey = \"/o/key\"",
			broker{"mqtts://hub:8883", "node", "/n/password", "/o/ca", "/o/crt", "/o/key"}, 4},
	} {
		config, err := Parse([]byte("[edge]\nenabled = true\norchestrator = true\n"+c.edge+"[orchestrator]\n"+c.orchestrator), "test")
		if err == nil {
			err = config.Complete()
		}
		if err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		o := config.Orchestrator.ForDaemon(&config.Edge)
		if got := (broker{o.Broker, o.User, o.PasswordFile, o.CA, o.Certificate, o.Key}); got != c.want || o.Protocol != c.protocol {
			t.Errorf("%s: in a daemon the orchestrator has the broker %+v, protocol %d; want %+v, %d", c.name, got, o.Protocol, c.want, c.protocol)
		}
		if c.orchestrator == "" && config.Orchestrator.Broker != "" {
			t.Errorf("%s: the program's orchestrator has the daemon's broker %s", c.name, config.Orchestrator.Broker)
		}
	}
}

func TestEdgeDefaults(t *testing.T) {
	c, err := Parse([]byte(`
root = "/srv/node"
state = "/run/node"
[edge]
enabled = true
[[edge.runtime]]
name = "min"
command = "/usr/local/bin/runtime --quiet"
[[edge.runtime]]
name = "other"
command = "/usr/local/bin/runtime"
uuid = "11111111-0000-4000-8000-000000000001"
[[broker.user]]
name = "node"
password_file = "/etc/tripod/node"
realms = ["realm"]
`), "test")
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Complete(); err != nil {
		t.Fatal(err)
	}
	if c.Orchestrator.Root != "/srv/node-orchestrator" {
		t.Errorf("derived orchestrator.root: got %q, want /srv/node-orchestrator", c.Orchestrator.Root)
	}
	if len(c.Edge.Runtimes) != 2 || c.Edge.Runtimes[1].Name != "other" || len(c.Broker.Users) != 1 || c.Broker.Users[0].Realms[0] != "realm" {
		t.Errorf("got runtimes %+v and users %+v, want two runtimes and one user", c.Edge.Runtimes, c.Broker.Users)
	}
}

// TestWebSocketTLS: websocket_tls_address alone uses the broker's certificate, too.
func TestWebSocketTLS(t *testing.T) {
	c := Default()
	c.Broker.WebSocketTLSAddress = ":8084"
	if err := c.Complete(); err == nil || !strings.Contains(err.Error(), "broker.certificate:") {
		t.Errorf("Complete without a certificate: got error %v, want one about broker.certificate", err)
	}
	c.Broker.Certificate, c.Broker.Key, c.Broker.ClientCA = "/etc/tripod/mqtt.crt", "/etc/tripod/mqtt.key", "/etc/tripod/ca.crt"
	if err := c.Complete(); err != nil {
		t.Errorf("Complete with a certificate: %v", err)
	}
}

// TestBrokerBytes: a message of the maximum size fits into an empty queue and can be retained.
func TestBrokerBytes(t *testing.T) {
	c := Default()
	c.Broker.MaxMessage, c.Broker.MaxQueuedBytes, c.Broker.MaxRetainedBytes = 1<<20, 1<<20, 1<<20
	if err := c.Complete(); err != nil {
		t.Errorf("Complete with equal sizes: %v", err)
	}
	c.Broker.MaxMessage++
	err := c.Complete()
	for _, key := range []string{"broker.max_queued_bytes:", "broker.max_retained_bytes:"} {
		if err == nil || !strings.Contains(err.Error(), key) {
			t.Errorf("Complete with larger messages: got error %v, want one about %s", err, key)
		}
	}
}

func TestEmbeddedBrokerNeedsAnAddress(t *testing.T) {
	c := Default()
	c.Broker.Address = ""
	if err := c.Complete(); err != nil {
		t.Errorf("Complete with a disabled edge: %v", err)
	}
	c.Edge.Enabled = true
	if err := c.Complete(); err == nil || !strings.Contains(err.Error(), "broker.address:") {
		t.Errorf("Complete with an unreachable broker: got error %v, want one about broker.address", err)
	}
}
