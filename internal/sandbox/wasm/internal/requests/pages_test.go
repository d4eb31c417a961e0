package requests

import (
	"io"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/net/http2"
	"google.golang.org/grpc/codes"
	pb "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/status"
)

// TestSentOnce checks that a request is not sent again after a worker has received it and died.
func TestSentOnce(t *testing.T) {
	r := newRig(t)
	r.run(testComponent, testComponent+"#0", testComponent+"#1")
	var taken atomic.Int64
	ln, err := net.Listen("unix", filepath.Join(t.TempDir(), "dying.sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	go func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			framer := http2.NewFramer(conn, conn)
			_, _ = io.ReadFull(conn, make([]byte, len(http2.ClientPreface)))
			_ = framer.WriteSettings()
			for {
				frame, err := framer.ReadFrame()
				if err != nil {
					break
				}
				if _, ok := frame.(*http2.DataFrame); ok { // the request has arrived with a part of its body
					taken.Add(1)
					break
				}
			}
			conn.Close()
		}
	}()
	r.mu.Lock()
	r.socket = ln.Addr().String()
	r.mu.Unlock()
	_, err = r.client(t).UnaryCall(t.Context(), &pb.SimpleRequest{Payload: &pb.Payload{Body: make([]byte, 1000)}})
	if status.Code(err) != codes.Unavailable || taken.Load() != 1 {
		t.Errorf("UnaryCall = %v, and the request was sent %d times; want Unavailable and once", err, taken.Load())
	}
}

// TestPages checks that a page can call a component through the node: preflight requests are routed by their path, and
// the response has the fields of CORS once.
func TestPages(t *testing.T) {
	r := newRig(t)
	r.run(testComponent, testComponent+"#5")
	url := "http://" + r.clearAddress + "/grpc.testing.TestService/UnaryCall"
	for origin, want := range map[string][]string{page: {page}, "https://evil.example": nil} {
		for _, method := range []string{http.MethodOptions, http.MethodPost} {
			request, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader("{}"))
			if err != nil {
				t.Fatal(err)
			}
			request.Header.Set("Origin", origin)
			if method == http.MethodPost {
				request.Header.Set("Content-Type", "application/json")
			} else {
				request.Header.Set("Access-Control-Request-Method", "POST")
			}
			response, err := http.DefaultClient.Do(request)
			if err != nil {
				t.Fatal(err)
			}
			response.Body.Close()
			if got := response.Header.Values("Access-Control-Allow-Origin"); !slices.Equal(got, want) {
				t.Errorf("%s from %s = %s %v, want the origin %v", method, origin, response.Status, response.Header, want)
			}
		}
	}
}
