package packet

import (
	"encoding/binary"
	"math/bits"
)

// PropertyID identifies a property (MQTT 5.0 table 2-4).
type PropertyID byte

// The properties of MQTT 5.0.
const (
	PayloadFormat       PropertyID = 0x01
	MessageExpiry       PropertyID = 0x02
	ContentType         PropertyID = 0x03
	ResponseTopic       PropertyID = 0x08
	CorrelationData     PropertyID = 0x09
	SubscriptionID      PropertyID = 0x0b
	SessionExpiry       PropertyID = 0x11
	AssignedClientID    PropertyID = 0x12
	ServerKeepAlive     PropertyID = 0x13
	AuthMethod          PropertyID = 0x15
	AuthData            PropertyID = 0x16
	RequestProblem      PropertyID = 0x17
	WillDelay           PropertyID = 0x18
	RequestResponse     PropertyID = 0x19
	ResponseInformation PropertyID = 0x1a
	ServerReference     PropertyID = 0x1c
	ReasonString        PropertyID = 0x1f
	ReceiveMaximum      PropertyID = 0x21
	TopicAliasMaximum   PropertyID = 0x22
	TopicAlias          PropertyID = 0x23
	MaximumQoS          PropertyID = 0x24
	RetainAvailable     PropertyID = 0x25
	UserProperties      PropertyID = 0x26
	MaximumPacketSize   PropertyID = 0x27
	WildcardAvailable   PropertyID = 0x28
	SubscriptionIDs     PropertyID = 0x29
	SharedAvailable     PropertyID = 0x2a
	lastProperty                   = SharedAvailable
	forwardedProperties            = 1<<PayloadFormat | 1<<ContentType | 1<<ResponseTopic | 1<<CorrelationData | 1<<UserProperties
)

// format is how a property is encoded.
type format byte

const (
	number8 format = iota + 1
	number16
	number32
	varNumber
	text
	blob
	pair
)

// willBit stands for the properties of a will among the bits of packet types; 0 is not a type.
const willBit = 1 << 0

// definitions has, for each property, its format, the packets that may carry it, and the numbers that are allowed.
var definitions = [lastProperty + 1]struct {
	format   format
	in       uint32
	min, max uint32 // of numbers; a max of 0 means no limit
}{
	PayloadFormat:       {number8, 1<<PUBLISH | willBit, 0, 1},
	MessageExpiry:       {number32, 1<<PUBLISH | willBit, 0, 0},
	ContentType:         {text, 1<<PUBLISH | willBit, 0, 0},
	ResponseTopic:       {text, 1<<PUBLISH | willBit, 0, 0},
	CorrelationData:     {blob, 1<<PUBLISH | willBit, 0, 0},
	SubscriptionID:      {varNumber, 1<<PUBLISH | 1<<SUBSCRIBE, 1, 0},
	SessionExpiry:       {number32, 1<<CONNECT | 1<<CONNACK | 1<<DISCONNECT, 0, 0},
	AssignedClientID:    {text, 1 << CONNACK, 0, 0},
	ServerKeepAlive:     {number16, 1 << CONNACK, 0, 0},
	AuthMethod:          {text, 1<<CONNECT | 1<<CONNACK | 1<<AUTH, 0, 0},
	AuthData:            {blob, 1<<CONNECT | 1<<CONNACK | 1<<AUTH, 0, 0},
	RequestProblem:      {number8, 1 << CONNECT, 0, 1},
	WillDelay:           {number32, willBit, 0, 0},
	RequestResponse:     {number8, 1 << CONNECT, 0, 1},
	ResponseInformation: {text, 1 << CONNACK, 0, 0},
	ServerReference:     {text, 1<<CONNACK | 1<<DISCONNECT, 0, 0},
	ReasonString: {text,
		1<<CONNACK | 1<<PUBACK | 1<<PUBREC | 1<<PUBREL | 1<<PUBCOMP | 1<<SUBACK | 1<<UNSUBACK | 1<<DISCONNECT | 1<<AUTH, 0, 0},
	ReceiveMaximum:    {number16, 1<<CONNECT | 1<<CONNACK, 1, 0},
	TopicAliasMaximum: {number16, 1<<CONNECT | 1<<CONNACK, 0, 0},
	TopicAlias:        {number16, 1 << PUBLISH, 0, 0}, // 0 has a reason code of its own
	MaximumQoS:        {number8, 1 << CONNACK, 0, 1},
	RetainAvailable:   {number8, 1 << CONNACK, 0, 1},
	UserProperties:    {pair, ^uint32(0), 0, 0},
	MaximumPacketSize: {number32, 1<<CONNECT | 1<<CONNACK, 1, 0},
	WildcardAvailable: {number8, 1 << CONNACK, 0, 1},
	SubscriptionIDs:   {number8, 1 << CONNACK, 0, 1},
	SharedAvailable:   {number8, 1 << CONNACK, 0, 1},
}

// User is a User Property.
type User struct{ Name, Value string }

// Properties are the properties of a packet (MQTT 5.0 §2.2.2). A nil *Properties has none, and can be read.
type Properties struct {
	set     uint64 // a bit for each property that is there
	numbers map[PropertyID]uint32
	texts   map[PropertyID]string // also for binary data
	ids     []uint32
	user    []User
}

