package dataplane

import (
	"bytes"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"connectrpc.com/connect"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	pb "google.golang.org/grpc/interop/grpc_testing"

	"github.com/tripod-run/tripod/test/until"
)

// rawHTTP2 is a client that writes frames.
type rawHTTP2 struct {
	*http2.Framer
	conn net.Conn
}

// dialRaw opens a connection of HTTP/2 over cleartext, with settings.
func dialRaw(t testing.TB, address string, settings ...http2.Setting) rawHTTP2 {
	t.Helper()
	conn, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	if _, err := io.WriteString(conn, http2.ClientPreface); err != nil {
		t.Fatal(err)
	}
	c := rawHTTP2{http2.NewFramer(conn, conn), conn}
	c.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	if err := c.WriteSettings(settings...); err != nil {
		t.Fatal(err)
	}
	return c
}

// request sends the header of a request, in frames of the allowed size.
func (c rawHTTP2) request(t testing.TB, id uint32, end bool, path string, fields ...string) {
	t.Helper()
	var block bytes.Buffer
	e := hpack.NewEncoder(&block)
	e.SetMaxDynamicTableSize(0)
	list := append([]string{":method", "POST", ":scheme", "http", ":path", path, ":authority", "a"}, fields...)
	for i := 0; i < len(list); i += 2 {
		if err := e.WriteField(hpack.HeaderField{Name: list[i], Value: list[i+1]}); err != nil {
			t.Fatal(err)
		}
	}
	first := block.Next(16 << 10)
	err := c.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: first, EndHeaders: block.Len() == 0, EndStream: end})
	for err == nil && block.Len() > 0 {
		next := block.Next(16 << 10)
		err = c.WriteContinuation(id, block.Len() == 0, next)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// TestHeaderTooLarge checks that a header over the limit is refused in the way of the protocol, and that the other
// requests of the connection are served.
func TestHeaderTooLarge(t *testing.T) {
	s := startServer(t, &echo{})
	many := []string{"content-type", "application/grpc"}
	for i := range 1000 {
		many = append(many, fmt.Sprintf("x-%d", i), strings.Repeat("y", 100))
	}
	c := dialRaw(t, s.CleartextAddress)
	c.request(t, 1, true, "/none")
	c.request(t, 3, true, testPath+"UnaryCall", "content-type", "application/json", "x-long", strings.Repeat("x", 100_000))
	c.request(t, 5, true, testPath+"UnaryCall", many...)
	c.request(t, 7, true, "/none")
	got := map[uint32]string{}
	for len(got) < 4 {
		f, err := c.ReadFrame()
		if err != nil {
			t.Fatal(err)
		}
		h, ok := f.(*http2.MetaHeadersFrame)
		if !ok {
			continue
		}
		got[h.StreamID] = h.PseudoValue("status")
		for _, field := range h.RegularFields() {
			if field.Name == "grpc-status" {
				got[h.StreamID] += " grpc-status " + field.Value
			}
		}
	}
	if fmt.Sprint(got) != "map[1:404 3:431 5:200 grpc-status 8 7:404]" {
		t.Errorf("statuses = %v", got)
	}
}

// TestMixedProtocols sends gRPC, gRPC-Web, Connect, JSON and plain HTTP on one connection at the same time, as a proxy
// does, beside a client of grpc-go and nghttp.
func TestMixedProtocols(t *testing.T) {
	s := startServer(t, &echo{})
	body := filepath.Join(t.TempDir(), "body")
	if err := os.WriteFile(body, []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	for way, secure := range map[string]*tls.Config{"cleartext": nil, "tls": s.clientTLS()} {
		t.Run(way, func(t *testing.T) {
			base := "http://" + s.CleartextAddress
			if secure != nil {
				base = "https://" + s.TLSAddress
			}
			transport := overHTTP2(secure)
			defer transport.CloseIdleConnections()
			c := &http.Client{Transport: transport}
			response, err := c.Get(base + "/none") // opens the connection that all share
			if err != nil {
				t.Fatal(err)
			}
			response.Body.Close()
			until.Holds(t, "the connections of the previous subtest are closed", func() bool { return s.Stats().Connections == 1 })
			var wg sync.WaitGroup
			defer wg.Wait()
			for _, options := range [][]connect.ClientOption{
				{connect.WithGRPC()}, {connect.WithGRPCWeb()}, {connect.WithProtoJSON()}, {}, {connect.WithGRPC(), connect.WithSendGzip()},
			} {
				client := connect.NewClient[pb.SimpleRequest, pb.SimpleResponse](c, base+testPath+"UnaryCall", options...)
				wg.Go(func() {
					for size := range 50 {
						r, err := client.CallUnary(t.Context(), connect.NewRequest(&pb.SimpleRequest{Payload: payload(size * 997)}))
						if err != nil || len(r.Msg.GetPayload().GetBody()) != size*997 {
							t.Errorf("call with %d bytes: %v", size*997, err)
							return
						}
					}
				})
			}
			wg.Go(func() {
				for range 50 {
					response, err := c.Get(base + "/none")
					if err != nil {
						t.Error(err)
						return
					}
					response.Body.Close()
					if response.StatusCode != http.StatusNotFound {
						t.Errorf("GET = %s, want 404", response.Status)
					}
				}
			})
			wg.Wait()
			if n := s.Stats().Connections; n != 1 {
				t.Errorf("%d connections, want 1", n)
			}
			if _, err := s.dial(t, secure != nil).UnaryCall(t.Context(), &pb.SimpleRequest{Payload: payload(100_000)}); err != nil {
				t.Errorf("grpc-go: %v", err)
			}
			out, err := exec.CommandContext(t.Context(), "nghttp", "-v", "--no-verify-peer", "-H:method: POST", "-Hcontent-type: application/json",
				"-d", body, base+testPath+"UnaryCall").CombinedOutput()
			if err != nil || !strings.Contains(string(out), ":status: 200") {
				t.Errorf("nghttp to %s: %v\n%s", base, err, out)
			}
		})
	}
}
