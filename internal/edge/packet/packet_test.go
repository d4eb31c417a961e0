package packet

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// samples has a packet of each type, with every property that it may have, for each level.
func samples(level byte) []Packet {
	all := func(of Type) *Properties {
		if level < 5 {
			return nil
		}
		p := &Properties{}
		for id, def := range definitions {
			switch id := PropertyID(id); {
			case def.format == 0 || def.in>>of&1 == 0:
			case id == UserProperties:
				p.AddUser("a", "1").AddUser("a", "2")
			case id == SubscriptionID && of == PUBLISH:
				p.SetNumber(id, 1).SetNumber(id, MaxLength)
			case id == ResponseTopic, def.format == text, def.format == blob:
				p.SetText(id, "text")
			default:
				p.SetNumber(id, 1)
			}
		}
		return p
	}
	code := func(c Code) Code {
		if level < 5 {
			return 0
		}
		return c
	}
	packets := []Packet{
		&Connect{Level: level, CleanStart: true, KeepAlive: 60, Properties: all(CONNECT), ClientID: "id", HasUsername: true, Username: "user",
			HasPassword: true, Password: []byte("pass"),
			Will: &Will{Topic: "will", Payload: []byte("gone"), QoS: 2, Retain: true, Properties: all(0)}},
		&Connack{SessionPresent: level > 3, Code: 5, Properties: all(CONNACK)},
		&Publish{Topic: "a/b", Payload: []byte("text"), Properties: all(PUBLISH)},
		&Publish{Dup: true, Retain: true, QoS: 2, ID: 65_535, Topic: "a", Payload: []byte{}},
		&Subscribe{ID: 1, Properties: all(SUBSCRIBE), Filters: []Subscription{{Filter: "a/+/#", QoS: 2}, {Filter: "$share/g/t", QoS: 1}}},
		&Suback{Type: SUBACK, ID: 1, Properties: all(SUBACK), Codes: []Code{0, 2, 0x80}},
		&Unsubscribe{ID: 1, Properties: all(UNSUBSCRIBE), Filters: []string{"a", "#"}},
		&Ping{Type: PINGREQ}, &Ping{Type: PINGRESP},
		&End{Type: DISCONNECT, Code: code(DisconnectWithWill), Properties: all(DISCONNECT)},
	}
	for of := PUBACK; of <= PUBCOMP; of++ {
		packets = append(packets, &Ack{Type: of, ID: 7}, &Ack{Type: of, ID: 7, Code: code(validCodes[of][1]), Properties: all(of)})
	}
	if level == 5 {
		packets = append(packets,
			&Subscribe{ID: 1, Filters: []Subscription{{Filter: "a", NoLocal: true, RetainAsPublished: true, RetainHandling: 2}}},
			&Suback{Type: UNSUBACK, ID: 1, Properties: all(UNSUBACK), Codes: []Code{0, 0x11}},
			&End{Type: AUTH, Code: ContinueAuthentication, Properties: all(AUTH)},
		)
	} else {
		packets = append(packets, &Connect{Level: level, Bridge: true, ClientID: "bridge"})
	}
	return packets
}

func decodeAll(t require.TestingT, data []byte, level byte) (first byte, p Packet) {
	length, size := Length(data[1:])
	require.Positive(t, size)
	require.Len(t, data, 1+size+length)
	p, err := Decode(data[0], data[1+size:], level)
	require.NoError(t, err, "%x", data)
	return data[0], p
}

func TestRoundTrip(t *testing.T) {
	for _, level := range []byte{3, 4, 5} {
		for _, p := range samples(level) {
			data := Append([]byte{}, p, level)
			_, got := decodeAll(t, data, level)
			assert.Equal(t, p, got, "level %d", level)
		}
	}
}

// TestCut checks that no packet is valid when its end is missing, except where the end may be left out.
func TestCut(t *testing.T) {
	for _, level := range []byte{4, 5} {
		for _, p := range samples(level) {
			data := Append(nil, p, level)
			_, size := Length(data[1:])
			body := data[1+size:]
			for n := range body {
				got, err := Decode(data[0], body[:n], level)
				if err != nil {
					var bad *Error
					require.ErrorAs(t, err, &bad)
					continue
				}
				again := Append(nil, got, level)
				_, rest := Length(again[1:])
				assert.True(t, bytes.HasPrefix(body, again[1+rest:]) || len(again) <= 1+rest+2, "%T is valid after %d of %d bytes", p, n, len(body))
			}
		}
	}
}

func TestLength(t *testing.T) {
	for _, n := range []int{0, 127, 128, 16_383, 16_384, 2_097_151, 2_097_152, MaxLength} {
		b := AppendLength(nil, n)
		assert.Len(t, b, LengthSize(n))
		got, size := Length(append(b, 0xff))
		assert.Equal(t, []int{n, len(b)}, []int{got, size})
		for i := range b {
			_, size := Length(b[:i])
			assert.Zero(t, size, "%d of %x", i, b)
		}
	}
	_, size := Length([]byte{0x80, 0x80, 0x80, 0x80})
	assert.Equal(t, -1, size)
	assert.Error(t, CheckLength(1, 2, 5))
	assert.NoError(t, CheckLength(1, 2, 4))
	assert.NoError(t, CheckLength(128, 2, 5))
}

func TestFilters(t *testing.T) {
	for filter, valid := range map[string]bool{
		"a": true, "/": true, "+": true, "#": true, "a/+/b/#": true, "+/+": true, "$SYS/#": true, "$share/g/a": true, "$share/g/#": true,
		" ": true,
		"":  false, "a+": false, "+a": false, "a#": false, "#/a": false, "a/#/b": false, "a/b#": false, "a\x00": false, "\xff": false,
		"$share/g":  false,
		"$share//a": false, "$share/g/": false, "$share/g+/a": false, "$share/#/a": false, "$share/g/a#": false,
	} {
		assert.Equal(t, valid, ValidFilter(filter), "%q", filter)
	}
}

// FuzzPacket checks that no bytes make Decode panic, and that whatever it accepts means the same after another round.
func FuzzPacket(f *testing.F) {
	for _, level := range []byte{3, 4, 5} {
		for _, p := range samples(level) {
			data := Append(nil, p, level)
			_, size := Length(data[1:])
			f.Add(data[0], data[1+size:], level)
		}
	}
	f.Fuzz(func(t *testing.T, first byte, body []byte, level byte) {
		level = 3 + level%3
		p, err := Decode(first, body, level)
		if err != nil {
			var bad *Error
			require.ErrorAs(t, err, &bad)
			return
		}
		if c, ok := p.(*Connect); ok {
			level = c.Level
		}
		_, again := decodeAll(t, Append(nil, p, level), level)
		require.Equal(t, Append(nil, p, level), Append(nil, again, level))
	})
}
