package broker_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/edge/broker"
)

// errCut is the end of a connection, as a kill causes it.
var errCut = errors.New("the connection has ended")

// wire is a connection of a client that bears with kills of the broker: errCut says that there was one.
type wire struct{ conn net.Conn }

// wired connects with MQTT 5.0. resumes says that the session must be there.
func wired(s *server, h hello, resumes bool) (*wire, error) {
	conn, err := net.Dial("tcp", s.address)
	if err != nil {
		return nil, errCut
	}
	w := &wire{conn}
	w.send(h.encode(5))
	ack, err := w.read()
	switch {
	case err != nil:
	case ack.kind != typeConnack || ack.code != 0:
		err = fmt.Errorf("%s: no CONNACK with success: %+v", h.id, ack)
	case ack.session != resumes:
		err = fmt.Errorf("%s: session present is %v", h.id, ack.session)
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	return w, nil
}

// send writes bytes. A connection that has ended is seen by the next read.
func (w *wire) send(b []byte) { w.conn.Write(b) }

func (w *wire) ack(kind byte, id uint16) {
	first := kind << 4
	if kind == typePubrel {
		first |= 2
	}
	w.send(packet(first, binary.BigEndian.AppendUint16(nil, id)))
}

func (w *wire) read() (frame, error) {
	if err := w.conn.SetReadDeadline(time.Now().Add(patience)); err != nil {
		return frame{}, errCut
	}
	f, err := readFrame(w.conn, 5)
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return f, fmt.Errorf("nothing has come for %v", patience)
	case err != nil:
		return f, errCut
	case f.kind == typeDisconnect:
		return f, fmt.Errorf("DISCONNECT with 0x%02x", f.code)
	case f.code >= 0x80 && f.kind != typePubcomp && f.kind != typePubrel: // these may be about what was completed before a kill
		return f, fmt.Errorf("refused: %+v", f)
	}
	return f, nil
}

// open is a message that its publisher has sent and that is not completely acknowledged.
type open struct {
	message
	released bool
}

// sender publishes numbered messages with QoS 1 and 2, with several on their way, and sends again what a kill has left
// open.
type sender struct {
	id   string
	rand *rand.Rand
	next int
	open []*open
	sent map[string]int // by topic
}

// run publishes until the connection ends. Once the sender is to finish, it only completes what is open.
func (p *sender) run(s *server, finish bool) error {
	w, err := wired(s, keeping(p.id), true)
	if err != nil {
		return err
	}
	defer w.conn.Close()
	for _, m := range p.open {
		if m.released {
			w.ack(typePubrel, m.id)
			continue
		}
		m.dup = true
		w.send(m.encode(5))
	}
	for {
		for !finish && len(p.open) < 1+p.rand.IntN(16) {
			m := &open{message: message{qos: byte(1 + p.rand.IntN(2)), id: uint16(p.next%60_000 + 1)}}
			p.next++
			m.topic = fmt.Sprintf("q%d/%s", m.qos, p.id)
			m.payload = strconv.Itoa(p.sent[m.topic])
			p.sent[m.topic]++
			p.open = append(p.open, m)
			w.send(m.encode(5))
		}
		if len(p.open) == 0 {
			return nil
		}
		f, err := w.read()
		if err != nil {
			return err
		}
		i := slices.IndexFunc(p.open, func(m *open) bool { return m.id == f.id })
		switch {
		case i < 0:
			return fmt.Errorf("%s: acknowledgement of an unknown message: %+v", p.id, f)
		case f.kind == typePubrec && p.open[i].qos == 2:
			p.open[i].released = true
			w.ack(typePubrel, f.id)
		case f.kind == typePuback && p.open[i].qos == 1, f.kind == typePubcomp && p.open[i].released:
			p.open = slices.Delete(p.open, i, i+1)
		default:
			return fmt.Errorf("%s: unexpected %+v", p.id, f)
		}
	}
}

// receiver has a persistent session and takes what comes, with a connection or another.
type receiver struct {
	id       string
	rand     *rand.Rand
	got      map[string][]string // payloads by topic
	received map[uint16]bool     // with QoS 2, and not yet released by the broker
}

// run receives until enough reports true, or without it until the broker is killed, with several connections.
func (r *receiver) run(s *server, enough func() bool) error {
	for {
		w, err := wired(s, keeping(r.id), true)
		if err != nil {
			return err
		}
		for left := 1 + r.rand.IntN(300); err == nil && (left > 0 || enough != nil); left-- {
			if enough != nil && enough() {
				w.conn.Close()
				return nil
			}
			err = r.receive(w)
		}
		w.conn.Close()
		if err != nil {
			return err
		}
	}
}

