package broker_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"syscall"
	"testing"
	"time"

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

// elapse lets time pass that is the subject itself: an interval of MQTT that has to be over, or in which nothing may happen.
func elapse(d time.Duration) { time.Sleep(d) }

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
				d.run(t, mosquittoServer(t))
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
