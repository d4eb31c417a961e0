package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/metadata"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// The modules of the examples.
var (
	relayModule  = filepath.Join(harness.Root(), "examples/edge/relay-c/relay.wasm")
	tickerModule = filepath.Join(harness.Root(), "examples/edge/ticker-go/ticker.wasm")
)

// edgeNode is a daemon, an orchestrator and the broker between them.
type edgeNode struct {
	*testing.T
	d    *harness.Daemon
	o    *harness.Orchestrator
	m    *harness.Mosquitto // nil: the broker is embedded in the daemon
	addr string             // address of the broker
	sub  *harness.Subscriber
}

// brokers runs a test with the embedded broker and with mosquitto.
func brokers(t *testing.T, test func(n *edgeNode), opts ...harness.Option) {
	t.Run("embedded", func(t *testing.T) { test(startEdge(t, false, opts...)) })
	t.Run("mosquitto", func(t *testing.T) { test(startEdge(t, true, opts...)) })
}

// startEdge starts broker, daemon and orchestrator, and waits until the node's runtime can run modules.
func startEdge(t *testing.T, mosquitto bool, opts ...harness.Option) *edgeNode {
	t.Helper()
	n := &edgeNode{T: t, addr: harness.FreeAddress(t)}
	url := ""
	if mosquitto {
		url = "mqtt://" + n.addr
	}
	n.d = harness.NewDaemon(t, append([]harness.Option{harness.Edge(t, n.addr, url)}, opts...)...)
	if mosquitto {
		n.m = harness.StartMosquitto(t, n.addr)
	}
	n.d.Start()
	n.o = harness.StartOrchestrator(t, "mqtt://"+n.addr)
	n.o.WaitRuntime("wasm", "A")
	n.sub = harness.Subscribe(t, n.addr, "app/#", "realm/#")
	return n
}

// TestEdgeHosted runs broker, manager and orchestrator in one daemon, kills it, and finds its module in the next one.
func TestEdgeHosted(t *testing.T) {
	address := harness.FreeAddress(t)
	o, hosted := harness.HostOrchestrator(t, address)
	d := harness.StartDaemon(t, harness.Edge(t, address, ""), hosted)
	o.WaitRuntime("wasm", "A")
	module := strings.TrimSpace(o.MustEdge("run", relayModule, "--name", "relay", "--channel", "in=app/in:r:1", "--channel",
		"out=app/out:w:1"))
	o.WaitModule(module, "A")
	d.Kill()
	d.Start()
	o.WaitRuntime("wasm", "A")
	o.WaitModule(module, "A")
	n := &edgeNode{T: t, d: d, o: o, addr: address, sub: harness.Subscribe(t, address, "app/#")}
	n.joined("app/in", "app/out", "relay")
	d.Stop()
	d.Start()
	o.WaitRuntime("wasm", "A")
	o.MustEdge("stop", module)
	o.WaitModule(module, "D")
}

// relay runs a relay from one topic to another, waits until its channels are open, and returns its uuid.
func (n *edgeNode) relay(name, from, to string, args ...string) string {
	n.Helper()
	module := n.o.MustEdge(append([]string{"run", relayModule, "--name", name, "--channel", "in=" + from + ":r:1", "--channel",
		"out=" + to + ":w:1"}, args...)...)
	n.joined(from, to, name)
	return module
}

// joined waits until a relay receives messages. A relay already runs before its channels are open, and misses messages
// until then.
func (n *edgeNode) joined(from, to, name string) {
	n.Helper()
	harness.Eventually(n.T, waitLimit, func() error {
		n.publish(from, "probe "+name)
		if n.count(to, strings.ToUpper("probe "+name)) == 0 {
			return fmt.Errorf("the relay %s does not answer", name)
		}
		return nil
	})
}

// publish publishes a message with QoS 1.
func (n *edgeNode) publish(topic, payload string) {
	n.Helper()
	if err := harness.Publish(n.addr, topic, 1, payload); err != nil {
		n.Fatal(err)
	}
}

