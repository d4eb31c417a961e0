package orchestrator

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/edge/broker"
	"github.com/tripod-run/tripod/internal/edge/mqtt"
	"github.com/tripod-run/tripod/internal/edge/wire"
	"github.com/tripod-run/tripod/test/until"
)

// patience bounds every wait for another process.
const patience = 30 * time.Second

// brokers are the brokers for these tests; each function starts one and returns its URL.
var brokers = map[string]func(testing.TB) string{"embedded": embedded, "mosquitto": mosquitto}

func embedded(t testing.TB) string { return startEmbedded(t).URL() }

func startEmbedded(t testing.TB) broker.Broker {
	t.Helper()
	b, err := broker.New(broker.Config{Address: "127.0.0.1:0", Path: filepath.Join(t.TempDir(), "broker")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := b.Close(ctx); err != nil {
			t.Error(err)
		}
	})
	return b
}

// mosquitto starts Debian's mosquitto on a free loopback port.
func mosquitto(t testing.TB) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	l.Close()
	_, port, _ := net.SplitHostPort(address)
	program, err := exec.LookPath("mosquitto")
	if err != nil {
		program = "/usr/sbin/mosquitto" // not in everybody's PATH
	}
	c := exec.Command(program, "-p", port)
	c.Dir = t.TempDir()
	if err := c.Start(); err != nil {
		t.Fatalf("%v; hack/setup.sh installs it", err)
	}
	t.Cleanup(func() {
		_ = c.Process.Kill()
		_ = c.Wait()
	})
	eventually(t, "mosquitto listens", func() bool {
		conn, err := net.Dial("tcp", address)
		if err == nil {
			conn.Close()
		}
		return err == nil
	})
	return "mqtt://" + address
}

// eventually polls a condition until it holds.
var eventually = until.Holds

// peer is a client of a broker that records the messages it receives.
type peer struct {
	mqtt.Client
	t     testing.TB
	mu    sync.Mutex
	heard []mqtt.Message
}

func connect(t testing.TB, c mqtt.Config, filters ...string) *peer {
	t.Helper()
	p := &peer{t: t}
	c.Handler = func(m mqtt.Message) {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.heard = append(p.heard, m)
	}
	client, err := mqtt.New(c)
	if err != nil {
		t.Fatal(err)
	}
	p.Client = client
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		_ = client.Close(ctx)
	})
	defer cancel()
	for _, f := range filters {
		if err := client.Subscribe(ctx, f, 2, mqtt.SubscribeOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	if err := client.WaitConnected(ctx); err != nil {
		t.Fatal(err)
	}
	return p
}

func (p *peer) say(topic, payload string) {
	p.t.Helper()
	p.publish(topic, payload, false)
}

func (p *peer) publish(topic, payload string, retain bool) {
	p.t.Helper()
	if err := p.Publish(p.t.Context(), topic, 2, retain, []byte(payload)); err != nil {
		p.t.Fatal(err)
	}
}

// all returns the received messages on topics that match the filter.
func (p *peer) all(filter string) []mqtt.Message {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(p.heard), func(m mqtt.Message) bool { return !channel.Covers(filter, m.Topic) })
}

// serve runs an orchestrator with the broker.
func serve(t testing.TB, url string, protocol int, path string) *Orchestrator {
	t.Helper()
	o, err := Open(t.Context(), Config{
		Path: path, Topics: wire.Topics{Realm: "realm"}, Connect: mqtt.New, Log: slog.New(slog.DiscardHandler),
		Broker: mqtt.Config{URL: url, Protocol: protocol, ClientID: "tripod-orchestrator-realm", SessionExpiry: time.Hour},
	})
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the orchestrator is at its broker", o.Connected)
	return o
}

func stop(t testing.TB, o *Orchestrator) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := o.Close(ctx); err != nil {
		t.Error(err)
	}
}

// TestRecordedSessionOverBrokers is TestRecordedSession through a broker, with a client like the public ones: MQTT
// 3.1.1 with the bridge bit. The orchestrator's messages are the same with each broker and version.
func TestRecordedSessionOverBrokers(t *testing.T) {
	for name, start := range brokers {
		for _, protocol := range []int{5, 4} {
			t.Run(fmt.Sprint(name, " ", protocol), func(t *testing.T) {
				t.Parallel()
				url := start(t)
				o := serve(t, url, protocol, filepath.Join(t.TempDir(), "record"))
				defer stop(t, o)
				public := connect(t, mqtt.Config{URL: url, Protocol: 4, NoLocal: true, Username: "cli"}, "realm/proc/#")
				expected := 0
				for _, s := range recorded(t) {
					switch {
					case s.defect:
					case s.ours:
						want := data(t, s.payload)
						if details, ok := want["details"].(map[string]any); ok {
							details["ka_interval_sec"] = 60.0
						}
						expected++
						eventually(t, "it says "+s.topic, func() bool { return len(public.all("#")) >= expected })
						m := public.all("#")[expected-1]
						if got := data(t, string(m.Payload)); m.Topic != s.topic || m.QoS != 2 || m.Retain || !reflect.DeepEqual(got, want) {
							t.Errorf("heard %s QoS %d %v\nwant %s %v", m.Topic, m.QoS, got, s.topic, want)
						}
					default:
						public.say(s.topic, s.payload)
					}
				}
				public.say("realm/proc/control", "the end")
				eventually(t, "the end is refused", func() bool { return len(public.all("realm/proc/log/orchestrator")) > 0 })
				if got := len(public.all("#")); got != expected+1 {
					t.Errorf("%d messages were heard, want %d: %v", got, expected+1, public.all("#"))
				}
			})
		}
	}
}

