package broker_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/edge/broker"
)

// Packet types.
const (
	typeConnect     byte = 1
	typeConnack     byte = 2
	typePublish     byte = 3
	typePuback      byte = 4
	typePubrec      byte = 5
	typePubrel      byte = 6
	typePubcomp     byte = 7
	typeSubscribe   byte = 8
	typeSuback      byte = 9
	typeUnsubscribe byte = 10
	typeUnsuback    byte = 11
	typePingreq     byte = 12
	typePingresp    byte = 13
	typeDisconnect  byte = 14
	typeAuth        byte = 15
)

// Property identifiers.
const (
	payloadFormat          byte = 0x01
	messageExpiry          byte = 0x02
	contentType            byte = 0x03
	responseTopic          byte = 0x08
	correlationData        byte = 0x09
	subscriptionIdentifier byte = 0x0b
	sessionExpiry          byte = 0x11
	assignedIdentifier     byte = 0x12
	serverKeepAlive        byte = 0x13
	authMethod             byte = 0x15
	authData               byte = 0x16
	requestProblem         byte = 0x17
	willDelay              byte = 0x18
	requestResponse        byte = 0x19
	responseInformation    byte = 0x1a
	serverReference        byte = 0x1c
	reasonString           byte = 0x1f
	receiveMaximum         byte = 0x21
	topicAliasMaximum      byte = 0x22
	topicAlias             byte = 0x23
	maximumQoS             byte = 0x24
	retainAvailable        byte = 0x25
	userProperty           byte = 0x26
	maximumPacketSize      byte = 0x27
	wildcardAvailable      byte = 0x28
	identifierAvailable    byte = 0x29
	sharedAvailable        byte = 0x2a
)

// form is the encoding of a property's value.
type form int

const (
	oneByte form = iota + 1
	twoBytes
	fourBytes
	variable
	text
	bytesOf // binary data
	textPair
)

var forms = map[byte]form{
	payloadFormat: oneByte, messageExpiry: fourBytes, contentType: text, responseTopic: text, correlationData: bytesOf,
	subscriptionIdentifier: variable, sessionExpiry: fourBytes, assignedIdentifier: text, serverKeepAlive: twoBytes,
	authMethod: text, authData: bytesOf, requestProblem: oneByte, willDelay: fourBytes, requestResponse: oneByte,
	responseInformation: text, serverReference: text, reasonString: text, receiveMaximum: twoBytes,
	topicAliasMaximum: twoBytes, topicAlias: twoBytes, maximumQoS: oneByte, retainAvailable: oneByte, userProperty: textPair,
	maximumPacketSize: fourBytes, wildcardAvailable: oneByte, identifierAvailable: oneByte, sharedAvailable: oneByte,
}

// property encodes a property; value is an int, a string, or a [2]string for a user property.
func property(id byte, value any) []byte {
	switch forms[id] {
	case oneByte:
		return []byte{id, byte(value.(int))}
	case twoBytes:
		return binary.BigEndian.AppendUint16([]byte{id}, uint16(value.(int)))
	case fourBytes:
		return binary.BigEndian.AppendUint32([]byte{id}, uint32(value.(int)))
	case variable:
		return binary.AppendUvarint([]byte{id}, uint64(value.(int)))
	case textPair:
		p := value.([2]string)
		return slices.Concat([]byte{id}, str(p[0]), str(p[1]))
	default:
		return append([]byte{id}, str(value.(string))...)
	}
}

// properties puts the length before encoded properties.
func properties(encoded ...[]byte) []byte {
	all := slices.Concat(encoded...)
	return append(binary.AppendUvarint(nil, uint64(len(all))), all...)
}

// frame is a packet from the broker.
type frame struct {
	kind, flags    byte
	id             uint16
	code           byte   // the reason code
	codes          []byte // of SUBACK and UNSUBACK
	session        bool   // session present
	topic, payload string
	props          map[byte][]any
}

func (f frame) qos() byte    { return f.flags >> 1 & 3 }
func (f frame) retain() bool { return f.flags&1 != 0 }
func (f frame) dup() bool    { return f.flags&8 != 0 }

// number returns an integer property, or absent if the packet does not have it.
func (f frame) number(id byte, absent int) int {
	if v := f.props[id]; len(v) > 0 {
		return v[0].(int)
	}
	return absent
}

var errShort = errors.New("packet ends too early")

// cursor reads fields of a packet; the first error stays.
type cursor struct {
	b   []byte
	err error
}

func (c *cursor) take(n int) []byte {
	if n > len(c.b) {
		c.err = errShort
		c.b = nil
		return make([]byte, 4)
	}
	b := c.b[:n]
	c.b = c.b[n:]
	return b
}

func (c *cursor) u8() byte     { return c.take(1)[0] }
func (c *cursor) u16() uint16  { return binary.BigEndian.Uint16(c.take(2)) }
func (c *cursor) text() string { return string(c.take(int(c.u16()))) }

func (c *cursor) varint() int {
	v, n := binary.Uvarint(c.b)
	c.take(max(n, 1))
	return int(v)
}

func (c *cursor) props() map[byte][]any {
	if len(c.b) == 0 {
		return nil
	}
	in := cursor{b: c.take(c.varint())}
	props := map[byte][]any{}
	for len(in.b) > 0 && in.err == nil {
		id := in.u8()
		var v any
		switch forms[id] {
		case oneByte:
			v = int(in.u8())
		case twoBytes:
			v = int(in.u16())
		case fourBytes:
			v = int(binary.BigEndian.Uint32(in.take(4)))
		case variable:
			v = in.varint()
		case text, bytesOf:
			v = in.text()
		case textPair:
			v = [2]string{in.text(), in.text()}
		default:
			in.err = fmt.Errorf("property 0x%02x is not defined", id)
		}
		props[id] = append(props[id], v)
	}
	c.err = errors.Join(c.err, in.err)
	return props
}

// decode reads the body of a packet from the broker to a client of the protocol level.
func decode(level, first byte, body []byte) (frame, error) {
	f := frame{kind: first >> 4, flags: first & 15}
	c := cursor{b: body}
	five := level == 5
	switch f.kind {
	case typeConnack:
		acknowledged := c.u8()
		f.session = acknowledged == 1
		f.code = c.u8()
		f.props = c.props()
		if acknowledged > 1 { // MQTT-3.2.2-1
			return f, fmt.Errorf("acknowledge flags %08b", acknowledged)
		}
	case typePublish:
		f.topic = c.text()
		if f.qos() > 0 {
			f.id = c.u16()
		}
		if five {
			f.props = c.props()
		}
		f.payload = string(c.take(len(c.b)))
	case typePuback, typePubrec, typePubrel, typePubcomp:
		f.id = c.u16()
		if five && len(c.b) > 0 {
			f.code = c.u8()
			f.props = c.props()
		}
	case typeSuback, typeUnsuback:
		f.id = c.u16()
		if five {
			f.props = c.props()
		}
		f.codes = c.take(len(c.b))
	case typeDisconnect, typeAuth:
		if len(c.b) > 0 {
			f.code = c.u8()
			f.props = c.props()
		}
		if f.props[sessionExpiry] != nil { // MQTT-3.14.2-2
			return f, errors.New("DISCONNECT of a server has a session expiry interval")
		}
	case typePingresp:
	default:
		return f, fmt.Errorf("packet type %d from a server", f.kind)
	}
	if c.err == nil && len(c.b) > 0 {
		c.err = fmt.Errorf("% x follows packet type %d", c.b, f.kind)
	}
	return f, c.err
}

func readFrame(conn net.Conn, level byte) (frame, error) {
	one := make([]byte, 1)
	if _, err := io.ReadFull(conn, one); err != nil {
		return frame{}, err
	}
	first, length := one[0], 0
	for shift := 0; ; shift += 7 {
		if _, err := io.ReadFull(conn, one); err != nil {
			return frame{}, err
		}
		length |= int(one[0]&0x7f) << shift
		if one[0] < 0x80 {
			break
		}
	}
	body := make([]byte, length)
	if _, err := io.ReadFull(conn, body); err != nil {
		return frame{}, err
	}
	return decode(level, first, body)
}

// isClosed reports whether a read failed because the broker closed the connection.
func isClosed(err error) bool { return errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) }

// message is what a client publishes, or its will.
type message struct {
	topic, payload string
	qos            byte
	id             uint16
	retain, dup    bool
	props          [][]byte
}

func (m message) encode(level byte) []byte {
	first := byte(0x30) | m.qos<<1
	if m.retain {
		first |= 1
	}
	if m.dup {
		first |= 8
	}
	body := str(m.topic)
	if m.qos > 0 {
		body = binary.BigEndian.AppendUint16(body, m.id)
	}
	if level == 5 {
		body = append(body, properties(m.props...)...)
	}
	return packet(first, append(body, m.payload...))
}

// hello is a CONNECT. Without keep it asks for a clean session.
type hello struct {
	id             string
	keep           bool
	alive          uint16
	will           *message
	user, password *string
	props          [][]byte
}

func (h hello) encode(level byte) []byte {
	flags := byte(0)
	if !h.keep {
		flags |= 2
	}
	payload := str(h.id)
	if w := h.will; w != nil {
		flags |= 4 | w.qos<<3
		if w.retain {
			flags |= 0x20
		}
		if level == 5 {
			payload = append(payload, properties(w.props...)...)
		}
		payload = slices.Concat(payload, str(w.topic), str(w.payload))
	}
	if h.user != nil {
		flags |= 0x80
		payload = append(payload, str(*h.user)...)
	}
	if h.password != nil {
		flags |= 0x40
		payload = append(payload, str(*h.password)...)
	}
	name := "MQTT"
	if level == 3 {
		name = "MQIsdp"
	}
	body := binary.BigEndian.AppendUint16(append(str(name), level, flags), h.alive)
	if level == 5 {
		body = append(body, properties(h.props...)...)
	}
	return packet(0x10, append(body, payload...))
}

// link is a connection that speaks one protocol level packet by packet.
type link struct {
	t       testing.TB
	conn    net.Conn
	level   byte
	lastID  uint16
	pending []frame // read while something else was awaited
	aliases map[int]string
	maximum int // of topic aliases that the client takes
}

func dialLink(t testing.TB, s *server, level byte) *link {
	return &link{t: t, conn: dialRaw(t, s.address).conn, level: level, aliases: map[int]string{}}
}

// login connects with h; the broker has to accept.
func login(t testing.TB, s *server, level byte, h hello) (*link, frame) {
	t.Helper()
	l := dialLink(t, s, level)
	ack := l.connect(h)
	require.Zero(t, ack.code, "CONNECT is accepted")
	return l, ack
}

// connect sends h and returns CONNACK.
func (l *link) connect(h hello) frame {
	l.t.Helper()
	for _, p := range h.props {
		if p[0] == topicAliasMaximum {
			l.maximum = int(binary.BigEndian.Uint16(p[1:]))
		}
	}
	l.send(h.encode(l.level))
	return l.want(typeConnack)
}

// send writes bytes. That the broker has closed the connection is seen by the next read.
func (l *link) send(b []byte) { l.conn.Write(b) }

// next reads a packet and resolves its topic alias.
func (l *link) next() frame {
	l.t.Helper()
	if len(l.pending) > 0 {
		f := l.pending[0]
		l.pending = l.pending[1:]
		return f
	}
	f, err := readFrame(l.conn, l.level)
	require.NoError(l.t, err)
	return l.resolve(f)
}

func (l *link) resolve(f frame) frame {
	l.t.Helper()
	alias, ok := f.props[topicAlias]
	if f.kind != typePublish || !ok {
		return f
	}
	n := alias[0].(int)
	require.LessOrEqual(l.t, n, l.maximum, "alias above the client's maximum")
	require.NotZero(l.t, n, "alias 0")
	if f.topic != "" {
		l.aliases[n] = f.topic
	}
	require.Contains(l.t, l.aliases, n, "an alias is used before its definition on this connection")
	f.topic = l.aliases[n]
	return f
}

