package broker_test

import (
	"fmt"
	"slices"
)

// place is a packet of MQTT 5.0 with room for properties.
type place struct {
	name    string
	first   byte
	allowed []byte
	with    func(block []byte) []byte // the body with an encoded property block
	connect bool
}

// sample is a valid property.
func sample(id byte) []byte {
	switch forms[id] {
	case oneByte, variable:
		return property(id, 1)
	case twoBytes:
		return property(id, 1)
	case fourBytes:
		return property(id, 1000)
	case textPair:
		return property(id, [2]string{"key", "value"})
	default:
		return property(id, "text")
	}
}

// connectBody is a CONNECT of MQTT 5.0 with a will, a user name and a password.
func connectBody(block, willBlock []byte) []byte {
	return slices.Concat(str("MQTT"), []byte{5, 0xee, 0, 60}, block, str("client"), willBlock, str("will"), str("gone"), str("user"),
		str("password"))
}

func places() []place {
	none := properties()
	acknowledgement := func(kind byte) place {
		first := kind << 4
		if kind == typePubrel {
			first |= 2
		}
		name := map[byte]string{typePuback: "PUBACK", typePubrec: "PUBREC", typePubrel: "PUBREL", typePubcomp: "PUBCOMP"}[kind]
		return place{name: name, first: first, allowed: []byte{reasonString, userProperty}, with: func(block []byte) []byte {
			return append([]byte{0, 9, 0}, block...)
		}}
	}
	return []place{
		{
			name: "CONNECT", first: 0x10, connect: true,
			allowed: []byte{sessionExpiry, authMethod, authData, requestProblem, requestResponse, receiveMaximum, topicAliasMaximum, userProperty,
				maximumPacketSize},
			with: func(block []byte) []byte { return connectBody(block, none) },
		},
		{
			name: "will", first: 0x10, connect: true,
			allowed: []byte{payloadFormat, messageExpiry, contentType, responseTopic, correlationData, willDelay, userProperty},
			with:    func(block []byte) []byte { return connectBody(none, block) },
		},
		{
			name: "PUBLISH", first: 0x32,
			allowed: []byte{payloadFormat, messageExpiry, contentType, responseTopic, correlationData, topicAlias, userProperty},
			with:    func(block []byte) []byte { return slices.Concat(str("topic"), []byte{0, 9}, block) },
		},
		acknowledgement(typePuback), acknowledgement(typePubrec), acknowledgement(typePubrel), acknowledgement(typePubcomp),
		{
			name: "SUBSCRIBE", first: 0x82, allowed: []byte{subscriptionIdentifier, userProperty},
			with: func(block []byte) []byte { return slices.Concat([]byte{0, 9}, block, str("filter"), []byte{1}) },
		},
		{
			name: "UNSUBSCRIBE", first: 0xa2, allowed: []byte{userProperty},
			with: func(block []byte) []byte { return slices.Concat([]byte{0, 9}, block, str("filter")) },
		},
		{
			name: "DISCONNECT", first: 0xe0, allowed: []byte{sessionExpiry, serverReference, reasonString, userProperty},
			with: func(block []byte) []byte { return append([]byte{0}, block...) },
		},
		{
			name: "AUTH", first: 0xf0, allowed: []byte{authMethod, authData, reasonString, userProperty},
			with: func(block []byte) []byte { return append([]byte{0x18}, block...) },
		},
	}
}

// notUTF8 are the encodings that MQTT-1.5.4-1 and -2 forbid.
var notUTF8 = map[string]string{
	"0xff": "a\xff", "continuation alone": "a\x80", "cut sequence": "a\xe2\x82", "overlong": "a\xc0\xaf", "overlong NUL": "a\xc0\x80",
	"high surrogate": "a\xed\xa0\x80", "surrogate pair": "a\xed\xa0\x80\xed\xb0\x80", "above U+10FFFF": "a\xf4\x90\x80\x80", "U+0000": "a\x00",
}

