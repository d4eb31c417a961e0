package cli

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// TestStopOfStoppedModule: the end of a module can precede the command that asks for it.
func TestStopOfStoppedModule(t *testing.T) {
	url := embedded(t)
	mux := http.NewServeMux()
	mux.HandleFunc("GET /api/modules/relay/", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"type":"module","uuid":"m-3","name":"relay","status":"D"}`)
	})
	server := httptest.NewServer(mux)
	defer server.Close()
	out, notes, err := edgeNotes(t, "stop", "relay", "--broker", url, "--orchestrator", server.URL)
	if err != nil || notes != "tripod edge stop: module m-3 is already stopped\n" || out != "m-3\n" {
		t.Errorf("stop of a dead module: got %q, %q, error %v; want that it is stopped", out, notes, err)
	}
	if _, notes, err = edgeNotes(t, "stop", "nobody", "--broker", url, "--orchestrator", server.URL); err == nil ||
		!strings.Contains(notes, "no module has the uuid or the name") {
		t.Errorf("stop of an unknown module: got %q, error %v; want an error", notes, err)
	}
}