// want reads the next packet, which is of the type.
func (l *link) want(kind byte) frame {
	l.t.Helper()
	f := l.next()
	require.Equal(l.t, kind, f.kind, "packet type, in %+v", f)
	return f
}

// await reads up to a packet of the type, and keeps the PUBLISH packets that come before it.
func (l *link) await(kind byte) frame {
	l.t.Helper()
	var kept []frame
	for {
		f := l.next()
		if f.kind == kind {
			l.pending = append(kept, l.pending...)
			return f
		}
		require.Equal(l.t, typePublish, f.kind, "before packet type %d, in %+v", kind, f)
		kept = append(kept, f)
	}
}

// closed reads until the broker closes the connection, and returns the packets before.
func (l *link) closed() []frame {
	l.t.Helper()
	var before []frame
	for {
		f, err := readFrame(l.conn, l.level)
		if err != nil {
			require.True(l.t, isClosed(err), "the broker closes the connection: %v", err)
			return before
		}
		before = append(before, f)
	}
}

// refused expects that the broker closes the connection: without a packet, or to MQTT 5.0 with DISCONNECT or CONNACK
// with one of the codes.
func (l *link) refused(codes ...byte) {
	l.t.Helper()
	before := l.closed()
	if l.level != 5 {
		require.Empty(l.t, before, "no packet says so")
		return
	}
	require.Len(l.t, before, 1, "one packet says why")
	require.Contains(l.t, []byte{typeConnack, typeDisconnect}, before[0].kind)
	require.Contains(l.t, codes, before[0].code, "reason code 0x%02x", before[0].code)
}

// nextID returns a packet identifier.
func (l *link) nextID() uint16 {
	l.lastID++
	return l.lastID
}

// subscribe subscribes to the filters with the same options, and returns the codes.
func (l *link) subscribe(options byte, props [][]byte, filters ...string) []byte {
	l.t.Helper()
	id := l.nextID()
	body := binary.BigEndian.AppendUint16(nil, id)
	if l.level == 5 {
		body = append(body, properties(props...)...)
	}
	for _, f := range filters {
		body = append(append(body, str(f)...), options)
	}
	l.send(packet(0x82, body))
	ack := l.await(typeSuback)
	require.Equal(l.t, id, ack.id)
	require.Len(l.t, ack.codes, len(filters))
	return ack.codes
}

// join subscribes and expects that the QoS in options is granted.
func (l *link) join(options byte, filters ...string) {
	l.t.Helper()
	for _, code := range l.subscribe(options, nil, filters...) {
		require.Equal(l.t, options&3, code, "granted QoS")
	}
}

// publish publishes m up to its last acknowledgement, and returns the first one.
func (l *link) publish(m message) frame {
	l.t.Helper()
	if m.qos > 0 && m.id == 0 {
		m.id = l.nextID()
	}
	l.send(m.encode(l.level))
	if m.qos == 0 {
		return frame{}
	}
	if m.qos == 1 {
		ack := l.await(typePuback)
		require.Equal(l.t, m.id, ack.id)
		return ack
	}
	ack := l.await(typePubrec)
	require.Equal(l.t, m.id, ack.id)
	if ack.code < 0x80 {
		l.ack(typePubrel, m.id)
		require.Equal(l.t, m.id, l.await(typePubcomp).id)
	}
	return ack
}

// ack sends an acknowledgement without reason code.
func (l *link) ack(kind byte, id uint16) {
	first := kind << 4
	if kind == typePubrel {
		first |= 2
	}
	l.send(packet(first, binary.BigEndian.AppendUint16(nil, id)))
}

// receive reads a PUBLISH and acknowledges it to the end.
func (l *link) receive() frame {
	l.t.Helper()
	f := l.want(typePublish)
	switch f.qos() {
	case 1:
		l.ack(typePuback, f.id)
	case 2:
		l.ack(typePubrec, f.id)
		rel := l.await(typePubrel)
		require.Equal(l.t, f.id, rel.id)
		l.ack(typePubcomp, f.id)
	}
	return f
}

// payloads receives n messages.
func (l *link) payloads(n int) []string {
	l.t.Helper()
	got := make([]string, 0, n)
	for range n {
		got = append(got, l.receive().payload)
	}
	return got
}

// quiet checks that nothing waits for the client: a message that other publishes now is the next that arrives.
func (l *link) quiet(other *link) {
	l.t.Helper()
	topic := fmt.Sprintf("quiet/%p/%d", l, l.lastID)
	l.join(1, topic)
	other.publish(message{topic: topic, qos: 1})
	require.Equal(l.t, topic, l.receive().topic, "nothing comes before")
	l.ping() // the broker has the acknowledgement, even if the connection is cut now
}

// ping checks that the connection lives, and that nothing has been sent on it.
func (l *link) ping() {
	l.t.Helper()
	l.send([]byte{0xc0, 0})
	l.want(typePingresp)
}

// cut closes the connection without DISCONNECT.
func (l *link) cut() { l.conn.Close() }

// leave sends DISCONNECT and waits for the end of the connection. It keeps the session as CONNECT says.
func (l *link) leave() {
	l.t.Helper()
	l.send([]byte{0xe0, 0})
	l.closed()
}

// disconnect sends the DISCONNECT of MQTT 5.0 with a reason code and properties.
func (l *link) disconnect(code byte, props ...[]byte) {
	l.t.Helper()
	l.send(packet(0xe0, append([]byte{code}, properties(props...)...)))
	l.closed()
}

func ptr(s string) *string { return &s }

// dialogue is a conversation that every broker has to lead in the same way.
type dialogue struct {
	name string
	// wrong says why Debian's mosquitto 2.0.11 is not asked.
	wrong string
	// config, if not nil, changes the configuration; then mosquitto is not asked either.
	config *broker.Config
	// restarts asks for one more run with a broker whose stop is SIGKILL.
	restarts bool
	run      func(t *testing.T, s *server)
}

// hold runs the dialogues with the embedded broker, and with Debian's mosquitto to check the dialogues themselves.
func hold(t *testing.T, all []dialogue) {
	t.Parallel()
	for _, d := range all {
		t.Run(d.name, func(t *testing.T) {
			t.Parallel()
			t.Run("embedded", func(t *testing.T) {
				t.Parallel()
				var cfg broker.Config
				if d.config != nil {
					cfg = *d.config
				}
				d.run(t, embedded(t, cfg))
			})
			if d.restarts {
				t.Run("killed", func(t *testing.T) {
					t.Parallel()
					d.run(t, process(t))
				})
			}
			if d.config != nil {
				return
			}
			t.Run("mosquitto", func(t *testing.T) {
				t.Parallel()
				if d.wrong != "" {
					t.Skip("mosquitto 2.0.11: " + d.wrong)
				}
				d.run(t, mosquitto(t))
			})
		})
	}
}

// levels runs a dialogue for MQTT 3.1.1 and for MQTT 5.0.
func levels(run func(t *testing.T, s *server, level byte)) func(t *testing.T, s *server) {
	return func(t *testing.T, s *server) {
		for _, level := range []byte{4, 5} {
			t.Run(fmt.Sprintf("level %d", level), func(t *testing.T) { run(t, s, level) })
		}
	}
}

// keeping makes a CONNECT of MQTT 5.0 that resumes a session and keeps it for 300 s.
func keeping(id string, props ...[]byte) hello {
	return hello{id: id, keep: true, props: append([][]byte{property(sessionExpiry, 300)}, props...)}
}

func TestDialogueAcknowledgements(t *testing.T) {
	own := [][]byte{property(userProperty, [2]string{"key", "value"})}
	hold(t, []dialogue{
		// 3.4.2.2, 3.5.2.2, 3.7.2.2: properties of an acknowledgement are the receiver's; MQTT-3.4.2-1, MQTT-3.5.2-1: codes.
		{name: "publisher's properties are not echoed", run: func(t *testing.T, s *server) {
			c, _ := login(t, s, 5, hello{id: "c"})
			for _, qos := range []byte{1, 2} {
				ack := c.publish(message{topic: "t", qos: qos, props: own})
				assert.NotContains(t, ack.props, userProperty)
				assert.Contains(t, []byte{0, 0x10}, ack.code)
			}
			c.send(message{topic: "t", qos: 2, id: 9}.encode(5))
			c.want(typePubrec)
			c.send(packet(0x62, slices.Concat([]byte{0, 9, 0}, properties(own...))))
			done := c.want(typePubcomp)
			assert.Zero(t, done.code)
			assert.NotContains(t, done.props, userProperty)
			c.send(packet(0x82, slices.Concat([]byte{0, 10}, properties(own...), str("t"), []byte{0})))
			assert.NotContains(t, c.want(typeSuback).props, userProperty)
			c.send(packet(0xa2, slices.Concat([]byte{0, 11}, properties(own...), str("t"))))
			gone := c.want(typeUnsuback)
			assert.NotContains(t, gone.props, userProperty)
			assert.Equal(t, []byte{0}, gone.codes)
		}},
		// MQTT-3.1.2-29: Reason String and User Property only in PUBLISH, CONNACK and DISCONNECT.
		{name: "Request Problem Information 0", run: func(t *testing.T, s *server) {
			c, _ := login(t, s, 5, hello{id: "c", props: [][]byte{property(requestProblem, 0)}})
			answers := []frame{c.publish(message{topic: "nobody", qos: 1}), c.publish(message{topic: "nobody", qos: 2}), c.publish(message{topic: "$SYS/x", qos: 1})}
			c.ack(typePubrel, 999)
			answers = append(answers, c.want(typePubcomp))
			c.send(packet(0xa2, slices.Concat([]byte{0, 90, 0}, str("unknown"))))
			answers = append(answers, c.want(typeUnsuback))
			for _, a := range answers {
				assert.NotContains(t, a.props, reasonString)
				assert.NotContains(t, a.props, userProperty)
			}
		}},
		// 3.6.2.1, 3.7.2.1: Packet Identifier not found; MQTT-4.3.3-11: PUBREL is always answered.
		{name: "PUBREL of an unknown identifier", run: levels(func(t *testing.T, s *server, level byte) {
			c, _ := login(t, s, level, hello{id: "c"})
			c.ack(typePubrel, 77)
			done := c.want(typePubcomp)
			assert.EqualValues(t, 77, done.id)
			if level == 5 {
				assert.Contains(t, []byte{0, 0x92}, done.code)
			}
			c.ping()
		})},
		// MQTT-3.3.4-1, 4.3.2, 4.3.3: a topic of the server's own is no exception.
		{name: "PUBLISH to $SYS is acknowledged", run: levels(func(t *testing.T, s *server, level byte) {
			c, _ := login(t, s, level, hello{id: "c"})
			for range 30 {
				c.publish(message{topic: "$SYS/broker/x", qos: 1})
				c.publish(message{topic: "$SYS/broker/x", qos: 2})
			}
			c.ping()
		})},
		// MQTT-3.3.1-3: DUP of the publisher is not passed on. MQTT-3.8.4-8: QoS is the lower of both.
		{name: "DUP and QoS of the publisher", run: levels(func(t *testing.T, s *server, level byte) {
			c, _ := login(t, s, level, hello{id: "c"})
			for granted := range byte(3) {
				topic := fmt.Sprint("t/", granted)
				c.join(granted, topic)
				for qos := range byte(3) {
					c.publish(message{topic: topic, qos: qos, dup: qos > 0})
					f := c.receive()
					assert.Equal(t, min(qos, granted), f.qos())
					assert.False(t, f.dup())
				}
			}
		})},
		// MQTT-3.11.3-2, 3.11.2-1: UNSUBACK has a code for each filter, in order; 3.1.1 has none.
		{name: "UNSUBACK", run: levels(func(t *testing.T, s *server, level byte) {
			c, _ := login(t, s, level, hello{id: "c"})
			c.join(1, "a", "b/+")
			empty := properties()
			if level == 4 {
				empty = nil
			}
			c.send(packet(0xa2, slices.Concat([]byte{0, 50}, empty, str("a"), str("x"), str("b/+"))))
			ack := c.want(typeUnsuback)
			assert.EqualValues(t, 50, ack.id)
			if level == 5 {
				assert.Equal(t, []byte{0, 0x11, 0}, ack.codes)
			} else {
				assert.Empty(t, ack.codes)
			}
			c.publish(message{topic: "a", qos: 1})
			c.publish(message{topic: "b/1", qos: 1})
			c.quiet(c)
		})},
	})
}

