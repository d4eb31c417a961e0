package cli

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
)

// TestAwaitRuntime: a module waits for a runtime to register with an orchestrator that has just started.
func TestAwaitRuntime(t *testing.T) {
	const registered = `{"type":"runtime","uuid":"rt-1","name":"wasm","status":"A"}`
	const dead = `{"type":"runtime","uuid":"rt-2","name":"other","status":"D"}`
	for name, test := range map[string]struct {
		wanted  string
		answers []string // the last one repeats
		waits   string   // what the command says that it waits for, or ""
	}{
		"registered":           {"", []string{registered}, ""},
		"the first registers":  {"", []string{"", dead, dead + "," + registered}, "a runtime"},
		"named, registered":    {"rt-1", []string{registered}, ""},
		"named, registers":     {"wasm", []string{"", registered}, `the runtime "wasm"`},
		"named, comes back":    {"other", []string{dead + "," + registered, strings.Replace(dead, `"D"`, `"A"`, 1)}, `the runtime "other"`},
		"nobody has this name": {"nobody", []string{registered}, ""}, // the orchestrator refuses
	} {
		asked := 0
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			results := test.answers[min(asked, len(test.answers)-1)]
			asked++
			fmt.Fprintf(w, `{"count":%d,"start":0,"results":[%s]}`, strings.Count(results, "uuid"), results)
		}))
		var errs bytes.Buffer
		err := (&App{Stderr: &errs}).awaitRuntime(t.Context(), &edgeOptions{orchestrator: server.URL, timeout: time.Hour}, test.wanted)
		server.Close()
		if err != nil || asked < len(test.answers) {
			t.Errorf("%s: got error %v after %d answers, want nil after %d", name, err, asked, len(test.answers))
		}
		if got := errs.String(); test.waits == "" && got != "" || !strings.Contains(got, test.waits) || strings.Count(got, "\n") > 1 {
			t.Errorf("%s: the command says %q, want one line about %q", name, got, test.waits)
		}
	}
}

func TestAwaitRuntimeEnds(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter,
		_ *http.Request) {
		fmt.Fprint(w, `{"count":0,"start":0,"results":[]}`)
	}))
	defer server.Close()
	o := &edgeOptions{orchestrator: server.URL, timeout: 1}
	if err := (&App{Stderr: io.Discard}).awaitRuntime(t.Context(), o, ""); !errdefs.IsUnavailable(err) ||
		!strings.Contains(err.Error(), "[edge] enabled") {
		t.Errorf("without a runtime: got error %v, want unavailable and what to do", err)
	}
	o = &edgeOptions{orchestrator: "http://" + closed(t), timeout: time.Hour}
	if err := (&App{Stderr: io.Discard}).awaitRuntime(t.Context(), o, ""); err != nil {
		t.Errorf("without REST: got error %v, want nil", err)
	}
}

// TestRunWaitsForRuntime runs a module before its runtime has registered. The create message must not precede the runtime.
func TestRunWaitsForRuntime(t *testing.T) {
	url, asked := embedded(t), 0
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if asked++; asked < 3 {
			fmt.Fprint(w, `{"count":0,"start":0,"results":[]}`)
			return
		}
		fmt.Fprint(w, `{"count":1,"start":0,"results":[{"type":"runtime","uuid":"rt-1","status":"A"}]}`)
	}))
	defer server.Close()
	out, notes, err := edgeNotes(t, "run", "/x.wasm", "--detach", "--uuid", "m-1", "--broker", url, "--orchestrator", server.URL)
	if err != nil || asked != 3 || !strings.Contains(notes, "waiting up to 30s for a runtime") || out != "m-1\n" {
		t.Errorf("run: got error %v after %d requests, notes %q and\n%s\nwant the uuid after 3 requests", err, asked, notes, out)
	}
}
