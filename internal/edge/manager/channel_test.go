package manager

import (
	"bytes"
	"fmt"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/edge/mqtt"
	"github.com/tripod-run/tripod/internal/edge/wire"
)

// modules creates modules 0 to n-1 on a runtime.
func (r *rig) modules(f *fake, n int) {
	r.t.Helper()
	for i := range n {
		r.order(f.info.UUID, wire.ActionCreate, moduleData(fmt.Sprint(f.info.Name, i)))
		f.find(r.t, true, i, wire.Create, 1)
	}
}

// filtered waits until the manager has subscribed to a filter, or has unsubscribed.
func (r *rig) filtered(filter string, want bool) byte {
	r.t.Helper()
	deadline := time.Now().Add(patience)
	for {
		r.mu.Lock()
		qos, ok := r.client().filters[filter]
		r.mu.Unlock()
		if ok == want {
			return qos
		}
		if time.Now().After(deadline) {
			r.t.Fatalf("subscribed to %s: %v, want %v", filter, ok, want)
		}
		<-time.After(time.Millisecond)
	}
}

// TestLoopback: a message reaches the other channels of the node, including those of the sender's runtime and module
// (the public manager withholds it from the whole runtime), but never the channel that sent it. It reaches the broker
// once.
func TestLoopback(t *testing.T) {
	r := newRig(t, nil)
	r.modules(r.a, 2)
	r.modules(r.b, 1)
	r.a.open(t, 0, 0, channel.ReadWrite|channel.QoS1, "app/x")
	r.a.open(t, 0, 1, channel.Read, "app/#")
	r.a.open(t, 1, 5, channel.Read|channel.QoS2, "app/+")
	r.b.open(t, 0, 9, channel.ReadWrite, "app/x")
	r.filtered("app/#", true)
	if err := poll(t.Context(), func() bool { return r.m.router.Count(runtimeA, 1)+r.m.router.Count(runtimeB, 0) == 2 }); err != nil {
		t.Fatal(err)
	}
	r.a.tell(t, false, 0, 0, "hello")
	for _, m := range []channel.Message{r.a.find(t, false, 0, 1, 1), r.a.find(t, false, 1, 5, 1), r.b.find(t, false, 0, 9, 1)} {
		if string(m.Payload) != "hello" {
			t.Errorf("%v got %q, want \"hello\"", m.Header, m.Payload)
		}
	}
	if m := r.find(t, "app/x", 1, nil); string(m.Payload) != "hello" || m.QoS != 1 || m.Retain {
		t.Errorf("the broker got %+v", m)
	}
	r.publish("app/x", false, []byte("from outside"))
	for _, m := range []channel.Message{r.a.find(t, false, 0, 0, 1), r.a.find(t, false, 0, 1, 2), r.a.find(t, false, 1, 5, 2),
		r.b.find(t, false, 0, 9, 2)} {
		if string(m.Payload) != "from outside" {
			t.Errorf("%v got %q, want \"from outside\"", m.Header, m.Payload)
		}
	}
	if n := r.count(func(m mqtt.Message) bool { return m.Topic == "app/x" }); n != 2 || r.a.count(false, 0) != 1 {
		t.Errorf("%d messages at the broker, %d at the sender's channel", n, r.a.count(false, 0))
	}
}

// TestChannelLimits: bad channels are refused and disturb nothing (fault E1).
func TestChannelLimits(t *testing.T) {
	r := newRig(t, nil)
	r.modules(r.a, 2)
	for fd := range channel.MaxChannels {
		r.a.open(t, 0, fd, channel.Read, fmt.Sprint("many/", fd))
	}
	r.a.open(t, 1, 0, channel.ReadWrite, "wild/#") // for reading only
	r.a.tell(t, false, 1, 0, "to a wildcard")
	r.a.open(t, 1, 1, channel.Read, "only/read")
	r.a.tell(t, false, 1, 1, "to a channel for reading")
	r.a.open(t, 1, 2, 0, "no/mode")
	r.a.open(t, 1, 3, channel.Write, "first")
	r.a.open(t, 1, 3, channel.Write, "second") // instead of the first
	r.a.tell(t, false, 1, 3, "two")
	if m := r.find(t, "second", 1, nil); string(m.Payload) != "two" {
		t.Errorf("got %q, want \"two\"", m.Payload)
	}
	if n := r.m.router.Count(runtimeA, 0); n != channel.MaxChannels {
		t.Errorf("%d channels, want %d", n, channel.MaxChannels)
	}
	if n := r.count(func(m mqtt.Message) bool { return m.Topic == "first" || m.Topic == "wild/#" || m.Topic == "only/read" }); n != 0 {
		t.Errorf("%d messages that should not be", n)
	}
}

// TestChannelsEnd: channels end when they are closed and with their module, and their subscriptions with them.
func TestChannelsEnd(t *testing.T) {
	r := newRig(t, nil)
	r.modules(r.a, 2)
	r.a.open(t, 0, 0, channel.Read, "one")
	r.a.open(t, 0, 1, channel.Read|channel.QoS2, "two")
	r.a.open(t, 1, 0, channel.Read, "$SL/proc/stdin")
	if qos := r.filtered("two", true); qos != 2 {
		t.Errorf("subscribed with QoS %d", qos)
	}
	r.filtered("realm/proc/stdin/a1", true)
	r.a.tell(t, true, 0, channel.CloseChannel, "\x00")
	r.filtered("one", false)
	r.a.tell(t, true, 0, wire.Exited, `{}`)
	r.filtered("two", false)
	r.filtered("realm/proc/stdin/a1", true)
	r.publish("realm/proc/stdin/a1", false, []byte("quit"))
	if m := r.a.find(t, false, 1, 0, 1); string(m.Payload) != "quit" {
		t.Errorf("got %q, want \"quit\"", m.Payload)
	}
}

