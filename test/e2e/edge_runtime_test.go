package e2e

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/tripod-run/tripod/test/harness"
)

// runtimeProgram builds the example of an external runtime and configures it as the node's runtime "min".
func runtimeProgram(t *testing.T) (program, sockets string, option harness.Option) {
	t.Helper()
	dir := t.TempDir()
	program, sockets = filepath.Join(dir, "slruntime"), filepath.Join(dir, "sl")
	build := exec.Command("go", "build", "-o", program, "./test/harness/slruntime")
	build.Dir, build.Env = harness.Root(), append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return program, sockets, func(d *harness.Daemon) {
		harness.Set("edge.socket_dir", sockets)(d)
		harness.Set("edge.runtime", []map[string]any{{"name": "min", "command": program + " " + sockets, "max_modules": 2}})(d)
	}
}

// TestEdgeRuntimeProgram tests an external runtime (linux/minimal). Its modules exchange messages with those of the
// built-in runtime. After it is killed (fault E3), it is restarted and its modules are created again. An excess module
// waits.
func TestEdgeRuntimeProgram(t *testing.T) {
	program, sockets, option := runtimeProgram(t)
	n := startEdge(t, true, option)
	n.o.WaitRuntime("min", "A")
	n.relay("relay", "realm/proc/stdio/one", "app/out") // what module one says, in capitals
	one := n.o.MustEdge("run", "/any/file.wasm", "--runtime", "min", "--name", "one", "--uuid", "one")
	n.sub.Wait("realm/proc/stdio/one", "hello one")
	n.sub.Wait("app/out", "HELLO ONE")
	n.o.MustEdge("run", "/any/file.wasm", "--runtime", "min", "--name", "two", "--uuid", "two")
	harness.Eventually(t, waitLimit, func() error { // a module receives messages once it has opened its channel
		n.publish("realm/proc/stdio/two", "ping")
		if n.count("realm/proc/stdio/two", "echo ping") == 0 {
			return errors.New("module two does not answer")
		}
		return nil
	})
	if _, err := n.o.Edge("run", "/any/file.wasm", "--runtime", "min", "--name", "three", "--uuid", "three", "--detach"); err != nil {
		t.Fatal(err)
	}
	n.o.WaitModule("three", "Q")
	n.publish("realm/proc/stdio/two", "quit")
	n.o.WaitModule("two", "D")
	n.o.WaitModule("three", "A") // there is room now
	n.sub.Wait("realm/proc/stdio/three", "hello three")

	hellos := n.count("realm/proc/stdio/one", "hello one")
	killByCommand(t, program+"\x00"+sockets+"\x000\x00")
	harness.Eventually(t, waitLimit, func() error {
		if n.count("realm/proc/stdio/one", "hello one") == hellos {
			return errors.New("module one has not been created again")
		}
		return nil
	})
	n.sub.Wait("realm/proc/control/"+fmt.Sprint(n.o.WaitRuntime("min", "A")["uuid"]), "runtime-lost")
	n.o.WaitModule(one, "A")
	n.o.MustEdge("stop", "one", "three", "relay")
	if record := n.o.WaitModule("three", "D"); !strings.Contains(fmt.Sprint(record["exit"]), "deleted") {
		t.Errorf("exit of the module: got %v, want the external runtime's reason \"deleted\"", record)
	}
}

// TestEdgeDesired: with a desired document, a node runs its modules without an orchestrator. It restarts them without a
// broker after the daemon and all workers have died.
func TestEdgeDesired(t *testing.T) {
	n := startEdge(t, true)
	runtime := fmt.Sprint(n.o.WaitRuntime("wasm", "A")["uuid"])
	n.o.Kill()
	n.retain("realm/proc/desired/"+runtime,
		fmt.Sprintf(`{"generation": 7, "modules": [{"uuid": "wanted", "name": "wanted", "filename": %q, "args": ["relay"],
		"channels": [{"name": "in", "topic": "app/in", "mode": "r:1"}, {"name": "out", "topic": "app/out", "mode": "w:1"}]}]}`, relayModule))
	n.sub.Wait("realm/proc/reported/"+runtime, `"running"`)
	n.joined("app/in", "app/out", "desired")
	n.relays("app/in", "app/out", "desired")

	n.d.Kill()
	n.m.Kill()
	for _, pid := range workers(t) {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
	}
	n.d.Start()
	harness.Eventually(t, waitLimit, func() error {
		if pods := n.pods(); len(pods) != 1 {
			return fmt.Errorf("pods without a broker: got %q, want one", pods)
		}
		return nil
	})
	n.m.Start()
	n.sub = harness.Subscribe(t, n.addr, "app/#", "realm/#")
	n.sub.Wait("realm/proc/reported/"+runtime, `"running"`)
	harness.Eventually(t, waitLimit, func() error { // until the channels are open again
		n.publish("app/in", "again")
		if n.count("app/out", "AGAIN") == 0 {
			return errors.New("the module does not answer")
		}
		return nil
	})
	n.retain("realm/proc/desired/"+runtime, "")
	harness.Eventually(t, waitLimit, func() error {
		if pods := n.pods(); len(pods) != 0 {
			return fmt.Errorf("pods after the document was cleared: got %q, want none", pods)
		}
		return nil
	})
}

// retain publishes a retained message. An empty payload clears it.
func (n *edgeNode) retain(topic, payload string) {
	n.Helper()
	args := []string{"pub", "--retain", "--qos", "1", topic, payload}
	if _, err := n.o.Edge(args...); err != nil {
		n.Fatal(err)
	}
}

// TestEdgeRestart: a module that ends is restarted according to its policy, but not after its deletion.
func TestEdgeRestart(t *testing.T) {
	n := startEdge(t, false)
	never := n.relay("never", "app/never", "app/out")
	failed := n.relay("failed", "app/failed", "app/out", "--restart", "on-failure")
	n.publish("app/never", "crash")
	n.publish("app/failed", "crash")
	if exit := n.exitStatus(never); exit["reason"] != "trap" {
		t.Errorf("exit of the module: got %v, want a trap", exit)
	}
	harness.Eventually(t, waitLimit, func() error {
		record := n.o.WaitModule(failed, "A")
		if record["restarts"] != 1.0 {
			return fmt.Errorf("restarts: got %v, want 1", record["restarts"])
		}
		return nil
	})
	harness.Eventually(t, waitLimit, func() error { // until the module's channels are open
		n.publish("app/failed", "again")
		if n.count("app/out", "AGAIN") == 0 {
			return errors.New("the module does not answer")
		}
		return nil
	})
	n.o.MustEdge("stop", failed)
	if record := n.o.WaitModule(failed, "D"); record["restarts"] != 1.0 {
		t.Errorf("record of the deleted module: got %v, want 1 restart", record)
	}
}
