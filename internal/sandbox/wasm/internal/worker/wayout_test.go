package worker

import (
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
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

// TestNoDialerAfterTheExit: a connection to the dialer that arrives after the pod's exit is closed.
func TestNoDialerAfterTheExit(t *testing.T) {
	pair := func() (workers, dialers *os.File) {
		fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		require.NoError(t, err)
		dialers = os.NewFile(uintptr(fds[1]), "")
		t.Cleanup(func() { dialers.Close() })
		return os.NewFile(uintptr(fds[0]), ""), dialers
	}
	requireClosed := func(dialers *os.File) {
		t.Helper()
		require.NoError(t, dialers.SetReadDeadline(time.Now().Add(5*time.Second)))
		_, err := dialers.Read(make([]byte, 1))
		require.ErrorIs(t, err, io.EOF)
	}
	o := &wayOut{pod: &pod{}, plain: &http.Transport{}, h2c: &http.Transport{}}
	workers, dialers := pair()
	require.NoError(t, o.connect(workers))
	o.close()
	requireClosed(dialers)
	workers, dialers = pair()
	err := o.connect(workers)
	require.True(t, errdefs.IsFailedPrecondition(err), "connect = %v", err)
	requireClosed(dialers)
}