// malformed collects cases.
type malformed struct{ cases []bad }

func (m *malformed) add(b bad, format string, args ...any) {
	b.name = fmt.Sprintf("%d.0 ", b.level) + fmt.Sprintf(format, args...)
	m.cases = append(m.cases, b)
}

// inPlaces generates what can be wrong with the properties of each packet (2.2.2).
func (m *malformed) inPlaces() {
	for _, p := range places() {
		add := func(block []byte, format string, args ...any) {
			m.add(bad{level: 5, bytes: packet(p.first, p.with(block)), connect: p.connect}, p.name+": "+format, args...)
		}
		for id := range byte(0x30) {
			if _, defined := forms[id]; !defined {
				add(properties([]byte{id, 0}), "undefined property 0x%02x", id)
				continue
			}
			if !slices.Contains(p.allowed, id) {
				add(properties(sample(id)), "property 0x%02x may not stand there", id)
				continue
			}
			if id != userProperty {
				add(properties(sample(id), sample(id)), "property 0x%02x twice", id)
			}
			for n := 1; n < len(sample(id)); n++ {
				add(properties(sample(id)[:n]), "property 0x%02x cut after %d bytes", id, n)
			}
			for name, s := range notUTF8 {
				switch forms[id] {
				case text:
					add(properties(property(id, s)), "property 0x%02x with %s", id, name)
				case textPair:
					add(properties(property(id, [2]string{s, "value"})), "user property's key with %s", name)
					add(properties(property(id, [2]string{"key", s})), "user property's value with %s", name)
				}
			}
		}
		add(properties([]byte{0x7f, 0}), "undefined property 0x7f")
		add(properties([]byte{0x80, 0x01, 0}), "undefined property 0x80 0x01")
		block := properties(sample(userProperty))
		add(append([]byte{block[0] + 1}, block[1:]...), "property length too great by 1")
		add(append([]byte{block[0] - 1}, block[1:]...), "property length too small by 1")
		add(append([]byte{block[0] | 0x80, 0}, block[1:]...), "property length in two bytes")
		add(append([]byte{block[0] | 0x80, 0x80, 0x80, 0x80, 0}, block[1:]...), "property length in five bytes")
		add([]byte{0x7f}, "property length beyond the packet")
		add([]byte{0xff, 0xff, 0xff, 0x7f}, "property length of 256 MB")
	}
}