func TestDialogueQoS2(t *testing.T) {
	hold(t, []dialogue{
		// MQTT-4.3.3-10, -12: until PUBREL the identifier is taken, whatever DUP says.
		{name: "same identifier before PUBREL is a duplicate", wrong: "ends the connection with 0x82", run: levels(func(t *testing.T, s *server, level byte) {
			sub, _ := login(t, s, level, hello{id: "sub"})
			sub.join(2, "t")
			c, _ := login(t, s, level, hello{id: "c"})
			for _, dup := range []bool{false, false, true} {
				c.send(message{topic: "t", payload: "once", qos: 2, id: 5, dup: dup}.encode(level))
				ack := c.want(typePubrec)
				assert.EqualValues(t, 5, ack.id)
				assert.Less(t, ack.code, byte(0x80))
			}
			c.ack(typePubrel, 5)
			c.want(typePubcomp)
			assert.Equal(t, "once", sub.receive().payload)
			c.publish(message{topic: "t", payload: "again", qos: 2, id: 5})
			assert.Equal(t, "again", sub.receive().payload, "after PUBCOMP the identifier is free")
			sub.quiet(c)
		})},
		// MQTT-4.3.3-10, 4.1: the identifiers that were received are part of the session.
		{name: "duplicate over a new connection", run: func(t *testing.T, s *server) {
			sub, _ := login(t, s, 5, hello{id: "sub"})
			sub.join(2, "t")
			c, _ := login(t, s, 5, keeping("c"))
			c.send(message{topic: "t", payload: "once", qos: 2, id: 5}.encode(5))
			c.want(typePubrec)
			c.cut()
			c, ack := login(t, s, 5, keeping("c"))
			require.True(t, ack.session)
			c.send(message{topic: "t", payload: "once", qos: 2, id: 5, dup: true}.encode(5))
			c.want(typePubrec)
			c.ack(typePubrel, 5)
			c.want(typePubcomp)
			assert.Equal(t, "once", sub.receive().payload)
			sub.quiet(c)
		}},
		// MQTT-4.3.3-4: PUBREL only after a PUBREC below 0x80; 3.5.2.1, 4.9: the slot of Receive Maximum is free.
		{name: "PUBREC with an error ends the message", run: func(t *testing.T, s *server) {
			pub, _ := login(t, s, 5, hello{id: "pub"})
			h := keeping("sub", property(receiveMaximum, 1))
			sub, _ := login(t, s, 5, h)
			sub.join(2, "t")
			pub.publish(message{topic: "t", payload: "first", qos: 2})
			pub.publish(message{topic: "t", payload: "second", qos: 2})
			f := sub.want(typePublish)
			assert.Equal(t, "first", f.payload)
			sub.send(packet(0x50, append(binary.BigEndian.AppendUint16(nil, f.id), 0x97)))
			assert.Equal(t, "second", sub.receive().payload, "no PUBREL comes before")
			sub.quiet(pub)
			sub.cut()
			sub, ack := login(t, s, 5, h)
			require.True(t, ack.session)
			sub.quiet(pub)
		}},
		// MQTT-4.3.2-3, 3.4.2.1: PUBACK with an error is an acknowledgement.
		{name: "PUBACK with an error ends the message", run: func(t *testing.T, s *server) {
			pub, _ := login(t, s, 5, hello{id: "pub"})
			sub, _ := login(t, s, 5, keeping("sub", property(receiveMaximum, 1)))
			sub.join(1, "t")
			pub.publish(message{topic: "t", payload: "first", qos: 1})
			pub.publish(message{topic: "t", payload: "second", qos: 1})
			f := sub.want(typePublish)
			sub.send(packet(0x40, append(binary.BigEndian.AppendUint16(nil, f.id), 0x80)))
			assert.Equal(t, "second", sub.receive().payload)
			sub.quiet(pub)
		}},
		// MQTT-4.4.0-1: after a new connection PUBLISH with DUP, after PUBREC a PUBREL, with the same identifiers.
		{name: "outbound message continues on a new connection", run: levels(func(t *testing.T, s *server, level byte) {
			pub, _ := login(t, s, level, hello{id: "pub"})
			sub, _ := login(t, s, level, keeping("sub"))
			sub.join(2, "t")
			pub.publish(message{topic: "t", payload: "m", qos: 2})
			first := sub.want(typePublish)
			assert.False(t, first.dup())
			sub.cut()
			sub, _ = login(t, s, level, keeping("sub"))
			second := sub.want(typePublish)
			assert.True(t, second.dup())
			assert.Equal(t, first.id, second.id)
			sub.ack(typePubrec, second.id)
			assert.Equal(t, first.id, sub.want(typePubrel).id)
			sub.cut()
			sub, _ = login(t, s, level, keeping("sub"))
			assert.Equal(t, first.id, sub.want(typePubrel).id)
			sub.ack(typePubcomp, first.id)
			sub.quiet(pub)
		})},
		// MQTT-4.3.2-5: after PUBACK the identifier is free, whatever DUP says.
		{name: "same identifier after PUBACK is a new message", run: levels(func(t *testing.T, s *server, level byte) {
			c, _ := login(t, s, level, hello{id: "c"})
			c.join(1, "t")
			for i, dup := range []bool{false, true, false} {
				c.publish(message{topic: "t", payload: fmt.Sprint(i), qos: 1, id: 50, dup: dup})
				assert.Equal(t, fmt.Sprint(i), c.receive().payload)
			}
		})},
		// MQTT-2.2.1-4, MQTT-4.3.2-1, MQTT-4.3.3-1: identifiers of the server are not 0, and each is unused.
		{name: "identifiers of the server are unused", run: levels(func(t *testing.T, s *server, level byte) {
			pub, _ := login(t, s, level, hello{id: "pub"})
			sub, _ := login(t, s, level, hello{id: "sub", props: [][]byte{property(receiveMaximum, 20)}})
			sub.join(2, "t")
			open := map[uint16]bool{0: true}
			for i := range 20 {
				pub.publish(message{topic: "t", qos: byte(1 + i%2)})
				f := sub.want(typePublish)
				assert.False(t, open[f.id], "identifier %d", f.id)
				open[f.id] = true
			}
		})},
		// MQTT-3.10.4-3: a delivery that was begun goes on after UNSUBSCRIBE.
		{name: "delivery is completed after UNSUBSCRIBE", run: levels(func(t *testing.T, s *server, level byte) {
			c, _ := login(t, s, level, hello{id: "c"})
			c.join(2, "t")
			c.publish(message{topic: "t", qos: 2})
			f := c.want(typePublish)
			body := []byte{0, 90}
			if level == 5 {
				body = append(body, 0)
			}
			c.send(packet(0xa2, append(body, str("t")...)))
			c.want(typeUnsuback)
			c.ack(typePubrec, f.id)
			rel := c.want(typePubrel)
			assert.Equal(t, f.id, rel.id)
			assert.Zero(t, rel.code)
			c.ack(typePubcomp, f.id)
			c.quiet(c)
		})},
		// MQTT-3.3.4-2, MQTT-3.9.3-1: overlapping subscriptions, each with its own QoS.
		{name: "greatest QoS of overlapping subscriptions", wrong: "sends 3.1.1 the QoS of one of them", run: levels(func(t *testing.T, s *server, level byte) {
			c, _ := login(t, s, level, hello{id: "c"})
			body := []byte{0, 90}
			if level == 5 {
				body = append(body, 0)
			}
			for i, filter := range []string{"t/+", "t/#", "+/1"} {
				body = append(append(body, str(filter)...), []byte{0, 2, 1}[i])
			}
			c.send(packet(0x82, body))
			assert.Equal(t, []byte{0, 2, 1}, c.want(typeSuback).codes, "in the order of the filters")
			c.publish(message{topic: "t/1", payload: "m", qos: 2})
			c.join(2, "end")
			c.publish(message{topic: "end", qos: 2})
			var granted []byte
			for f := c.receive(); f.topic != "end"; f = c.receive() {
				granted = append(granted, f.qos())
			}
			assert.Contains(t, granted, byte(2))
			assert.LessOrEqual(t, len(granted), 3)
		})},
		// MQTT-3.3.1-1, -2: DUP says that the same packet was sent before, queueing does not count.
		{name: "DUP on the second delivery only", run: levels(func(t *testing.T, s *server, level byte) {
			pub, _ := login(t, s, level, hello{id: "pub"})
			sub, _ := login(t, s, level, keeping("sub"))
			sub.join(1, "t")
			sub.leave()
			pub.publish(message{topic: "t", payload: "m", qos: 1})
			sub, _ = login(t, s, level, keeping("sub"))
			first := sub.want(typePublish)
			assert.False(t, first.dup(), "it was queued, but not sent")
			sub.cut()
			sub, _ = login(t, s, level, keeping("sub"))
			second := sub.want(typePublish)
			assert.True(t, second.dup())
			assert.Equal(t, first.id, second.id)
			assert.Equal(t, "m", second.payload)
			sub.ack(typePuback, second.id)
			sub.quiet(pub)
			sub.leave()
		})},
	})
}

