package edgetest_test

import (
	"context"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/edge/broker"
	"github.com/tripod-run/tripod/internal/edge/manager"
	"github.com/tripod-run/tripod/internal/edge/mqtt"
	"github.com/tripod-run/tripod/internal/edge/orchestrator"
	"github.com/tripod-run/tripod/internal/edge/runtime"
	"github.com/tripod-run/tripod/internal/edge/runtime/minimal"
	"github.com/tripod-run/tripod/internal/edge/wire"
	"github.com/tripod-run/tripod/test/edgetest"
	"github.com/tripod-run/tripod/test/races"
)

const patience = 60 * time.Second

func TestMain(m *testing.M) {
	edgetest.Main()
	os.Exit(races.Run(m.Run))
}

// brokers are the brokers for playing sessions.
var brokers = map[string]func(*testing.T) string{"embedded": embedded, "mosquitto": mosquitto}

func embedded(t *testing.T) string {
	b, err := broker.New(broker.Config{Address: "127.0.0.1:0"})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, b.Close(within(t))) })
	return b.URL()
}

// mosquitto starts Debian's mosquitto on a free loopback port.
func mosquitto(t *testing.T) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	address := l.Addr().String()
	l.Close()
	_, port, _ := net.SplitHostPort(address)
	program, err := exec.LookPath("mosquitto")
	if err != nil {
		program = "/usr/sbin/mosquitto" // not in everybody's PATH
	}
	c := exec.Command(program, "-p", port)
	c.Dir = t.TempDir()
	require.NoError(t, c.Start(), "hack/setup.sh installs it")
	t.Cleanup(func() { _ = c.Process.Kill(); _ = c.Wait() })
	require.Eventually(t, func() bool {
		conn, err := net.Dial("tcp", address)
		if err == nil {
			conn.Close()
		}
		return err == nil
	}, patience, 10*time.Millisecond)
	return "mqtt://" + address
}

// within returns a context for one step, also for clean-ups after the test's own context has ended.
func within(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), patience)
	t.Cleanup(cancel)
	return ctx
}

// foreignOrchestrator and the functions below start one side of a session, and return the function that ends it.
func foreignOrchestrator(t *testing.T, url string, later bool) {
	o, err := edgetest.StartOrchestrator(url, edgetest.Realm, later)
	require.NoError(t, err)
	t.Cleanup(o.Close)
}

func ourOrchestrator(t *testing.T, url string, _ bool) { openOrchestrator(t, url) }

func openOrchestrator(t *testing.T, url string) *orchestrator.Orchestrator {
	o, err := orchestrator.Open(within(t), orchestrator.Config{
		Path: filepath.Join(t.TempDir(), "orchestrator.db"), Topics: wire.Topics{Realm: edgetest.Realm, Nested: true}, Connect: mqtt.New,
		Broker: mqtt.Config{URL: url, ClientID: "tripod-orchestrator"}, KeepaliveInterval: edgetest.KeepaliveInterval, KeepaliveMissed: 60,
	})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, o.Close(within(t))) })
	require.Eventually(t, o.Connected, patience, 5*time.Millisecond)
	return o
}

func foreignManager(t *testing.T, url string, later bool) (keepalive, end func() error) {
	m, err := edgetest.StartManager(within(t), edgetest.SessionManager(url, later))
	require.NoError(t, err)
	return func() error {
		if err := m.Keepalive(edgetest.RuntimeChan); err != nil {
			return err
		}
		return m.Keepalive(edgetest.RuntimeTwo)
	}, func() error { m.Kill(); return nil }
}

// ourManager speaks MQTT 5.
func ourManager(t *testing.T, url string, _ bool) (keepalive, end func() error) {
	return nil, startManager(t, mqtt.Config{URL: url})
}

