package broker_test

import (
	"encoding/binary"
	"fmt"
	"net"
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
