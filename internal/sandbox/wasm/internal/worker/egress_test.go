package worker

import (
	"bufio"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// TestEgressBoundsHeaders: a transport refuses the header of a response that is larger than maxAnswerHeader.
func TestEgressBoundsHeaders(t *testing.T) {
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
		transport := (&podEgress{}).transport(server.Client().Transport.(*http.Transport).TLSClientConfig)
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

// TestConnectionOption: a request with te has the connection option te over HTTP/1.1 on every transport, once, and never
// over HTTP/2, also when a transport repeats the request over another protocol.
func TestConnectionOption(t *testing.T) {
	sent := make(chan string, 1)
	h1 := func(conn net.Conn) { // answers a request at /first, and closes the connection at others
		for in := bufio.NewReader(conn); ; {
			var head strings.Builder
			for !strings.HasSuffix(head.String(), "\r\n\r\n") {
				line, err := in.ReadString('\n')
				if err != nil {
					return
				}
				head.WriteString(line)
			}
			if strings.HasPrefix(head.String(), "GET /again ") {
				return
			}
			sent <- head.String()
			fmt.Fprint(conn, "HTTP/1.1 204 No Content\r\n\r\n")
		}
	}
	h2 := httptest.NewUnstartedServer(http.HandlerFunc(func(_ http.ResponseWriter,
		r *http.Request) {
		sent <- fmt.Sprint(r.Proto, " ", r.Header)
	}))
	h2.EnableHTTP2 = true
	h2.StartTLS()
	defer h2.Close()
	serve := func(config *tls.Config) (address string) {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		t.Cleanup(func() { l.Close() })
		if config != nil {
			l = tls.NewListener(l, config)
		}
		go func() {
			for {
				conn, err := l.Accept()
				if err != nil {
					return
				}
				go func() {
					defer conn.Close()
					h1(conn)
				}()
			}
		}()
		return l.Addr().String()
	}
	plain, secure := serve(nil), serve(&tls.Config{Certificates: h2.TLS.Certificates, NextProtos: []string{"http/1.1"}})
	var upgraded atomic.Bool // the server speaks HTTP/2 on new connections
	o := &podEgress{}
	transport := func(config *tls.Config) *http.Transport {
		to := o.transport(config)
		to.DialContext = func(ctx context.Context, network, address string) (net.Conn, error) {
			if upgraded.Load() {
				address = h2.Listener.Addr().String()
			}
			return new(net.Dialer).DialContext(ctx, network, address)
		}
		t.Cleanup(to.CloseIdleConnections)
		return to
	}
	o.plain = transport(nil)
	o.secure.Store(transport(h2.Client().Transport.(*http.Transport).TLSClientConfig))
	get := func(way http.RoundTripper, url, te string) string {
		t.Helper()
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
		require.NoError(t, err)
		if te != "" {
			r.Header.Set("Te", te)
		}
		before := r.Header.Clone()
		response, err := way.RoundTrip(r)
		require.NoError(t, err)
		response.Body.Close()
		require.Equal(t, before, r.Header)
		return <-sent
	}
	for way, url := range map[http.RoundTripper]string{o: "http://" + plain, grpcEgress{o}: "https://" + secure} {
		for range 2 { // the second request uses the same connection
			head := get(way, url+"/first", "trailers")
			require.Equal(t, 1, strings.Count(head, "\r\nConnection: te\r\n"), head)
			require.Contains(t, head, "\r\nTe: trailers\r\n")
			require.NotContains(t, get(way, url+"/first", ""), "Connection")
		}
	}
	upgraded.Store(true)
	for _, path := range []string{"/again", "/first"} { // the server closes the connection of HTTP/1.1 at the first one
		require.Equal(t, "HTTP/2.0 map[Te:[trailers] User-Agent:[Go-http-client/2.0]]", get(o, "https://"+secure+path, "trailers"))
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
	o := &podEgress{pod: &pod{}, plain: &http.Transport{}, h2c: &http.Transport{}}
	workers, dialers := pair()
	require.NoError(t, o.connect(workers))
	o.close()
	requireClosed(dialers)
	workers, dialers = pair()
	err := o.connect(workers)
	require.True(t, errdefs.IsFailedPrecondition(err), "connect = %v", err)
	requireClosed(dialers)
}
