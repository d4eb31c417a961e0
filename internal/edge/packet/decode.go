package packet

import (
	"encoding/binary"
	"strings"
	"unicode/utf8"
)

// MaxLength is the largest remaining length that MQTT can encode (MQTT 5.0 §1.5.5), in bytes.
const MaxLength = 268_435_455

// Length reads a Variable Byte Integer (MQTT 5.0 §1.5.5) and returns it with the number of bytes that it takes: 0 if b
// ends too early, and -1 if it is none.
func Length(b []byte) (value, size int) {
	for i, c := range b {
		if i == 4 {
			return 0, -1
		}
		value |= int(c&0x7f) << (7 * i)
		if c < 0x80 {
			return value, i + 1
		}
	}
	if len(b) >= 4 {
		return 0, -1
	}
	return 0, 0
}

// minimal reports whether a Variable Byte Integer takes no more bytes than it needs, as [MQTT-1.5.5-1] requires.
func minimal(value, size int) bool { return size == 1 || value>>(7*(size-1)) > 0 }

// CheckLength returns an error if the remaining length of a packet is encoded in more bytes than it needs. MQTT 3.1.1
// does not forbid that, and small clients do it.
func CheckLength(value, size int, level byte) error {
	if level >= 5 && !minimal(value, size) {
		return malformed("the remaining length %d takes %d bytes", value, size)
	}
	return nil
}

// Decode decodes the packet with the given first byte and the bytes after its remaining length. The level is that of the
// connection; for CONNECT it is ignored. The packet's payload and password are parts of body. The error is an *Error.
func Decode(first byte, body []byte, level byte) (Packet, error) {
	d := decoder{rest: body}
	of, flags := Type(first>>4), first&0x0f
	want := byte(0)
	switch of {
	case PUBREL, SUBSCRIBE, UNSUBSCRIBE:
		want = 2
	case PUBLISH:
		want = flags
	case AUTH:
		if level < 5 {
			return nil, violation("there is no AUTH in MQTT 3")
		}
	case 0:
		return nil, malformed("there is no packet type 0")
	}
	if level == 3 { // MQTT 3.1 §2.1 lets clients set DUP in these, and says nothing about the other flags
		want = flags
	}
	if flags != want {
		return nil, malformed("%v has the flags %04b", of, flags)
	}
	var p Packet
	switch of {
	case CONNECT:
		p = d.connect()
	case CONNACK:
		p = d.connack(level)
	case PUBLISH:
		p = d.publish(flags, level)
	case PUBACK, PUBREC, PUBREL, PUBCOMP:
		p = d.ack(of, level)
	case SUBSCRIBE:
		p = d.subscribe(level)
	case UNSUBSCRIBE:
		p = d.unsubscribe(level)
	case SUBACK, UNSUBACK:
		p = d.suback(of, level)
	case PINGREQ, PINGRESP:
		p = &Ping{of}
	case DISCONNECT, AUTH:
		p = d.end(of, level)
	}
	if d.err == nil && len(d.rest) > 0 {
		d.fail(malformed("%v has %d bytes too many", of, len(d.rest)))
	}
	if d.err != nil {
		return nil, d.err
	}
	return p, nil
}

// decoder reads the parts of a packet. After the first error it reads zeros.
type decoder struct {
	rest []byte
	err  error
}

func (d *decoder) fail(err error) {
	if d.err == nil {
		d.err = err
	}
}

func (d *decoder) take(n int) []byte {
	if d.err == nil && len(d.rest) < n {
		d.err = malformed("the packet ends too early")
	}
	if d.err != nil {
		return nil
	}
	b := d.rest[:n:n]
	d.rest = d.rest[n:]
	return b
}

func (d *decoder) number8() byte {
	if b := d.take(1); b != nil {
		return b[0]
	}
	return 0
}

func (d *decoder) number16() uint16 {
	if b := d.take(2); b != nil {
		return binary.BigEndian.Uint16(b)
	}
	return 0
}

func (d *decoder) number32() uint32 {
	if b := d.take(4); b != nil {
		return binary.BigEndian.Uint32(b)
	}
	return 0
}

func (d *decoder) varNumber() uint32 {
	if d.err != nil {
		return 0
	}
	value, size := Length(d.rest)
	if size <= 0 || !minimal(value, size) {
		d.fail(malformed("a Variable Byte Integer is wrong"))
		return 0
	}
	d.rest = d.rest[size:]
	return uint32(value)
}

