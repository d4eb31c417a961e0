package broker_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"syscall"
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
