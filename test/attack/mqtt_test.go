package attack

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/tripod-run/tripod/test/harness"
)

// packet returns an MQTT control packet with the fixed header (MQTT 3.1.1, section 2.2).
func packet(kind byte, body ...string) string {
	rest := strings.Join(body, "")
	return string(binary.AppendUvarint([]byte{kind}, uint64(len(rest)))) + rest
}

// text encodes a string for MQTT, prefixed with its length.
func text(s string) string { return string(binary.BigEndian.AppendUint16(nil, uint16(len(s)))) + s }

// connect returns a CONNECT packet of MQTT 3.1.1 with a clean session.
func connect(client string) string {
	return packet(0x10, text("MQTT"), "\x04\x02\x00\x3c", text(client))
}

// send connects to the broker, sends packets, and returns the connection, from which it does not read.
func send(t *testing.T, address string, packets ...string) net.Conn {
	t.Helper()
	conn, err := net.DialTimeout("tcp", address, waitLimit)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(waitLimit))
	_, _ = io.WriteString(conn, strings.Join(packets, "")) // the broker may close the connection early
	return conn
}

// wantClosed waits until the broker has closed the connection.
func wantClosed(t *testing.T, what string, conn net.Conn) {
	t.Helper()
	_, err := io.Copy(io.Discard, conn)
	if e, ok := errors.AsType[net.Error](err); ok && e.Timeout() {
		t.Errorf("%s: the broker did not close the connection within %v", what, waitLimit)
	}
}

// TestMQTTClient: the attacker can connect to the embedded broker of a node, which has no users configured.
func TestMQTTClient(t *testing.T) {
	address := harness.FreeAddress(t)
	g := open(t, harness.Edge(t, address, ""))
	o := harness.StartOrchestrator(t, "mqtt://"+address)
	o.WaitRuntime("wasm", "A")
	relay := filepath.Join(harness.Root(), "examples/edge/relay-c/relay.wasm")
	module := o.MustEdge("run", relay, "--name", "neighbour", "--channel", "in=app/a:r:1", "--channel", "out=app/b:w:1")
	out := harness.Subscribe(t, address, "app/b")
	// relays checks that the module still relays messages between its channels.
	sent := 0
	relays := func(t *testing.T) {
		t.Helper()
		sent++
		message := fmt.Sprintf("message %d", sent)
		harness.Eventually(t, waitLimit, func() error {
			if err := harness.Publish(address, "app/a", 1, message); err != nil {
				return err
			}
			for _, m := range out.Messages() {
				if m.Payload == strings.ToUpper(message) {
					return nil
				}
			}
			return fmt.Errorf("no answer of the relay to %q", message)
		})
	}
	relays(t)
	for name, beginning := range map[string]string{"silence": "", "half a packet": connect("half")[:5]} {
		g.attack(name, func(t *testing.T) {
			defer halfOpen(address, beginning, 1000)()
			relays(t)
		})
	}
	g.attack("malformed packets", func(t *testing.T) {
		for what, bad := range map[string]string{
			"another protocol":         "GET / HTTP/1.1\r\nHost: x\r\n\r\n",
			"a length of five bytes":   "\x10\xff\xff\xff\xff\xff",
			"not a CONNECT":            packet(0x30, text("app/a"), "x"),
			"a text beyond the packet": packet(0x10, "\xff\xffMQTT"),
			"a second CONNECT":         connect("twice") + connect("twice"),
			"a topic with wildcards":   connect("wild") + packet(0x30, text("app/#"), "x"),
			"a topic that is no UTF-8": connect("utf8") + packet(0x30, text("app/\xff\xfe"), "x"),
			"QoS 3":                    connect("qos") + packet(0x36, text("app/a"), "\x00\x01x"),
			"a reserved kind":          connect("kind") + packet(0x00),
			"no packet at all":         connect("random") + "\xff\xff\xff\xff\xff\xff",
		} {
			wantClosed(t, what, send(t, address, bad))
		}
		relays(t)
	})
	g.attack("a packet of 256 MiB", func(t *testing.T) {
		conn := send(t, address, connect("large"), string(binary.AppendUvarint([]byte{0x30}, 1<<28-1)), text("app/a"))
		go func() {
			for junk := make([]byte, 1<<16); ; {
				if _, err := conn.Write(junk); err != nil {
					return
				}
			}
		}()
		wantClosed(t, "256 MiB", conn)
	})
	g.attack("somebody who does not read", func(t *testing.T) {
		deaf := send(t, address, connect("deaf"), packet(0x82, "\x00\x01", text("#"), "\x01"))
		defer deaf.Close()
		loud := send(t, address, connect("loud"))
		large := packet(0x30, text("other/topic"), strings.Repeat("x", 100_000))
		for range 200 {
			if _, err := io.WriteString(loud, large); err != nil {
				t.Fatal(err)
			}
		}
		relays(t)
	})
	g.attack("retained messages", func(t *testing.T) {
		conn := send(t, address, connect("retains"))
		for i := range 2000 {
			if _, err := io.WriteString(conn, packet(0x31, text(fmt.Sprintf("retained/%d", i)), "x")); err != nil {
				t.Fatal(err)
			}
		}
		relays(t)
		for i := range 2000 {
			if _, err := io.WriteString(conn, packet(0x31, text(fmt.Sprintf("retained/%d", i)))); err != nil {
				t.Fatal(err)
			}
		}
	})
	g.attack("orders", func(t *testing.T) {
		conn := send(t, address, connect("orders"))
		for _, order := range []string{
			`{`, `null`, `[[[[[[[[` + strings.Repeat("[", 100_000),
			`{"object_id":"1","action":"create","type":"arts_req","data":{"type":"module","uuid":"../../x","name":"n","filename":"/etc/passwd"}}`,
			`{"object_id":"2","action":"create","type":"arts_req","data":{"type":"module","uuid":"m","name":"n","filename":"` +
				filepath.Join(harness.Root(), "../../../etc/passwd") + `"}}`,
			`{"object_id":"3","action":"` + strings.Repeat("x", 100_000) + `"}`,
		} {
			for _, topic := range []string{"realm/proc/control", "realm/proc/control/x", "realm/proc/reg", "realm/proc/keepalive",
				"realm/proc/desired"} {
				if _, err := io.WriteString(conn, packet(0x30, text(topic), order)); err != nil {
					t.Fatal(err)
				}
			}
		}
		relays(t)
	})
	o.MustEdge("stop", module)
}