// TestSlowModule: a module that does not read delays no other, and its queue is bounded: the oldest message is dropped.
func TestSlowModule(t *testing.T) {
	r := newRig(t, func(c *Config) { c.Limits.Messages = 10 })
	r.modules(r.a, 3)
	gate := make(chan struct{})
	r.a.mu.Lock()
	r.a.blocked[0] = gate
	r.a.mu.Unlock()
	r.a.open(t, 0, 0, channel.Read, "x")
	r.a.open(t, 1, 1, channel.Read, "x")
	r.a.open(t, 2, 2, channel.Write, "x")
	for i := range 100 {
		r.a.tell(t, false, 2, 2, fmt.Sprint(i))
		r.a.find(t, false, 1, 1, i+1)
	}
	close(gate)
	last := r.a.find(t, false, 0, 0, 10)
	if n := r.figures()["tripod_edge_dropped_messages_total slow-module"]; n < 85 || n > 90 {
		t.Errorf("%v messages dropped", n)
	}
	if string(last.Payload) < "9" {
		t.Errorf("the tenth message of the slow module is %q", last.Payload)
	}
}

// TestRate: a module that publishes too much loses messages above its limit; other modules lose none.
func TestRate(t *testing.T) {
	r := newRig(t, func(c *Config) { c.Limits.MessagesPerSecond, c.Limits.BytesPerSecond = 5, 1000 })
	r.modules(r.a, 3)
	for i := range 3 {
		r.a.open(t, i, 0, channel.Write, fmt.Sprint("from/", i))
	}
	for range 100 {
		r.a.tell(t, false, 0, 0, "x")
	}
	r.a.tell(t, false, 1, 0, string(bytes.Repeat([]byte("y"), 900)))
	r.a.tell(t, false, 1, 0, string(bytes.Repeat([]byte("y"), 900)))
	r.a.tell(t, false, 2, 0, string(bytes.Repeat([]byte("z"), 1<<20))) // longer than the bucket: it goes when that is full
	r.find(t, "from/0", 5, nil)
	r.find(t, "from/1", 1, nil)
	r.find(t, "from/2", 1, nil)
	if n := r.figures()["tripod_edge_dropped_messages_total rate"]; n < 90 {
		t.Errorf("%v messages dropped", n)
	}
}

// TestLargeMessages: large messages arrive complete in both directions (fault E2).
func TestLargeMessages(t *testing.T) {
	r := newRig(t, nil)
	r.modules(r.a, 1)
	r.a.open(t, 0, 0, channel.ReadWrite, "big")
	big := bytes.Repeat([]byte("x"), 1<<20)
	r.a.tell(t, false, 0, 0, string(big))
	if m := r.find(t, "big", 1, nil); !bytes.Equal(m.Payload, big) {
		t.Errorf("%d bytes", len(m.Payload))
	}
	r.filtered("big", true)
	for i := range 20 { // more than the bound of what waits at a time
		r.publish("big", false, big)
		r.a.find(t, false, 0, 0, i+1)
	}
}

// TestWhileTheBrokerIsAway: messages with QoS 1 wait in the client, those with QoS 0 are counted, and modules of the
// node still reach each other.
func TestWhileTheBrokerIsAway(t *testing.T) {
	r := newRig(t, nil)
	r.modules(r.a, 2)
	r.a.open(t, 0, 0, channel.Write, "plain")
	r.a.open(t, 0, 1, channel.Write|channel.QoS1, "sure")
	r.a.open(t, 1, 0, channel.Read, "#")
	r.filtered("#", true)
	r.client().disconnect()
	r.a.tell(t, false, 0, 0, "lost")
	r.a.tell(t, false, 0, 1, "kept")
	r.a.find(t, false, 1, 0, 2)
	deadline := time.Now().Add(patience)
	for r.figures()["tripod_edge_dropped_messages_total no-broker"] != 1 {
		if time.Now().After(deadline) {
			t.Fatal("the message without a broker is not counted")
		}
		<-time.After(time.Millisecond)
	}
	r.client().connect()
	r.find(t, "sure", 1, nil)
	if n := r.count(func(m mqtt.Message) bool { return m.Topic == "plain" }); n != 0 {
		t.Errorf("%d messages with QoS 0, want 0", n)
	}
}

// TestCollector: the metrics can be registered and collected.
func TestCollector(t *testing.T) {
	r := newRig(t, nil)
	r.modules(r.a, 2)
	r.a.tell(t, true, 99, wire.Exited, `{}`)
	r.a.tell(t, true, 0, wire.Exited, `{"status": {"code": 1, "reason": "a reason that nobody knows"}}`)
	r.exitedOf(runtimeA, "a0", 1)
	got := r.figures()
	for name, want := range map[string]float64{"tripod_edge_runtime_up a": 1, "tripod_edge_modules a running": 1,
		"tripod_edge_refused_total unknown-index": 1,
		"tripod_edge_exited_modules_total other":  1, "tripod_edge_broker_connected": 1, "tripod_edge_registered": 1} {
		if got[name] != want {
			t.Errorf("%s is %v, want %v", name, got[name], want)
		}
	}
}

// figures returns the manager's metrics, by name and labels.
func (r *rig) figures() map[string]float64 {
	r.t.Helper()
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(r.m)
	families, err := registry.Gather()
	if err != nil {
		r.t.Fatal(err)
	}
	got := map[string]float64{}
	for _, f := range families {
		for _, m := range f.Metric {
			name := f.GetName()
			for _, l := range m.Label {
				name += " " + l.GetValue()
			}
			got[name] = m.GetGauge().GetValue() + m.GetCounter().GetValue()
		}
	}
	return got
}
