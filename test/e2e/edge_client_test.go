package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// pushModule pushes an example, with the tag 1, and returns the reference with its digest for nodes.
func pushModule(t *testing.T, example, repository string) string {
	t.Helper()
	tripod, err := harness.Binary()
	if err != nil {
		t.Fatal(err)
	}
	push := exec.CommandContext(t.Context(), tripod, "push", "--plain-http", filepath.Join(harness.Root(), "examples/edge", example),
		harness.Registry(t).Addr+"/"+repository+":1")
	push.Dir = t.TempDir()
	var errs strings.Builder
	push.Stderr = &errs
	out, err := push.Output()
	if err != nil {
		t.Fatalf("%v\n%s", err, &errs)
	}
	_, digest, _ := strings.Cut(strings.TrimSpace(string(out)), "@")
	return harness.ImagePrefix + repository + "@" + digest
}

// TestEdgeImage: modules of each kind can run from a registry, by digest. A tag without a digest is refused, because tags can
// move.
func TestEdgeImage(t *testing.T) {
	n := startEdge(t, false)
	for example, repository := range map[string]string{
		"relay-c/relay.wasm": "edge/relay", "relay-wit-c/relay.wasm": "edge/relay-wit", "relay-messaging-c/relay.wasm": "edge/relay-messaging",
	} {
		in, out := "app/"+repository+"/in", "app/"+repository+"/out"
		module := n.o.MustEdge("run", pushModule(t, example, repository), "--channel", "in="+in+":r:1", "--channel", "out="+out+":w:1")
		n.joined(in, out, "image")
		n.relays(in, out, "from a registry")
		n.o.MustEdge("stop", module)
	}
	if _, err := n.o.Edge("run", harness.ImagePrefix+"edge/relay:1"); err == nil || !strings.Contains(err.Error(), "digest") {
		t.Errorf("run by tag: got error %v, want a refusal that asks for a digest", err)
	}
	if _, err := n.o.Edge("run", harness.ImagePrefix+"edge/nothing@sha256:"+strings.Repeat("0", 64)); err == nil {
		t.Error("run of a missing image succeeded, want an error")
	}
}

// TestEdgeMessages: a module of wasi:messaging goes on after a message that it cannot handle, logs it, ends with its channels, and
// gets no messages as a pod.
func TestEdgeMessages(t *testing.T) {
	n := startEdge(t, true)
	image := pushModule(t, "relay-messaging-c/relay.wasm", "edge/messages")
	module := n.o.MustEdge("run", image, "--channel", "in=app/in:r:1", "--channel", "out=app/out:w:1")
	n.joined("app/in", "app/out", "messages")
	n.publish("app/in", "a\x00b")
	n.publish("app/in", "")
	n.relays("app/in", "app/out", "goes on")
	if out, err := n.o.Edge("logs", module); err != nil || !strings.Contains(out, "could not handle it: other: the message is empty") ||
		!strings.Contains(out, `message on channel "in": `) {
		t.Errorf("logs of the module: got %q, error %v; want why it did not handle two messages", out, err)
	}
	n.d.Kill()
	n.d.Start()
	n.o.WaitRuntime("wasm", "A")
	n.joined("app/in", "app/out", "after the daemon")
	n.o.MustEdge("stop", module)
	if exit := n.exitStatus(module); exit["reason"] != "killed" {
		t.Errorf("exit of the stopped module: got %v, want killed", exit)
	}
	_, id, err := createIn(t, n.d, image)
	if err == nil {
		_, err = n.d.CRI().StartContainer(t.Context(), &runtimeapi.StartContainerRequest{ContainerId: id})
	}
	if err == nil || !strings.Contains(err.Error(), "run it as a module of the edge") {
		t.Errorf("start as a pod: got error %v, want where it runs", err)
	}
}

