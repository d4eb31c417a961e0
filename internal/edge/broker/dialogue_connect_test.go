package broker_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/edge/broker"
)

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
				elapse(700 * time.Millisecond)
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
		{name: "packets after a refused CONNECT", config: &broker.Config{Users: []broker.User{{Name: "alice", Realms: []string{"a"}}}},
			run: levels(func(t *testing.T, s *server, level byte) {
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
			elapse(3 * time.Second)
			c, ack = login(t, s, 5, keeping("c"))
			assert.False(t, ack.session, "1: after a second")
			c.disconnect(0, property(sessionExpiry, 200))
			_, ack = login(t, s, 5, keeping("c"))
			assert.True(t, ack.session)
		}},
		{name: "DISCONNECT with a shorter session expiry before a restart", wrong: "the interval begins again", restarts: true,
			run: func(t *testing.T, s *server) {
				c, _ := login(t, s, 5, keeping("c"))
				c.disconnect(0, property(sessionExpiry, 1))
				kept, _ := login(t, s, 5, keeping("kept"))
				kept.disconnect(0, property(sessionExpiry, 200))
				s.stop(t)
				elapse(2500 * time.Millisecond)
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
			for _, first := range [][]byte{{0xc0, 0}, message{topic: "t"}.encode(level), packet(0x82, append([]byte{0, 1}, append(str("t"), 0)...)),
				{0xe0, 0}, {0xf0, 0}} {
				c := dialLink(t, s, level)
				c.send(first)
				assert.Empty(t, c.closed(), "MQTT-3.2.0-1, MQTT-3.14.0-1: nothing comes before CONNACK")
			}
		})},
		// 2.1.2: packets that only a server sends.
		{name: "packets of a server", wrong: "takes SUBACK, and closes without DISCONNECT",
			run: levels(func(t *testing.T, s *server, level byte) {
				for _, b := range [][]byte{{0x20, 2, 0, 0}, {0x20, 3, 0, 0, 0}, {0x90, 3, 0, 1, 0}, {0xb0, 2, 0, 1}, {0xb0, 4, 0, 1, 0, 0}, {0xd0, 0}} {
					c, _ := login(t, s, level, hello{id: "c"})
					c.send(b)
					c.refused(0x81, 0x82)
				}
			})},
		// 4.12, MQTT-4.12.0-6 and -7: without a method in CONNECT there is no AUTH.
		{name: "AUTH without a method", wrong: "closes without DISCONNECT", run: func(t *testing.T, s *server) {
			for _, b := range [][]byte{
				{0xf0, 0}, packet(0xf0, append([]byte{0x18}, properties(property(authMethod, "x"))...)),
				packet(0xf0, append([]byte{0x19}, properties(property(authMethod, "x"))...)),
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