// values generates properties and reason codes out of their range.
func (m *malformed) values() {
	byName := map[string]place{}
	for _, p := range places() {
		byName[p.name] = p
	}
	for name, values := range map[string]map[string][]byte{
		"CONNECT": {
			"Receive Maximum 0": property(receiveMaximum, 0), "Maximum Packet Size 0": property(maximumPacketSize, 0),
			"Request Problem Information 2": property(requestProblem, 2), "Request Problem Information 255": property(requestProblem, 255),
			"Request Response Information 2": property(requestResponse, 2), "Request Response Information 255": property(requestResponse, 255),
			"Authentication Data without a method": property(authData, "data"), "unknown Authentication Method": property(authMethod, "unknown"),
		},
		"will": {
			"Payload Format 2": property(payloadFormat, 2), "Payload Format 255": property(payloadFormat, 255),
			"Response Topic a/#": property(responseTopic, "a/#"),
			"Response Topic a/+": property(responseTopic, "a/+"), "empty Response Topic": property(responseTopic, ""),
		},
		"PUBLISH": {
			"Payload Format 2": property(payloadFormat, 2), "Payload Format 255": property(payloadFormat, 255),
			"Response Topic a/#": property(responseTopic, "a/#"),
			"Response Topic a/+": property(responseTopic, "a/+"), "empty Response Topic": property(responseTopic, ""),
			"Topic Alias 0": property(topicAlias, 0),
		},
		"SUBSCRIBE": {
			"Subscription Identifier 0":              property(subscriptionIdentifier, 0),
			"Subscription Identifier in five bytes":  {subscriptionIdentifier, 0x80, 0x80, 0x80, 0x80, 1},
			"Subscription Identifier 1 in two bytes": {subscriptionIdentifier, 0x81, 0},
		},
		"DISCONNECT": {"Session Expiry after none in CONNECT": property(sessionExpiry, 60)},
	} {
		p := byName[name]
		for value, encoded := range values {
			b := bad{level: 5, bytes: packet(p.first, p.with(properties(encoded))), connect: p.connect}
			if p.name == "PUBLISH" {
				b.answer = typePuback
			}
			m.add(b, "%s: %s", name, value)
		}
	}
	for first, codes := range map[byte][]byte{
		0x40: {0x01, 0x02, 0x11, 0x7f, 0x81, 0x82, 0x92, 0xff}, 0x50: {0x01, 0x02, 0x11, 0x7f, 0x81, 0x82, 0x92, 0xff},
	} {
		for _, code := range codes {
			m.add(bad{level: 5, inflight: first>>4 - 3, bytes: packet(first, []byte{0, 0, code})}, "packet type %d: reason code 0x%02x", first>>4,
				code)
		}
	}
	for first, codes := range map[byte][]byte{
		0x62: {0x01, 0x10, 0x7f, 0x80, 0x91, 0xff}, 0x70: {0x01, 0x10, 0x7f, 0x80, 0x91, 0xff},
	} {
		for _, code := range codes {
			m.add(bad{level: 5, bytes: packet(first, []byte{0, 9, code})}, "packet type %d: reason code 0x%02x", first>>4, code)
		}
	}
	for _, code := range []byte{0x01, 0x02, 0x03, 0x05, 0x7f, 0xff} {
		m.add(bad{level: 5, bytes: packet(0xe0, []byte{code})}, "DISCONNECT: reason code 0x%02x", code)
	}
	for _, code := range []byte{0x00, 0x01, 0x17, 0x1a, 0xff} {
		m.add(bad{level: 5, bytes: packet(0xf0, append([]byte{code}, properties(sample(authMethod))...))}, "AUTH: reason code 0x%02x", code)
	}
}

// valid is a packet that would be accepted, or part of it.
type valid struct {
	name    string
	level   byte
	first   byte
	body    []byte
	also    []int // shorter lengths of the body that are valid too
	open    bool  // bytes may follow
	connect bool
}