// startManager starts our manager with three runtimes of linux/minimal, whose program is this test binary.
func startManager(t *testing.T, way mqtt.Config) (end func() error) {
	self, err := os.Executable()
	require.NoError(t, err)
	dir, err := os.MkdirTemp("", "sl")
	require.NoError(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	foreign := edgetest.SessionManager(way.URL, false)
	var runtimes []runtime.Runtime
	for i, rt := range foreign.Runtimes {
		r, err := minimal.New(minimal.Config{
			Info: runtime.Info{Type: rt.Type, Name: rt.Name, UUID: rt.UUID, APIs: rt.APIs}, Index: i + 9, Dir: dir,
			Command: []string{self}, Env: edgetest.Script{Dir: dir}.Env(), ConnectTimeout: patience,
		})
		require.NoError(t, err)
		runtimes = append(runtimes, r)
	}
	m, err := manager.Open(manager.Config{
		Root: t.TempDir(), UUID: foreign.UUID, Name: foreign.Name, Topics: wire.Topics{Realm: edgetest.Realm, Nested: true},
		MQTT: way, Runtimes: runtimes, Probation: time.Second,
	})
	require.NoError(t, err)
	return func() error { return m.Close(within(t)) }
}

// dialects are the two dialects of peers with managers; scene_test.go has the third.
var dialects = map[string]bool{"seed": false, "later": true}

// table returns the session in a dialect.
func table(later bool) edgetest.Lines {
	if later {
		return edgetest.Later(edgetest.Session())
	}
	return edgetest.Session()
}

// each runs a test with each broker and each dialect.
func each(t *testing.T, run func(t *testing.T, url string, later bool)) {
	for name, start := range brokers {
		for dialect, later := range dialects {
			t.Run(name+"/"+dialect, func(t *testing.T) { run(t, start(t), later) })
		}
	}
}

// sides are those of a session.
type sides struct {
	orchestrator func(t *testing.T, url string, later bool)
	manager      func(t *testing.T, url string, later bool) (keepalive, end func() error)
}

// play plays the session, and returns a function with the messages so far; the last may still arrive.
func play(t *testing.T, url string, s sides, later, onlyControl bool) func() edgetest.Lines {
	t.Helper()
	r, err := edgetest.Record(url)
	require.NoError(t, err)
	t.Cleanup(r.Close)
	s.orchestrator(t, url, later)
	keepalive, end := s.manager(t, url, later)
	_, err = r.Wait(within(t), 4, func(l edgetest.Line) bool { // all are registered
		return len(wire.Cut(l.Topic, "realm/proc/reg")) == 1 && edgetest.On(l.Topic, `"result"`)(l)
	})
	require.NoError(t, err)
	require.NoError(t, edgetest.Player{URL: url, Recorder: r, BeforeQuit: keepalive, OnlyControl: onlyControl, Later: later}.Play(within(t)))
	_, err = r.Wait(within(t), 2, edgetest.On("realm/proc/notif", "exited"))
	require.NoError(t, err)
	require.NoError(t, end())
	_, err = r.Wait(within(t), 1, edgetest.On("realm/proc/reg/"+edgetest.ManagerUUID, `"delete"`))
	require.NoError(t, err)
	return r.Lines
}

// The scripted peers reproduce the recorded session of public peers.
func TestForeignPeersGiveTheRecordedSession(t *testing.T) {
	each(t, func(t *testing.T, url string, later bool) {
		got := play(t, url, sides{foreignOrchestrator, foreignManager}, later, false)
		same(t, table(later), got, all)
	})
}

// same waits until a session equals the wanted one, as sorted lists.
func same(t *testing.T, want edgetest.Lines, got func() edgetest.Lines, view func(edgetest.Lines) edgetest.Lines) {
	t.Helper()
	text := func(ls edgetest.Lines) string { return strings.Join(view(ls).Normal(), "\n") }
	for end := time.Now().Add(patience); text(want) != text(got()); {
		if time.Now().After(end) {
			require.Equal(t, text(want), text(got()))
		}
		<-time.After(10 * time.Millisecond)
	}
}

func all(ls edgetest.Lines) edgetest.Lines { return ls }

// heard returns the part of a session that modules and clients see: requests, modules' messages and exits. Our manager
// reports exits with QoS 2, the public one with 0; runtime programs have their own logs.
func heard(ls edgetest.Lines) edgetest.Lines {
	some := ls.Without("realm/proc/reg", "realm/proc/log/orchestrator", "realm/proc/keepalive", "realm/proc/reported",
		"realm/g").Select(func(l edgetest.Line) bool {
		return len(wire.Cut(l.Topic, "realm/proc/log")) != 1
	})
	for i, l := range some {
		if strings.Contains(string(l.Payload), `"exited"`) {
			some[i].QoS = 2
		}
	}
	return some
}

// onlyControl returns the session of a client that sends all requests to the orchestrator's topic.
func onlyControl(ls edgetest.Lines) edgetest.Lines {
	const two = "realm/proc/control/" + edgetest.RuntimeTwo
	for i, l := range ls {
		switch {
		case l.Topic == two && strings.Contains(string(l.Payload), `"o-`):
			ls[i].Topic = "realm/proc/control"
		case l.Topic == two+"/"+edgetest.RuntimeTwo:
			ls[i].Topic = two
		}
	}
	return ls
}

func TestOurOrchestratorForForeignPeers(t *testing.T) {
	each(t, func(t *testing.T, url string, later bool) {
		got := play(t, url, sides{ourOrchestrator, foreignManager}, later, true)
		same(t, onlyControl(table(later)), got, heard)
		assert.Empty(t, got().Below("realm/proc/log/orchestrator"), "it does not hear itself")
	})
}

// A client's request on a runtime's topic reaches the manager directly, and the orchestrator learns of the module.
func TestOurOrchestratorLearnsOfModulesThatGoPastIt(t *testing.T) {
	got := play(t, embedded(t), sides{ourOrchestrator, foreignManager}, false, false)
	assert.Len(t, heard(got()).Below("app"), 4, "the modules speak with each other")
	assert.Empty(t, got().Below("realm/proc/log/orchestrator"))
}

func TestOurManagerForForeignPeers(t *testing.T) {
	each(t, func(t *testing.T, url string, later bool) {
		got := play(t, url, sides{foreignOrchestrator, ourManager}, later, false)
		same(t, table(later), got, heard)
	})
}

// pair returns the session of our own two sides, which speak the seed's dialect with each other, for a client of either.
func pair(later bool) edgetest.Lines {
	session := onlyControl(edgetest.Session())
	for i, l := range edgetest.Later(session) {
		if later && (l.Topic == "realm/proc/notif" || l.Topic == "realm/proc/control") {
			session[i] = l
		}
	}
	return session
}

// The same session on both brokers gives the same list. Our manager's reports of a module's states may skip some, and its
// announcements depend on when the orchestrator answers.
func TestOurOwnSession(t *testing.T) {
	steady := func(ls edgetest.Lines) edgetest.Lines { return ls.Without("realm/proc/reported", "realm/g") }
	for dialect, later := range dialects {
		var sessions []func() edgetest.Lines
		for name, start := range brokers {
			t.Run(name+"/"+dialect, func(t *testing.T) {
				got := play(t, start(t), sides{ourOrchestrator, ourManager}, later, true)
				same(t, pair(later), got, heard)
				sessions = append(sessions, got)
			})
		}
		same(t, sessions[0](), sessions[1], steady)
	}
}
