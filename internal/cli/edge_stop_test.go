package cli

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/tripod-run/tripod/internal/edge/broker"
)

// TestStopOfStoppedModule: the end of a module can precede the command that asks for it.
func TestStopOfStoppedModule(t *testing.T) {
	b, err := broker.New(broker.Config{Address: "127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.Close(context.Background()) })
	mux := http.NewServeMux()
	mux.HandleFunc("GET /api/modules/relay/", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"type":"module","uuid":"m-3","name":"relay","status":"D"}`)
	})
	server := httptest.NewServer(mux)
	defer server.Close()
	out, err := edge(t, "stop", "relay", "--broker", b.URL(), "--orchestrator", server.URL)
	if err != nil || out != "tripod edge stop: module m-3 is already stopped\nm-3\n" {
		t.Errorf("stop of a dead module: got %q, error %v; want that it is stopped", out, err)
	}
	if out, err = edge(t, "stop", "nobody", "--broker", b.URL(), "--orchestrator", server.URL); err == nil || !strings.Contains(out, "no module has the uuid or the name") {
		t.Errorf("stop of an unknown module: got %q, error %v; want an error", out, err)
	}
}