func TestDialogueRetained(t *testing.T) {
	hold(t, []dialogue{
		// 4.7.1.2: # includes the parent level. MQTT-3.3.1-9.
		{name: "filter that includes the parent level", run: levels(func(t *testing.T, s *server, level byte) {
			c, _ := login(t, s, level, hello{id: "c"})
			c.publish(message{topic: "a/b", payload: "kept", qos: 1, retain: true})
			for _, filter := range []string{"a/b/#", "+/b/#", "a/+/#", "a/#", "#", "+/+", "a/b"} {
				c.join(1, filter)
				f := c.receive()
				assert.Equal(t, "a/b", f.topic, filter)
				assert.True(t, f.retain(), filter)
				id := c.nextID()
				body := binary.BigEndian.AppendUint16(nil, id)
				if level == 5 {
					body = append(body, 0)
				}
				c.send(packet(0xa2, append(body, str(filter)...)))
				c.want(typeUnsuback)
			}
			for _, filter := range []string{"a", "a/b/+", "a/b/c/#", "+", "b/#"} {
				c.join(1, filter)
			}
			c.quiet(c)
		})},
		// MQTT-4.7.2-1: a filter that begins with a wildcard does not match $ topics.
		{name: "topics that begin with $", run: levels(func(t *testing.T, s *server, level byte) {
			pub, _ := login(t, s, level, hello{id: "pub"})
			pub.publish(message{topic: "$app/x", payload: "kept", qos: 1, retain: true})
			for _, filter := range []string{"#", "+/x", "+/#", "+/+"} {
				c, _ := login(t, s, level, hello{id: "c"})
				c.join(1, filter)
				pub.publish(message{topic: "$app/x", payload: "live", qos: 1})
				pub.publish(message{topic: "app/x", qos: 1})
				assert.Equal(t, "app/x", c.receive().topic, filter)
				c.leave()
			}
		})},
		// MQTT-4.7.3-4, MQTT-1.5.4-3: topics are compared byte by byte, and nothing is stripped.
		{name: "topics are not normalized", run: levels(func(t *testing.T, s *server, level byte) {
			c, _ := login(t, s, level, hello{id: "c"})
			topics := []string{"a/b", "A/b", "a//b", "/a/b", "a/b/", "a/ b", "a/\u00e4", "a/a\u0308", "a/\ufeffb", "\ufeffa/b"}
			for _, topic := range topics {
				c.join(1, topic)
			}
			for _, topic := range topics {
				c.publish(message{topic: topic, qos: 1})
				assert.Equal(t, topic, c.receive().topic)
			}
			c.quiet(c)
		})},
		// MQTT-3.3.1-6, -7: an empty payload removes the message and is delivered as an ordinary one.
		{name: "empty retained message", run: levels(func(t *testing.T, s *server, level byte) {
			c, _ := login(t, s, level, hello{id: "c"})
			c.publish(message{topic: "t", payload: "kept", qos: 1, retain: true})
			c.join(1, "t")
			assert.Equal(t, "kept", c.receive().payload)
			c.publish(message{topic: "t", qos: 1, retain: true})
			assert.Empty(t, c.receive().payload)
			late, _ := login(t, s, level, hello{id: "late"})
			late.join(1, "t")
			late.quiet(c)
		})},
		// MQTT-3.3.1-5, -8: the last message with RETAIN stays, one without changes nothing.
		{name: "the last retained message", run: levels(func(t *testing.T, s *server, level byte) {
			c, _ := login(t, s, level, hello{id: "c"})
			c.publish(message{topic: "t", payload: "old", qos: 1, retain: true})
			c.publish(message{topic: "t", payload: "new", qos: 2, retain: true})
			c.publish(message{topic: "t", payload: "passing", qos: 1})
			c.join(2, "t")
			f := c.receive()
			assert.Equal(t, "new", f.payload)
			assert.EqualValues(t, 2, f.qos())
			c.quiet(c)
		})},
		// MQTT-3.3.4-3: the subscription identifier comes with every message of the subscription, also a retained one.
		{name: "subscription identifier of a retained message", run: func(t *testing.T, s *server) {
			c, _ := login(t, s, 5, hello{id: "c"})
			c.publish(message{topic: "t/1", payload: "m", qos: 1, retain: true})
			c.subscribe(1, [][]byte{property(subscriptionIdentifier, 268_435_455)}, "t/+")
			assert.Equal(t, []any{268_435_455}, c.receive().props[subscriptionIdentifier])
			c.publish(message{topic: "t/1", qos: 1})
			assert.Equal(t, []any{268_435_455}, c.receive().props[subscriptionIdentifier])
		}},
		// MQTT-3.8.4-3: a subscription again replaces the identifier; without one it has none.
		{name: "subscription identifier is replaced", run: func(t *testing.T, s *server) {
			c, _ := login(t, s, 5, hello{id: "c"})
			for _, props := range [][][]byte{{property(subscriptionIdentifier, 1)}, {property(subscriptionIdentifier, 200)}, nil} {
				c.subscribe(1, props, "t")
				c.publish(message{topic: "t", qos: 1})
				f := c.receive()
				if props == nil {
					assert.NotContains(t, f.props, subscriptionIdentifier)
				} else {
					assert.Len(t, f.props[subscriptionIdentifier], 1)
				}
			}
		}},
		// MQTT-3.3.4-4, -5: all identifiers in one copy, or one in each.
		{name: "identifiers of overlapping subscriptions", run: func(t *testing.T, s *server) {
			c, _ := login(t, s, 5, hello{id: "c"})
			c.subscribe(1, [][]byte{property(subscriptionIdentifier, 1)}, "t/+")
			c.subscribe(1, [][]byte{property(subscriptionIdentifier, 2)}, "t/#")
			c.publish(message{topic: "t/1", qos: 1})
			var ids []any
			for len(ids) < 2 {
				ids = append(ids, c.receive().props[subscriptionIdentifier]...)
			}
			assert.ElementsMatch(t, []any{1, 2}, ids)
			c.quiet(c)
		}},
		// MQTT-3.3.1-9, -10, -11: Retain Handling.
		{name: "Retain Handling", run: func(t *testing.T, s *server) {
			c, _ := login(t, s, 5, hello{id: "c"})
			c.publish(message{topic: "t", payload: "kept", qos: 1, retain: true})
			c.join(0x20|1, "t")
			c.quiet(c)
			for range 2 {
				c.join(1, "t")
				assert.Equal(t, "kept", c.receive().payload, "0: at each subscription")
			}
			c.join(0x10|1, "t")
			c.quiet(c) // 1: the subscription is not new
			c.join(0x10|1, "+")
			assert.Equal(t, "kept", c.receive().payload, "1: at a new subscription")
			c.join(0x10|1, "+")
			c.quiet(c)
		}},
		// MQTT-3.3.1-12, -13: Retain As Published; a retained message at SUBSCRIBE has RETAIN.
		{name: "Retain As Published", run: func(t *testing.T, s *server) {
			pub, _ := login(t, s, 5, hello{id: "pub"})
			for _, option := range []byte{0, 8} {
				c, _ := login(t, s, 5, hello{id: fmt.Sprint("c", option)})
				c.join(option|1, fmt.Sprint("t/", option))
				for _, retain := range []bool{true, false} {
					pub.publish(message{topic: fmt.Sprint("t/", option), qos: 1, payload: "m", retain: retain})
					assert.Equal(t, retain && option == 8, c.receive().retain())
				}
				c.join(option|1, fmt.Sprint("t/", option))
				assert.True(t, c.receive().retain())
			}
		}},
		// MQTT-3.8.3-3: No Local, for the connection that published.
		{name: "No Local", run: func(t *testing.T, s *server) {
			c, _ := login(t, s, 5, hello{id: "c"})
			c.join(4|1, "t")
			other, _ := login(t, s, 5, hello{id: "other"})
			c.publish(message{topic: "t", payload: "own", qos: 1})
			other.publish(message{topic: "t", payload: "other's", qos: 1})
			assert.Equal(t, "other's", c.receive().payload)
			c.quiet(other)
		}},
		// 4.8.2: a shared subscription gets no retained messages when it begins.
		{name: "shared subscription gets no retained messages", wrong: "sends them", run: func(t *testing.T, s *server) {
			c, _ := login(t, s, 5, hello{id: "c"})
			c.publish(message{topic: "t", payload: "kept", qos: 1, retain: true})
			c.join(1, "$share/g/t")
			c.quiet(c)
		}},
		// 3.3.2.3: properties of the message are kept, in order; MQTT-3.3.2-4, -15, -16, -17, -18, -20.
		{name: "properties of a message are passed on", run: func(t *testing.T, s *server) {
			c, _ := login(t, s, 5, hello{id: "c"})
			c.publish(message{topic: "t", payload: "m", qos: 1, retain: true, props: described})
			c.join(1, "t")
			checkDescribed(t, c.receive())
			c.publish(message{topic: "t", payload: "m", qos: 1, props: described})
			checkDescribed(t, c.receive())
			four, _ := login(t, s, 4, hello{id: "four"})
			four.join(1, "t")
			assert.Equal(t, "m", four.receive().payload)
		}},
		// MQTT-3.3.1-9: all of them, however many.
		{name: "10000 retained messages with QoS 0", wrong: "loses some", run: func(t *testing.T, s *server) { manyRetained(t, s, 0) }},
		{name: "10000 retained messages with QoS 1", wrong: "max_queued_messages is 1000", run: func(t *testing.T, s *server) { manyRetained(t, s, 1) }},
	})
}

// described are the properties of a message that a broker passes on.
var described = [][]byte{
	property(payloadFormat, 1), property(contentType, "text/plain"), property(responseTopic, "answer/here"),
	property(correlationData, "\x00\xff data"), property(userProperty, [2]string{"b", "1"}), property(userProperty, [2]string{"a", "2"}),
	property(userProperty, [2]string{"b", "1"}),
}

func checkDescribed(t *testing.T, f frame) {
	t.Helper()
	assert.Equal(t, []any{1}, f.props[payloadFormat])
	assert.Equal(t, []any{"text/plain"}, f.props[contentType])
	assert.Equal(t, []any{"answer/here"}, f.props[responseTopic])
	assert.Equal(t, []any{"\x00\xff data"}, f.props[correlationData])
	assert.Equal(t, []any{[2]string{"b", "1"}, [2]string{"a", "2"}, [2]string{"b", "1"}}, f.props[userProperty])
}

func manyRetained(t *testing.T, s *server, qos byte) {
	const count, window = 10_000, 20
	pub, ack := login(t, s, 5, hello{id: "pub"})
	require.GreaterOrEqual(t, ack.number(receiveMaximum, 65_535), window)
	for i := 0; i < count; i += window {
		for n := range window {
			pub.send(message{topic: fmt.Sprint("many/", i+n), payload: "m", qos: 1, id: uint16(n + 1), retain: true}.encode(5))
		}
		for range window {
			pub.want(typePuback)
		}
	}
	c, _ := login(t, s, 5, hello{id: "c"})
	c.join(qos, "many/#")
	seen := map[string]bool{}
	for range count {
		f := c.receive()
		assert.True(t, f.retain())
		seen[f.topic] = true
	}
	assert.Len(t, seen, count)
	c.quiet(pub)
}

