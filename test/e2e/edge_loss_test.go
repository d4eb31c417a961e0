package e2e

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	paho "github.com/eclipse/paho.mqtt.golang"

	"github.com/tripod-run/tripod/test/guestbuild"
	"github.com/tripod-run/tripod/test/harness"
)

// lossModules is the number of modules of TestEdgeLosesNothing.
const lossModules = 4

// numbered counts the messages "NAME N" of modules.
type numbered struct {
	mu    sync.Mutex
	seen  map[string]map[int]int // times, by name and number
	total int
}

func (n *numbered) hear(_ paho.Client, m paho.Message) {
	name, text, _ := strings.Cut(string(m.Payload()), " ")
	number, err := strconv.Atoi(text)
	n.mu.Lock()
	defer n.mu.Unlock()
	if err != nil {
		number = -1
	}
	if n.seen[name] == nil {
		n.seen[name] = map[int]int{}
	}
	n.seen[name][number]++
	n.total++
}

// missing returns the number of messages that have not come, of those from 1 to last of each of the modules.
func (n *numbered) missing(last int) (missing, twice int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for module := range lossModules {
		all := n.seen[fmt.Sprintf("m%d", module)]
		for number := 1; number <= last; number++ {
			switch times := all[number]; {
			case times == 0:
				missing++
			case times > 1:
				twice += times - 1
			}
		}
	}
	return missing, twice
}

// TestEdgeLosesNothing: modules publish numbered messages with QoS 1 from their first moment on, while the daemon, the broker
// and the orchestrator are killed at random. A subscriber with a session gets all of them. TRIPOD_EDGE_MESSAGES is their number.
func TestEdgeLosesNothing(t *testing.T) {
	messages := 100_000
	if text := os.Getenv("TRIPOD_EDGE_MESSAGES"); text != "" {
		var err error
		if messages, err = strconv.Atoi(text); err != nil {
			t.Fatal(err)
		}
	}
	for name, inDaemon := range map[string]bool{"broker in the daemon": true, "broker in the orchestrator": false} {
		t.Run(name, func(t *testing.T) { loseNothing(t, inDaemon, messages/2) })
	}
}

func loseNothing(t *testing.T, inDaemon bool, messages int) {
	program := guestbuild.Command(t, filepath.Join(harness.Root(), "test/guests"), "./numbers")
	addr := harness.FreeAddress(t)
	url, room := "mqtt://"+addr, map[string]any{"broker.max_queued": messages + 1000, "broker.max_queued_bytes": 1 << 30}
	options := []harness.Option{harness.Edge(t, addr, url), harness.Set("edge.module_roots", []string{filepath.Dir(program)})}
	keys, broker := map[string]any{}, url
	if inDaemon {
		options[0] = harness.Edge(t, addr, "")
		for key, value := range room {
			options = append(options, harness.Set(key, value))
		}
	} else {
		keys, broker = room, "embedded"
		keys["broker.address"] = addr
	}
	d := harness.NewDaemon(t, options...)
	d.Start()
	o := harness.StartOrchestratorWith(t, broker, keys)
	o.Broker = url
	o.WaitRuntime("wasm", "A")

	heard := &numbered{seen: map[string]map[int]int{}}
	c := paho.NewClient(paho.NewClientOptions().AddBroker("tcp://" + addr).SetClientID("numbers").SetCleanSession(false).SetResumeSubs(true).
		SetAutoReconnect(true).SetMaxReconnectInterval(100 * time.Millisecond).SetConnectRetry(true).SetConnectRetryInterval(50 * time.Millisecond))
	for _, step := range []paho.Token{c.Connect(), c.Subscribe("numbers/#", 1, heard.hear)} {
		if !step.WaitTimeout(waitLimit) || step.Error() != nil {
			t.Fatal(step.Error())
		}
	}
	defer c.Disconnect(100)

	last := messages / lossModules
	for module := range lossModules {
		name := fmt.Sprintf("m%d", module)
		o.MustEdge("run", program, "--name", name, "--channel", "out=numbers/"+name+":w:1", "--", name, strconv.Itoa(last))
	}
	kills := 0
	deadline := time.Now().Add(waitLimit)
	for before := -1; ; {
		missing, twice := heard.missing(last)
		if missing == 0 {
			t.Logf("%d messages, %d kills, %d came twice", messages, kills, twice)
			return
		}
		if heard := messages - missing; heard > before {
			before, deadline = heard, time.Now().Add(waitLimit)
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d of %d messages are missing after %d kills", missing, messages, kills)
		}
		time.Sleep(time.Duration(50+rand.IntN(500)) * time.Millisecond) // pacing: the moment of the kill is random
		kills++
		if rand.IntN(2) == 0 {
			d.Kill()
			d.Start()
		} else {
			o.Kill()
			o.Start()
		}
	}
}
