package program

import (
	"bytes"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

func TestWasiHTTP(t *testing.T) {
	r := startWorker(t, workerapi.WorkerConfig{})
	for _, reuse := range []bool{false, true} {
		p := r.serve("hello-http-c", func(s *workerapi.PodSpec) { s.Limits.Reuse = reuse })
		h3 := p.overHTTP3()
		for base, c := range map[string]*http.Client{"http://" + p.cleartext.String(): http.DefaultClient, "https://" + p.tls.String(): h3} {
			get := func(path string) (int, string) {
				t.Helper()
				resp, err := c.Get(base + path)
				require.NoError(t, err)
				defer resp.Body.Close()
				data, err := io.ReadAll(resp.Body)
				require.NoError(t, err)
				return resp.StatusCode, string(data)
			}
			code, body := get("/path")
			require.Equal(t, http.StatusOK, code)
			require.True(t, strings.HasPrefix(body, "hello from /path"), body)
			code, _ = get("/status/404")
			require.Equal(t, http.StatusNotFound, code)
			code, _ = get("/trap")
			require.Equal(t, http.StatusInternalServerError, code)
			code, _ = get("/empty")
			require.Equal(t, http.StatusInternalServerError, code)
			sent := bytes.Repeat([]byte("0123456789"), 100_000)
			resp, err := c.Post(base+"/echo", "application/octet-stream", bytes.NewReader(sent))
			require.NoError(t, err)
			back, err := io.ReadAll(resp.Body)
			resp.Body.Close()
			require.NoError(t, err)
			require.True(t, bytes.Equal(sent, back), "%d bytes came back", len(back))
		}
		require.Contains(t, p.logged("stderr"), "tripod: GET /trap: ")
		require.Equal(t, uint64(2), p.stats().Traps)
		end, err := r.Stop(t.Context(), p.ID, 0)
		require.NoError(t, err)
		require.Zero(t, end.ExitCode, "%+v", end)
	}
}
