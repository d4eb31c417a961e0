package edge

import (
	"context"
	"errors"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/tripod-run/tripod/internal/config"
	"github.com/tripod-run/tripod/internal/edge/broker"
	"github.com/tripod-run/tripod/internal/edge/mqtt"
	"github.com/tripod-run/tripod/internal/health"
	"github.com/tripod-run/tripod/test/until"
)

// finding is the one on the subject.
func finding(t *testing.T, c *config.Config, subject string) health.Finding {
	t.Helper()
	for _, f := range Check(t.Context(), c) {
		if f.Subject == subject {
			return f
		}
	}
	t.Fatalf("nothing is found out about %s", subject)
	return health.Finding{}
}

func TestCheckEdge(t *testing.T) {
	c := config.Default()
	if all := Check(t.Context(), c); len(all) > 0 {
		t.Errorf("an edge that is off: %+v", all)
	}
	c.Edge.Enabled = true
	if f := finding(t, c, "edge broker"); !f.OK || !strings.Contains(f.Detail, "127.0.0.1:1883") {
		t.Errorf("the default: %+v", f)
	}
	c.Broker.Address = "0.0.0.0:1883"
	if f := finding(t, c, "edge broker"); f.OK || f.Required {
		t.Errorf("open to everybody: %+v", f)
	}
	c.Broker.Address, c.Broker.WebSocketAddress = "127.0.0.1:1883", ":8083"
	if f := finding(t, c, "edge broker"); f.OK || !strings.Contains(f.Detail, "127.0.0.1:1883 :8083") {
		t.Errorf("open to everybody by WebSocket: %+v", f)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c.Edge.Broker = "mqtt://" + l.Addr().String()
	if f := finding(t, c, "edge broker"); !f.OK {
		t.Errorf("one that answers: %+v", f)
	}
	l.Close()
	if f := finding(t, c, "edge broker"); f.OK || f.Required {
		t.Errorf("one that does not: %+v", f)
	}
	c.Edge.ModuleRoots = []string{t.TempDir(), "/no/such/directory"}
	if f := finding(t, c, "edge.module_roots"); f.OK || !strings.Contains(f.Detail, "/no/such/directory") {
		t.Errorf("a root that is not there: %+v", f)
	}
	c.Edge.Runtimes = []config.EdgeRuntime{{Name: "min", Command: "/no/such/program --quiet"}, {Name: "sh", Command: "/bin/sh -c x"}}
	if f := finding(t, c, "edge runtime min"); f.OK {
		t.Errorf("a program that is not there: %+v", f)
	}
	if f := finding(t, c, "edge runtime sh"); !f.OK {
		t.Errorf("a program: %+v", f)
	}
	c.Edge.PasswordFile = "/no/such/file"
	if f := finding(t, c, "edge.password_file"); f.OK || !f.Required {
		t.Errorf("a password that cannot be read: %+v", f)
	}
	c.Backends.Wasm = false
	if f := finding(t, c, "edge runtime wasm"); f.OK {
		t.Errorf("a runtime without its backend: %+v", f)
	}
}

// TestCheckRunningBroker checks that the finding about an embedded broker that runs has its clients, sessions and queues.
func TestCheckRunningBroker(t *testing.T) {
	b, err := broker.New(broker.Config{Address: "127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.Close(t.Context()) })
	connect := func(id string) mqtt.Client {
		c, err := mqtt.New(mqtt.Config{URL: b.URL(), ClientID: id, SessionExpiry: time.Hour})
		if err == nil {
			err = c.WaitConnected(t.Context())
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close(context.Background()) })
		return c
	}
	away := connect("away")
	if err := errors.Join(away.Subscribe(t.Context(), "t", 1, mqtt.SubscribeOptions{}), away.Close(t.Context()),
		connect("here").Publish(t.Context(), "t", 1, false, nil)); err != nil {
		t.Fatal(err)
	}
	c := config.Default()
	c.Edge.Enabled, c.Broker.Address = true, b.Addresses()[0]
	const want = "1 clients connected, 1 sessions of absent clients, 1 messages queued"
	until.Holds(t, want, func() bool { return strings.Contains(finding(t, c, "edge broker").Detail, want) })
}
