package worker

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestWayOutBoundsHeaders: a transport refuses the header of a response that is larger than maxAnswerHeader.
func TestWayOutBoundsHeaders(t *testing.T) {
	for _, h2 := range []bool{false, true} {
		server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			for _, name := range []string{"A", "B", "C"} {
				w.Header().Set(name, strings.Repeat("x", maxAnswerHeader/4))
			}
			if r.URL.Path == "/big" {
				w.Header().Set("D", strings.Repeat("x", maxAnswerHeader/2)) // net/http can exceed the limit by connBuffer
			}
		}))
		server.EnableHTTP2 = h2
		server.StartTLS()
		defer server.Close()
		transport := (&wayOut{}).transport(server.Client().Transport.(*http.Transport).TLSClientConfig)
		transport.DialContext = nil
		defer transport.CloseIdleConnections()
		get := func(path string) error {
			r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL+path, nil)
			require.NoError(t, err)
			response, err := transport.RoundTrip(r)
			if err == nil {
				require.Equal(t, h2, response.ProtoMajor == 2)
				response.Body.Close()
			}
			return err
		}
		require.NoError(t, get("/small"))
		require.ErrorContains(t, get("/big"), "response header")
	}
}
