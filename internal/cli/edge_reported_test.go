package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/edge/broker"
)

// embedded starts a broker and returns its URL.
func embedded(t *testing.T) string {
	t.Helper()
	b, err := broker.New(broker.Config{Address: "127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Close(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return b.URL()
}

// TestDesiredModules: modules of desired documents are listed from the managers' reports, also if the orchestrator or the
// broker does not answer.
func TestDesiredModules(t *testing.T) {
	url, none := embedded(t), closed(t)
	mux := http.NewServeMux()
	for path, results := range map[string]string{
		"modules":  `{"type":"module","uuid":"m-1","name":"a","parent":"rt-1","status":"A","file":"/srv/a.wasm"}`,
		"runtimes": `{"type":"runtime","uuid":"rt-1","name":"one","status":"A"},{"type":"runtime","uuid":"rt-2","name":"two","status":"D"}`,
	} {
		mux.HandleFunc("GET /api/"+path+"/{$}", func(w http.ResponseWriter, _ *http.Request) {
			fmt.Fprintf(w, `{"count":%d,"start":0,"results":[%s]}`, strings.Count(results, "uuid"), results)
		})
	}
	server := httptest.NewServer(mux)
	defer server.Close()
	for topic, report := range map[string]string{
		"realm/proc/reported/rt-1": `{"uuid":"rt-1","up":true,"modules":[
			{"uuid":"m-1","name":"a","index":0,"state":"running","origin":"control"},
			{"uuid":"d-1","name":"meter","index":1,"state":"running","origin":"desired","file":"/srv/meter.wasm","restarts":2,"exit":{"code":134,"reason":"trap"}},
			{"uuid":"d-2","name":"bad","state":"waiting","origin":"desired","error":"no such program","retry_at":"2026-01-31T12:00:00Z"},
			{"uuid":"d-3","name":"once","state":"finished","origin":"desired","exit":{"code":3,"reason":"exited"}}]}`,
		"realm/proc/reported/rt-2": `{"uuid":"rt-2","up":true,"modules":[{"uuid":"d-4","name":"gone","state":"running","origin":"desired"}]}`,
		"realm/proc/reported/rt-3": `not a report`,
	} {
		if _, err := edge(t, "pub", "-R", "-q", "1", topic, report, "--broker", url); err != nil {
			t.Fatal(err)
		}
	}
	out, notes, err := edgeNotes(t, "ps", "--broker", url, "--orchestrator", server.URL)
	rows := rowsOf(out)
	if err != nil || notes != "" || len(rows) != 5 || rows["m-1"] != "m-1 a alive orchestrator rt-1 /srv/a.wasm -" ||
		rows["d-1"] != "d-1 meter alive desired rt-1 /srv/meter.wasm trap, code 134" ||
		rows["d-2"] != "d-2 bad waiting desired rt-1 - no such program" || rows["d-4"] != "d-4 gone lost desired rt-2 - -" {
		t.Errorf("ps: got error %v, notes %q and\n%s\nwant the modules of both origins that are not dead", err, notes, out)
	}
	out, notes, err = edgeNotes(t, "ps", "-a", "--broker", url, "--orchestrator", "http://"+none)
	rows = rowsOf(out)
	if err != nil || !strings.Contains(notes, "modules of the orchestrator are not listed: no orchestrator answers") || len(rows) != 5 ||
		rows["d-3"] != "d-3 once dead desired rt-1 - exited, code 3" {
		t.Errorf("ps -a without an orchestrator: got error %v, notes %q and\n%s\nwant the modules of desired documents", err, notes, out)
	}
	out, notes, err = edgeNotes(t, "ps", "--broker", "mqtt://"+none, "--orchestrator", server.URL)
	if err != nil || !strings.Contains(notes, "modules of desired documents are not listed: no broker answers") || len(rowsOf(out)) != 2 {
		t.Errorf("ps without a broker: got error %v, notes %q and\n%s\nwant the modules of the orchestrator", err, notes, out)
	}
	for _, q := range []string{"d-2", "bad", "2"} {
		var records []map[string]any
		out, err = edge(t, "ps", q, "-o", "json", "--broker", url, "--orchestrator", server.URL)
		if err != nil || json.Unmarshal([]byte(out), &records) != nil || len(records) != 1 || records[0]["uuid"] != "d-2" ||
			records[0]["origin"] != "desired" || records[0]["error"] != "no such program" {
			t.Errorf("ps %s -o json: got error %v and\n%s\nwant the module d-2", q, err, out)
		}
	}
	if _, err = edge(t, "ps", "nobody", "--broker", url, "--orchestrator", server.URL); !errdefs.IsNotFound(err) {
		t.Errorf("ps nobody: got error %v, want not found", err)
	}
}

// rowsOf returns the rows of a table by their first cell, with one space between two cells.
func rowsOf(table string) map[string]string {
	rows := map[string]string{}
	for _, line := range strings.Split(strings.TrimSpace(table), "\n") {
		cells := strings.Fields(line)
		rows[cells[0]] = strings.Join(cells, " ")
	}
	return rows
}