func TestDialogueWills(t *testing.T) {
	will := func(props ...[]byte) *message { return &message{topic: "will", payload: "gone", qos: 1, props: props} }
	with := func(h hello, w *message) hello {
		h.will = w
		return h
	}
	watch := func(t *testing.T, s *server, level byte) *link {
		t.Helper()
		w, _ := login(t, s, level, hello{id: "watch"})
		w.join(2, "will")
		return w
	}
	hold(t, []dialogue{
		// MQTT-3.1.2-8, 3.14.2.1: the will is published unless DISCONNECT had reason code 0.
		{name: "published when the connection is lost", run: levels(func(t *testing.T, s *server, level byte) {
			for qos := range byte(3) {
				w := watch(t, s, level)
				c, _ := login(t, s, level, hello{id: "c", will: &message{topic: "will", payload: "gone", qos: qos}})
				c.cut()
				f := w.receive()
				assert.Equal(t, "gone", f.payload)
				assert.Equal(t, qos, f.qos())
				assert.False(t, f.retain())
				w.leave()
			}
		})},
		{name: "published after an error of the client", run: levels(func(t *testing.T, s *server, level byte) {
			w := watch(t, s, level)
			c, _ := login(t, s, level, hello{id: "c", will: will()})
			c.send([]byte{0x00, 0})
			c.closed()
			assert.Equal(t, "gone", w.receive().payload)
		})},
		// MQTT-3.1.2-10, MQTT-3.14.4-3: discarded with DISCONNECT.
		{name: "not published after DISCONNECT", run: levels(func(t *testing.T, s *server, level byte) {
			w := watch(t, s, level)
			c, _ := login(t, s, level, hello{id: "c", will: will()})
			c.leave()
			w.quiet(w)
			c, _ = login(t, s, level, hello{id: "c"})
			c.cut()
			w.quiet(w)
		})},
		// 3.14.2.1: Disconnect with Will Message.
		{name: "DISCONNECT 0x04 publishes the will", run: func(t *testing.T, s *server) {
			w := watch(t, s, 5)
			c, _ := login(t, s, 5, hello{id: "c", will: will()})
			c.disconnect(4)
			assert.Equal(t, "gone", w.receive().payload)
		}},
		{name: "DISCONNECT with an error publishes the will", wrong: "only 0x04 does", run: func(t *testing.T, s *server) {
			w := watch(t, s, 5)
			c, _ := login(t, s, 5, hello{id: "c", will: will()})
			c.disconnect(0x80)
			assert.Equal(t, "gone", w.receive().payload)
		}},
		// 3.1.3.2.2: it goes when the delay has passed or the session ends, whichever is first.
		{name: "delay without a session goes at once", wrong: "waits for the delay", run: func(t *testing.T, s *server) {
			w := watch(t, s, 5)
			c, _ := login(t, s, 5, hello{id: "c", will: will(property(willDelay, 600))})
			c.cut()
			assert.Equal(t, "gone", w.receive().payload)
		}},
		{name: "session expiry shorter than the delay", run: func(t *testing.T, s *server) {
			w := watch(t, s, 5)
			c, _ := login(t, s, 5, hello{id: "c", keep: true, will: will(property(willDelay, 600)), props: [][]byte{property(sessionExpiry, 2)}})
			start := time.Now()
			c.cut()
			assert.Equal(t, "gone", w.receive().payload)
			assert.GreaterOrEqual(t, time.Since(start), 900*time.Millisecond, "neither of both was over")
		}},
		{name: "delay is waited for", run: func(t *testing.T, s *server) {
			w := watch(t, s, 5)
			c, _ := login(t, s, 5, with(keeping("c"), will(property(willDelay, 2))))
			start := time.Now()
			c.cut()
			assert.Equal(t, "gone", w.receive().payload)
			assert.GreaterOrEqual(t, time.Since(start), 900*time.Millisecond) // mosquitto rounds to seconds
			c, ack := login(t, s, 5, keeping("c"))
			assert.True(t, ack.session)
			c.leave()
		}},
		{name: "DISCONNECT that ends the session publishes the delayed will", wrong: "waits for the delay", run: func(t *testing.T, s *server) {
			w := watch(t, s, 5)
			c, _ := login(t, s, 5, with(keeping("c"), will(property(willDelay, 600))))
			c.disconnect(4, property(sessionExpiry, 0))
			assert.Equal(t, "gone", w.receive().payload)
		}},
		// MQTT-3.1.2-4, 3.1.3.2.2: Clean Start ends the session.
		{name: "Clean Start within the delay publishes it", wrong: "does not publish it", run: func(t *testing.T, s *server) {
			w := watch(t, s, 5)
			c, _ := login(t, s, 5, with(keeping("c"), will(property(willDelay, 250))))
			c.cut()
			login(t, s, 5, hello{id: "c"})
			assert.Equal(t, "gone", w.receive().payload)
		}},
		// MQTT-3.1.3-9: a connection to the session within the delay suppresses the will.
		{name: "return within the delay suppresses it", run: func(t *testing.T, s *server) {
			w := watch(t, s, 5)
			c, _ := login(t, s, 5, with(keeping("c"), will(property(willDelay, 1))))
			c.cut()
			_, ack := login(t, s, 5, keeping("c"))
			require.True(t, ack.session)
			time.Sleep(2500 * time.Millisecond)
			w.quiet(w)
		}},
		{name: "takeover within the delay suppresses it", run: func(t *testing.T, s *server) {
			w := watch(t, s, 5)
			c, _ := login(t, s, 5, with(keeping("c"), will(property(willDelay, 1))))
			_, ack := login(t, s, 5, keeping("c"))
			require.True(t, ack.session)
			c.closed()
			time.Sleep(2500 * time.Millisecond)
			w.quiet(w)
		}},
		// 3.1.4, non-normative: with Clean Start, or without a delay, a takeover publishes the will.
		{name: "takeover with Clean Start publishes it", wrong: "waits for the delay", run: func(t *testing.T, s *server) {
			w := watch(t, s, 5)
			login(t, s, 5, with(keeping("c"), will(property(willDelay, 600))))
			login(t, s, 5, hello{id: "c"})
			assert.Equal(t, "gone", w.receive().payload)
		}},
		{name: "takeover without a delay publishes it", wrong: "publishes only if the session ends", run: levels(func(t *testing.T, s *server, level byte) {
			w := watch(t, s, level)
			login(t, s, level, with(keeping("c"), will()))
			login(t, s, level, keeping("c"))
			assert.Equal(t, "gone", w.receive().payload)
			w.quiet(w)
		})},
		// MQTT-3.1.2-14, -15: Will Retain.
		{name: "retain", run: levels(func(t *testing.T, s *server, level byte) {
			topic := fmt.Sprint("will/", level)
			c, _ := login(t, s, level, hello{id: "c", will: &message{topic: topic, payload: "kept", qos: 1, retain: true}})
			w, _ := login(t, s, level, hello{id: "watch"})
			w.join(1, topic)
			c.cut()
			assert.False(t, w.receive().retain())
			w.join(1, topic)
			assert.True(t, w.receive().retain())
		})},
		{name: "retain of a delayed will", run: func(t *testing.T, s *server) {
			w := watch(t, s, 5)
			c, _ := login(t, s, 5, with(keeping("c"), &message{topic: "will", payload: "kept", qos: 1, retain: true, props: [][]byte{property(willDelay, 1)}}))
			c.cut()
			assert.False(t, w.receive().retain())
			late := watch(t, s, 5)
			f := late.receive()
			assert.True(t, f.retain())
			assert.Equal(t, "kept", f.payload)
		}},
		// 3.1.3.2: the properties of the will are those of the PUBLISH.
		{name: "properties", run: func(t *testing.T, s *server) {
			for _, delay := range []int{0, 1} {
				w := watch(t, s, 5)
				c, _ := login(t, s, 5, with(keeping("c"), will(append([][]byte{property(willDelay, delay), property(messageExpiry, 100)}, described...)...)))
				c.cut()
				f := w.receive()
				checkDescribed(t, f)
				assert.InDelta(t, 100, f.number(messageExpiry, -1), 40)
				assert.LessOrEqual(t, f.number(messageExpiry, -1), 100)
				assert.NotContains(t, f.props, willDelay)
				w.leave()
			}
		}},
		// 3.1.3.2.4: the interval of the will begins when it is published.
		{name: "expiry shorter than the delay", run: func(t *testing.T, s *server) {
			w := watch(t, s, 5)
			c, _ := login(t, s, 5, with(keeping("c"), will(property(willDelay, 3), property(messageExpiry, 2))))
			c.cut()
			assert.Equal(t, "gone", w.receive().payload)
		}},
		// MQTT-3.1.3-11, MQTT-4.7.1-1, MQTT-4.7.3-1, 3.1.3.3: a will topic is a topic name.
		{name: "invalid topic", run: levels(func(t *testing.T, s *server, level byte) {
			w, _ := login(t, s, level, hello{id: "watch"})
			w.join(1, "will/#")
			for _, topic := range []string{"will/#", "will/+", "+", "", "will/\x00", "will/\xff", "will/a+b"} {
				c := dialLink(t, s, level)
				c.send(hello{id: "c", will: &message{topic: topic, qos: 1}}.encode(level))
				refusedConnect(t, c, topic, 0x80, 0x81, 0x82, 0x83, 0x90)
			}
			w.quiet(w)
		})},
		// MQTT-3.1.2-8, 4.1: a will that waits is part of the session.
		{name: "delayed will after a restart", restarts: true, run: func(t *testing.T, s *server) {
			w, _ := login(t, s, 5, keeping("watch"))
			w.join(1, "will")
			c, _ := login(t, s, 5, with(keeping("c"), will(append([][]byte{property(willDelay, 2)}, described...)...)))
			c.disconnect(4)
			s.stop(t)
			s.start(t)
			w, ack := login(t, s, 5, keeping("watch"))
			require.True(t, ack.session)
			checkDescribed(t, w.receive())
		}},
	})
}

// refusedConnect expects that CONNECT is refused: with one of the codes of MQTT 5.0, with a code of 3.1.1, or by closing.
func refusedConnect(t *testing.T, c *link, what string, codes ...byte) {
	t.Helper()
	for _, f := range c.closed() {
		if c.level != 5 {
			codes = []byte{1, 2, 3, 4, 5}
		}
		require.Equal(t, typeConnack, f.kind, "%q: MQTT-3.14.0-1", what)
		assert.Contains(t, codes, f.code, "%q: code 0x%02x", what, f.code)
		assert.False(t, f.session, "MQTT-3.2.2-6, MQTT-3.2.2-4 of 3.1.1")
	}
}

