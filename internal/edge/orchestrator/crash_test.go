package orchestrator

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/tripod-run/tripod/internal/edge/mqtt"
	"github.com/tripod-run/tripod/internal/edge/wire"
	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/test/races"
)

// crashBroker is the variable with the broker of a child process, and crashDir that with the directory of its record.
const (
	crashBroker = "TRIPOD_TEST_CRASH_BROKER"
	crashDir    = "TRIPOD_TEST_CRASH_DIR"
)

func TestMain(m *testing.M) {
	if url := os.Getenv(crashBroker); url != "" {
		if err := crashChild(context.Background(), url, os.Getenv(crashDir)); err != nil {
			os.Stderr.WriteString(err.Error())
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(races.Run(m.Run))
}

// crashChild runs an orchestrator that prints the address of its REST interface and runs until it is killed.
func crashChild(ctx context.Context, url, dir string) error {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	o, err := Open(ctx, Config{
		Path: filepath.Join(dir, "record"), Topics: wire.Topics{Realm: "realm"}, Connect: mqtt.New, RestartMin: 1,
		Broker: mqtt.Config{URL: url, ClientID: "orchestrator", SessionExpiry: patience * 10},
	})
	if err != nil {
		return err
	}
	fmt.Println(l.Addr())
	return o.Serve(ctx, l)
}

// child is a process that runs crashChild.
type child struct {
	t    *testing.T
	cmd  *exec.Cmd
	rest string
}

func startChild(t *testing.T, url, dir, point string) *child {
	t.Helper()
	c := &child{t: t, cmd: exec.Command(os.Args[0])}
	c.cmd.Env = append(os.Environ(), crashBroker+"="+url, crashDir+"="+dir)
	if point != "" {
		c.cmd.Env = append(c.cmd.Env, failpoint.Variable+"="+point+"=kill")
	}
	c.cmd.Stderr = os.Stderr
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	address, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	c.rest = "http://" + strings.TrimSpace(address)
	eventually(t, "the child is at its broker", func() bool { return c.get("/healthz", nil) })
	return c
}

func (c *child) get(path string, into any) bool {
	resp, err := http.Get(c.rest + path)
	if err != nil {
		return false
	}
	defer resp.Body.Close()
	if into != nil {
		if err := json.NewDecoder(resp.Body).Decode(into); err != nil {
			return false
		}
	}
	return resp.StatusCode == http.StatusOK
}

// states are those of all records: runtimes, then modules.
func (c *child) states() string {
	var all []string
	for _, path := range []string{"/api/runtimes/?dead=1", "/api/modules/?dead=1"} {
		var list struct {
			Results []struct{ UUID, Status string }
		}
		if !c.get(path, &list) {
			return "it does not answer"
		}
		for _, r := range list.Results {
			all = append(all, r.UUID+":"+r.Status)
		}
	}
	return strings.Join(all, " ")
}

// died waits until the child was killed by SIGKILL.
func (c *child) died() {
	c.t.Helper()
	_ = c.cmd.Wait()
	if s := c.cmd.ProcessState.Sys().(syscall.WaitStatus); !s.Signaled() || s.Signal() != syscall.SIGKILL {
		c.t.Fatalf("the child ended by %v", c.cmd.ProcessState)
	}
}

// crashScript is a sequence of messages, and the states after each.
var crashScript = []struct{ topic, payload, states string }{
	{"realm/proc/reg/m", envelope("create", `{"type":"manager","uuid":"m"}`), ""},
	{"realm/proc/reg/r", envelope("create", `{"type":"runtime","uuid":"r","parent":"m","max_nmodules":1}`), "r:A"},
	{"realm/proc/control", envelope("create", `{"type":"module","uuid":"a","parent":"r"}`), "r:A a:A"},
	{"realm/proc/control", envelope("create", `{"type":"module","uuid":"b","parent":"r","restart":"always"}`), "r:A a:A b:Q"},
	{"realm/proc/control", envelope("delete", `{"type":"module","uuid":"a"}`), "r:A a:E b:Q"},
	{"realm/proc/control/r", envelope("exited", `{"type":"module","uuid":"a","status":"exited"}`), "r:A a:D b:A"},
	{"realm/proc/reg/m", managerWill, "r:D a:D b:K"},
	{"realm/proc/reg/m", envelope("create", `{"type":"manager","uuid":"m"}`), "r:D a:D b:K"},
	{"realm/proc/reg/r", envelope("create", `{"type":"runtime","uuid":"r","parent":"m","max_nmodules":1}`), "r:A a:D b:A"},
	{"realm/proc/control/r", envelope("exited", `{"type":"module","uuid":"b","status":"exited"}`), "r:A a:D b:A"},
}

// TestN1KilledAtEveryFailPoint kills the orchestrator at each fail point of each transition and starts another with the
// same record. The broker repeats messages that were not acknowledged. The final record is the same as without the
// crash, each order has reached the manager, and no module was ordered under two object_ids.
func TestN1KilledAtEveryFailPoint(t *testing.T) {
	failpoint.Needed(t)
	visited := 0
	for _, point := range failpoint.Names() {
		if !strings.HasPrefix(point, "orchestrator.") {
			continue
		}
		visited++
		t.Run(point, func(t *testing.T) {
			t.Parallel()
			broker, dir := startEmbedded(t), t.TempDir()
			url := broker.URL()
			manager := connect(t, mqtt.Config{URL: url, NoLocal: true}, "realm/proc/control/+")
			acknowledged := func() bool { return broker.Stats().Inflight == 0 } // else the next child finds it at its start
			for i, step := range crashScript {
				before := manager.all("#")
				c := startChild(t, url, dir, point)
				manager.say(step.topic, step.payload)
				orders := i != 0 && i != 1 && i != 3 && i != 6 && i != 7
				if orders || !strings.HasPrefix(point, "orchestrator.orders.") {
					c.died()
				} else {
					eventually(t, step.states, func() bool { return c.states() == step.states })
					eventually(t, "the broker knows that it is done", acknowledged)
					_ = c.cmd.Process.Kill()
					c.died()
				}
				c = startChild(t, url, dir, "")
				eventually(t, fmt.Sprintf("step %d: %s", i, step.states), func() bool { return c.states() == step.states })
				if orders {
					eventually(t, fmt.Sprintf("step %d: its order", i), func() bool { return len(manager.all("#")) > len(before) })
					c.settled()
				}
				eventually(t, "the broker knows that it is done", acknowledged)
				_ = c.cmd.Process.Kill()
				c.died()
			}
			ids, times := map[string]map[string]bool{}, map[string]int{}
			for _, m := range manager.all("#") {
				e, err := wire.ParseEnvelope(m.Payload)
				if err != nil {
					t.Fatal(err)
				}
				d, err := wire.ParseModuleData(e.Data)
				if err != nil {
					t.Fatal(err)
				}
				what := e.Action + " " + d.UUID()
				if ids[what] == nil {
					ids[what] = map[string]bool{}
				}
				ids[what][e.ObjectID] = true
				times[what]++
			}
			for what, want := range map[string]struct{ names, times int }{"create a": {1, 1}, "create b": {2, 3}} {
				if len(ids[what]) != want.names {
					t.Errorf("%s was ordered under %d names, want %d: %v", what, len(ids[what]), want.names, ids[what])
				}
				// Told, and killed before that was noted, an order is repeated under its name.
				if times[what] != want.times && point != "orchestrator.transition.told" {
					t.Errorf("%s was ordered %d times, want %d", what, times[what], want.times)
				}
			}
		})
	}
	if visited != 4 {
		t.Errorf("%d fail points were visited", visited)
	}
}

// settled waits until the record has all orders as confirmed, so that the next process sends none again.
func (c *child) settled() {
	c.t.Helper()
	eventually(c.t, "all orders are noted as told", func() bool {
		var list struct {
			Results []struct {
				Unconfirmed bool `json:"untold"`
			}
		}
		if !c.get("/api/modules/?dead=1", &list) {
			return false
		}
		for _, m := range list.Results {
			if m.Unconfirmed {
				return false
			}
		}
		return true
	})
}