func (d *decoder) blob() []byte { return d.take(int(d.number16())) }

// text reads a UTF-8 Encoded String (MQTT 5.0 §1.5.4).
func (d *decoder) text() string {
	b := d.blob()
	if !utf8.Valid(b) {
		d.fail(malformed("a string is not UTF-8"))
		return ""
	}
	s := string(b)
	if strings.IndexByte(s, 0) >= 0 {
		d.fail(malformed("a string has the character U+0000"))
	}
	return s
}

// id reads a packet identifier.
func (d *decoder) id() uint16 {
	id := d.number16()
	if d.err == nil && id == 0 {
		d.fail(violation("the packet identifier is 0"))
	}
	return id
}

func (d *decoder) connect() *Connect {
	name := d.text()
	level := d.number8()
	p := &Connect{Level: level &^ 0x80, Bridge: level&0x80 != 0}
	switch {
	case d.err != nil:
		return p
	case name != "MQTT" && name != "MQIsdp":
		d.fail(&Error{UnsupportedVersion, "the protocol is neither MQTT nor MQIsdp"})
		return p
	case (name == "MQIsdp") != (p.Level == 3), p.Level > 5, p.Level < 3, p.Bridge && p.Level == 5:
		d.fail(&Error{UnsupportedVersion, "the protocol level is not 3, 4 or 5"})
		return p
	}
	flags := d.number8()
	p.CleanStart, p.HasUsername, p.HasPassword = flags&0x02 != 0, flags&0x80 != 0, flags&0x40 != 0
	qos := flags >> 3 & 3
	switch {
	case flags&0x01 != 0 && p.Level > 3:
		d.fail(malformed("the reserved flag of CONNECT is set"))
	case flags&0x04 == 0 && flags&0x38 != 0:
		d.fail(malformed("CONNECT has a QoS or Retain for a will that it has not"))
	case qos == 3:
		d.fail(malformed("the will has QoS 3"))
	case p.HasPassword && !p.HasUsername && p.Level < 5:
		d.fail(malformed("CONNECT has a password without a user name"))
	}
	p.KeepAlive = d.number16()
	if p.Level == 5 {
		p.Properties = d.decodeProperties(CONNECT)
		if p.Properties.Has(AuthData) && !p.Properties.Has(AuthMethod) {
			d.fail(violation("CONNECT has authentication data without a method"))
		}
	}
	p.ClientID = d.text()
	if flags&0x04 != 0 {
		w := &Will{QoS: qos, Retain: flags&0x20 != 0}
		if p.Level == 5 {
			w.Properties = d.decodeProperties(0)
			d.checkResponseTopic(w.Properties)
		}
		w.Topic = d.text()
		w.Payload = d.blob()
		if d.err == nil && !ValidTopic(w.Topic) {
			d.fail(&Error{TopicNameInvalid, "the will's topic is empty or has a wildcard"})
		}
		p.Will = w
	}
	if p.HasUsername {
		p.Username = d.text()
	}
	if p.HasPassword && (p.Level > 3 || len(d.rest) > 0) { // MQTT 3.1 §3.1 lets a client leave it out in spite of its flag
		p.Password = d.blob()
	}
	return p
}

func (d *decoder) checkResponseTopic(p *Properties) {
	if d.err == nil && p.Has(ResponseTopic) && !ValidTopic(p.Text(ResponseTopic)) {
		d.fail(violation("the response topic is empty or has a wildcard"))
	}
}

func (d *decoder) connack(level byte) *Connack {
	flags := d.number8()
	p := &Connack{SessionPresent: flags&1 != 0, Code: Code(d.number8())}
	if flags&^1 != 0 {
		d.fail(malformed("CONNACK has the flags %02x", flags))
	}
	if level >= 5 {
		p.Properties = d.decodeProperties(CONNACK)
	}
	return p
}

