package manager

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/edge/wire"
)

// dropped waits until a drop is counted, and checks that a line of the log names its module and topic.
func (r *rig) dropped(reason, module, topic string) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), patience)
	defer cancel()
	if err := poll(ctx, func() bool { return r.figures()["tripod_edge_dropped_messages_total "+reason] > 0 }); err != nil {
		r.t.Fatalf("no drop with the reason %s is counted: %v", reason, err)
	}
	line := fmt.Sprintf("reason=%s module=%s topic=%s messages=", reason, module, topic)
	if module == "" {
		line = fmt.Sprintf("reason=%s module=\"\" topic=%s messages=", reason, topic)
	}
	var text string
	logged := func() bool { // the counter comes first
		raw, err := os.ReadFile(r.log)
		text = string(raw)
		return err == nil && strings.Contains(text, line)
	}
	if err := poll(ctx, logged); err != nil {
		r.t.Errorf("no line has %q:\n%s", line, text)
	}
}

// TestDropsToModules checks the drops of messages that a module does not get.
func TestDropsToModules(t *testing.T) {
	r := newRig(t, func(c *Config) { c.Limits.Messages = 10 })
	r.modules(r.a, 1)
	r.a.mu.Lock()
	r.a.blocked[0] = make(chan struct{})
	r.a.mu.Unlock()
	r.a.open(t, 0, 3, channel.Read, "to/+")
	r.filtered("to/+", true)
	for range 20 {
		r.publish("to/a", false, []byte("x"))
	}
	r.dropped("slow-module", "a0", "to/+")
	r.a.tell(t, true, 0, wire.Exited, `{}`)
	r.dropped("module-ended", "a0", "to/+")
}

// TestDropsFromModules checks the drops of messages that a module has published.
func TestDropsFromModules(t *testing.T) {
	r := newRig(t, func(c *Config) { c.Limits.MessagesPerSecond = 5 })
	r.modules(r.a, 2)
	r.a.open(t, 0, 0, channel.Write, "from/a")
	for range 20 {
		r.a.tell(t, false, 0, 0, "x")
	}
	r.dropped("rate", "a0", "from/a")
	r.client().disconnect()
	r.a.open(t, 1, 1, channel.Write, "from/a1")
	r.a.tell(t, false, 1, 1, "x")
	r.dropped("no-broker", "a1", "from/a1")
	r.m.publish(t.Context(), "not/+/a/topic", 1, false, nil)
	r.dropped("publish", "", "not/+/a/topic")
}

// TestDropsOfASlowBroker checks the drops of messages that the MQTT client does not take.
func TestDropsOfASlowBroker(t *testing.T) {
	stalled := make(chan struct{})
	r := newRig(t, nil, func(b *bus) { b.stalled = stalled })
	defer close(stalled)
	r.modules(r.b, 1)
	for full := false; !full; { // one message is with the client
		_, ok := r.m.out.queue.put(outgoing{topic: "other"}, 0, false)
		full = !ok
	}
	r.b.open(t, 0, 2, channel.Write, "from/b")
	r.b.tell(t, false, 0, 2, "x")
	r.dropped("slow-broker", "b0", "from/b")
	r.m.out.stop()
	r.dropped("closed", "", "other")
}
