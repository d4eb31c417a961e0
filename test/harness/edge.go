package harness

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/pelletier/go-toml/v2"
)

// edgeTimeout bounds the start and the end of a program of the edge protocol.
const edgeTimeout = 30 * time.Second

// Edge enables the MQTT front door, with the broker at the given URL. If the URL is "", the daemon embeds a broker that
// listens at the given address.
func Edge(t testing.TB, address, broker string) Option {
	t.Helper()
	wasm := Wasm(t, "node")
	return func(d *Daemon) {
		wasm(d)
		Set("edge.enabled", true)(d)
		Set("edge.keepalive_interval", "1s")(d)
		Set("edge.module_roots", []string{Root()})(d)
		if broker != "" {
			Set("edge.broker", broker)(d)
		} else {
			Set("broker.address", address)(d)
		}
	}
}

// FreeAddress returns an unused address on loopback.
func FreeAddress(t testing.TB) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// process is a program that a test can kill and start again. It is stopped when the test ends.
type process struct {
	t    testing.TB
	args []string
	log  string
	cmd  *exec.Cmd
	done chan struct{}
}

func (p *process) start(ready func() error) {
	p.t.Helper()
	log, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		p.t.Fatal(err)
	}
	defer log.Close()
	p.cmd = exec.Command(p.args[0], p.args[1:]...)
	p.cmd.Stdout, p.cmd.Stderr, p.cmd.Dir = log, log, "/"
	if err := p.cmd.Start(); err != nil {
		p.t.Fatal(err)
	}
	done, cmd := make(chan struct{}), p.cmd
	p.done = done
	go func() {
		_ = cmd.Wait() // ProcessState has the result
		close(done)
	}()
	Eventually(p.t, edgeTimeout, func() error {
		select {
		case <-done:
			p.t.Fatalf("%s ended: %v\n%s", p.args[0], cmd.ProcessState, tail(p.log, 20))
		default:
		}
		return ready()
	})
}

func (p *process) end(sig syscall.Signal) {
	p.t.Helper()
	if p.cmd == nil {
		return
	}
	_ = p.cmd.Process.Signal(sig)
	select {
	case <-p.done:
	case <-time.After(edgeTimeout):
		_ = p.cmd.Process.Kill()
		<-p.done
		p.t.Errorf("%s did not end on %v\n%s", p.args[0], sig, tail(p.log, 50))
	}
	p.cmd = nil
}

func (p *process) cleanUp() {
	p.end(syscall.SIGTERM)
	if p.t.Failed() {
		p.t.Logf("log of %s:\n%s", filepath.Base(p.args[0]), tail(p.log, 100))
	}
}

// Listens returns nil if the address accepts connections.
func Listens(address string) error {
	c, err := net.DialTimeout("tcp", address, time.Second)
	if err == nil {
		err = c.Close()
	}
	return err
}

// Orchestrator is a tripod orchestrator under test.
type Orchestrator struct {
	process
	// REST is the URL of the orchestrator's REST interface. Broker is the URL of the MQTT broker.
	REST, Broker string
}

// StartOrchestrator starts an orchestrator; the broker need not be running yet. Create the daemon first, for the reason
// given at StartMosquitto.
func StartOrchestrator(t testing.TB, broker string) *Orchestrator {
	t.Helper()
	return StartOrchestratorWith(t, broker, nil)
}

// HostOrchestrator returns the orchestrator of a daemon with the embedded broker at the given address, and the option that
// makes the daemon run it.
func HostOrchestrator(t testing.TB, broker string) (*Orchestrator, Option) {
	t.Helper()
	rest := FreeAddress(t)
	return &Orchestrator{process: process{t: t}, REST: "http://" + rest, Broker: "mqtt://" + broker}, func(d *Daemon) {
		for key, value := range map[string]any{
			"edge.orchestrator": true, "orchestrator.address": rest,
			"orchestrator.root": filepath.Join(t.TempDir(), "orchestrator"), "orchestrator.keepalive_interval": "2s",
		} {
			set(d.config, key, value)
		}
	}
}