// TestEdgeUpload: a file outside edge.module_roots runs if the command sends it, and without that the error says whose path
// it is.
func TestEdgeUpload(t *testing.T) {
	n := startEdge(t, false)
	wasm, err := os.ReadFile(relayModule)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "relay.wasm")
	if err := os.WriteFile(file, wasm, 0o600); err != nil {
		t.Fatal(err)
	}
	channels := []string{"--channel", "in=app/in:r:1", "--channel", "out=app/out:w:1"}
	if _, err := n.o.Edge(append([]string{"run", file}, channels...)...); err == nil ||
		!strings.Contains(err.Error(), "a path on the module's node") {
		t.Errorf("run of a file outside module_roots: got error %v, want whose path it is", err)
	}
	module := n.o.MustEdge(append([]string{"run", "--upload", file, "--endpoint", n.d.Socket}, channels...)...)
	n.joined("app/in", "app/out", "upload")
	n.relays("app/in", "app/out", "from a directory of the user")
	n.o.MustEdge("stop", module)
}

// TestEdgeCommandLine checks the output of the commands, as text and as JSON.
func TestEdgeCommandLine(t *testing.T) {
	n := startEdge(t, false)
	dir := t.TempDir()
	module := n.o.MustEdge("run", tickerModule, "--name", "ticker", "--env", "A=b", "--channel", "out=app/tick:w:1", "--", "100ms")
	if got := n.o.MustEdge("ps", "-q"); got != module {
		t.Errorf("ps -q: got %q, want %q", got, module)
	}
	var records []map[string]any
	if err := json.Unmarshal([]byte(n.o.MustEdge("ps", "ticker", "-o", "json")), &records); err != nil || len(records) != 1 ||
		records[0]["uuid"] != module || records[0]["status"] != "A" {
		t.Errorf("ps -o json: got %v, error %v; want the running module", records, err)
	}
	if got := n.o.MustEdge("runtimes"); !strings.Contains(got, "tripod/wasm") || !strings.Contains(got, "1/128") {
		t.Errorf("runtimes: got\n%s\nwant tripod/wasm with 1 of 128 modules", got)
	}
	out := n.o.MustEdge("sub", "--count", "2", "-o", "json", "app/tick")
	for line := range strings.Lines(out) {
		var m struct {
			Topic, Payload string
			QoS            int
		}
		if err := json.Unmarshal([]byte(line), &m); err != nil || m.Topic != "app/tick" || !strings.HasPrefix(m.Payload, "tick ") {
			t.Errorf("sub -o json: got %q, error %v; want a tick", line, err)
		}
	}
	logs := filepath.Join(dir, "logs")
	followed := make(chan error, 1)
	go func() {
		out, err := n.o.Edge("logs", "-f", "ticker")
		followed <- err
		_ = os.WriteFile(logs, []byte(out), 0o600) // read below
		close(followed)
	}()
	n.sub.Wait("app/tick", "tick 20")
	n.o.MustEdge("stop", "ticker")
	if err := <-followed; err != nil {
		t.Error(err)
	}
	<-followed
	if text, err := os.ReadFile(logs); err != nil || !strings.Contains(string(text), "tick ") {
		t.Errorf("logs -f: got %q, error %v; want a tick", text, err)
	}
	if got := n.o.MustEdge("ps", "-a"); !strings.Contains(got, "dead") || !strings.Contains(got, "killed") {
		t.Errorf("ps -a: got\n%s\nwant the dead module, killed", got)
	}
	if got := n.o.MustEdge("stop", "ticker"); got != module {
		t.Errorf("second stop: got %q, want %q", got, module)
	}
}

