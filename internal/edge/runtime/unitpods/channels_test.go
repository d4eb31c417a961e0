package unitpods

import (
	"io"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/edge/wire"
)

const withChannel = `"channels":[{"name":"c","mode":"rw","topic":"app/c"}]`

func open(fd int, topic string) channel.Message {
	return channel.Message{Header: channel.Header{Control: true, Arg: channel.OpenChannel},
		Payload: channel.Open{FD: fd, Flags: channel.Read | channel.Write, Topic: topic}.Append(nil)}
}

// passesIn checks that a message to a channel of a module reaches its worker.
func (r *rig) passesIn(w *channel.Conn, index, fd int) {
	r.Helper()
	sent := make(chan error, 1)
	go func() {
		sent <- r.Send(r.Context(), channel.Message{Header: channel.Header{Module: index, Arg: fd}, Payload: []byte("in")})
	}()
	m, err := w.Read()
	r.must(err)
	r.must(<-sent)
	if m.Control || m.Module != 0 || m.Arg != fd || string(m.Payload) != "in" {
		r.Errorf("the worker got %+v", m)
	}
}

// TestChannelsBothWays: messages from the worker get the module's index, in order, and messages to the module reach the
// worker.
func TestChannelsBothWays(t *testing.T) {
	r := newRig(t)
	p := r.create(9, uuid, withChannel)
	w := r.worker()
	r.must(w.Write(open(200, "app/c")))
	r.must(w.Write(channel.Message{Header: channel.Header{Arg: 200}, Payload: []byte("out")}))
	if m := r.receive(); !m.Control || m.Module != 9 || m.Arg != channel.OpenChannel {
		t.Errorf("received %+v, want a message of type OpenChannel", m)
	}
	if r.Group(9) != "group" {
		t.Errorf("group %q", r.Group(9))
	}
	if m := r.receive(); m.Control || m.Module != 9 || m.Arg != 200 || string(m.Payload) != "out" {
		t.Errorf("received %+v, want the payload %q", m, "out")
	}
	r.passesIn(w, 9, 200)
	// The last message comes before the end.
	r.must(w.Write(channel.Message{Header: channel.Header{Arg: 200}, Payload: []byte("last")}))
	r.guests.Exit(p.ID, 0)
	if m := r.receive(); string(m.Payload) != "last" {
		t.Errorf("received %+v, want the payload %q", m, "last")
	}
	r.wantExited(9, 0, "exited")
}

// TestChannelsConnectAnew: when the connection breaks, the channels are reported as closed, and the worker opens them
// on the next connection. Until then nothing is sent to them.
func TestChannelsConnectAnew(t *testing.T) {
	r := newRig(t)
	r.create(1, uuid, withChannel)
	w := r.worker()
	r.must(w.Write(open(3, "app/c")))
	if m := r.receive(); m.Arg != channel.OpenChannel {
		t.Errorf("received %+v, want a message of type OpenChannel", m)
	}
	r.must(w.Close())
	m := r.receive()
	if fd, err := channel.ParseClose(m.Payload); m.Arg != channel.CloseChannel || fd != 3 || err != nil {
		t.Errorf("received %+v, want a message of type CloseChannel", m)
	}
	w = r.worker()
	r.must(w.Write(open(4, "app/c")))
	if m := r.receive(); m.Arg != channel.OpenChannel || m.Module != 1 {
		t.Errorf("received %+v, want a message of type OpenChannel", m)
	}
	if err := r.Send(t.Context(), channel.Message{Header: channel.Header{Module: 1, Arg: 3}}); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("Send to a channel of the previous connection: %v, want ErrFailedPrecondition", err)
	}
	r.must(w.Write(open(3, "app/c")))
	if m := r.receive(); m.Arg != channel.OpenChannel || m.Module != 1 {
		t.Errorf("received %+v, want a message of type OpenChannel", m)
	}
	r.passesIn(w, 1, 3)
}

