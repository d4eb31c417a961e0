package edgetest_test

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/edge/mqtt"
	"github.com/tripod-run/tripod/internal/edge/orchestrator"
	"github.com/tripod-run/tripod/test/edgetest"
)

// site is our manager with foreign runtime programs, a recorder, and a client; the orchestrator is ours or foreign.
type site struct {
	t      *testing.T
	heard  *edgetest.Recorder
	client *edgetest.Peer
	n      int
}

func newSite(t *testing.T, orchestrator func(*testing.T, string, bool)) *site {
	t.Helper()
	return newSiteAt(t, embedded(t), 5, orchestrator)
}

// newSiteAt is like newSite, with a given broker and MQTT version of the manager.
func newSiteAt(t *testing.T, url string, protocol int, orchestrator func(*testing.T, string, bool)) *site {
	t.Helper()
	s := &site{t: t}
	var err error
	s.heard, err = edgetest.Record(url)
	require.NoError(t, err)
	t.Cleanup(s.heard.Close)
	s.client, err = edgetest.Dial(edgetest.PeerOptions{URL: url, ID: "edgetest-client"})
	require.NoError(t, err)
	t.Cleanup(s.client.Close)
	orchestrator(t, url, false)
	end := startManager(t, mqtt.Config{URL: url, Protocol: protocol})
	t.Cleanup(func() { require.NoError(t, end()) })
	s.registered(edgetest.RuntimeMin, 1)
	s.registered(edgetest.RuntimeChan, 1)
	s.registered(edgetest.RuntimeTwo, 1)
	return s
}

// registered waits until the runtime has registered n times.
func (s *site) registered(runtime string, n int) {
	s.t.Helper()
	s.wait(n, edgetest.On("realm/proc/reg/"+runtime, `"ok"`))
}

func (s *site) wait(n int, want func(edgetest.Line) bool) edgetest.Line {
	s.t.Helper()
	l, err := s.heard.Wait(within(s.t), n, want)
	require.NoError(s.t, err)
	return l
}

// create asks for a scripted module and returns its uuid.
func (s *site) create(runtime string, argv ...string) string {
	s.t.Helper()
	s.n++
	uuid := fmt.Sprintf("module-%d", s.n)
	s.control(edgetest.Message("", "create", "arts_req", map[string]any{
		"type": "module", "uuid": uuid, "name": uuid, "parent": runtime, "filename": "/srv/wasm/x.wasm", "args": argv,
	}))
	return uuid
}

func (s *site) control(payload []byte) {
	s.t.Helper()
	require.NoError(s.t, s.client.Publish("realm/proc/control", 2, payload))
}

// log waits for a line in a module's log.
func (s *site) log(runtime, uuid, text string) {
	s.t.Helper()
	s.wait(1, edgetest.On("realm/proc/log/"+runtime+"/"+uuid, text))
}

// exit waits for the end of a module and returns the data of the message.
func (s *site) exit(runtime, uuid string) map[string]any {
	s.t.Helper()
	l := s.wait(1, func(l edgetest.Line) bool {
		text := string(l.Payload)
		return l.Topic == "realm/proc/control/"+runtime && strings.Contains(text, `"exited"`) && strings.Contains(text, `"`+uuid+`"`)
	})
	var e struct{ Data map[string]any }
	require.NoError(s.t, json.Unmarshal(l.Payload, &e))
	return e.Data
}

// witness checks that a module of "echo" still answers on its channel. It repeats the message, because a module that
// has just opened the channel may not be subscribed at the broker yet.
func (s *site) witness(topic string) {
	s.t.Helper()
	ctx := within(s.t)
	for {
		s.n++
		word := fmt.Sprintf("word-%d.", s.n)
		require.NoError(s.t, s.client.Publish(topic, 2, []byte(word)))
		try, cancel := context.WithTimeout(ctx, time.Second)
		_, err := s.heard.Wait(try, 2, edgetest.On(topic, word))
		cancel()
		if err == nil {
			return
		}
		require.NoError(s.t, ctx.Err(), "the module on %s does not answer", topic)
	}
}

