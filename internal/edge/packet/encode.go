package packet

import (
	"encoding/binary"
	"slices"
)

// Append appends a packet as the given level encodes it.
func Append(to []byte, p Packet, level byte) []byte {
	start := len(to)
	to = p.appendBody(append(to, p.first(), 0), level)
	n := len(to) - start - 2
	if n < 0x80 {
		to[start+1] = byte(n)
		return to
	}
	return slices.Replace(to, start+1, start+2, AppendLength(nil, n)...)
}

// AppendLength appends a Variable Byte Integer (MQTT 5.0 §1.5.5), which is at most MaxLength.
func AppendLength(to []byte, n int) []byte { return binary.AppendUvarint(to, uint64(n)) }

// LengthSize returns the number of bytes that AppendLength appends.
func LengthSize(n int) int {
	switch {
	case n < 1<<7:
		return 1
	case n < 1<<14:
		return 2
	case n < 1<<21:
		return 3
	}
	return 4
}

// PublishFlags returns the first byte of a PUBLISH.
func PublishFlags(qos byte, dup, retain bool) byte {
	first := byte(PUBLISH)<<4 | qos<<1
	if dup {
		first |= 8
	}
	if retain {
		first |= 1
	}
	return first
}

// AppendText appends a UTF-8 Encoded String (MQTT 5.0 §1.5.4).
func AppendText(to []byte, s string) []byte {
	return append(binary.BigEndian.AppendUint16(to, uint16(len(s))), s...)
}

func (p *Connect) first() byte { return byte(CONNECT) << 4 }

func (p *Connect) appendBody(to []byte, level byte) []byte {
	name := "MQTT"
	if level == 3 {
		name = "MQIsdp"
	}
	wire := level
	if p.Bridge {
		wire |= 0x80
	}
	flags := byte(0)
	set := func(bit byte, on bool) {
		if on {
			flags |= bit
		}
	}
	set(0x02, p.CleanStart)
	set(0x80, p.HasUsername)
	set(0x40, p.HasPassword)
	if w := p.Will; w != nil {
		flags |= 0x04 | w.QoS<<3
		set(0x20, w.Retain)
	}
	to = append(AppendText(to, name), wire, flags)
	to = binary.BigEndian.AppendUint16(to, p.KeepAlive)
	if level >= 5 {
		to = p.Properties.appendTo(to)
	}
	to = AppendText(to, p.ClientID)
	if w := p.Will; w != nil {
		if level >= 5 {
			to = w.Properties.appendTo(to)
		}
		to = AppendText(AppendText(to, w.Topic), string(w.Payload))
	}
	if p.HasUsername {
		to = AppendText(to, p.Username)
	}
	if p.HasPassword {
		to = AppendText(to, string(p.Password))
	}
	return to
}

func (p *Connack) first() byte { return byte(CONNACK) << 4 }

func (p *Connack) appendBody(to []byte, level byte) []byte {
	flags, code := byte(0), p.Code
	if p.SessionPresent && level > 3 { // MQTT 3.1 §3.2 has no such flag
		flags = 1
	}
	if level < 5 {
		return append(to, flags, byte(code.Return()))
	}
	return p.Properties.appendTo(append(to, flags, byte(code)))
}

func (p *Publish) first() byte { return PublishFlags(p.QoS, p.Dup, p.Retain) }

func (p *Publish) appendBody(to []byte, level byte) []byte {
	to = AppendText(to, p.Topic)
	if p.QoS > 0 {
		to = binary.BigEndian.AppendUint16(to, p.ID)
	}
	if level >= 5 {
		to = p.Properties.appendTo(to)
	}
	return append(to, p.Payload...)
}

func (p *Ack) first() byte {
	if p.Type == PUBREL {
		return byte(PUBREL)<<4 | 2
	}
	return byte(p.Type) << 4
}

func (p *Ack) appendBody(to []byte, level byte) []byte {
	return appendReason(binary.BigEndian.AppendUint16(to, p.ID), p.Code, p.Properties, level)
}

// appendReason appends a reason code and properties, as far as they are there.
func appendReason(to []byte, code Code, p *Properties, level byte) []byte {
	switch {
	case level < 5, code == Success && p == nil:
		return to
	case p == nil:
		return append(to, byte(code))
	}
	return p.appendTo(append(to, byte(code)))
}

func (p *Subscribe) first() byte { return byte(SUBSCRIBE)<<4 | 2 }

func (p *Subscribe) appendBody(to []byte, level byte) []byte {
	to = binary.BigEndian.AppendUint16(to, p.ID)
	if level >= 5 {
		to = p.Properties.appendTo(to)
	}
	for _, f := range p.Filters {
		options := f.QoS
		if level >= 5 {
			options |= f.RetainHandling << 4
			if f.NoLocal {
				options |= 4
			}
			if f.RetainAsPublished {
				options |= 8
			}
		}
		to = append(AppendText(to, f.Filter), options)
	}
	return to
}

func (p *Unsubscribe) first() byte { return byte(UNSUBSCRIBE)<<4 | 2 }

func (p *Unsubscribe) appendBody(to []byte, level byte) []byte {
	to = binary.BigEndian.AppendUint16(to, p.ID)
	if level >= 5 {
		to = p.Properties.appendTo(to)
	}
	for _, f := range p.Filters {
		to = AppendText(to, f)
	}
	return to
}

func (p *Suback) first() byte { return byte(p.Type) << 4 }

func (p *Suback) appendBody(to []byte, level byte) []byte {
	to = binary.BigEndian.AppendUint16(to, p.ID)
	if level >= 5 {
		to = p.Properties.appendTo(to)
	} else if p.Type == UNSUBACK {
		return to
	}
	for _, c := range p.Codes {
		if level < 5 && c.Failed() { // MQTT 3.1.1 §3.9.3 knows one failure
			c = Unspecified
		}
		to = append(to, byte(c))
	}
	return to
}

func (p *Ping) first() byte { return byte(p.Type) << 4 }

func (p *Ping) appendBody(to []byte, _ byte) []byte { return to }

func (p *End) first() byte { return byte(p.Type) << 4 }

// appendBody also appends the empty properties, which the specification lets it leave out: some clients do not find the
// reason code otherwise.
func (p *End) appendBody(to []byte, level byte) []byte {
	if level < 5 || p.Code == Success && p.Properties == nil {
		return to
	}
	return p.Properties.appendTo(append(to, byte(p.Code)))
}