// relays checks that a relay republishes a message in upper case.
func (n *edgeNode) relays(from, to, text string) {
	n.Helper()
	n.publish(from, text)
	n.sub.Wait(to, strings.ToUpper(text))
}

// count returns the number of messages with this payload on a topic.
func (n *edgeNode) count(topic, payload string) int {
	c := 0
	for _, m := range n.sub.Messages() {
		if m.Topic == topic && m.Payload == payload {
			c++
		}
	}
	return c
}

// TestEdgePair: two modules exchange messages over channels, also with a third-party client. One is deleted, the other
// ends by itself.
func TestEdgePair(t *testing.T) {
	brokers(t, func(n *edgeNode) {
		first := n.relay("first", "app/a", "app/b")
		second := n.relay("second", "app/b", "app/c")
		n.relays("app/a", "app/c", "hello modules")
		n.sub.Wait("app/b", "HELLO MODULES") // the broker's copy, which can come after the second module's answer
		if got := n.count("app/b", "HELLO MODULES"); got != 1 {
			n.Errorf("the first module's message in app/b: got %d copies, want 1", got)
		}
		if pods := n.pods(); len(pods) != 2 {
			n.Errorf("pods: got %q, want 2", pods)
		}
		n.Log(n.o.MustEdge("ps"))
		n.o.MustEdge("stop", first)
		exit := n.exitStatus(first)
		if exit["reason"] != "killed" {
			n.Errorf("exit of the deleted module: got %v, want killed", exit)
		}
		n.publish("app/b", "quit")
		n.o.WaitModule(second, "D")
		if exit := n.exitStatus(second); exit["reason"] != "exited" || exit["code"] != 3.0 {
			n.Errorf("exit of the other module: got %v, want exited with code 3", exit)
		}
		harness.Eventually(n.T, waitLimit, func() error {
			if pods := n.pods(); len(pods) > 0 {
				return fmt.Errorf("pods: got %q, want none", pods)
			}
			return nil
		})
	})
}

// pods returns the IDs of the node's pods for modules, sorted.
func (n *edgeNode) pods() []string {
	n.Helper()
	all := metadata.AppendToOutgoingContext(n.Context(), "tripod-pods", "all") // they are not for the kubelet's eyes
	resp, err := n.d.CRI().ListPodSandbox(all, &runtimeapi.ListPodSandboxRequest{})
	if err != nil {
		n.Fatal(err)
	}
	var ids []string
	for _, p := range resp.GetItems() {
		if p.GetMetadata().GetNamespace() == "edge" {
			ids = append(ids, p.GetId())
		}
	}
	slices.Sort(ids)
	return ids
}

// exitStatus returns the status object in a dead module's record.
func (n *edgeNode) exitStatus(module string) map[string]any {
	n.Helper()
	record := n.o.WaitModule(module, "D")
	exit, _ := record["exit"].(map[string]any)
	status, _ := exit["status"].(map[string]any)
	if status == nil {
		n.Errorf("record of module %s: got %v, want an exit status", module, record)
	}
	return status
}

// TestEdgeModulesOutliveTheDaemon: modules keep running and exchanging messages after SIGKILL of the daemon.
func TestEdgeModulesOutliveTheDaemon(t *testing.T) {
	brokers(t, func(n *edgeNode) {
		first := n.relay("first", "app/a", "app/b")
		second := n.relay("second", "app/b", "app/c")
		n.relays("app/a", "app/c", "before")
		before := n.pods()
		for round := range 2 {
			n.d.Kill()
			n.d.Start()
			n.resubscribe()
			n.o.WaitRuntime("wasm", "A")
			text := fmt.Sprintf("after %d", round)
			harness.Eventually(n.T, waitLimit, func() error { // until the channels are open again
				n.publish("app/a", text)
				if n.count("app/c", strings.ToUpper(text)) == 0 {
					return errors.New("the message has not passed both modules")
				}
				return nil
			})
			n.o.WaitModule(first, "A")
			n.o.WaitModule(second, "A")
		}
		if after := n.pods(); !slices.Equal(before, after) {
			n.Errorf("pods: got %v, want %v", after, before)
		}
		n.o.MustEdge("stop", first, second)
	})
}