// Whatever a module or its runtime does wrong, the other modules keep running, and the end of the faulty one is
// reported.
func TestWrongModulesDisturbNobody(t *testing.T) {
	s := newSite(t, foreignOrchestrator)
	witness := s.create(edgetest.RuntimeTwo, "echo", "witness/two")
	s.log(edgetest.RuntimeTwo, witness, "open")
	beside := s.create(edgetest.RuntimeChan, "echo", "witness/beside")
	s.log(edgetest.RuntimeChan, beside, "open")

	for _, argv := range []string{"badindex", "badtype", "badchannel"} {
		s.log(edgetest.RuntimeChan, s.create(edgetest.RuntimeChan, argv), "said")
	}
	wild := s.create(edgetest.RuntimeChan, "wild", "wild/#")
	s.log(edgetest.RuntimeChan, wild, "wild")
	closing := s.create(edgetest.RuntimeChan, "closing", "closing/topic")
	s.log(edgetest.RuntimeChan, closing, "closed")
	s.wait(1, edgetest.On("closing/topic", "before"))
	many := s.create(edgetest.RuntimeChan, "channels", "256")
	s.log(edgetest.RuntimeChan, many, "opened")
	s.log(edgetest.RuntimeChan, s.create(edgetest.RuntimeChan, "log", "\x83text"), "level")
	badjson := s.create(edgetest.RuntimeChan, "badjson")
	assert.Contains(t, s.exit(edgetest.RuntimeChan, badjson), "status")
	status, _ := s.exit(edgetest.RuntimeChan, s.create(edgetest.RuntimeChan, "exit", "7"))["status"].(map[string]any)
	assert.Equal(t, map[string]any{"code": 7.0, "reason": "exited", "message": ""}, status, "as the runtime gave it")
	s.witness("witness/beside")
	s.witness("witness/two")

	for _, l := range s.heard.Lines() {
		assert.NotEqual(t, "to a wildcard", string(l.Payload), "published on %s", l.Topic)
		assert.NotEqual(t, "after", string(l.Payload), "published on a closed channel")
		assert.NotContains(t, string(l.Payload), "from nowhere")
		assert.False(t, strings.HasPrefix(string(l.Payload), "\x82"), "the level prefix of %s is stripped", l.Topic)
	}
}

// A runtime program that dies or breaks the framing loses its modules, whose exits have a reason, and is started again.
func TestALostRuntimeComesBack(t *testing.T) {
	s := newSite(t, foreignOrchestrator)
	witness := s.create(edgetest.RuntimeTwo, "echo", "witness/two")
	s.log(edgetest.RuntimeTwo, witness, "open")
	for i, argv := range []string{"crash", "oversized", "truncated"} {
		s.create(edgetest.RuntimeChan, argv)
		uuid := fmt.Sprintf("module-%d", s.n)
		status, _ := s.exit(edgetest.RuntimeChan, uuid)["status"].(map[string]any)
		assert.Equal(t, "runtime-lost", status["reason"], argv)
		s.registered(edgetest.RuntimeChan, i+2)
		s.witness("witness/two")
		// What took the runtime down is not to do it again.
		require.NoError(t, s.client.Publish("realm/proc/control/"+edgetest.RuntimeChan, 2,
			edgetest.Message("", "delete", "arts_req", map[string]any{"type": "module", "uuid": uuid})))
	}
}

// A module that makes its runtime die again and again ends, and the orchestrator does not create it again. The other
// modules of that runtime run.
func TestAModuleThatKillsItsRuntimeEnds(t *testing.T) {
	var o *orchestrator.Orchestrator
	s := newSite(t, func(t *testing.T, url string, _ bool) { o = openOrchestrator(t, url) })
	beside := s.create(edgetest.RuntimeChan, "echo", "witness/beside")
	s.log(edgetest.RuntimeChan, beside, "open")
	killer := s.create(edgetest.RuntimeChan, "crash")
	last := s.create(edgetest.RuntimeChan, "echo", "witness/last")
	s.wait(1, func(l edgetest.Line) bool {
		text := string(l.Payload)
		return l.Topic == "realm/proc/control/"+edgetest.RuntimeChan && strings.Contains(text, `"runtime-crash"`) &&
			strings.Contains(text, `"`+killer+`"`)
	})
	status(t, o, "modules/"+killer, "D")
	status(t, o, "modules/"+beside, "A")
	status(t, o, "modules/"+last, "A")
	s.witness("witness/beside")
	s.witness("witness/last")
	for _, l := range s.heard.Lines() {
		if text := string(l.Payload); strings.Contains(text, `"runtime-crash"`) {
			assert.NotContains(t, text, beside)
			assert.NotContains(t, text, last)
		}
	}
}

