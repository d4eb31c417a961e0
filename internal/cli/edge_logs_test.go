package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/edge/wire"
)

// logNode answers requests for logs of the runtime rt-1, as a manager does.
func logNode(t *testing.T, url string, answer func(data map[string]any) string) {
	t.Helper()
	o := edgeOptions{broker: url, realm: "realm", protocol: 5, timeout: 10 * time.Second}
	node, err := o.connect(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(node.close)
	topics := wire.Topics{Realm: "realm", Nested: true}
	if err := node.subscribe(t.Context(), 1, topics.LogRequest("rt-1")); err != nil {
		t.Fatal(err)
	}
	go func() {
		for {
			select {
			case m := <-node.messages:
				var data map[string]any
				e, err := wire.ParseEnvelope(m.Payload)
				if err != nil || e.Action != wire.ActionLog || json.Unmarshal(e.Data, &data) != nil {
					continue
				}
				other := wire.Envelope{ObjectID: "other", Action: e.Action, Type: wire.Response, Data: []byte(`{"log":"of another request"}`)}
				for _, a := range []wire.Envelope{other, e.Answer([]byte(answer(data)))} {
					_ = node.Publish(context.Background(), topics.KeptLog("rt-1", fmt.Sprint(data["uuid"])), 1, false, a.Bytes())
				}
			case <-t.Context().Done():
				return
			}
		}
	}()
}

// TestKeptLogs: without -f, the log that the module's node keeps is printed, also of a module that has ended.
func TestKeptLogs(t *testing.T) {
	url := embedded(t)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case strings.Contains(r.URL.Path, "/m-1/"):
			fmt.Fprint(w, `{"type":"module","uuid":"m-1","name":"a","parent":"rt-1","status":"D"}`)
		case strings.Contains(r.URL.Path, "/m-2/"):
			fmt.Fprint(w, `{"type":"module","uuid":"m-2","name":"b","status":"Q"}`)
		default:
			w.WriteHeader(http.StatusNotFound)
		}
	}))
	defer server.Close()
	logNode(t, url, func(data map[string]any) string {
		if data["uuid"] == "d-1" {
			return `{"uuid":"d-1","log":"","error":"no log of an ended run is kept"}`
		}
		raw, err := json.Marshal(map[string]any{"cut": true, "log": fmt.Sprintf("%v %v %v", data["uuid"], data["previous"], data["tail"])})
		if err != nil {
			t.Error(err)
		}
		return string(raw)
	})
	at := []string{"--broker", url, "--orchestrator", server.URL}
	for want, args := range map[string][]string{"m-1 false 0\n": {"logs", "m-1"},
		"m-1 true 5\n": {"logs", "--previous", "--tail", "5", "m-1"}} {
		out, notes, err := edgeNotes(t, append(args, at...)...)
		if err != nil || out != want || !strings.Contains(notes, "the beginning of this log") {
			t.Errorf("%v: got %q, notes %q and error %v, want %q", args, out, notes, err, want)
		}
	}
	if _, err := edge(t, "pub", "-R", "-q", "1", "realm/proc/reported/rt-1",
		`{"uuid":"rt-1","modules":[{"uuid":"d-1","name":"meter","state":"finished","origin":"desired"}]}`, "--broker", url); err != nil {
		t.Fatal(err)
	}
	if _, err := edge(t, append([]string{"logs", "meter"}, at...)...); !errdefs.IsNotFound(err) ||
		!strings.Contains(err.Error(), "no log of an ended run is kept") {
		t.Errorf("logs of a module without a log: got error %v, want the node's answer", err)
	}
	if _, err := edge(t, append([]string{"logs", "-f", "m-1"}, at...)...); !errdefs.IsFailedPrecondition(err) ||
		!strings.Contains(err.Error(), "without -f") {
		t.Errorf("logs -f of a dead module: got error %v, want what to do", err)
	}
	if _, err := edge(t, append([]string{"logs", "m-2"}, at...)...); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("logs of a queued module: got error %v, want failed precondition", err)
	}
}