// resubscribe subscribes again if the broker ended with the daemon.
func (n *edgeNode) resubscribe() {
	n.Helper()
	if n.m == nil {
		n.sub = harness.Subscribe(n.T, n.addr, "app/#", "realm/#")
	}
}

// TestEdgeBrokerFlaps: the broker is killed and restarted (fault E2). Meanwhile modules on one node keep exchanging
// messages, and their messages with QoS 1 arrive at the broker afterwards.
func TestEdgeBrokerFlaps(t *testing.T) {
	n := startEdge(t, true)
	n.relay("sink", "app/tick", "app/out")
	ticker := n.o.MustEdge("run", tickerModule, "--name", "ticker", "--channel", "out=app/tick:w:1", "--", "100ms")
	n.sub.Wait("app/out", "TICK 3")
	for range 2 {
		n.m.Kill()
		if pods := n.pods(); len(pods) != 2 {
			n.Errorf("pods without a broker: got %v, want 2", pods)
		}
		n.m.Start()
		n.sub = harness.Subscribe(n.T, n.addr, "app/#", "realm/#")
		n.o.WaitRuntime("wasm", "A")
		n.o.WaitModule(ticker, "A")
		n.sub.Wait("app/out", "TICK")
	}
	n.relay("late", "app/x", "app/y")
	n.relays("app/x", "app/y", "a module that came after")
}

// TestEdgeOrchestratorComesBack: after the orchestrator is killed, modules keep running, and its record is right after
// its restart.
func TestEdgeOrchestratorComesBack(t *testing.T) {
	n := startEdge(t, true)
	first := n.relay("first", "app/a", "app/b")
	second := n.relay("second", "app/c", "app/d")
	n.o.Kill()
	n.relays("app/a", "app/b", "without an orchestrator")
	n.publish("app/c", "quit") // it ends while the orchestrator is down
	harness.Eventually(t, waitLimit, func() error {
		if pods := n.pods(); len(pods) != 1 {
			return fmt.Errorf("pods: got %q, want one", pods)
		}
		return nil
	})
	n.o.Start()
	n.o.WaitModule(first, "A")
	n.o.WaitModule(second, "D")
	n.relays("app/a", "app/b", "and with one")
	n.o.MustEdge("stop", first)
}

// TestEdgeExits: the record of a module has the reason and code of its end, for each kind of end.
func TestEdgeExits(t *testing.T) {
	n := startEdge(t, false)
	for name, test := range map[string]struct {
		message, reason string
		code            float64
	}{
		"quits":   {"quit", "exited", 3},
		"crashes": {"crash", "trap", 134},
	} {
		module := n.relay(name, "app/"+name, "app/out")
		n.publish("app/"+name, test.message)
		if exit := n.exitStatus(module); exit["reason"] != test.reason || exit["code"] != test.code {
			t.Errorf("exit of %s: got %v, want reason %v, code %v", name, exit, test.reason, test.code)
		}
	}
	out, err := n.o.Edge("run", "/no/such/file.wasm")
	if err == nil || !strings.Contains(err.Error(), "/no/such/file.wasm") {
		t.Errorf("run of a missing file: got %q, error %v; want an error that names the file", out, err)
	}
	if _, err := n.o.Edge("run", relayModule, "--runtime", "nobody"); err == nil || !strings.Contains(err.Error(), "nobody") {
		t.Errorf("run on an unknown runtime: got error %v, want its name", err)
	}
}