// TestE1RetainedPoison: retained messages that are bad do not stop the orchestrator when it starts.
func TestE1RetainedPoison(t *testing.T) {
	for name, start := range brokers {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url := start(t)
			client := connect(t, mqtt.Config{URL: url}, "realm/proc/#")
			for topic, payload := range map[string]string{
				"realm/proc/control": "\xff{poison", "realm/proc/control/r": `[]`, "realm/proc/reg/x": `{"type":7}`, "realm/proc/keepalive/x": ``,
			} {
				client.publish(topic, payload, true)
			}
			client.publish("realm/proc/reg/m", envelope("create", `{"type":"manager","uuid":"m"}`), true)
			eventually(t, "the broker has them", func() bool { return client.Stats().Queued == 0 })
			path := filepath.Join(t.TempDir(), "record")
			for range 2 {
				o := serve(t, url, 5, path)
				if n := len(o.state.list(Manager)); n != 0 {
					t.Errorf("a retained registration is acted upon")
				}
				before := len(client.all("realm/proc/log/orchestrator"))
				client.say("realm/proc/control", "live poison")
				eventually(t, "it answers", func() bool { return len(client.all("realm/proc/log/orchestrator")) > before })
				stop(t, o)
			}
		})
	}
}

// TestE2WhatComesWhileItIsAway: while the orchestrator is disconnected, orders and last wills wait at the broker.
func TestE2WhatComesWhileItIsAway(t *testing.T) {
	for name, start := range brokers {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url := start(t)
			path := filepath.Join(t.TempDir(), "record")
			o := serve(t, url, 5, path)
			client := connect(t, mqtt.Config{URL: url}, "realm/proc/control/+", "realm/proc/reg/+")
			client.say("realm/proc/reg/m", envelope("create", `{"type":"manager","uuid":"m"}`))
			client.say("realm/proc/reg/r", envelope("create", `{"type":"runtime","uuid":"r","parent":"m","max_nmodules":1}`))
			client.say("realm/proc/control", envelope("create", `{"type":"module","uuid":"a","parent":"r"}`))
			eventually(t, "a is ordered", func() bool { return len(client.all("realm/proc/control/r")) == 1 })
			eventually(t, "that is noted", func() bool { return !o.state.get(key{Module, "a"}).Unconfirmed })
			stop(t, o)
			client.say("realm/proc/control/r", envelope("exited", `{"type":"module","uuid":"a","status":"exited"}`))
			client.say("realm/proc/control", envelope("create", `{"type":"module","uuid":"b","parent":"r"}`))
			client.say("realm/proc/reg/m", managerWill)
			eventually(t, "the broker has it", func() bool { return client.Stats().Queued == 0 })
			o = serve(t, url, 5, path)
			defer stop(t, o)
			eventually(t, "b is ordered, and its runtime lost", func() bool {
				b := o.state.get(key{Module, "b"})
				return b != nil && b.Status == Killed
			})
			if a := o.state.get(key{Module, "a"}); a.Status != Dead {
				t.Errorf("a is %s", a.Status)
			}
			eventually(t, "a and b are ordered, once and in their order", func() bool {
				var orders []string
				for _, m := range client.all("realm/proc/control/r") {
					var e struct {
						Action string
						Data   struct{ UUID string }
					}
					if err := json.Unmarshal(m.Payload, &e); err != nil {
						t.Error(err)
					}
					if e.Action == "create" {
						orders = append(orders, e.Data.UUID)
					}
				}
				return strings.Join(orders, " ") == "a b"
			})
		})
	}
}

// TestOrderAfterQuiet: an order is confirmed even if the orchestrator had stopped to look for acknowledgements because no
// order was open.
func TestOrderAfterQuiet(t *testing.T) {
	t.Parallel()
	url := embedded(t)
	o := serve(t, url, 5, filepath.Join(t.TempDir(), "record"))
	defer stop(t, o)
	client := connect(t, mqtt.Config{URL: url}, "realm/proc/control/+")
	client.say("realm/proc/reg/m", envelope("create", `{"type":"manager","uuid":"m"}`))
	client.say("realm/proc/reg/r", envelope("create", `{"type":"runtime","uuid":"r","parent":"m","max_nmodules":2}`))
	for _, uuid := range []string{"a", "b"} {
		time.Sleep(4 * orderTick) // pacing: the ticker stops at a tick without open orders, which nothing announces
		client.say("realm/proc/control", envelope("create", `{"type":"module","uuid":"`+uuid+`","parent":"r"}`))
		eventually(t, "the order for "+uuid+" is confirmed", func() bool {
			m := o.state.get(key{Module, uuid})
			return m != nil && m.Status == Alive && !m.Unconfirmed
		})
	}
}
