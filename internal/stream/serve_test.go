package stream

import (
	"log/slog"
	"net/http"
	"net/http/httptest"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// TestClosedServerKeepsTokens: a token that arrives at a server that is closing stays valid for the next one, and an
// unknown token holds nobody up.
func TestClosedServerKeepsTokens(t *testing.T) {
	listener, err := listen(DefaultAddress)
	if err != nil {
		t.Fatal(err)
	}
	redeemed := 0
	s := newServer(Config{Logger: slog.New(slog.DiscardHandler)}, listener, func(string, string) (any, Runtime, bool) {
		redeemed++
		return &runtimeapi.ExecRequest{}, nil, false
	})
	ask := func() int {
		w := httptest.NewRecorder()
		s.handle(kindExec)(w, httptest.NewRequest(http.MethodPost, "/exec/token", nil))
		return w.Code
	}
	if code := ask(); code != http.StatusNotFound || redeemed != 1 || s.open.Load() != 0 {
		t.Errorf("an unknown token: status %d, %d redeemed, %d open; want 404, 1, 0", code, redeemed, s.open.Load())
	}
	if err := s.Close(); err != nil {
		t.Errorf("Close = %v, want that no session is open", err)
	}
	if code := ask(); code != http.StatusServiceUnavailable || redeemed != 1 {
		t.Errorf("a token at a closed server: status %d, %d redeemed; want 503, 1", code, redeemed)
	}
}