// StartOrchestratorWith is like StartOrchestrator, with additional configuration keys.
func StartOrchestratorWith(t testing.TB, broker string, keys map[string]any) *Orchestrator {
	t.Helper()
	bin, err := Binary()
	if err != nil {
		t.Fatal(err)
	}
	dir, rest := t.TempDir(), FreeAddress(t)
	config := map[string]any{}
	for key, value := range map[string]any{
		"root": filepath.Join(dir, "node"), "log.level": "debug", "orchestrator.broker": broker, "orchestrator.address": rest,
		"orchestrator.root": filepath.Join(dir, "orchestrator"), "orchestrator.keepalive_interval": "2s",
	} {
		set(config, key, value)
	}
	for key, value := range keys {
		set(config, key, value)
	}
	text, err := toml.Marshal(config)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "config.toml")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	o := &Orchestrator{
		process: process{t: t, args: []string{bin, "orchestrator", "--config", file}, log: filepath.Join(dir, "log")},
		REST:    "http://" + rest, Broker: broker,
	}
	o.Start()
	t.Cleanup(o.cleanUp)
	return o
}

// Start starts the orchestrator. It can be called again after Kill.
func (o *Orchestrator) Start() {
	o.t.Helper()
	o.start(func() error { return Listens(strings.TrimPrefix(o.REST, "http://")) })
}

// Kill kills the orchestrator with SIGKILL.
func (o *Orchestrator) Kill() { o.t.Helper(); o.end(syscall.SIGKILL) }

// Pid returns the process ID.
func (o *Orchestrator) Pid() int { return o.cmd.Process.Pid }

// Record is a runtime or module as REST describes it.
type Record map[string]any

// Get reads a path of the REST interface.
func (o *Orchestrator) Get(path string, into any) error {
	client := &http.Client{Timeout: 10 * time.Second}
	resp, err := client.Get(o.REST + path)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("GET %s: %s: %s", path, resp.Status, body)
	}
	return json.Unmarshal(body, into)
}

// WaitModule waits until the module's record has the status.
func (o *Orchestrator) WaitModule(module, status string) Record {
	o.t.Helper()
	return o.waitStatus("/api/modules/"+module+"/", status)
}

// WaitRuntime waits until the named runtime has the status.
func (o *Orchestrator) WaitRuntime(name, status string) Record {
	o.t.Helper()
	return o.waitStatus("/api/runtimes/"+name+"/", status)
}

func (o *Orchestrator) waitStatus(path, status string) (r Record) {
	o.t.Helper()
	Eventually(o.t, edgeTimeout, func() error {
		r = nil
		if err := o.Get(path, &r); err != nil {
			return err
		}
		if r["status"] != status {
			return fmt.Errorf("%s has status %v, want %s: %v", path, r["status"], status, r)
		}
		return nil
	})
	return r
}

// Edge runs `tripod edge` with this orchestrator and its broker, and returns the command's output.
func (o *Orchestrator) Edge(args ...string) (string, error) {
	bin, err := Binary()
	if err != nil {
		return "", err
	}
	c := exec.Command(bin, append([]string{"edge", "--broker", o.Broker, "--orchestrator", o.REST}, args...)...)
	var stderr bytes.Buffer
	c.Stderr = &stderr
	out, err := c.Output()
	if err != nil {
		err = fmt.Errorf("tripod edge %s: %w: %s", strings.Join(args, " "), err, stderr.Bytes())
	}
	return strings.TrimSpace(string(out)), err
}

// MustEdge is like Edge, but fails the test on error.
func (o *Orchestrator) MustEdge(args ...string) string {
	o.t.Helper()
	out, err := o.Edge(args...)
	if err != nil {
		o.t.Fatal(err)
	}
	return out
}
