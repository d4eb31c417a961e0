package edgetest_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/tripod-run/tripod/test/edgetest"
)

// everyWay runs a test on both brokers with both versions of MQTT.
func everyWay(t *testing.T, test func(t *testing.T, s *site)) {
	for name, start := range brokers {
		for _, protocol := range []int{5, 4} {
			t.Run(fmt.Sprintf("%s, MQTT %d", name, protocol), func(t *testing.T) {
				test(t, newSiteAt(t, start(t), protocol, foreignOrchestrator))
			})
		}
	}
}

// heardBy returns the messages that modules of "hear" have received, as "MODULE MESSAGE".
func (s *site) heardBy() []string {
	var all []string
	for _, l := range s.heard.Lines().Below("realm/proc/log") {
		if message, ok := strings.CutPrefix(string(l.Payload), "heard "); ok {
			all = append(all, l.Topic[strings.LastIndex(l.Topic, "/")+1:]+" "+message)
		}
	}
	return all
}

// Each channel receives each message once, from another module of its own or another runtime of the node and from
// outside, however the node's filters overlap. (The public manager withholds a message from all modules of the sender's
// runtime.)
func TestEachChannelHasEachMessageOnce(t *testing.T) {
	everyWay(t, func(t *testing.T, s *site) {
		var want []string
		for _, filter := range []string{"once/in", "once/#", "once/in", "once/+"} {
			for _, runtime := range []string{edgetest.RuntimeChan, edgetest.RuntimeTwo} {
				uuid := s.create(runtime, "hear", filter)
				s.log(runtime, uuid, "open")
				want = append(want, uuid+" from outside", uuid+" from inside", uuid+" from inside")
			}
		}
		s.create(edgetest.RuntimeChan, "tell", "once/in", "from inside")
		s.wait(2, edgetest.On("once/in", "from inside"))
		s.settle() // what was opened before is subscribed to
		if err := s.client.Publish("once/in", 2, []byte("from outside")); err != nil {
			t.Fatal(err)
		}
		s.wait(len(want), func(l edgetest.Line) bool { return strings.HasPrefix(string(l.Payload), "heard ") })
		s.settle()
		assert.ElementsMatch(t, want, s.heardBy())
	})
}

// settle waits until earlier messages have arrived, by sending another message the same way.
func (s *site) settle() {
	s.t.Helper()
	for _, runtime := range []string{edgetest.RuntimeChan, edgetest.RuntimeTwo} {
		topic := fmt.Sprintf("settle/%d", s.n)
		uuid := s.create(runtime, "echo", topic)
		s.log(runtime, uuid, "open")
		s.witness(topic)
	}
}

// A module's message has the QoS of its channel at the broker, and does not come back to the channel.
func TestQualityOfServiceAndOwnMessages(t *testing.T) {
	everyWay(t, func(t *testing.T, s *site) {
		s.create(edgetest.RuntimeChan, "tell", "quality", "x")
		s.wait(2, edgetest.On("quality", "x"))
		echo := s.create(edgetest.RuntimeChan, "echo", "own")
		s.log(edgetest.RuntimeChan, echo, "open")
		s.witness("own")
		s.settle()
		var levels []byte
		own := map[string]int{}
		for _, l := range s.heard.Lines() {
			if l.Topic == "quality" {
				levels = append(levels, l.QoS)
			}
			if l.Topic == "own" {
				own[string(l.Payload)]++
			}
		}
		assert.ElementsMatch(t, []byte{1, 2}, levels)
		for word, n := range own {
			assert.LessOrEqual(t, n, 2, "%s: the client's and the module's, which does not hear itself", word)
		}
	})
}

// A retained message reaches each channel that is opened later, once.
func TestRetainedMessages(t *testing.T) {
	everyWay(t, func(t *testing.T, s *site) {
		if err := s.client.PublishRetained("kept/x", 1, []byte("setting")); err != nil {
			t.Fatal(err)
		}
		var want []string
		for i, filter := range []string{"kept/x", "kept/x", "kept/#", "kept/+"} {
			uuid := s.create(edgetest.RuntimeChan, "hear", filter)
			want = append(want, uuid+" setting")
			s.wait(i+1, func(l edgetest.Line) bool { return string(l.Payload) == "heard setting" })
		}
		s.settle()
		assert.ElementsMatch(t, want, s.heardBy())
	})
}