func (d *decoder) publish(flags, level byte) *Publish {
	p := &Publish{Dup: flags&8 != 0, QoS: flags >> 1 & 3, Retain: flags&1 != 0}
	switch {
	case p.QoS == 3:
		d.fail(malformed("PUBLISH has QoS 3"))
	case p.Dup && p.QoS == 0 && level > 3:
		d.fail(malformed("PUBLISH has DUP with QoS 0"))
	}
	p.Topic = d.text()
	if p.QoS > 0 {
		p.ID = d.id()
	}
	if level >= 5 {
		p.Properties = d.decodeProperties(PUBLISH)
		d.checkResponseTopic(p.Properties)
		if p.Properties.Has(TopicAlias) && p.Properties.Number(TopicAlias) == 0 {
			d.fail(&Error{TopicAliasInvalid, "the topic alias is 0"})
		}
	}
	switch {
	case d.err != nil:
	case p.Topic == "" && !p.Properties.Has(TopicAlias):
		d.fail(violation("PUBLISH has neither a topic nor an alias"))
	case p.Topic != "" && !ValidTopic(p.Topic):
		d.fail(&Error{TopicNameInvalid, "the topic of PUBLISH has a wildcard"})
	}
	p.Payload, d.rest = d.rest, nil
	return p
}

func (d *decoder) ack(of Type, level byte) *Ack {
	p := &Ack{Type: of, ID: d.id()}
	if level >= 5 && len(d.rest) > 0 {
		p.Code = d.code(of)
		if len(d.rest) > 0 {
			p.Properties = d.decodeProperties(of)
		}
	}
	return p
}

// code reads a reason code and checks that the packet may have it.
func (d *decoder) code(of Type) Code {
	c := Code(d.number8())
	if d.err == nil {
		for _, valid := range validCodes[of] {
			if c == valid {
				return c
			}
		}
		d.fail(malformed("%v may not have the reason code 0x%02x", of, byte(c)))
	}
	return c
}

func (d *decoder) subscribe(level byte) *Subscribe {
	p := &Subscribe{ID: d.id()}
	if level >= 5 {
		p.Properties = d.decodeProperties(SUBSCRIBE)
	}
	for d.err == nil && len(d.rest) > 0 {
		s := Subscription{Filter: d.filter()}
		options := d.number8()
		s.QoS = options & 3
		s.NoLocal, s.RetainAsPublished, s.RetainHandling = options&4 != 0, options&8 != 0, options>>4&3
		switch {
		case s.QoS == 3, level < 5 && options > 2, options > 0x3f:
			d.fail(malformed("the subscription options %08b are reserved", options))
		case s.RetainHandling == 3:
			d.fail(violation("there is no Retain Handling 3"))
		case s.NoLocal && strings.HasPrefix(s.Filter, SharePrefix):
			d.fail(violation("a shared subscription has No Local"))
		}
		p.Filters = append(p.Filters, s)
	}
	if d.err == nil && len(p.Filters) == 0 {
		d.fail(violation("SUBSCRIBE has no filter"))
	}
	return p
}

func (d *decoder) filter() string {
	f := d.text()
	if d.err == nil && !ValidFilter(f) {
		d.fail(malformed("%q is not a topic filter", f))
	}
	return f
}

func (d *decoder) unsubscribe(level byte) *Unsubscribe {
	p := &Unsubscribe{ID: d.id()}
	if level >= 5 {
		p.Properties = d.decodeProperties(UNSUBSCRIBE)
	}
	for d.err == nil && len(d.rest) > 0 {
		p.Filters = append(p.Filters, d.filter())
	}
	if d.err == nil && len(p.Filters) == 0 {
		d.fail(violation("UNSUBSCRIBE has no filter"))
	}
	return p
}

func (d *decoder) suback(of Type, level byte) *Suback {
	p := &Suback{Type: of, ID: d.id()}
	if level >= 5 {
		p.Properties = d.decodeProperties(of)
	}
	for d.err == nil && len(d.rest) > 0 && (of == SUBACK || level >= 5) {
		p.Codes = append(p.Codes, d.code(of))
	}
	return p
}

func (d *decoder) end(of Type, level byte) *End {
	p := &End{Type: of}
	if level >= 5 && len(d.rest) > 0 {
		p.Code = d.code(of)
		if len(d.rest) > 0 {
			p.Properties = d.decodeProperties(of)
		}
	}
	return p
}

// Level returns the protocol level of the MQTT version whose rules apply to the answer to a CONNECT, of which body are
// the bytes after the remaining length. It is 4 if the CONNECT is not understood.
func Level(body []byte) byte {
	d := decoder{rest: body}
	d.text()
	if level := d.number8(); level == 5 && d.err == nil {
		return 5
	}
	return 4
}