// TestBadFramesOfAWorker: messages that a worker must not send are dropped, and an oversized frame ends only that
// connection.
func TestBadFramesOfAWorker(t *testing.T) {
	r := newRig(t)
	r.create(0, uuid, withChannel)
	w := r.worker()
	for _, m := range []channel.Message{
		{Header: channel.Header{Control: true, Arg: wire.Exited}, Payload: []byte("{}")},
		{Header: channel.Header{Control: true, Arg: channel.OpenChannel}, Payload: []byte{1}},
		{Header: channel.Header{Control: true, Arg: channel.CloseChannel}},
		{Header: channel.Header{Control: true, Arg: 77}},
		{Header: channel.Header{Module: 5, Arg: 1}, Payload: []byte("as module 5")},
	} {
		r.must(w.Write(m))
	}
	if m := r.receive(); m.Module != 0 || string(m.Payload) != "as module 5" {
		t.Errorf("message %+v %q", m, m.Payload)
	}
	raw := r.guests.conns
	r.must(w.Close())
	conn := <-raw
	_, err := conn.Write([]byte{0xff, 0xff, 0xff, 0xff, 0, 0})
	r.must(err)
	if _, err := io.Copy(io.Discard, conn); err != nil {
		t.Errorf("after an oversized frame: %v", err)
	}
	r.worker() // the next connection
}

// TestSettled: a worker learns which messages with QoS 1 or 2 it need not keep, in the order in which it sent them, and those
// with QoS 0 do not count.
func TestSettled(t *testing.T) {
	r := newRig(t)
	r.create(0, uuid, withChannel)
	w := r.worker()
	reliable := channel.Open{FD: 1, Flags: channel.Write | channel.QoS1, Topic: "app/r"}
	r.must(w.Write(open(0, "app/c")))
	r.must(w.Write(channel.Message{Header: channel.Header{Control: true, Arg: channel.OpenChannel}, Payload: reliable.Append(nil)}))
	r.receive()
	r.receive()
	var all []channel.Message
	for _, fd := range []int{1, 0, 1, 1} {
		r.must(w.Write(channel.Message{Header: channel.Header{Arg: fd}, Payload: []byte("m")}))
		all = append(all, r.receive())
	}
	if all[1].Settled != nil {
		t.Error("a message with QoS 0 is settled")
	}
	all[2].Settled()
	all[0].Settled()
	r.settled(w, 2)
	all[3].Settled()
	r.settled(w, 3)
}

func TestMessagesForNobody(t *testing.T) {
	r := newRig(t)
	r.guests.deaf = true
	r.create(0, uuid, withChannel)
	r.create(1, "no-channels")
	for index, class := range map[int]func(error) bool{0: errdefs.IsFailedPrecondition, 1: errdefs.IsFailedPrecondition,
		2: errdefs.IsNotFound} {
		if err := r.Send(t.Context(), channel.Message{Header: channel.Header{Module: index}}); !class(err) {
			t.Errorf("module %d: %v", index, err)
		}
	}
	r.guests.mu.Lock()
	r.guests.deaf = false
	r.guests.mu.Unlock()
	r.worker() // it is reached when its worker is there
}

// TestClosedRuntime: modules keep running, and no call blocks forever.
func TestClosedRuntime(t *testing.T) {
	r := newRig(t)
	p := r.create(0, uuid, withChannel)
	w := r.worker()
	r.must(r.Runtime.Close())
	if _, err := w.Read(); err == nil {
		t.Error("the connection stands")
	}
	if _, err := r.Receive(t.Context()); !errdefs.IsUnavailable(err) {
		t.Errorf("Receive of a closed runtime returned %v, want Unavailable", err)
	}
	for name, err := range map[string]error{
		"Send":   r.Send(t.Context(), channel.Message{}),
		"Create": r.Create(t.Context(), 1, r.data("other")),
	} {
		if !errdefs.IsUnavailable(err) {
			t.Errorf("%s of a closed runtime returned %v, want Unavailable", name, err)
		}
	}
	if _, err := r.Start(t.Context()); !errdefs.IsUnavailable(err) {
		t.Errorf("Start of a closed runtime returned %v, want Unavailable", err)
	}
	if c := r.pod(uuid).Container(p.ID); c.State != "Running" {
		t.Errorf("the module is %s", c.State)
	}
}

// TestFullQueue: a manager that does not receive blocks nobody forever, and loses nothing.
func TestFullQueue(t *testing.T) {
	r := newRig(t)
	r.create(0, uuid, withChannel)
	w := r.worker()
	const n = 3 * queued
	sent := make(chan error, 1)
	go func() {
		for i := range n {
			if err := w.Write(channel.Message{Header: channel.Header{Arg: 1}, Payload: []byte{byte(i), byte(i >> 8)}}); err != nil {
				sent <- err
				return
			}
		}
		sent <- nil
	}()
	time.Sleep(10 * time.Millisecond) // the queue is full, or soon
	for i := range n {
		if m := r.receive(); int(m.Payload[0])+int(m.Payload[1])<<8 != i {
			t.Fatalf("message %d is %v", i, m.Payload)
		}
	}
	r.must(<-sent)
}