// TestEdgeManyModules: if a runtime is full, further modules wait.
func TestEdgeManyModules(t *testing.T) {
	n := startEdge(t, false, harness.Set("edge.wasm.max_modules", 8))
	for i := range 10 {
		n.o.MustEdge("run", relayModule, "--detach", "--uuid", fmt.Sprintf("m-%d", i), "--name", fmt.Sprintf("m-%d", i),
			"--channel", fmt.Sprintf("in=app/%d/in:r:1", i), "--channel", "out=app/out:w:1")
	}
	waiting := func() (ids []string) {
		var queued struct {
			Results []struct{ UUID string }
		}
		if err := n.o.Get("/api/queued/", &queued); err != nil {
			t.Fatal(err)
		}
		for _, r := range queued.Results {
			ids = append(ids, r.UUID)
		}
		return ids
	}
	harness.Eventually(t, waitLimit, func() error {
		if q := waiting(); len(q) != 2 {
			return fmt.Errorf("waiting modules: got %q, want 2", q)
		}
		return nil
	})
	for len(waiting()) > 0 {
		next := waiting()[0]
		var running []struct{ UUID string }
		if err := json.Unmarshal([]byte(n.o.MustEdge("ps", "-o", "json")), &running); err != nil {
			t.Fatal(err)
		}
		n.o.MustEdge("stop", running[0].UUID)
		n.o.WaitModule(next, "A")
	}
}

// TestEdgeLargeMessages: a message of 1 MiB passes through a module and the broker unchanged (fault E2). A message that
// is too large for the broker ends at most the sender's connection.
func TestEdgeLargeMessages(t *testing.T) {
	brokers(t, func(n *edgeNode) {
		module := n.relay("relay", "app/in", "app/out")
		for i := range 3 {
			n.publish("app/in", strings.Repeat(string(rune('a'+i)), 1<<20))
			want := strings.Repeat(string(rune('A'+i)), 1<<20)
			harness.Eventually(t, waitLimit, func() error {
				if n.count("app/out", want) != 1 {
					return fmt.Errorf("message %d has not arrived", i)
				}
				return nil
			})
		}
		if n.m == nil {
			_ = harness.Publish(n.addr, "app/in", 1, strings.Repeat("x", 17<<20)) // exceeds broker.max_message; any result is right
		}
		n.relays("app/in", "app/out", "and small ones")
		n.o.MustEdge("stop", module)
	})
}

// TestEdgeRetainedPoison: invalid retained messages, which the daemon receives at each start, change nothing (fault
// E1).
func TestEdgeRetainedPoison(t *testing.T) {
	n := startEdge(t, true)
	runtime := fmt.Sprint(n.o.WaitRuntime("wasm", "A")["uuid"])
	module := n.relay("relay", "app/in", "app/out")
	for _, topic := range []string{"control", "control/" + runtime, "reg/" + runtime, "keepalive/" + runtime, "desired/" + runtime,
		"reported/x"} {
		for _, poison := range []string{"{", "\xff",
			`{"object_id": "1", "action": "dance", "type": "arts_req", "data": {"type": "module", "uuid": "` + module + `"}}`} {
			n.retain("realm/proc/"+topic, poison)
		}
	}
	n.d.Kill()
	n.o.Kill()
	n.d.Start()
	n.o.Start()
	n.o.WaitRuntime("wasm", "A")
	n.o.WaitModule(module, "A")
	harness.Eventually(t, waitLimit, func() error {
		n.publish("app/in", "still there")
		if n.count("app/out", "STILL THERE") == 0 {
			return fmt.Errorf("the module does not answer")
		}
		return nil
	})
	second := n.relay("second", "app/x", "app/y")
	n.relays("app/x", "app/y", "and a new one")
	n.o.MustEdge("stop", module, second)
}

// TestEdgeMetrics: the node's metrics include those of manager and broker. The orchestrator has its own address.
func TestEdgeMetrics(t *testing.T) {
	address := harness.FreeAddress(t)
	n := startEdge(t, false, harness.Set("metrics.address", address))
	module := n.relay("relay", "app/in", "app/out")
	for url, names := range map[string][]string{
		"http://" + address + "/metrics": {"tripod_edge_broker_clients ", "tripod_edge_broker_received_messages_total ", "tripod_edge_modules",
			"tripod_pods"},
		n.o.REST + "/metrics": {"tripod_orchestrator_records{", "go_goroutines"},
	} {
		text := get(t, url)
		for _, name := range names {
			if !strings.Contains(text, "\n"+name) {
				t.Errorf("metrics at %s: want %s among\n%s", url, name, text)
			}
		}
	}
	n.o.MustEdge("stop", module)
}
