package wasi

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/component/wit"
)

// mailbox is a Messages that keeps what it gets.
type mailbox struct {
	sent []string
	fail error
}

func (m *mailbox) Send(_ context.Context, topic string, data []byte) error {
	m.sent = append(m.sent, topic+"="+string(data))
	return m.fail
}

func (g *guest) message(name string, params ...[]byte) *wit.Reader {
	g.t.Helper()
	return g.call("wasi:messaging/types", name, params...)
}

func (g *guest) newMessage(data string) uint32 {
	g.t.Helper()
	return g.message("[constructor]message", list([]byte(data))).U32()
}

// failed returns an error of wasi:messaging.
func (g *guest) failed(r *wit.Reader) string {
	g.t.Helper()
	err := ReadHandled(r.Rest())
	if err == nil {
		g.t.Fatal("the result is ok, want an error")
	}
	return err.Error()
}

func TestMessaging(t *testing.T) {
	box := &mailbox{}
	g := newGuest(t, Options{Messages: box})
	if f := MessageHandler().Funcs; len(f) != 1 || f[0].Name != "handle" {
		t.Errorf("MessageHandler has the functions %v, want handle", f)
	}
	client := ok(t, g.message("[static]client.connect", str("any"))).U32()
	received := g.PutMessage("in", []byte("hello"))
	if topic := option(g.message("[method]message.topic", u32(received))); topic != "in" {
		t.Errorf("topic of a received message: got %q, want in", topic)
	}
	if data := g.message("[method]message.data", u32(received)).String(); data != "hello" {
		t.Errorf("data: got %q, want hello", data)
	}
	made := g.newMessage("one")
	if topic := option(g.message("[method]message.topic", u32(made))); topic != "none" {
		t.Errorf("topic of a new message: got %q, want none", topic)
	}
	g.message("[method]message.set-data", u32(made), list([]byte("three")))
	for _, m := range []uint32{made, received} {
		ok(t, g.call("wasi:messaging/producer", "send", u32(client), str("out"), u32(m)))
		if _, err := g.try("wasi:messaging/types", "[method]message.data", u32(m)); err == nil {
			t.Error("a message that was sent still exists")
		}
	}
	if want := []string{"out=three", "out=hello"}; !slices.Equal(box.sent, want) {
		t.Errorf("sent: got %v, want %v", box.sent, want)
	}
	for cause, want := range map[error]string{
		fmt.Errorf("channel \"out\": %w", errdefs.ErrPermissionDenied): "permission-denied: channel \"out\": permission denied",
		errors.New("no such channel"):                                  "other: no such channel",
	} {
		box.fail = cause
		if got := g.failed(g.call("wasi:messaging/producer", "send", u32(client), str("out"), u32(g.newMessage("x")))); got != want {
			t.Errorf("send: got error %q, want %q", got, want)
		}
	}
	ok(t, g.message("[method]client.disconnect", u32(client)))
	if got := g.failed(g.call("wasi:messaging/producer", "send", u32(client), str("out"),
		u32(g.newMessage("x")))); got != "connection: the client is disconnected" {
		t.Errorf("send of a disconnected client: got error %q", got)
	}
	if g.held != 0 {
		t.Errorf("held bytes: got %d, want 0", g.held)
	}
}

// TestMessagesCarryData: a message has no content type and no metadata, and the guest learns that when it sets them.
func TestMessagesCarryData(t *testing.T) {
	g := newGuest(t, Options{})
	if got := g.failed(g.message("[static]client.connect",
		str(""))); got != "connection: the component has no channels: it does not run as a module of the edge" {
		t.Errorf("connect without channels: got error %q", got)
	}
	m := u32(g.newMessage("data"))
	if g.message("[method]message.set-content-type", m, str("text/plain")).Case(2) != 1 {
		t.Error("set-content-type: got ok, want an error")
	}
	for name, params := range map[string][][]byte{
		"add-metadata": {m, str("key"), str("value")}, "set-metadata": {m, wit.AppendLen(nil, 0)}, "remove-metadata": {m, str("key")},
	} {
		if r := g.message("[method]message."+name, params...); r.Case(2) != 1 || r.Case(2) != 0 {
			t.Errorf("%s: got another result than not-supported", name)
		}
	}
	for _, name := range []string{"content-type", "metadata"} {
		if g.message("[method]message."+name, m).Option() {
			t.Errorf("%s: got a value, want none", name)
		}
	}
}

// TestMessagesHeld: the messages that a guest makes are bounded, and a message that was received does not count.
func TestMessagesHeld(t *testing.T) {
	g := newGuest(t, Options{})
	g.PutMessage("in", make([]byte, maxHeld))
	g.newMessage(string(make([]byte, maxHeld)))
	if _, err := g.try("wasi:messaging/types", "[constructor]message", list([]byte{1})); !errors.Is(err, ErrHeld) {
		t.Errorf("another message: got error %v, want ErrHeld", err)
	}
}
