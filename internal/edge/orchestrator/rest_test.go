package orchestrator

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// get sends a GET request and decodes the answer, which must be JSON.
func get(t *testing.T, b *bench, path string) (int, map[string]any) {
	t.Helper()
	w := httptest.NewRecorder()
	b.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
	var body map[string]any
	if err := json.Unmarshal(w.Body.Bytes(), &body); err != nil || w.Header().Get("Content-Type") != "application/json" {
		t.Errorf("GET %s: %s %s: %v", path, w.Header(), w.Body, err)
	}
	return w.Code, body
}

func uuids(list map[string]any) string {
	var all []string
	results, _ := list["results"].([]any)
	for _, r := range results {
		all = append(all, fmt.Sprint(r.(map[string]any)["uuid"]))
	}
	return fmt.Sprint(list["count"], list["start"], all)
}

func TestLists(t *testing.T) {
	b := open(t)
	if _, all := get(t, b, "/api/modules/"); uuids(all) != "0 0 []" || all["results"] == nil {
		t.Errorf("no modules: %v", all)
	}
	b.node(2, "r1", "r2")
	for _, m := range []string{"a", "b", "c", "d"} {
		b.create(m, "r1", "")
	}
	b.exited("r1", "a", `{"code":3,"reason":"exited"}`)
	for path, want := range map[string]string{
		"/api/runtimes/":                  "2 0 [r1 r2]",
		"/api/runtimes":                   "2 0 [r1 r2]",
		"/api/modules/":                   "3 0 [b c d]",
		"/api/modules/?dead=1":            "4 0 [a b c d]",
		"/api/modules/?start=1&limit=1":   "3 1 [c]",
		"/api/modules/?limit=0":           "3 0 []",
		"/api/modules/?start=4000000":     "3 131072 []",
		"/api/queued/":                    "1 0 [d]",
		"/api/queued/?start=1":            "1 1 []",
		"/api/modules/?limit=2147483647":  "3 0 [b c d]",
		"/api/modules/?start=0&unknown=1": "3 0 [b c d]",
	} {
		if code, got := get(t, b, path); code != http.StatusOK || uuids(got) != want {
			t.Errorf("GET %s: %d %s, want %s", path, code, uuids(got), want)
		}
	}
	for _, path := range []string{"/api/modules/?start=-1", "/api/runtimes/?limit=many", "/api/queued/?start=99999999999999999999"} {
		if code, got := get(t, b, path); code != http.StatusBadRequest || got["error"] == "" {
			t.Errorf("GET %s: got %d %v, want %d and an error", path, code, got, http.StatusBadRequest)
		}
	}
}

func TestOne(t *testing.T) {
	b := open(t)
	b.node(3, "11111111-0000-4000-8000-000000000001", "22222222-0000-4000-8000-000000000002")
	r1 := "11111111-0000-4000-8000-000000000001"
	b.create("aaaa-1", r1, `,"custom":7`)
	b.create("bbbb-2", r1, "")
	b.say("realm/proc/control", envelope("create", `{"type":"module","uuid":"cccc-1","name":"bbbb-2","parent":"`+r1+`"}`))
	b.say("realm/proc/keepalive/"+r1, beatOf(r1))
	b.exited(r1, "aaaa-1", `"exited","exit_code":3`)
	for path, want := range map[string]string{
		"/api/modules/aaaa-1/":         "aaaa-1",
		"/api/modules/aaaa-1":          "aaaa-1",
		"/api/modules/n-aaaa-1/":       "aaaa-1", // by name
		"/api/modules/bbbb-2/":         "bbbb-2", // the uuid before the name
		"/api/modules/-1/":             "cccc-1", // by the end: the living one
		"/api/runtimes/000000000002/":  "22222222-0000-4000-8000-000000000002",
		"/api/runtimes/name-" + r1:     r1,
		"/api/runtimes/" + r1 + "/?x=": r1,
	} {
		if code, got := get(t, b, path); code != http.StatusOK || got["uuid"] != want {
			t.Errorf("GET %s: got %d %v, want the record %s", path, code, got, want)
		}
	}
	_, m := get(t, b, "/api/modules/aaaa-1/")
	if m["status"] != "D" || m["custom"] != 7.0 || m["parent"] != r1 || fmt.Sprint(m["exit"]) != "map[exit_code:3 status:exited]" ||
		m["type"] != "module" {
		t.Errorf("a dead module is %v", m)
	}
	_, r := get(t, b, "/api/runtimes/"+r1+"/")
	if uuids(map[string]any{"results": r["children"]}) != "<nil> <nil> [bbbb-2 cccc-1]" || r["keepalive"] == nil || r["max_nmodules"] != 3.0 ||
		r["status"] != "A" {
		t.Errorf("a runtime is %v", r)
	}
	for _, path := range []string{"/api/modules/nope/", "/api/runtimes/aaaa-1/", "/", "/api/", "/api/modules/a/b/", "/api/queued/a/",
		"/api/modules/%00/"} {
		if code, got := get(t, b, path); code != http.StatusNotFound || got["error"] == nil {
			t.Errorf("GET %s: got %d %v, want %d and an error", path, code, got, http.StatusNotFound)
		}
	}
}

func TestOnlyGETIsServed(t *testing.T) {
	b := open(t)
	for _, method := range []string{http.MethodPost, http.MethodPut, http.MethodDelete} {
		w := httptest.NewRecorder()
		b.Handler().ServeHTTP(w, httptest.NewRequest(method, "/api/modules/", strings.NewReader("{}")))
		if w.Code != http.StatusMethodNotAllowed || w.Header().Get("Allow") == "" {
			t.Errorf("%s is answered with %d, want %d and an Allow header", method, w.Code, http.StatusMethodNotAllowed)
		}
	}
}

func TestMetricsAndHealth(t *testing.T) {
	b := open(t)
	b.node(3, "r1")
	b.create("a", "r1", "")
	b.say("realm/proc/control", "junk")
	w := httptest.NewRecorder()
	b.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	for _, want := range []string{
		`tripod_orchestrator_records{status="A",type="module"} 1`, `tripod_orchestrator_slots{of="used",runtime="r1"} 1`,
		`tripod_orchestrator_messages_total{result="refused",topic="control"} 1`, `tripod_orchestrator_broker_connected 1`,
	} {
		if !strings.Contains(w.Body.String(), want) {
			t.Errorf("no %s in /metrics", want)
		}
	}
	if code, got := get(t, b, "/healthz"); code != http.StatusOK || got["status"] != "ok" {
		t.Errorf("GET /healthz: got %d %v, want 200 and ok", code, got)
	}
	b.link.set(func(l *link) { l.away = true })
	if code, _ := get(t, b, "/healthz"); code != http.StatusServiceUnavailable {
		t.Errorf("health without a broker is %d", code)
	}
}

func TestServeEndsWithItsContext(t *testing.T) {
	b := open(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- b.Serve(ctx, l) }()
	resp, err := http.Get("http://" + l.Addr().String() + "/api/queued/")
	if err != nil {
		t.Fatal(err)
	}
	body, _ := io.ReadAll(resp.Body)
	resp.Body.Close()
	if strings.TrimSpace(string(body)) != `{"count":0,"results":[],"start":0}` {
		t.Errorf("GET /api/queued/ answered %s, want an empty list", body)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
