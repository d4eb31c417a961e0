package cli

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/tripod-run/tripod/internal/edge/broker"
	"github.com/tripod-run/tripod/internal/edge/mqtt"
)

// TestEdgeClients lists a client that is connected and one that is away with a message, as a table and as JSON, and asks
// as a user who may not see the list.
func TestEdgeClients(t *testing.T) {
	b, err := broker.New(broker.Config{Address: "127.0.0.1:0",
		Users: []broker.User{{Name: "admin", Realms: []string{"t"}, Read: []string{"$SYS/#"}}, {Name: "other"}}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.Close(context.Background()) })
	connect := func(id string) mqtt.Client {
		c, err := mqtt.New(mqtt.Config{URL: b.URL(), ClientID: id, Username: "admin", SessionExpiry: time.Hour})
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
	if err := away.Subscribe(t.Context(), "t/#", 1, mqtt.SubscribeOptions{}); err != nil {
		t.Fatal(err)
	}
	away.Close(t.Context())
	if err := connect("here").Publish(t.Context(), "t/1", 1, false, []byte("text")); err != nil {
		t.Fatal(err)
	}
	var sessions []broker.Session
	for len(sessions) < 2 || sessions[0].Queued == 0 { // the message is on its way
		out, err := edge(t, "clients", "--broker", b.URL(), "--user", "admin", "-o", "json")
		if err != nil || json.Unmarshal([]byte(out), &sessions) != nil {
			t.Fatalf("clients -o json: got %s, error %v", out, err)
		}
	}
	if a, h := sessions[0], sessions[1]; a.Client != "away" || a.Connected || a.Queued != 1 || a.QueuedBytes != 7 || a.Subscriptions != 1 ||
		a.Expiry != time.Hour || h.Client != "here" || !h.Connected || h.Level != 5 || len(sessions) != 2 {
		t.Errorf("clients -o json: got %+v, want away with a message of 7 bytes, and here", sessions)
	}
	out, err := edge(t, "clients", "--broker", b.URL(), "--user", "admin", "-o", "wide")
	if err != nil || !strings.Contains(out, "left ") || !strings.Contains(out, "connected") || !strings.Contains(out, "5.0") {
		t.Errorf("clients -o wide: got\n%s\nerror %v; want one that left and one that is connected", out, err)
	}
	if _, err := edge(t, "clients", "--broker", b.URL(), "--user", "other"); err == nil || !strings.Contains(err.Error(), "refused") {
		t.Errorf("clients as another user: got error %v, want that the broker refuses", err)
	}
}