func validPackets() []valid {
	user := properties(sample(userProperty), property(reasonString, "why"))
	all := []valid{
		{
			name: "CONNECT", level: 5, first: 0x10, connect: true, body: connectBody(
				properties(sample(sessionExpiry), sample(receiveMaximum), sample(maximumPacketSize), sample(userProperty)),
				properties(sample(willDelay), sample(contentType))),
		},
		{name: "CONNECT", level: 4, first: 0x10, connect: true,
			body: slices.Concat(str("MQTT"), []byte{4, 0xee, 0, 60}, str("client"), str("will"), str("gone"), str("user"), str("pass"))},
		{name: "CONNECT", level: 3, first: 0x10, connect: true,
			body: slices.Concat(str("MQIsdp"), []byte{3, 0x06, 0, 60}, str("client"), str("will"), str("gone"))},
		{name: "PUBLISH", level: 5, first: 0x34, open: true,
			body: slices.Concat(str("topic"), []byte{0, 9}, properties(sample(contentType), sample(messageExpiry)))},
		{name: "PUBLISH", level: 4, first: 0x34, open: true, body: slices.Concat(str("topic"), []byte{0, 9})},
		{name: "PUBLISH with QoS 0", level: 5, first: 0x30, open: true, body: slices.Concat(str("topic"), properties(sample(contentType)))},
		{name: "PUBLISH with QoS 0", level: 4, first: 0x30, open: true, body: str("topic")},
		{name: "SUBSCRIBE", level: 5, first: 0x82,
			body: slices.Concat([]byte{0, 9}, properties(sample(subscriptionIdentifier)), str("a/b"), []byte{1}, str("c/d"), []byte{2}),
			also: []int{11}},
		{name: "SUBSCRIBE", level: 4, first: 0x82, body: slices.Concat([]byte{0, 9}, str("a/b"), []byte{1}, str("c/d"), []byte{2}),
			also: []int{8}},
		{name: "UNSUBSCRIBE", level: 5, first: 0xa2, body: slices.Concat([]byte{0, 9}, properties(sample(userProperty)), str("a/b"), str("c/d")),
			also: []int{21}},
		{name: "UNSUBSCRIBE", level: 4, first: 0xa2, body: slices.Concat([]byte{0, 9}, str("a/b"), str("c/d")), also: []int{7}},
		{name: "PINGREQ", level: 5, first: 0xc0}, {name: "PINGREQ", level: 4, first: 0xc0},
		{name: "DISCONNECT", level: 5, first: 0xe0, body: append([]byte{0}, user...), also: []int{0, 1}},
		{name: "DISCONNECT", level: 4, first: 0xe0},
		{name: "AUTH", level: 5, first: 0xf0, body: append([]byte{0x18}, properties(sample(authMethod), sample(authData))...)},
	}
	for name, first := range map[string]byte{"PUBACK": 0x40, "PUBREC": 0x50, "PUBREL": 0x62, "PUBCOMP": 0x70} {
		all = append(all, valid{name: name, level: 5, first: first, body: append([]byte{0, 9, 0}, user...), also: []int{2, 3}},
			valid{name: name, level: 4, first: first, body: []byte{0, 9}})
	}
	return all
}

// framing generates cut packets, packets with bytes after the end, and fixed headers that are not allowed (2.1).
func (m *malformed) framing() {
	for _, v := range validPackets() {
		add := func(bytes []byte, format string, args ...any) {
			b := bad{level: v.level, bytes: bytes, connect: v.connect, will: v.level == 4 && v.name == "DISCONNECT"}
			m.add(b, v.name+": "+format, args...)
		}
		for n := range v.body {
			if !slices.Contains(v.also, n) {
				add(packet(v.first, v.body[:n]), "cut after %d of %d bytes", n, len(v.body))
			}
		}
		add(append([]byte{v.first, 0x80, 0x80, 0x80, 0x80, 0x01}, v.body...), "remaining length in five bytes")
		add(append([]byte{v.first, 0xff, 0xff, 0xff, 0xff, 0x7f}, v.body...), "remaining length above the maximum")
		if v.level == 3 { // MQTT 3.1 says less
			continue
		}
		if !v.open {
			add(packet(v.first, append(slices.Clone(v.body), 0)), "a byte after the end")
			add(packet(v.first, append(slices.Clone(v.body), 0, 1, 'x', 0xff)), "four bytes after the end")
		}
		for flags := range byte(16) {
			isPublish := v.first>>4 == typePublish
			if isPublish && flags&6 != 6 || !isPublish && flags == v.first&15 {
				continue
			}
			add(packet(v.first&0xf0|flags, v.body), "flags %04b", flags)
		}
		if v.first == 0x30 {
			add(packet(0x38, v.body), "DUP with QoS 0")
			add(packet(0x39, v.body), "DUP and RETAIN with QoS 0")
		}
		if v.level == 5 && len(v.body) < 128 {
			add(append([]byte{v.first, byte(len(v.body)) | 0x80, 0}, v.body...), "remaining length in two bytes") // MQTT-1.5.5-1
		}
	}
	for _, level := range []byte{4, 5} {
		for flags := range byte(16) {
			m.add(bad{level: level, bytes: []byte{flags, 0}}, "packet type 0, flags %04b", flags)
		}
		for name, bytes := range map[string][]byte{
			"CONNACK": {0x20, 2, 0, 0}, "CONNACK with properties": {0x20, 3, 0, 0, 0}, "SUBACK": {0x90, 3, 0, 9, 0},
			"SUBACK with properties": {0x90, 4, 0, 9, 0, 0},
			"UNSUBACK":               {0xb0, 2, 0, 9}, "UNSUBACK with properties": {0xb0, 4, 0, 9, 0, 0}, "PINGRESP": {0xd0, 0},
			"second CONNECT": hello{id: "x"}.encode(level),
		} {
			m.add(bad{level: level, bytes: bytes}, "%s from a client", name)
		}
	}
	m.add(bad{level: 4, bytes: []byte{0xf0, 0}}, "packet type 15")
	m.add(bad{level: 5, bytes: []byte{0xf0, 0}}, "AUTH without a method")
}