func TestDialogueConnect(t *testing.T) {
	users := &broker.Config{Users: []broker.User{{Name: "alice", Realms: []string{"alice"}}}}
	hold(t, []dialogue{
		// MQTT-3.1.2-22 (5.0), MQTT-3.1.2-24 (3.1.1): one and a half times the interval.
		{name: "Keep Alive times 1.5", run: levels(func(t *testing.T, s *server, level byte) {
			c := dialLink(t, s, level)
			start := time.Now()
			require.Zero(t, c.connect(hello{id: "c", alive: 1}).code)
			c.closed()
			assert.GreaterOrEqual(t, time.Since(start), 1400*time.Millisecond)
			assert.Less(t, time.Since(start), 15*time.Second)
		})},
		// 3.14.2.1: 0x8d, Keep Alive timeout.
		{name: "Keep Alive ends with 0x8d", wrong: "closes without DISCONNECT", run: levels(func(t *testing.T, s *server, level byte) {
			c, _ := login(t, s, level, hello{id: "c", alive: 1})
			c.refused(0x8d)
		})},
		{name: "Keep Alive is any packet", run: levels(func(t *testing.T, s *server, level byte) {
			c, _ := login(t, s, level, hello{id: "c", alive: 1})
			for i := range 6 {
				time.Sleep(700 * time.Millisecond)
				if i%2 == 0 {
					c.publish(message{topic: "t"})
				} else {
					c.ping()
				}
			}
		})},
		// MQTT-3.1.4-3, 4.13: 0x8e to a client of 5.0, none to one of 3.1.1 (there only clients send DISCONNECT).
		{name: "session taken over", wrong: "closes without DISCONNECT", run: levels(func(t *testing.T, s *server, level byte) {
			takeOver(t, s, level, level)
		})},
		{name: "session taken over by another level", wrong: "closes without DISCONNECT", run: levels(func(t *testing.T, s *server, level byte) {
			takeOver(t, s, level, 9-level)
		})},
		{name: "no DISCONNECT to 3.1.1 at the end of the broker", run: levels(func(t *testing.T, s *server, level byte) {
			c, _ := login(t, s, level, hello{id: "c"})
			s.stop(t)
			for _, f := range c.closed() {
				assert.EqualValues(t, 5, level, "nothing is sent to 3.1.1")
				assert.Equal(t, typeDisconnect, f.kind)
				assert.EqualValues(t, 0x8b, f.code)
			}
			s.start(t)
		})},
		// MQTT-3.1.3-8 of 3.1.1: code 2.
		{name: "3.1.1 empty identifier without Clean Session", run: func(t *testing.T, s *server) {
			c := dialLink(t, s, 4)
			assert.EqualValues(t, 2, c.connect(hello{keep: true}).code)
			assert.Empty(t, c.closed())
		}},
		{name: "3.1.1 empty identifier with Clean Session", run: func(t *testing.T, s *server) {
			a, _ := login(t, s, 4, hello{})
			b, _ := login(t, s, 4, hello{})
			a.ping()
			b.ping()
		}},
		// MQTT-3.1.2-2: a level that is not spoken: code 1, or 0x84.
		{name: "unknown protocol level", run: func(t *testing.T, s *server) {
			for _, level := range []byte{1, 2, 6, 9, 127} {
				c := dialLink(t, s, 4)
				c.send(packet(0x10, slices.Concat(str("MQTT"), []byte{level, 2, 0, 0}, str("c"))))
				for _, f := range c.closed() {
					assert.Equal(t, typeConnack, f.kind)
					assert.Contains(t, []byte{1, 0x84}, f.code)
				}
			}
		}},
		// MQTT-3.2.2-4 of 3.1.1 and its table 3.1; 3.1.4: the codes of each level.
		{name: "unknown user", config: users, run: levels(func(t *testing.T, s *server, level byte) {
			c := dialLink(t, s, level)
			ack := c.connect(hello{id: "c", user: ptr("mallory"), password: ptr("x")})
			if level == 4 {
				assert.Contains(t, []byte{4, 5}, ack.code)
			} else {
				assert.Contains(t, []byte{0x86, 0x87}, ack.code)
			}
			assert.Empty(t, c.closed())
			c = dialLink(t, s, level)
			assert.NotZero(t, c.connect(hello{id: "c"}).code, "no user at all")
			assert.Empty(t, c.closed())
		})},
		{name: "too many clients", config: &broker.Config{MaxClients: 1}, run: levels(func(t *testing.T, s *server, level byte) {
			c, _ := login(t, s, level, hello{id: "c"})
			refused := dialLink(t, s, level)
			ack := refused.connect(hello{id: "other"})
			if level == 4 {
				assert.EqualValues(t, 3, ack.code)
			} else {
				assert.Contains(t, []byte{0x88, 0x89, 0x97, 0x9f}, ack.code)
			}
			assert.Empty(t, refused.closed())
			c.ping()
			c.leave()
			require.Eventually(t, func() bool { return s.stats().Clients == 0 }, patience, time.Millisecond)
		})},
		// 3.2 of MQTT 3.1: the first byte of CONNACK is reserved.
		{name: "3.1 has no session present bit", run: func(t *testing.T, s *server) {
			for range 2 {
				c, ack := login(t, s, 3, hello{id: "c", keep: true})
				assert.False(t, ack.session)
				c.join(1, "t")
				c.leave()
			}
			pub, _ := login(t, s, 4, hello{id: "pub"})
			pub.publish(message{topic: "t", payload: "m", qos: 1})
			c, ack := login(t, s, 3, hello{id: "c", keep: true})
			assert.False(t, ack.session)
			assert.Equal(t, "m", c.receive().payload, "the session was there all the same")
		}},
		// MQTT-3.2.2-2, -3: session present.
		{name: "session present", run: levels(func(t *testing.T, s *server, level byte) {
			for i, want := range []bool{false, true, true} {
				c, ack := login(t, s, level, keeping(fmt.Sprint("c", level)))
				assert.Equal(t, want, ack.session, i)
				c.leave()
			}
			c, ack := login(t, s, level, hello{id: fmt.Sprint("c", level)})
			assert.False(t, ack.session)
			c.leave()
			_, ack = login(t, s, level, keeping(fmt.Sprint("c", level)))
			assert.False(t, ack.session, "a clean session is not kept")
		})},
		// MQTT-3.1.3-12 (5.0), MQTT-3.1.3-11 (3.1.1), MQTT-1.5.4-1: the user name is UTF-8.
		{name: "user name that is not UTF-8", run: levels(func(t *testing.T, s *server, level byte) {
			for _, name := range []string{"\xff", "a\xc0\x80", "\xed\xa0\x80", "nul\x00"} {
				c := dialLink(t, s, level)
				c.send(hello{id: "c", user: &name, password: ptr("x")}.encode(level))
				refusedConnect(t, c, name, 0x80, 0x81, 0x82, 0x83, 0x86, 0x87)
			}
		})},
		// MQTT-3.1.2-22 of 3.1.1 forbids it; 3.1.2.9 of 5.0 allows it.
		{name: "3.1.1 password without a user name", run: func(t *testing.T, s *server) {
			c := dialLink(t, s, 4)
			c.send(hello{id: "c", password: ptr("x")}.encode(4))
			refusedConnect(t, c, "password")
		}},
		{name: "5.0 password without a user name", run: func(t *testing.T, s *server) {
			c, _ := login(t, s, 5, hello{id: "c", password: ptr("x")})
			c.ping()
		}},
		// MQTT-3.1.4-6: nothing is processed after a refusal.
		{name: "packets after a refused CONNECT", config: &broker.Config{Users: []broker.User{{Name: "alice", Realms: []string{"a"}}}}, run: levels(func(t *testing.T, s *server, level byte) {
			watch, _ := login(t, s, level, hello{id: "watch", user: ptr("alice")})
			watch.join(1, "a/#")
			c := dialLink(t, s, level)
			c.send(append(hello{id: "c", user: ptr("mallory")}.encode(level), message{topic: "a/x", payload: "m", qos: 1, id: 1}.encode(level)...))
			refusedConnect(t, c, "mallory", 0x86, 0x87)
			other, _ := login(t, s, level, hello{id: "other", user: ptr("alice")})
			other.publish(message{topic: "a/x", payload: "last", qos: 1})
			assert.Equal(t, "last", watch.receive().payload)
		})},
		// MQTT-3.1.3-5: the identifiers that every server takes.
		{name: "identifiers of 1 to 23 letters and digits", run: levels(func(t *testing.T, s *server, level byte) {
			for _, id := range []string{"0", "0123456789abcdefghijklm", "nopqrstuvwxyzABCDEFGHIJ", "KLMNOPQRSTUVWXYZ"} {
				c, _ := login(t, s, level, hello{id: id})
				c.ping()
			}
		})},
		// MQTT-3.1.2-28: Response Information has to be asked for.
		{name: "Request Response Information 0", run: func(t *testing.T, s *server) {
			for _, props := range [][][]byte{nil, {property(requestResponse, 0)}} {
				_, ack := login(t, s, 5, hello{id: "c", props: props})
				assert.NotContains(t, ack.props, responseInformation)
			}
		}},
		// MQTT-3.1.3-6, -7, MQTT-3.2.2-16.
		{name: "assigned client identifier", run: func(t *testing.T, s *server) {
			var ids []string
			for range 2 {
				c, ack := login(t, s, 5, hello{keep: true, props: [][]byte{property(sessionExpiry, 300)}})
				require.Len(t, ack.props[assignedIdentifier], 1)
				ids = append(ids, ack.props[assignedIdentifier][0].(string))
				assert.NotEmpty(t, ids[len(ids)-1])
				c.leave()
			}
			assert.NotEqual(t, ids[0], ids[1])
			_, ack := login(t, s, 5, keeping(ids[0]))
			assert.True(t, ack.session)
			assert.NotContains(t, ack.props, assignedIdentifier, "it was the client's own")
		}},
		// 3.1.2.11.2: 0xffffffff is no end; a broker with a bound says it in CONNACK (3.2.2.3.2).
		{name: "session expiry 0xffffffff", run: func(t *testing.T, s *server) {
			h := hello{id: "c", keep: true, props: [][]byte{property(sessionExpiry, 0xffffffff)}}
			c, first := login(t, s, 5, h)
			assert.NotZero(t, first.number(sessionExpiry, 0xffffffff))
			c.leave()
			_, ack := login(t, s, 5, h)
			assert.True(t, ack.session)
		}},
		{name: "bounded session expiry is announced", config: &broker.Config{SessionExpiry: time.Hour}, run: func(t *testing.T, s *server) {
			for asked, announced := range map[int]int{0xffffffff: 3600, 7200: 3600, 60: 60} {
				_, ack := login(t, s, 5, hello{id: fmt.Sprint("c", asked), props: [][]byte{property(sessionExpiry, asked)}})
				assert.Equal(t, announced, ack.number(sessionExpiry, asked))
			}
		}},
		{name: "bounded packet size is announced and held", config: &broker.Config{MaxPacket: 4096}, run: func(t *testing.T, s *server) {
			c, ack := login(t, s, 5, hello{id: "c"})
			assert.Equal(t, 4096, ack.number(maximumPacketSize, 0))
			c.publish(message{topic: "t", payload: strings.Repeat("x", 4096-10), qos: 1})
			c.send(message{topic: "t", payload: strings.Repeat("x", 4096), qos: 1, id: 9}.encode(5))
			c.refused(0x95)
		}},
		// 3.1.2.11.2, MQTT-4.1.0-2: an absent Session Expiry Interval is 0.
		{name: "session without expiry ends with its connection", run: func(t *testing.T, s *server) {
			c, _ := login(t, s, 5, hello{id: "c", keep: true})
			c.join(1, "t")
			c.leave()
			_, ack := login(t, s, 5, hello{id: "c", keep: true})
			assert.False(t, ack.session)
		}},
		// 3.14.2.2.2: DISCONNECT may shorten the interval, and may not begin one.
		{name: "DISCONNECT with a shorter session expiry", run: func(t *testing.T, s *server) {
			c, _ := login(t, s, 5, keeping("c"))
			c.disconnect(0, property(sessionExpiry, 0))
			c, ack := login(t, s, 5, keeping("c"))
			assert.False(t, ack.session, "0: at once")
			c.disconnect(0, property(sessionExpiry, 1))
			time.Sleep(3 * time.Second)
			c, ack = login(t, s, 5, keeping("c"))
			assert.False(t, ack.session, "1: after a second")
			c.disconnect(0, property(sessionExpiry, 200))
			_, ack = login(t, s, 5, keeping("c"))
			assert.True(t, ack.session)
		}},
		{name: "DISCONNECT with a shorter session expiry before a restart", wrong: "the interval begins again", restarts: true, run: func(t *testing.T, s *server) {
			c, _ := login(t, s, 5, keeping("c"))
			c.disconnect(0, property(sessionExpiry, 1))
			kept, _ := login(t, s, 5, keeping("kept"))
			kept.disconnect(0, property(sessionExpiry, 200))
			s.stop(t)
			time.Sleep(2500 * time.Millisecond)
			s.start(t)
			_, ack := login(t, s, 5, keeping("c"))
			assert.False(t, ack.session)
			_, ack = login(t, s, 5, keeping("kept"))
			assert.True(t, ack.session)
		}},
		{name: "DISCONNECT begins no session expiry", run: func(t *testing.T, s *server) {
			c, _ := login(t, s, 5, hello{id: "c"})
			c.send(packet(0xe0, append([]byte{0}, properties(property(sessionExpiry, 60))...)))
			c.refused(0x82)
		}},
		// MQTT-3.1.0-2: the second CONNECT is an error.
		{name: "second CONNECT", wrong: "closes without DISCONNECT", run: levels(func(t *testing.T, s *server, level byte) {
			c, _ := login(t, s, level, hello{id: "c"})
			c.send(hello{id: "c"}.encode(level))
			c.refused(0x82)
		})},
		// MQTT-3.1.0-1, MQTT-3.14.0-1: the first packet is CONNECT.
		{name: "first packet is not CONNECT", run: levels(func(t *testing.T, s *server, level byte) {
			for _, first := range [][]byte{{0xc0, 0}, message{topic: "t"}.encode(level), packet(0x82, append([]byte{0, 1}, append(str("t"), 0)...)), {0xe0, 0}, {0xf0, 0}} {
				c := dialLink(t, s, level)
				c.send(first)
				assert.Empty(t, c.closed(), "MQTT-3.2.0-1, MQTT-3.14.0-1: nothing comes before CONNACK")
			}
		})},
		// 2.1.2: packets that only a server sends.
		{name: "packets of a server", wrong: "takes SUBACK, and closes without DISCONNECT", run: levels(func(t *testing.T, s *server, level byte) {
			for _, b := range [][]byte{{0x20, 2, 0, 0}, {0x20, 3, 0, 0, 0}, {0x90, 3, 0, 1, 0}, {0xb0, 2, 0, 1}, {0xb0, 4, 0, 1, 0, 0}, {0xd0, 0}} {
				c, _ := login(t, s, level, hello{id: "c"})
				c.send(b)
				c.refused(0x81, 0x82)
			}
		})},
		// 4.12, MQTT-4.12.0-6 and -7: without a method in CONNECT there is no AUTH.
		{name: "AUTH without a method", wrong: "closes without DISCONNECT", run: func(t *testing.T, s *server) {
			for _, b := range [][]byte{
				{0xf0, 0}, packet(0xf0, append([]byte{0x18}, properties(property(authMethod, "x"))...)), packet(0xf0, append([]byte{0x19}, properties(property(authMethod, "x"))...)),
			} {
				c, _ := login(t, s, 5, hello{id: "c"})
				c.send(b)
				c.refused(0x81, 0x82, 0x8c)
			}
		}},
		// MQTT-4.12.0-1: a method that the broker does not have.
		{name: "unknown authentication method", run: func(t *testing.T, s *server) {
			c := dialLink(t, s, 5)
			ack := c.connect(hello{id: "c", props: [][]byte{property(authMethod, "no such method"), property(authData, "x")}})
			assert.Contains(t, []byte{0x8c, 0x87}, ack.code)
			assert.Empty(t, c.closed())
		}},
		// 3.1.2.11.10: data without a method.
		{name: "authentication data without a method", wrong: "takes it", run: func(t *testing.T, s *server) {
			c := dialLink(t, s, 5)
			c.send(hello{id: "c", props: [][]byte{property(authData, "x")}}.encode(5))
			refusedConnect(t, c, "data", 0x81, 0x82)
		}},
	})
}