// TestEdgeBadInput tests fault E1 from outside: each bad message is answered on the error topic, and the next module
// runs normally.
func TestEdgeBadInput(t *testing.T) {
	n := startEdge(t, true)
	first := n.relay("first", "app/a", "app/b")
	for _, bad := range []string{
		`{`, `[]`, `null`, ``, `{"object_id":"1","action":"dance","type":"arts_req","data":{}}`,
		`{"object_id":"2","action":"create","type":"arts_req"}`,
		`{"object_id":"3","action":"create","type":"arts_req","data":{"type":"module"}}`,
		`{"object_id":"4","action":"create","type":"arts_req","data":{"type":"module","uuid":"` + first + `","name":"again","filename":"` +
			relayModule + `"}}`,
		`{"object_id":"5","action":"create","type":"arts_req","data":{"type":"module","uuid":"x/y","name":"n","filename":"/x"}}`,
		`{"object_id":"6","action":"create","type":"arts_req","data":{"type":"module","uuid":"m-6","name":"n","parent":"nobody","filename":"/x"}}`,
		`{"object_id":"7","action":"delete","type":"arts_req","data":{"type":"module","uuid":"not there"}}`,
		`{"object_id":"8","action":"create_batch","type":"arts_req","data":{"type":"module"}}`,
	} {
		before := len(n.errors())
		n.publish("realm/proc/control", bad)
		harness.Eventually(t, waitLimit, func() error {
			if bad != "" && len(n.errors()) == before {
				return fmt.Errorf("no answer on the error topic to %s", bad)
			}
			return nil
		})
	}
	second := n.relay("second", "app/b", "app/c")
	n.relays("app/a", "app/c", "served on")
	n.o.MustEdge("stop", first, second)
}

// errors returns the answers on the error topic.
func (n *edgeNode) errors() []string {
	var all []string
	for _, m := range n.sub.Messages() {
		if m.Topic == "realm/proc/log/orchestrator" {
			all = append(all, m.Payload)
		}
	}
	return all
}

// TestEdgeSameSessionOnBothBrokers: a scripted session produces the same messages with both brokers.
func TestEdgeSameSessionOnBothBrokers(t *testing.T) {
	var sessions [][]string
	brokers(t, func(n *edgeNode) {
		first := n.relay("first", "app/a", "app/b", "--uuid", "33333333-0000-4000-8000-000000000001")
		second := n.relay("second", "app/b", "app/c", "--uuid", "33333333-0000-4000-8000-000000000002")
		for i := range 5 {
			n.relays("app/a", "app/c", fmt.Sprintf("message %d", i))
		}
		n.publish("app/b", "quit")
		n.o.WaitModule(second, "D")
		n.o.MustEdge("stop", first)
		n.o.WaitModule(first, "D")
		if _, err := n.o.Edge("run", relayModule, "--runtime", "nobody", "--uuid", "33333333-0000-4000-8000-000000000003"); err == nil {
			n.Error("run on an unknown runtime succeeded, want an error")
		}
		n.sub.Wait("realm/proc/log/orchestrator", "nobody")
		var session []string
		for _, m := range n.sub.Messages() {
			if line := sessionLine(m); line != "" {
				session = append(session, line)
			}
		}
		slices.Sort(session)
		sessions = append(sessions, session)
	})
	if len(sessions) == 2 && !slices.Equal(sessions[0], sessions[1]) {
		t.Errorf("messages differ; embedded broker:\n%s\n\nmosquitto:\n%s", strings.Join(sessions[0], "\n"), strings.Join(sessions[1], "\n"))
	}
}

// sessionLine formats a message without the parts that differ between sessions. It returns "" for periodic messages.
func sessionLine(m harness.Message) string {
	if strings.HasPrefix(strings.ToLower(m.Payload), "probe ") {
		return ""
	}
	for _, timed := range []string{"/keepalive/", "/reported/", "/reg/", "/profile/", "/g/public/"} {
		if strings.Contains(m.Topic, timed) {
			return ""
		}
	}
	var e struct {
		Action string         `json:"action"`
		Type   string         `json:"type"`
		Data   map[string]any `json:"data"`
	}
	topic := m.Topic
	if strings.HasPrefix(topic, "realm/proc/control/") {
		topic = "realm/proc/control/RUNTIME"
	}
	if json.Unmarshal([]byte(m.Payload), &e) != nil || e.Action == "" {
		return fmt.Sprintf("%s %s %s", topic, m.QoS, m.Payload)
	}
	uuid, _ := e.Data["uuid"].(string)
	status, _ := json.Marshal(e.Data["status"])
	return fmt.Sprintf("%s %s %s %s %s %s", topic, m.QoS, e.Action, e.Type, uuid, status)
}