// connects generates fields of CONNECT out of their range (3.1).
func (m *malformed) connects() {
	for _, level := range []byte{4, 5} {
		empty := properties()
		if level == 4 {
			empty = nil
		}
		head := func(name string, level, flags byte) []byte {
			return slices.Concat(str(name), []byte{level, flags, 0, 60}, empty)
		}
		add := func(body []byte, format string, args ...any) {
			m.add(bad{level: level, connect: true, bytes: packet(0x10, body)}, "CONNECT: "+format, args...)
		}
		for _, name := range []string{"", "M", "MQT", "MQTTT", "mqtt", "MQTX", "MQIsdp", "HTTP", "MQTT\x00"} {
			add(append(head(name, level, 2), str("c")...), "protocol name %q", name)
		}
		if level == 5 {
			for _, other := range []byte{0, 1, 2, 6, 7, 16, 127} {
				add(append(head("MQTT", other, 2), str("c")...), "protocol level %d", other)
			}
		}
		with := slices.Concat(str("c"), empty, str("will"), str("gone"))
		add(append(head("MQTT", level, 3), str("c")...), "reserved flag")
		add(append(head("MQTT", level, 0x1e), with...), "will with QoS 3")
		for _, flags := range []byte{0x0a, 0x12, 0x1a, 0x22, 0x2a} {
			add(append(head("MQTT", level, flags), str("c")...), "flags 0x%02x without a will", flags)
		}
		if level == 4 {
			add(slices.Concat(head("MQTT", level, 0x42), str("c"), str("pass")), "password without a user name")
		}
		for name, s := range notUTF8 {
			add(append(head("MQTT", level, 2), str(s)...), "client identifier with %s", name)
			add(slices.Concat(head("MQTT", level, 6), str("c"), empty, str(s), str("gone")), "will topic with %s", name)
			add(slices.Concat(head("MQTT", level, 0xc2), str("c"), str(s), str("pass")), "user name with %s", name)
		}
		for _, topic := range []string{"", "#", "+", "a/#", "a/+/b", "a#", "a+"} {
			add(slices.Concat(head("MQTT", level, 6), str("c"), empty, str(topic), str("gone")), "will topic %q", topic)
		}
	}
}

