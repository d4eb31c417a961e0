package orchestrator

import (
	"encoding/json"
	"os"
	"reflect"
	"strings"
	"testing"
)

// step is one line of the recorded session of public peers.
type step struct {
	topic, payload string
	ours           bool // the orchestrator said it
	defect         bool // it should not have
}

// recorded reads testdata/trace.txt.
func recorded(t testing.TB) []step {
	t.Helper()
	text, err := os.ReadFile("testdata/trace.txt")
	if err != nil {
		t.Fatal(err)
	}
	var steps []step
	for line := range strings.Lines(string(text)) {
		f := strings.SplitN(strings.TrimSuffix(line, "\n"), " ", 4)
		if len(f) != 4 || !strings.HasPrefix(f[2], "realm/proc/") {
			continue // of a module
		}
		s := step{topic: f[2], payload: f[3]}
		switch kind := strings.Split(f[2], "/")[2]; {
		case kind == "log" && strings.HasSuffix(f[2], "/orchestrator"):
			s.ours, s.defect = true, true // it refused its own message
		case kind == "control" && strings.Count(f[2], "/") == 4:
			s.ours, s.defect = true, true // it answered an order to a manager with another one, to nobody
		case kind == "notif", kind == "reg" && strings.Contains(s.payload, "arts_resp"),
			kind == "control" && strings.Contains(s.payload, `"status": "A"`):
			s.ours = true
		case kind == "log" || kind == "profile":
			continue
		}
		steps = append(steps, s)
	}
	return steps
}

// data returns the data of a message.
func data(t testing.TB, payload string) map[string]any {
	t.Helper()
	var e struct {
		Data map[string]any `json:"data"`
	}
	if err := json.Unmarshal([]byte(payload), &e); err != nil {
		t.Fatalf("%s: %v", payload, err)
	}
	return e.Data
}

// TestRecordedSession replays the messages of the public manager and client, and compares the orchestrator's messages
// with those of the public one, apart from its defects.
func TestRecordedSession(t *testing.T) {
	b := open(t)
	var expected int
	for _, s := range recorded(t) {
		switch {
		case s.defect:
		case !s.ours:
			b.say(s.topic, s.payload)
		default:
			expected++
			var said []said
			b.link.set(func(l *link) {
				if len(l.sent) > 0 {
					said = append(said, saidOf(t, l.sent[0]))
					l.sent = l.sent[1:]
				}
			})
			if len(said) == 0 {
				t.Fatalf("not said: %s %s", s.topic, s.payload)
			}
			want, got := data(t, s.payload), said[0]
			if details, ok := want["details"].(map[string]any); ok {
				details["ka_interval_sec"] = 60.0 // ours tells managers too
			}
			if got.Topic != s.topic || !reflect.DeepEqual(got.Data, want) {
				t.Errorf("said %v\nwant %s %v", got, s.topic, want)
			}
		}
	}
	b.hears()
	if expected != 8 {
		t.Errorf("%d messages were compared", expected)
	}
	b.wantStates("33333333-0000-4000-8000-000000000001:D 33333333-0000-4000-8000-000000000002:D " +
		"33333333-0000-4000-8000-000000000003:K 33333333-0000-4000-8000-000000000004:K")
}