// With more modules than a runtime can have, 128 run and the others are refused.
func TestARuntimeHas128ModulesAndNoMore(t *testing.T) {
	s := newSite(t, foreignOrchestrator)
	var first string
	for i := range channel.MaxModules {
		uuid := s.create(edgetest.RuntimeChan, "echo", fmt.Sprintf("full/%d", i))
		if i == 0 {
			first = uuid
		}
	}
	s.wait(channel.MaxModules, func(l edgetest.Line) bool { return string(l.Payload) == "open" })
	s.exit(edgetest.RuntimeChan, s.create(edgetest.RuntimeChan, "stay"))
	s.witness("full/0")
	s.witness("full/127")
	require.NoError(t, s.client.Publish("realm/proc/control/"+edgetest.RuntimeChan, 2,
		edgetest.Message("", "delete", "arts_req", map[string]any{"type": "module", "uuid": first})))
	s.exit(edgetest.RuntimeChan, first)
	s.log(edgetest.RuntimeChan, s.create(edgetest.RuntimeChan, "log", "in the free place"), "in the free place")
}

// A module can neither end its node's subscriptions, by closing a channel on the node's topics, nor publish there with
// the node's rights.
func TestModulesDoNotGovern(t *testing.T) {
	everyWay(t, func(t *testing.T, s *site) {
		own := "realm/proc/control/" + edgetest.RuntimeChan
		ear := s.create(edgetest.RuntimeChan, "hear", own+"/#")
		s.log(edgetest.RuntimeChan, ear, "open")
		everything := s.create(edgetest.RuntimeChan, "hear", "#")
		s.log(edgetest.RuntimeChan, everything, "open")
		forged := string(edgetest.Message("forged", "create", "arts_req", map[string]any{"type": "module", "uuid": "forged", "filename": "/x"}))
		for _, topic := range []string{own, "realm/proc/control", "realm/proc/reg/x", "$SL/proc/control"} {
			s.create(edgetest.RuntimeChan, "tell", topic, forged)
		}
		s.settle()
		for _, uuid := range []string{ear, everything} {
			require.NoError(t, s.client.Publish(own, 2, edgetest.Message("", "delete", "arts_req", map[string]any{"type": "module", "uuid": uuid})))
			s.exit(edgetest.RuntimeChan, uuid)
		}
		s.settle()
		s.log(edgetest.RuntimeChan, s.create(edgetest.RuntimeChan, "log", "still heard"), "still heard")
		for _, l := range s.heard.Lines() {
			assert.NotEqual(t, forged, string(l.Payload), "on %s", l.Topic)
		}
	})
}

// Messages that stop the public orchestrator, or are simply wrong, are answered on the error topic, and the next
// request is served.
func TestWrongRequestsAreAnsweredAndServingGoesOn(t *testing.T) {
	s := newSite(t, ourOrchestrator)
	witness := s.create(edgetest.RuntimeTwo, "echo", "witness/two")
	s.log(edgetest.RuntimeTwo, witness, "open")
	const errors = "realm/proc/log/orchestrator"
	for i, payload := range []string{
		"", "{", "null", `"text"`, `[]`, "\xff\xfe", strings.Repeat("[", 5000),
		`{"object_id":"w","action":"create","type":"arts_req"}`,
		`{"object_id":"w","action":"create","type":"arts_req","data":{"type":"module"}}`,
		`{"object_id":"w","action":"create","type":"arts_req","data":{"type":"module","uuid":"w","parent":"nobody","filename":"/x"}}`,
		`{"object_id":"w","action":"create","type":"arts_req","data":{"type":"module","uuid":"a/b","parent":"min","filename":"/x"}}`,
		`{"object_id":"w","action":"explode","type":"arts_req","data":{"type":"module","uuid":"w"}}`,
		`{"object_id":"w","action":"delete","type":"arts_req","data":{"type":"module","uuid":"nobody"}}`,
		string(edgetest.Message("", "create", "arts_req",
			map[string]any{"type": "module", "uuid": witness, "parent": edgetest.RuntimeTwo, "filename": "/x"})),
	} {
		s.control([]byte(payload))
		s.wait(i+1, edgetest.On(errors, `"error"`))
	}
	s.witness("witness/two")
	later := s.create(edgetest.RuntimeTwo, "log", "served")
	s.log(edgetest.RuntimeTwo, later, "served")
}
