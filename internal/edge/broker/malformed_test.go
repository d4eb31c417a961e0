package broker_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/edge/broker"
)

// bad is a packet that no broker accepts.
type bad struct {
	name  string
	level byte
	bytes []byte
	// connect: bytes are the first packet.
	connect bool
	// answer is the type of a packet with an error code that is right too; 0 means that only closing is.
	answer byte
	// inflight is the QoS of a message whose identifier is put into bytes 2 and 3.
	inflight byte
	// will: only the will shows whether DISCONNECT was accepted.
	will bool
}

// errSilent: MQTT-4.13.1-1 demands the end of the connection; that DISCONNECT comes before is recommended.
var errSilent = errors.New("closed without DISCONNECT")

// badDeadline bounds one case: all answers are immediate.
const badDeadline = 5 * time.Second

// peerOf opens a connection of the protocol level.
func peerOf(address string, level byte, h hello) (net.Conn, error) {
	conn, err := net.Dial("tcp", address)
	if err != nil {
		return nil, err
	}
	conn.SetDeadline(time.Now().Add(badDeadline))
	conn.Write(h.encode(level))
	f, err := readFrame(conn, level)
	if err == nil && (f.kind != typeConnack || f.code != 0) {
		err = fmt.Errorf("CONNECT is answered by %+v", f)
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	return conn, nil
}

// awaitFrame reads up to a packet of the type.
func awaitFrame(conn net.Conn, level, kind byte) (frame, error) {
	for {
		if f, err := readFrame(conn, level); err != nil || f.kind == kind {
			return f, err
		}
	}
}

func subscribePacket(level byte, id uint16, options byte, filters ...string) []byte {
	body := binary.BigEndian.AppendUint16(nil, id)
	if level == 5 {
		body = append(body, 0)
	}
	for _, f := range filters {
		body = append(append(body, str(f)...), options)
	}
	return packet(0x82, body)
}

// bystander connects a client that gets its own messages.
func bystander(address, id string) (net.Conn, error) {
	conn, err := peerOf(address, 4, hello{id: id})
	if err != nil {
		return nil, err
	}
	conn.Write(subscribePacket(4, 1, 1, id))
	_, err = awaitFrame(conn, 4, typeSuback)
	return conn, err
}

// exchange checks that a bystander still gets a message of its own.
func exchange(conn net.Conn, id string) error {
	conn.SetDeadline(time.Now().Add(badDeadline))
	conn.Write(message{topic: id, qos: 1, id: 7}.encode(4))
	for range 2 { // PUBACK and PUBLISH
		f, err := readFrame(conn, 4)
		if err != nil {
			return fmt.Errorf("the bystander's exchange failed: %w", err)
		}
		if f.kind == typePublish {
			conn.Write(packet(0x40, binary.BigEndian.AppendUint16(nil, f.id)))
		}
	}
	return nil
}

// refusal returns nil if the broker at the address does not accept the packet.
func (b bad) refusal(address, id string) error {
	bytes := b.bytes
	topic := "own/" + id
	var conn, watch net.Conn
	var err error
	if b.connect {
		if conn, err = net.Dial("tcp", address); err != nil {
			return err
		}
		conn.SetDeadline(time.Now().Add(badDeadline))
	} else {
		h := hello{id: id}
		if b.will {
			h.will = &message{topic: topic, qos: 1}
		}
		if conn, err = peerOf(address, b.level, h); err != nil {
			return err
		}
	}
	defer conn.Close()
	if b.will {
		if watch, err = peerOf(address, 4, hello{id: id + "w"}); err != nil {
			return err
		}
		defer watch.Close()
		watch.Write(subscribePacket(4, 1, 0, topic))
		if _, err := awaitFrame(watch, 4, typeSuback); err != nil {
			return err
		}
	}
	if b.inflight > 0 {
		conn.Write(append(subscribePacket(b.level, 1, b.inflight, topic), message{topic: topic, qos: b.inflight, id: 2}.encode(b.level)...))
		answers := 3 // SUBACK, PUBACK, PUBLISH
		if b.inflight == 2 {
			conn.Write(packet(0x62, []byte{0, 2}))
			answers = 4 // SUBACK, PUBREC, PUBCOMP, PUBLISH
		}
		got := map[byte]frame{}
		for len(got) < answers {
			f, err := readFrame(conn, b.level)
			if err != nil {
				return err
			}
			got[f.kind] = f
		}
		bytes = slices.Clone(bytes)
		binary.BigEndian.PutUint16(bytes[2:], got[typePublish].id)
	}
	conn.Write(append(slices.Clone(bytes), 0xc0, 0))
	var answers []frame
	for {
		f, err := readFrame(conn, b.level)
		if isClosed(err) {
			break
		}
		if err != nil {
			return err
		}
		if f.kind == typePingresp {
			return b.answered(answers)
		}
		answers = append(answers, f)
	}
	if b.will {
		if _, err := awaitFrame(watch, 4, typePublish); err != nil {
			return errors.New("accepted: the will was not published")
		}
		return nil
	}
	return b.closed(answers)
}

// answered judges a connection that stays open.
func (b bad) answered(answers []frame) error {
	if len(answers) == 1 && b.answer != 0 && answers[0].kind == b.answer {
		if slices.ContainsFunc(append(answers[0].codes, answers[0].code), func(c byte) bool { return c >= 0x80 }) {
			return nil
		}
	}
	return fmt.Errorf("accepted: %+v", answers)
}

// closed judges the packets before the broker closed the connection.
func (b bad) closed(answers []frame) error {
	switch {
	case len(answers) == 0 && (b.connect || b.level != 5):
		return nil
	case len(answers) == 0:
		return errSilent
	case len(answers) > 1:
		return fmt.Errorf("closed after %+v", answers)
	}
	f := answers[0]
	switch {
	case b.connect && b.level != 5 && f.kind == typeConnack && f.code >= 1 && f.code <= 5:
		return nil
	case b.connect && f.kind == typeConnack && (f.code >= 0x80 || f.code == 1 && b.level == 5):
		return nil
	case !b.connect && b.level == 5 && f.kind == typeDisconnect && f.code >= 0x80: // MQTT-3.14.0-1
		return nil
	}
	return fmt.Errorf("closed after %+v", f)
}

// refuse sends all cases, some at once, and returns the errors in their order.
func refuse(t *testing.T, s *server, workers int, cases []bad) []error {
	failures := make([]error, len(cases))
	next := make(chan int)
	var all sync.WaitGroup
	for w := range workers {
		id := fmt.Sprint("bystander", w)
		conn, err := bystander(s.address, id)
		require.NoError(t, err)
		defer conn.Close()
		all.Go(func() {
			for i := range next {
				failures[i] = errors.Join(cases[i].refusal(s.address, fmt.Sprint("case", i)), exchange(conn, id))
			}
		})
	}
	for i := range cases {
		next <- i
	}
	close(next)
	all.Wait()
	return failures
}

// TestValidPackets checks with mosquitto that the packets from which TestMalformedPackets begins are accepted.
func TestValidPackets(t *testing.T) {
	var cases []bad
	for _, v := range validPackets() {
		if v.first != 0xe0 && v.first != 0xf0 { // these end a connection
			for _, n := range append(v.also, len(v.body)) {
				cases = append(cases,
					bad{name: fmt.Sprintf("%d %s of %d bytes", v.level, v.name, n), level: v.level, connect: v.connect,
						bytes: packet(v.first, v.body[:n])})
			}
		}
	}
	for _, p := range places() {
		if p.first == 0xe0 || p.first == 0xf0 {
			continue
		}
		for _, id := range p.allowed {
			if id != authMethod && id != authData {
				cases = append(cases,
					bad{name: fmt.Sprintf("%s with property 0x%02x", p.name, id), level: 5, connect: p.connect,
						bytes: packet(p.first, p.with(properties(sample(id))))})
			}
		}
	}
	for i, err := range refuse(t, mosquittoServer(t), 1, cases) {
		assert.ErrorContains(t, err, "accepted", cases[i].name)
	}
}

// TestMalformedPackets sends every packet that is malformed or forbidden: the broker refuses it, and other clients do not
// notice. MQTT-4.8.0-1 of 3.1.1; MQTT-4.13.1-1 and 4.13.2 of 5.0.
func TestMalformedPackets(t *testing.T) {
	cases := malformedCases()
	names := map[string]bool{}
	for _, b := range cases {
		require.False(t, names[b.name], "two cases are named %q", b.name)
		names[b.name] = true
	}
	report := func(t *testing.T, failures []error) (held, silent int) {
		for i, err := range failures {
			switch {
			case err == nil:
				held++
				continue
			case errors.Is(err, errSilent):
				silent++
			}
			t.Logf("%s: %v", cases[i].name, err)
		}
		t.Logf("%d held, %d failed, %d of these closed without DISCONNECT", held, len(cases)-held, silent)
		return held, silent
	}
	t.Run("embedded", func(t *testing.T) {
		held, _ := report(t, refuse(t, embedded(t, broker.Config{}), 16, cases))
		assert.Equal(t, len(cases), held)
	})
	t.Run("mosquitto", func(t *testing.T) {
		held, silent := report(t, refuse(t, mosquittoServer(t), 16, cases))
		assert.Greater(t, held+silent, len(cases)*85/100, "most cases are right for another broker too")
	})
}