// receive handles one packet.
func (r *receiver) receive(w *wire) error {
	f, err := w.read()
	if err != nil {
		return err
	}
	switch {
	case f.kind == typePublish && f.qos() == 1:
		r.got[f.topic] = append(r.got[f.topic], f.payload)
		w.ack(typePuback, f.id)
	case f.kind == typePublish && f.qos() == 2:
		if !r.received[f.id] {
			r.received[f.id] = true
			r.got[f.topic] = append(r.got[f.topic], f.payload)
		}
		w.ack(typePubrec, f.id)
	case f.kind == typePubrel:
		delete(r.received, f.id)
		w.ack(typePubcomp, f.id)
	default:
		return fmt.Errorf("%s: unexpected %+v", r.id, f)
	}
	return nil
}

// state is what a client has ordered for a topic or filter: what was acknowledged, and what was ordered since.
type state struct{ acked, ordered string }

// changer changes one state after the other, each after the acknowledgement of the previous one.
type changer struct {
	id    string
	rand  *rand.Rand
	turn  int
	of    map[string]*state
	order func(w *wire, name, value string)
	value func(turn int, now string) string
	keeps bool // it has a persistent session
}

func (c *changer) run(s *server) error {
	h := hello{id: c.id}
	if c.keeps {
		h = keeping(c.id)
	}
	w, err := wired(s, h, c.keeps)
	if err != nil {
		return err
	}
	defer w.conn.Close()
	for {
		c.turn++
		name := fmt.Sprintf("%s/%d", c.id, c.rand.IntN(10))
		one := c.of[name]
		if one == nil {
			one = &state{}
			c.of[name] = one
		}
		one.ordered = c.value(c.turn, one.acked)
		c.order(w, name, one.ordered)
		if _, err := w.read(); err != nil {
			return err
		}
		one.acked = one.ordered
	}
}

// check compares what is there with what was ordered, which from now on is what is there.
func (c *changer) check(t *testing.T, there map[string]string) {
	t.Helper()
	for name, one := range c.of {
		require.Contains(t, []string{one.acked, one.ordered}, there[name], "%s is lost", name)
		one.acked, one.ordered = there[name], there[name]
	}
}

// mortal leaves wills behind that are due after a second.
type mortal struct {
	rand  *rand.Rand
	count int
	left  []string // topics of the wills of connections that were accepted
}

func (m *mortal) run(s *server) error {
	var all []*wire
	defer func() {
		for _, w := range all {
			w.conn.Close()
		}
	}()
	for {
		topic := fmt.Sprint("will/", m.count)
		m.count++
		h := keeping(fmt.Sprint("mortal", m.count))
		h.will = &message{topic: topic, payload: "gone", qos: 2, props: [][]byte{property(willDelay, 1)}}
		w, err := wired(s, h, false)
		if err != nil {
			return err
		}
		m.left = append(m.left, topic)
		if m.rand.IntN(2) == 0 {
			w.conn.Close() // it dies at once, and the others with the broker
		} else {
			all = append(all, w)
		}
		time.Sleep(time.Millisecond) // pacing
	}
}