// topics generates topic names, filters, subscription options and packet identifiers that are not allowed.
func (m *malformed) topics() {
	for _, level := range []byte{4, 5} {
		empty := properties()
		if level == 4 {
			empty = nil
		}
		add := func(answer byte, bytes []byte, format string, args ...any) {
			if level == 4 && answer != typeSuback {
				answer = 0
			}
			m.add(bad{level: level, answer: answer, bytes: bytes}, format, args...)
		}
		subscribe := func(id byte, filter string, options byte) []byte {
			return packet(0x82, slices.Concat([]byte{0, id}, empty, str(filter), []byte{options}))
		}
		unsubscribe := func(id byte, filter string) []byte {
			return packet(0xa2, slices.Concat([]byte{0, id}, empty, str(filter)))
		}
		both := []string{"", "a#", "a+", "#a", "+a", "a/#/b", "a/b#", "a/+b", "a/b+/c", "#/a", "##", "++", "a/##", "/#/"}
		var shared []string
		if level == 5 { // to 3.1.1 these are ordinary filters
			both = append(both, "$share/g+/t", "$share/g#/t", "$share/g/a#", "$share/g/#/a", "$share/#/t")
			shared = []string{"$share/g", "$share/g/", "$share/", "$share//t", "$share/+/t", "$share/#"}
		}
		for _, filter := range append(both, shared...) {
			add(typeSuback, subscribe(9, filter, 1), "SUBSCRIBE: filter %q", filter)
		}
		for _, filter := range both { // of the others there can be no subscription, 0x11
			add(typeUnsuback, unsubscribe(9, filter), "UNSUBSCRIBE: filter %q", filter)
		}
		for name, s := range notUTF8 {
			add(0, subscribe(9, s, 1), "SUBSCRIBE: filter with %s", name)
			add(0, unsubscribe(9, s), "UNSUBSCRIBE: filter with %s", name)
			for qos := range byte(3) {
				add(0, message{topic: s, qos: qos, id: 9}.encode(level), "PUBLISH: QoS %d, topic with %s", qos, name)
			}
		}
		options := []byte{0x03, 0x04, 0x05, 0x08, 0x10, 0x20, 0x40, 0x80, 0xff}
		if level == 5 {
			options = []byte{0x03, 0x07, 0x0b, 0x13, 0x30, 0x31, 0x32, 0x3c, 0x40, 0x41, 0x80, 0x81, 0xc2, 0xff}
		}
		for _, o := range options {
			add(0, subscribe(9, "filter", o), "SUBSCRIBE: options %08b", o)
		}
		if level == 5 {
			add(0, subscribe(9, "$share/g/t", 0x05), "SUBSCRIBE: No Local of a shared subscription") // MQTT-3.8.3-4
		}
		for qos := range byte(3) {
			for _, topic := range []string{"", "#", "+", "a/#", "a/+/b", "a+", "a#"} {
				answer := map[byte]byte{1: typePuback, 2: typePubrec}[qos]
				if topic == "" {
					answer = 0 // 3.3.2.1 and MQTT-4.7.3-1: an error of the protocol
				}
				add(answer, message{topic: topic, qos: qos, id: 9}.encode(level), "PUBLISH: QoS %d, topic %q", qos, topic)
			}
		}
		if level == 5 {
			add(typePuback, message{topic: "$share/g/t", qos: 1, id: 9}.encode(level), "PUBLISH: a topic of a shared subscription")
		}
		add(0, subscribe(0, "filter", 1), "SUBSCRIBE: identifier 0")
		add(0, unsubscribe(0, "filter"), "UNSUBSCRIBE: identifier 0")
		add(0, message{topic: "t", qos: 1}.encode(level), "PUBLISH: QoS 1, identifier 0")
		add(0, message{topic: "t", qos: 2}.encode(level), "PUBLISH: QoS 2, identifier 0")
		for _, first := range []byte{0x40, 0x50, 0x62, 0x70} {
			add(0, packet(first, []byte{0, 0}), "packet type %d: identifier 0", first>>4)
		}
		m.add(bad{level: level, inflight: 2, bytes: packet(0x40, []byte{0, 0})}, "PUBACK of a message with QoS 2")
		m.add(bad{level: level, inflight: 1, bytes: packet(0x70, []byte{0, 0})}, "PUBCOMP of a message with QoS 1")
		wrong := bad{level: level, inflight: 1, bytes: packet(0x50, []byte{0, 0})}
		if level == 5 {
			wrong.answer = typePubrel // with 0x92
		}
		m.add(wrong, "PUBREC of a message with QoS 1")
	}
}

func malformedCases() []bad {
	var m malformed
	m.inPlaces()
	m.values()
	m.framing()
	m.connects()
	m.topics()
	slices.SortStableFunc(m.cases, func(a, b bad) int { return int(a.level) - int(b.level) })
	return m.cases
}