// Has reports whether a property is there.
func (p *Properties) Has(id PropertyID) bool { return p != nil && p.set>>id&1 == 1 }

// Number returns the value of a numeric property, or 0.
func (p *Properties) Number(id PropertyID) uint32 {
	if p == nil {
		return 0
	}
	return p.numbers[id]
}

// NumberOr returns the value of a numeric property, or the given default if it is not there.
func (p *Properties) NumberOr(id PropertyID, absent uint32) uint32 {
	if !p.Has(id) {
		return absent
	}
	return p.numbers[id]
}

// Text returns the value of a property with text or binary data, or "".
func (p *Properties) Text(id PropertyID) string {
	if p == nil {
		return ""
	}
	return p.texts[id]
}

// SubscriptionIDs returns the Subscription Identifiers, in their order.
func (p *Properties) SubscriptionIDs() []uint32 {
	if p == nil {
		return nil
	}
	return p.ids
}

// User returns the User Properties, in their order.
func (p *Properties) User() []User {
	if p == nil {
		return nil
	}
	return p.user
}

// SetNumber sets a numeric property. A Subscription Identifier is added to those that are there.
func (p *Properties) SetNumber(id PropertyID, value uint32) *Properties {
	p.set |= 1 << id
	if id == SubscriptionID {
		p.ids = append(p.ids, value)
		return p
	}
	if p.numbers == nil {
		p.numbers = map[PropertyID]uint32{}
	}
	p.numbers[id] = value
	return p
}

// SetText sets a property with text or binary data.
func (p *Properties) SetText(id PropertyID, value string) *Properties {
	p.set |= 1 << id
	if p.texts == nil {
		p.texts = map[PropertyID]string{}
	}
	p.texts[id] = value
	return p
}

// AddUser adds a User Property.
func (p *Properties) AddUser(name, value string) *Properties {
	p.set |= 1 << UserProperties
	p.user = append(p.user, User{name, value})
	return p
}

// decodeProperties reads the properties of a packet, or of a will with the type 0. It returns nil if there are none.
func (d *decoder) decodeProperties(of Type) *Properties {
	length := d.varNumber()
	if d.err != nil || length == 0 {
		return nil
	}
	if int(length) > len(d.rest) {
		d.fail(malformed("the properties end after the packet"))
		return nil
	}
	in := decoder{rest: d.rest[:length]}
	d.rest = d.rest[length:]
	p := &Properties{}
	for len(in.rest) > 0 && in.err == nil {
		p.decodeOne(&in, of)
	}
	d.fail(in.err)
	return p
}

func (p *Properties) decodeOne(d *decoder, of Type) {
	id := PropertyID(min(d.varNumber(), 0xff))
	if d.err != nil {
		return
	}
	if id > lastProperty || definitions[id].format == 0 {
		d.fail(malformed("there is no property 0x%02x", byte(id)))
		return
	}
	def := definitions[id]
	if def.in>>of&1 == 0 {
		d.fail(violation("%v may not have the property 0x%02x", of, byte(id)))
		return
	}
	if p.Has(id) && id != UserProperties && (id != SubscriptionID || of != PUBLISH) {
		d.fail(violation("the property 0x%02x is there twice", byte(id)))
		return
	}
	var n uint32
	switch def.format {
	case number8:
		n = uint32(d.number8())
	case number16:
		n = uint32(d.number16())
	case number32:
		n = d.number32()
	case varNumber:
		n = d.varNumber()
	case text:
		p.SetText(id, d.text())
		return
	case blob:
		p.SetText(id, string(d.blob()))
		return
	case pair:
		name := d.text()
		p.AddUser(name, d.text())
		return
	}
	switch {
	case d.err != nil:
	case n < def.min, def.max > 0 && n > def.max:
		d.fail(violation("the property 0x%02x may not be %d", byte(id), n))
	default:
		p.SetNumber(id, n)
	}
}

// AppendForwarded appends the properties of a PUBLISH or of a will that its receivers get unchanged (MQTT 5.0
// §3.3.2.3), without their length.
func (p *Properties) AppendForwarded(to []byte) []byte {
	if p == nil {
		return to
	}
	return p.appendBody(to, p.set&forwardedProperties)
}

// appendTo appends the length and the properties.
func (p *Properties) appendTo(to []byte) []byte {
	if p == nil || p.set == 0 {
		return append(to, 0)
	}
	body := p.appendBody(nil, p.set)
	return append(AppendLength(to, len(body)), body...)
}

func (p *Properties) appendBody(to []byte, set uint64) []byte {
	for ; set != 0; set &= set - 1 {
		id := PropertyID(bits.TrailingZeros64(set))
		switch definitions[id].format {
		case number8:
			to = append(to, byte(id), byte(p.numbers[id]))
		case number16:
			to = binary.BigEndian.AppendUint16(append(to, byte(id)), uint16(p.numbers[id]))
		case number32:
			to = binary.BigEndian.AppendUint32(append(to, byte(id)), p.numbers[id])
		case varNumber:
			for _, n := range p.ids {
				to = AppendLength(append(to, byte(id)), int(n))
			}
		case text, blob:
			to = AppendText(append(to, byte(id)), p.texts[id])
		case pair:
			for _, u := range p.user {
				to = AppendText(AppendText(append(to, byte(id)), u.Name), u.Value)
			}
		}
	}
	return to
}