// takeOver connects twice with the same identifier.
func takeOver(t *testing.T, s *server, level, by byte) {
	c, _ := login(t, s, level, hello{id: "c"})
	second, _ := login(t, s, by, hello{id: "c"})
	c.refused(0x8e)
	second.ping()
	second.leave()
}

func TestDialogueFlow(t *testing.T) {
	large := strings.Repeat("x", 200)
	hold(t, []dialogue{
		// MQTT-3.1.2-24, -25, MQTT-3.3.4-9: a message that is too large is dropped as if it had been sent.
		{name: "Maximum Packet Size takes no slot", wrong: "the slot stays taken", run: func(t *testing.T, s *server) {
			pub, _ := login(t, s, 5, hello{id: "pub"})
			for _, qos := range []byte{1, 2} {
				sub, _ := login(t, s, 5, hello{id: "sub", props: [][]byte{property(maximumPacketSize, 100), property(receiveMaximum, 1)}})
				sub.join(qos, "t")
				for range 3 {
					pub.publish(message{topic: "t", payload: large, qos: qos})
				}
				pub.publish(message{topic: "t", payload: "small", qos: qos})
				assert.Equal(t, "small", sub.receive().payload)
				pub.publish(message{topic: "t", payload: large})
				sub.quiet(pub)
				sub.leave()
			}
		}},
		{name: "Maximum Packet Size of queued messages", wrong: "the slot stays taken", run: func(t *testing.T, s *server) {
			pub, _ := login(t, s, 5, hello{id: "pub"})
			sub, _ := login(t, s, 5, keeping("sub"))
			sub.join(1, "t")
			sub.leave()
			for _, payload := range []string{large, "a", large, "b"} {
				pub.publish(message{topic: "t", payload: payload, qos: 1})
			}
			h := keeping("sub", property(maximumPacketSize, 100), property(receiveMaximum, 1))
			sub, _ = login(t, s, 5, h)
			assert.Equal(t, []string{"a", "b"}, sub.payloads(2))
			sub.quiet(pub)
			sub.leave()
			sub, ack := login(t, s, 5, h)
			require.True(t, ack.session)
			sub.quiet(pub)
		}},
		{name: "Maximum Packet Size of retained messages", wrong: "the slot stays taken", run: func(t *testing.T, s *server) {
			pub, _ := login(t, s, 5, hello{id: "pub"})
			pub.publish(message{topic: "t/1", payload: large, qos: 1, retain: true})
			pub.publish(message{topic: "t/2", payload: "small", qos: 1, retain: true})
			sub, _ := login(t, s, 5, hello{id: "sub", props: [][]byte{property(maximumPacketSize, 100), property(receiveMaximum, 1)}})
			sub.join(1, "t/#")
			assert.Equal(t, "small", sub.receive().payload)
			sub.quiet(pub)
		}},
		// MQTT-3.3.4-9, MQTT-4.9.0-2, -3: no more than Receive Maximum; other packets go on.
		{name: "Receive Maximum of the client", run: bothQoS(func(t *testing.T, s *server, qos byte) {
			pub, _ := login(t, s, 5, hello{id: "pub"})
			sub, _ := login(t, s, 5, hello{id: "sub", props: [][]byte{property(receiveMaximum, 2)}})
			sub.join(qos, "t")
			for i := range 5 {
				pub.publish(message{topic: "t", payload: fmt.Sprint(i), qos: qos})
			}
			a, b := sub.want(typePublish), sub.want(typePublish)
			assert.Equal(t, []string{"0", "1"}, []string{a.payload, b.payload})
			sub.ping()
			for _, f := range []frame{a, b} {
				if qos == 1 {
					sub.ack(typePuback, f.id)
					continue
				}
				sub.ack(typePubrec, f.id)
				assert.Equal(t, f.id, sub.await(typePubrel).id)
				sub.ack(typePubcomp, f.id)
			}
			assert.Equal(t, []string{"2", "3", "4"}, sub.payloads(3))
			sub.quiet(pub)
		})},
		// 3.3.4, MQTT-3.3.4-7, -8: more than the server's Receive Maximum is an error, 0x93.
		{name: "Receive Maximum of the server", wrong: "takes more", run: func(t *testing.T, s *server) {
			c, ack := login(t, s, 5, hello{id: "c"})
			allowed := ack.number(receiveMaximum, 65_535)
			if allowed == 65_535 {
				t.Skip("there are no more identifiers")
			}
			go func() {
				for id := range allowed + 1 {
					c.send(message{topic: "t", qos: 2, id: uint16(id + 1)}.encode(5))
				}
			}()
			before := c.closed()
			last := before[len(before)-1]
			assert.Equal(t, typeDisconnect, last.kind)
			assert.EqualValues(t, 0x93, last.code)
		}},
	})
}

// bothQoS runs a dialogue of MQTT 5.0 for QoS 1 and 2.
func bothQoS(run func(t *testing.T, s *server, qos byte)) func(t *testing.T, s *server) {
	return func(t *testing.T, s *server) {
		for _, qos := range []byte{1, 2} {
			t.Run(fmt.Sprintf("QoS %d", qos), func(t *testing.T) { run(t, s, qos) })
		}
	}
}

func TestDialogueTopicAliases(t *testing.T) {
	alias := func(n int) [][]byte { return [][]byte{property(topicAlias, n)} }
	announced := func(t *testing.T, ack frame) int {
		t.Helper()
		n := ack.number(topicAliasMaximum, 0)
		if n == 0 {
			t.Skip("the broker takes no aliases")
		}
		return n
	}
	hold(t, []dialogue{
		// MQTT-3.3.2-12, 3.2.2.3.8: aliases up to the maximum that CONNACK announces.
		{name: "inbound", run: func(t *testing.T, s *server) {
			c, ack := login(t, s, 5, hello{id: "c"})
			n := announced(t, ack)
			c.join(2, "#")
			for qos := range byte(3) {
				for _, a := range []int{1, n} {
					c.publish(message{topic: fmt.Sprint("topic/", a), qos: qos, props: alias(a)})
					c.publish(message{qos: qos, props: alias(a)})
					for range 2 {
						f := c.receive()
						assert.Equal(t, fmt.Sprint("topic/", a), f.topic)
						assert.NotContains(t, f.props, topicAlias)
					}
				}
			}
			c.publish(message{topic: "other", qos: 1, props: alias(1)})
			c.publish(message{qos: 1, props: alias(1)})
			assert.Equal(t, "other", c.receive().topic)
			assert.Equal(t, "other", c.receive().topic, "the alias was given to another topic")
		}},
		// MQTT-3.2.2-17, -18: without a maximum in CONNACK there are none.
		{name: "none without a maximum", run: func(t *testing.T, s *server) {
			c, ack := login(t, s, 5, hello{id: "c"})
			c.send(message{topic: "t", qos: 1, id: 1, props: alias(1)}.encode(5))
			if ack.number(topicAliasMaximum, 0) == 0 {
				c.refused(0x94)
			} else {
				c.want(typePuback)
			}
		}},
		{name: "unknown", run: func(t *testing.T, s *server) {
			c, _ := login(t, s, 5, hello{id: "c"})
			c.send(message{qos: 1, id: 1, props: alias(1)}.encode(5))
			c.refused(0x82, 0x94)
		}},
		// MQTT-3.3.2-9: 0x94; MQTT-3.3.2-8: 0 is none.
		{name: "above the maximum", run: func(t *testing.T, s *server) {
			c, ack := login(t, s, 5, hello{id: "c"})
			n := ack.number(topicAliasMaximum, 0) + 1
			if n > 65_535 {
				t.Skip("there is no greater alias")
			}
			c.send(message{topic: "t", qos: 1, id: 1, props: alias(n)}.encode(5))
			c.refused(0x94)
		}},
		{name: "0", run: func(t *testing.T, s *server) {
			c, _ := login(t, s, 5, hello{id: "c"})
			c.send(message{topic: "t", qos: 1, id: 1, props: alias(0)}.encode(5))
			c.refused(0x81, 0x82, 0x94)
		}},
		// MQTT-3.3.2-7: aliases end with their connection.
		{name: "inbound alias ends with its connection", run: func(t *testing.T, s *server) {
			c, ack := login(t, s, 5, keeping("c"))
			announced(t, ack)
			c.publish(message{topic: "t", qos: 1, props: alias(1)})
			c.leave()
			c, ack = login(t, s, 5, keeping("c"))
			require.True(t, ack.session)
			c.send(message{qos: 1, id: 1, props: alias(1)}.encode(5))
			c.refused(0x82, 0x94)
		}},
		// 5.4.2, 3.3.2.3.4: rules are asked about the topic, not about the alias.
		{name: "inbound alias is checked", config: &broker.Config{Users: []broker.User{{Name: "alice", Realms: []string{"hers"}}, {Name: "root", Read: []string{"#"}}}}, run: func(t *testing.T, s *server) {
			watch, _ := login(t, s, 5, hello{id: "watch", user: ptr("root")})
			watch.join(1, "#")
			c, ack := login(t, s, 5, hello{id: "c", user: ptr("alice")})
			announced(t, ack)
			assert.Less(t, c.publish(message{topic: "hers/x", payload: "first", qos: 1, props: alias(1)}).code, byte(0x80))
			assert.Less(t, c.publish(message{payload: "second", qos: 1, props: alias(1)}).code, byte(0x80))
			assert.Equal(t, []string{"first", "second"}, watch.payloads(2))
			c.send(message{topic: "theirs/x", payload: "third", qos: 1, id: 20, props: alias(1)}.encode(5))
			c.send(message{payload: "fourth", qos: 1, id: 21, props: alias(1)}.encode(5))
			for range 2 {
				if f := c.next(); f.kind == typeDisconnect {
					break
				} else {
					assert.GreaterOrEqual(t, f.code, byte(0x80))
				}
			}
			other, _ := login(t, s, 5, hello{id: "other", user: ptr("alice")})
			other.publish(message{topic: "hers/x", payload: "last", qos: 1})
			assert.Equal(t, "last", watch.receive().payload)
		}},
		// MQTT-3.1.2-26, -27, MQTT-3.3.2-7, -11: link.resolve checks maximum and definitions.
		{name: "outbound", restarts: true, run: func(t *testing.T, s *server) {
			topics := []string{"a", "b", "a", "c", "d", "a", "b"}
			for _, most := range []int{0, 2} {
				h := keeping(fmt.Sprint("sub", most), property(topicAliasMaximum, most))
				sub, _ := login(t, s, 5, h)
				sub.join(1, "+")
				exchange := func() {
					pub, _ := login(t, s, 5, hello{id: "pub"})
					for _, topic := range topics {
						pub.publish(message{topic: topic, qos: 1})
					}
					for _, topic := range topics {
						assert.Equal(t, topic, sub.receive().topic)
					}
				}
				exchange()
				for range 2 { // the second time without an answer
					sub.leave()
					sub, _ = login(t, s, 5, h)
					exchange()
					pub, _ := login(t, s, 5, hello{id: "pub"})
					pub.publish(message{topic: "a", qos: 1})
					assert.Equal(t, "a", sub.want(typePublish).topic)
					sub.leave()
					sub, _ = login(t, s, 5, h)
					assert.Equal(t, "a", sub.receive().topic)
				}
				pub, _ := login(t, s, 5, hello{id: "pub"})
				pub.publish(message{topic: "b", qos: 1})
				assert.Equal(t, "b", sub.want(typePublish).topic)
				sub.leave()
				s.stop(t)
				s.start(t)
				sub, _ = login(t, s, 5, h)
				assert.Equal(t, "b", sub.receive().topic)
				exchange()
				sub.leave()
			}
		}},
	})
}