// TestKilledAtRandom kills the broker at random moments while clients publish, receive, retain, subscribe and die. Nothing
// that was acknowledged is lost, QoS 2 comes once, and messages of one QoS keep their order.
func TestKilledAtRandom(t *testing.T) {
	seed := rand.Uint64()
	if text := os.Getenv("TRIPOD_TEST_SEED"); text != "" {
		var err error
		seed, err = strconv.ParseUint(text, 10, 64)
		require.NoError(t, err)
	}
	t.Logf("TRIPOD_TEST_SEED=%d", seed)
	actors := uint64(0)
	dice := func() *rand.Rand {
		actors++
		return rand.New(rand.NewPCG(seed, actors))
	}
	s := processWith(t, broker.Config{MaxClients: 20_000, MaxQueued: 10_000_000})
	own := dice()
	var senders []*sender
	var receivers []*receiver
	for i := range 3 {
		senders = append(senders, &sender{id: fmt.Sprint("pub", i), rand: dice(), sent: map[string]int{}})
		login(t, s, 5, keeping(senders[i].id))
	}
	for i := range 2 {
		receivers = append(receivers, &receiver{id: fmt.Sprint("sub", i), rand: dice(), got: map[string][]string{}, received: map[uint16]bool{}})
		l, _ := login(t, s, 5, keeping(receivers[i].id))
		l.join(2, "q1/+", "q2/+", "will/+")
	}
	retains := &changer{id: "retains", rand: dice(), of: map[string]*state{}, order: func(w *wire, name, value string) {
		w.send(message{topic: name, payload: value, qos: 1, id: 1, retain: true}.encode(5))
	}, value: func(turn int, _ string) string {
		if turn%4 == 0 {
			return ""
		}
		return strconv.Itoa(turn)
	}}
	subscribes := &changer{id: "subscribes", rand: dice(), of: map[string]*state{}, keeps: true, order: func(w *wire, name, value string) {
		if value == "" {
			w.send(packet(0xa2, slices.Concat([]byte{0, 1, 0}, str(name))))
			return
		}
		w.send(packet(0x82, slices.Concat([]byte{0, 1, 0}, str(name), []byte{1})))
	}, value: func(_ int, now string) string {
		if now == "" {
			return "subscribed"
		}
		return ""
	}}
	l, _ := login(t, s, 5, keeping(subscribes.id))
	l.join(1, "mark")
	mortals := &mortal{rand: dice()}

	for range scale(5, 100) {
		var running sync.WaitGroup
		act := func(run func() error) {
			running.Go(func() {
				if err := run(); !errors.Is(err, errCut) {
					t.Errorf("before the kill: %v", err)
				}
			})
		}
		for _, p := range senders {
			act(func() error { return p.run(s, false) })
		}
		for _, r := range receivers {
			act(func() error { return r.run(s, nil) })
		}
		for _, run := range []func(*server) error{retains.run, subscribes.run, mortals.run} {
			act(func() error { return run(s) })
		}
		time.Sleep(time.Duration(own.IntN(200)) * time.Millisecond) // the moment of the kill
		s.stop(t)
		running.Wait()
		if t.Failed() {
			return
		}
		s.start(t)
		retains.check(t, retained(t, s))
		subscribes.check(t, subscribed(t, s, subscribes))
	}

	var running sync.WaitGroup
	for _, p := range senders {
		running.Go(func() { assert.NoError(t, p.run(s, true)) })
	}
	running.Wait()
	s.stop(t)
	s.start(t)
	for _, r := range receivers {
		running.Go(func() { assert.NoError(t, r.run(s, func() bool { return r.has(senders, mortals) })) })
	}
	running.Wait()
	end, _ := login(t, s, 5, hello{id: "end"})
	end.publish(message{topic: "q1/end", qos: 1})
	for _, r := range receivers {
		require.NoError(t, r.run(s, func() bool { return r.got["q1/end"] != nil }))
		r.check(t, senders, mortals)
	}
	t.Logf("%d, %d and %d messages, %d changes of retained messages and %d of subscriptions, %d wills",
		senders[0].next, senders[1].next, senders[2].next, retains.turn, subscribes.turn, len(mortals.left))
}

// retained returns all retained messages of the changer.
func retained(t *testing.T, s *server) map[string]string {
	there := map[string]string{}
	l, _ := login(t, s, 5, hello{id: "check"})
	l.join(1, "retains/+", "end")
	l.publish(message{topic: "end", qos: 1})
	for f := l.receive(); f.topic != "end"; f = l.receive() {
		there[f.topic] = f.payload
	}
	l.leave()
	return there
}

// subscribed returns the subscriptions of the changer. Messages of an earlier check may come once more.
func subscribed(t *testing.T, s *server, c *changer) map[string]string {
	there := map[string]string{}
	l, _ := login(t, s, 5, keeping(c.id))
	check := fmt.Sprint("check ", rand.Uint64())
	for i := range 10 {
		l.publish(message{topic: fmt.Sprintf("%s/%d", c.id, i), payload: check, qos: 1})
	}
	l.publish(message{topic: "mark", payload: check, qos: 1})
	for f := l.receive(); f.topic != "mark" || f.payload != check; f = l.receive() {
		if f.payload == check {
			there[f.topic] = "subscribed"
		}
	}
	l.leave()
	return there
}

// has reports whether everything has arrived.
func (r *receiver) has(senders []*sender, m *mortal) bool {
	for _, p := range senders {
		for topic, n := range p.sent {
			if got := r.got[topic]; len(got) == 0 || got[len(got)-1] != strconv.Itoa(n-1) {
				return false
			}
		}
	}
	return !slices.ContainsFunc(m.left, func(topic string) bool { return r.got[topic] == nil })
}

// check checks that each message has arrived, in order and with QoS 2 once.
func (r *receiver) check(t *testing.T, senders []*sender, m *mortal) {
	for _, p := range senders {
		for topic, n := range p.sent {
			got := r.got[topic]
			if topic[:2] == "q1" {
				got = withoutRepeats(got)
			}
			want := make([]string, n)
			for i := range want {
				want[i] = strconv.Itoa(i)
			}
			require.Equal(t, want, got, "%s from %s", r.id, topic)
		}
	}
	for _, topic := range m.left {
		require.Equal(t, []string{"gone"}, r.got[topic], "%s: %s", r.id, topic)
	}
}

// withoutRepeats leaves the first of equal payloads.
func withoutRepeats(all []string) []string {
	seen := map[string]bool{}
	return slices.DeleteFunc(slices.Clone(all), func(s string) bool {
		again := seen[s]
		seen[s] = true
		return again
	})
}