func TestDialogueMessageExpiry(t *testing.T) {
	expiry := func(seconds int) [][]byte { return [][]byte{property(messageExpiry, seconds)} }
	remaining := func(t *testing.T, f frame) {
		t.Helper()
		assert.Equal(t, "long", f.payload)
		assert.LessOrEqual(t, f.number(messageExpiry, 1000), 99, "the interval less the time that it waited")
		assert.Positive(t, f.number(messageExpiry, 0))
	}
	const wait = 2200 * time.Millisecond
	pause := func(t *testing.T, s *server, restart bool) {
		if restart {
			s.stop(t)
		}
		time.Sleep(wait)
		if restart {
			s.start(t)
		}
	}
	queued := func(restart bool) func(t *testing.T, s *server) {
		return func(t *testing.T, s *server) {
			sub, _ := login(t, s, 5, keeping("sub"))
			sub.join(1, "t")
			sub.leave()
			pub, _ := login(t, s, 5, hello{id: "pub"})
			pub.publish(message{topic: "t", payload: "short", qos: 1, props: expiry(1)})
			pub.publish(message{topic: "t", payload: "long", qos: 1, props: expiry(100)})
			pub.publish(message{topic: "t", payload: "endless", qos: 1})
			pause(t, s, restart)
			sub, _ = login(t, s, 5, keeping("sub"))
			remaining(t, sub.receive())
			f := sub.receive()
			assert.Equal(t, "endless", f.payload)
			assert.NotContains(t, f.props, messageExpiry)
		}
	}
	retained := func(restart bool) func(t *testing.T, s *server) {
		return func(t *testing.T, s *server) {
			pub, _ := login(t, s, 5, hello{id: "pub"})
			pub.publish(message{topic: "t/short", payload: "short", qos: 1, retain: true, props: expiry(1)})
			pub.publish(message{topic: "t/long", payload: "long", qos: 1, retain: true, props: expiry(100)})
			pause(t, s, restart)
			for _, level := range []byte{4, 5} {
				sub, _ := login(t, s, level, hello{id: "sub"})
				sub.join(1, "t/#")
				f := sub.receive()
				assert.Equal(t, "long", f.payload)
				if level == 5 {
					remaining(t, f)
				}
				other, _ := login(t, s, 5, hello{id: "other"})
				sub.quiet(other)
			}
		}
	}
	hold(t, []dialogue{
		// MQTT-3.3.2-5, -6: what is expired is not sent; the interval is what remains.
		{name: "queued", run: queued(false)},
		{name: "queued over a restart", restarts: true, run: queued(true)},
		{name: "retained", run: retained(false)},
		{name: "retained over a restart", restarts: true, run: retained(true)},
		{name: "live", run: func(t *testing.T, s *server) {
			c, _ := login(t, s, 5, hello{id: "c"})
			c.join(1, "t")
			c.publish(message{topic: "t", qos: 1, props: expiry(100)})
			n := c.receive().number(messageExpiry, -1)
			assert.LessOrEqual(t, n, 100)
			assert.Positive(t, n)
		}},
		// 3.1.3.2.4: the interval of a will is that of its PUBLISH.
		{name: "will", run: func(t *testing.T, s *server) {
			sub, _ := login(t, s, 5, keeping("sub"))
			sub.join(1, "t")
			sub.leave()
			seen, _ := login(t, s, 5, hello{id: "seen"})
			seen.join(1, "t")
			for payload, seconds := range map[string]int{"short": 1, "long": 100} {
				c, _ := login(t, s, 5, hello{id: "c", will: &message{topic: "t", payload: payload, qos: 1, props: expiry(seconds)}})
				c.cut()
				assert.Equal(t, payload, seen.receive().payload)
			}
			time.Sleep(wait)
			sub, _ = login(t, s, 5, keeping("sub"))
			remaining(t, sub.receive())
			sub.quiet(seen)
		}},
		// MQTT-4.3.3-7, -13: what was sent does not expire any more.
		{name: "after it was sent", run: func(t *testing.T, s *server) {
			sub, _ := login(t, s, 5, keeping("sub"))
			sub.join(2, "t")
			pub, _ := login(t, s, 5, hello{id: "pub"})
			pub.publish(message{topic: "t", payload: "short", qos: 2, props: expiry(1)})
			f := sub.want(typePublish)
			time.Sleep(wait)
			sub.ack(typePubrec, f.id)
			assert.Equal(t, f.id, sub.want(typePubrel).id)
			sub.ack(typePubcomp, f.id)
			sub.quiet(pub)
		}},
		// A message that waits for Receive Maximum expires too.
		{name: "behind Receive Maximum", wrong: "sends nothing after an expired message", run: func(t *testing.T, s *server) {
			sub, _ := login(t, s, 5, hello{id: "sub", props: [][]byte{property(receiveMaximum, 1)}})
			sub.join(1, "t")
			pub, _ := login(t, s, 5, hello{id: "pub"})
			pub.publish(message{topic: "t", payload: "first", qos: 1})
			pub.publish(message{topic: "t", payload: "short", qos: 1, props: expiry(1)})
			pub.publish(message{topic: "t", payload: "long", qos: 1, props: expiry(100)})
			first := sub.want(typePublish)
			time.Sleep(wait)
			sub.ack(typePuback, first.id)
			remaining(t, sub.receive())
		}},
	})
}

func TestDialogueSharedSubscriptions(t *testing.T) {
	hold(t, []dialogue{
		// 4.8.2: each shared subscription gets a copy, and so does an ordinary one.
		{name: "groups and an ordinary subscription each get a copy", run: func(t *testing.T, s *server) {
			for qos := range byte(3) {
				c, _ := login(t, s, 5, hello{id: "c"})
				c.subscribe(qos, [][]byte{property(subscriptionIdentifier, 1)}, "$share/one/t")
				c.subscribe(qos, [][]byte{property(subscriptionIdentifier, 2)}, "$share/two/t")
				c.subscribe(qos, [][]byte{property(subscriptionIdentifier, 3)}, "t")
				c.publish(message{topic: "t", payload: "m", qos: qos})
				var ids []any
				for range 3 {
					ids = append(ids, c.receive().props[subscriptionIdentifier]...)
				}
				assert.ElementsMatch(t, []any{1, 2, 3}, ids)
				c.quiet(c)
				c.leave()
			}
		}},
		// 4.8.2: one member gets each message.
		{name: "each message goes to one member", run: func(t *testing.T, s *server) {
			pub, _ := login(t, s, 5, hello{id: "pub"})
			var members []*link
			for i := range 3 {
				m, _ := login(t, s, 5, hello{id: fmt.Sprint("m", i)})
				m.join(1, "$share/g/t", fmt.Sprint("end/", i))
				members = append(members, m)
			}
			const count = 30
			for i := range count {
				pub.publish(message{topic: "t", payload: fmt.Sprint(i), qos: 1})
			}
			seen := map[string]int{}
			for i, m := range members {
				pub.publish(message{topic: fmt.Sprint("end/", i), qos: 1})
				for f := m.receive(); f.topic == "t"; f = m.receive() {
					seen[f.payload]++
				}
			}
			assert.Len(t, seen, count)
			for payload, n := range seen {
				assert.Equal(t, 1, n, payload)
			}
		}},
		// 4.8.2: the server may choose; a member that is away loses QoS 0.
		{name: "absent member gets nothing while another is there", wrong: "gives it its share", run: func(t *testing.T, s *server) {
			pub, _ := login(t, s, 5, hello{id: "pub"})
			away, _ := login(t, s, 5, keeping("away"))
			away.join(1, "$share/g/t")
			there, _ := login(t, s, 5, hello{id: "there"})
			there.join(1, "$share/g/t")
			away.leave()
			for qos := range byte(2) {
				for i := range 10 {
					pub.publish(message{topic: "t", payload: fmt.Sprint(i), qos: qos})
				}
				for i := range 10 {
					assert.Equal(t, fmt.Sprint(i), there.receive().payload)
				}
			}
			away, ack := login(t, s, 5, keeping("away"))
			require.True(t, ack.session)
			away.quiet(pub)
		}},
		// 4.8.2: "SHOULD" of messages with QoS 1 whose member's session has ended.
		{name: "QoS 1 of an ended session goes to another member", wrong: "loses them", run: func(t *testing.T, s *server) {
			pub, _ := login(t, s, 5, hello{id: "pub"})
			for _, sent := range []bool{true, false} {
				first, _ := login(t, s, 5, keeping("first"))
				first.join(1, "$share/g/t")
				if !sent {
					first.leave()
				}
				for i := range 3 {
					pub.publish(message{topic: "t", payload: fmt.Sprint(i), qos: 1})
				}
				if sent {
					for range 3 {
						first.want(typePublish)
					}
				}
				second, _ := login(t, s, 5, hello{id: "second"})
				second.join(1, "$share/g/t")
				if sent {
					first.disconnect(0, property(sessionExpiry, 0))
				} else {
					first, _ = login(t, s, 5, hello{id: "first"})
					first.leave()
				}
				assert.ElementsMatch(t, []string{"0", "1", "2"}, second.payloads(3))
				second.leave()
			}
		}},
		// MQTT-4.8.2-4: a member that returns gets what was begun.
		{name: "QoS 2 is completed when the member returns", run: func(t *testing.T, s *server) {
			pub, _ := login(t, s, 5, hello{id: "pub"})
			first, _ := login(t, s, 5, keeping("first"))
			first.join(2, "$share/g/t")
			pub.publish(message{topic: "t", payload: "m", qos: 2})
			id := first.want(typePublish).id
			second, _ := login(t, s, 5, hello{id: "second"})
			second.join(2, "$share/g/t")
			first.cut()
			first, _ = login(t, s, 5, keeping("first"))
			f := first.receive()
			assert.Equal(t, id, f.id)
			assert.Equal(t, "m", f.payload)
			second.quiet(pub)
		}},
		// MQTT-4.8.2-5: with QoS 2 it does not.
		{name: "QoS 2 of an ended session goes to nobody", run: func(t *testing.T, s *server) {
			pub, _ := login(t, s, 5, hello{id: "pub"})
			first, _ := login(t, s, 5, keeping("first"))
			first.join(2, "$share/g/t")
			pub.publish(message{topic: "t", qos: 2})
			first.want(typePublish)
			second, _ := login(t, s, 5, hello{id: "second"})
			second.join(2, "$share/g/t")
			first.disconnect(0, property(sessionExpiry, 0))
			second.quiet(pub)
		}},
		// MQTT-4.8.2-6: an error in PUBACK discards the message.
		{name: "message that a member refuses goes to nobody", run: func(t *testing.T, s *server) {
			pub, _ := login(t, s, 5, hello{id: "pub"})
			first, _ := login(t, s, 5, hello{id: "first"})
			first.join(1, "$share/g/t")
			pub.publish(message{topic: "t", qos: 1})
			f := first.want(typePublish)
			second, _ := login(t, s, 5, hello{id: "second"})
			second.join(1, "$share/g/t")
			first.send(packet(0x40, append(binary.BigEndian.AppendUint16(nil, f.id), 0x83)))
			first.quiet(pub)
			second.quiet(pub)
		}},
		// MQTT-4.8.2-3: the QoS is that of the member.
		{name: "QoS of the member", run: func(t *testing.T, s *server) {
			c, _ := login(t, s, 5, hello{id: "c"})
			c.join(1, "$share/g/t")
			c.publish(message{topic: "t", qos: 2})
			assert.EqualValues(t, 1, c.receive().qos())
		}},
	})
}
