package grpcclient

import (
	"context"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc/codes"

	"github.com/tripod-run/tripod/internal/component/wasihttp"
)

// hostile serves HTTP/2 without TLS by hand. The function gets the stream of the first request.
func hostile(t *testing.T, answer func(f *http2.Framer, stream uint32)) *guest {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	ctx, end := context.WithCancel(t.Context())
	var conns sync.WaitGroup
	conns.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			conns.Go(func() {
				defer conn.Close()
				defer context.AfterFunc(ctx, func() { conn.Close() })()
				if _, err := io.ReadFull(conn, make([]byte, len(http2.ClientPreface))); err != nil {
					return
				}
				f := http2.NewFramer(conn, conn)
				_ = f.WriteSettings()
				for {
					frame, err := f.ReadFrame()
					if err != nil {
						return
					}
					if h, ok := frame.(*http2.HeadersFrame); ok {
						answer(f, h.StreamID)
					}
				}
			})
		}
	})
	g := newGuest(t, "http://"+l.Addr().String())
	t.Cleanup(func() { // before the guest's own
		l.Close()
		end()
		conns.Wait()
	})
	return g
}

// fields returns an encoded header.
func fields(list ...string) []byte {
	var b strings.Builder
	e := hpack.NewEncoder(&b)
	for pair := range slices.Chunk(list, 2) {
		_ = e.WriteField(hpack.HeaderField{Name: pair[0], Value: pair[1]})
	}
	return []byte(b.String())
}

var goodHeader = []string{":status", "200", "content-type", "application/grpc"}

// TestHostileServers: what a server sends against the protocol, or without end, ends the call with a status.
func TestHostileServers(t *testing.T) {
	headers := func(f *http2.Framer, stream uint32, end bool, list ...string) {
		_ = f.WriteHeaders(http2.HeadersFrameParam{StreamID: stream, BlockFragment: fields(list...), EndStream: end, EndHeaders: true})
	}
	with := func(more ...string) []string { return append(goodHeader[:len(goodHeader):len(goodHeader)], more...) }
	for what, c := range map[string]struct {
		answer func(f *http2.Framer, stream uint32)
		code   codes.Code
		text   string
	}{
		"reset before the header": {func(f *http2.Framer, s uint32) { _ = f.WriteRSTStream(s, http2.ErrCodeEnhanceYourCalm) },
			codes.ResourceExhausted, "ENHANCE_YOUR_CALM"},
		"reset in mid-stream": {func(f *http2.Framer, s uint32) {
			headers(f, s, false, goodHeader...)
			_ = f.WriteRSTStream(s, http2.ErrCodeInternal)
		}, codes.Internal, "INTERNAL_ERROR"},
		"cancelled by the server": {func(f *http2.Framer, s uint32) {
			headers(f, s, false, goodHeader...)
			_ = f.WriteRSTStream(s, http2.ErrCodeCancel)
		}, codes.Canceled, "CANCEL"},
		"GOAWAY in mid-stream": {func(f *http2.Framer, s uint32) {
			headers(f, s, false, goodHeader...)
			_ = f.WriteGoAway(0, http2.ErrCodeInternal, nil)
		}, codes.Unavailable, ""},
		"headers without end": {func(f *http2.Framer, s uint32) {
			big := strings.Repeat("x", 10_000)
			_ = f.WriteHeaders(http2.HeadersFrameParam{StreamID: s, BlockFragment: fields(with("a", big)...)})
			for range 1000 {
				if f.WriteContinuation(s, false, fields("a", big)) != nil {
					return
				}
			}
		}, codes.Internal, "protocol"},
		"trailers without end": {func(f *http2.Framer, s uint32) {
			headers(f, s, false, goodHeader...)
			big := strings.Repeat("x", 10_000)
			_ = f.WriteHeaders(http2.HeadersFrameParam{StreamID: s, BlockFragment: fields("a", big), EndStream: true})
			for range 1000 {
				if f.WriteContinuation(s, false, fields("a", big)) != nil {
					return
				}
			}
		}, codes.Internal, "protocol"},
		"a redirect": {func(f *http2.Framer, s uint32) {
			headers(f, s, true, ":status", "307", "location", "http://127.0.0.1:1/")
		}, codes.Unknown, "307"},
		"HTTP 503": {func(f *http2.Framer, s uint32) { headers(f, s, true, ":status", "503") }, codes.Unavailable, "503"},
		"a web page": {func(f *http2.Framer, s uint32) { headers(f, s, true, ":status", "200", "content-type", "text/html") }, codes.Unknown,
			"text/html"},
		"gzip": {func(f *http2.Framer, s uint32) { headers(f, s, false, with("grpc-encoding", "gzip")...) }, codes.Internal, "gzip"},
		"a compressed message": {func(f *http2.Framer, s uint32) {
			headers(f, s, false, goodHeader...)
			_ = f.WriteData(s, false, []byte{1, 0, 0, 0, 1, 0})
		}, codes.Internal, "compressed"},
		"no trailers": {func(f *http2.Framer, s uint32) {
			headers(f, s, false, goodHeader...)
			_ = f.WriteData(s, true, nil)
		}, codes.Internal, "without sending trailers"},
		"half a prefix": {func(f *http2.Framer, s uint32) {
			headers(f, s, false, goodHeader...)
			_ = f.WriteData(s, true, []byte{0, 0})
		}, codes.Internal, "prefix"},
		"half a message": {func(f *http2.Framer, s uint32) {
			headers(f, s, false, goodHeader...)
			_ = f.WriteData(s, true, []byte{0, 0, 0, 0, 9, 1})
		}, codes.Internal, "within a message"},
		"an endless message": {func(f *http2.Framer, s uint32) {
			headers(f, s, false, goodHeader...)
			_ = f.WriteData(s, false, []byte{0, 0xff, 0xff, 0xff, 0xff})
		}, codes.ResourceExhausted, "larger than max"},
		"a malformed status": {func(f *http2.Framer, s uint32) { headers(f, s, true, with("grpc-status", "x")...) }, codes.Internal, "malformed"},
		"an unknown status": {func(f *http2.Framer, s uint32) {
			headers(f, s, true, with("grpc-status", "99", "grpc-message", "%zz")...)
		}, 99, "%zz"},
		"malformed details": {func(f *http2.Framer, s uint32) {
			headers(f, s, true, with("grpc-status", "5", "grpc-status-details-bin", "////")...)
		}, codes.NotFound, ""},
		"no HTTP/2": {func(f *http2.Framer, s uint32) { _ = f.WriteRawFrame(http2.FrameData, 0, 0, []byte("?")) }, codes.Internal, ""},
	} {
		t.Run(what, func(t *testing.T) {
			g := hostile(t, c.answer)
			g.start(t.Context(), "FullDuplexCall", func(r *Request) { r.Timeout = 30 * time.Second }).wantCode(c.code, c.text)
		})
	}
}

// TestSilentServers: a server that never answers, or never ends what it has begun, holds a call until its deadline, and a
// message that was announced is allocated only as it arrives.
func TestSilentServers(t *testing.T) {
	for what, answer := range map[string]func(f *http2.Framer, stream uint32){
		"no header": func(*http2.Framer, uint32) {},
		"no message": func(f *http2.Framer, s uint32) {
			_ = f.WriteHeaders(http2.HeadersFrameParam{StreamID: s, BlockFragment: fields(goodHeader...), EndHeaders: true})
		},
		"announced message": func(f *http2.Framer, s uint32) {
			_ = f.WriteHeaders(http2.HeadersFrameParam{StreamID: s, BlockFragment: fields(goodHeader...), EndHeaders: true})
			_ = f.WriteData(s, false, []byte{0, 0, 0x3f, 0xff, 0xff, 1})
		},
	} {
		t.Run(what, func(t *testing.T) {
			g := hostile(t, answer)
			c := g.start(t.Context(), "FullDuplexCall", func(r *Request) { r.Timeout = 300 * time.Millisecond })
			c.wantCode(codes.DeadlineExceeded, "")
			if held := g.meter.held.Load(); held > wasihttp.CallSize+2*firstRead {
				t.Errorf("%d bytes are held", held)
			}
			c = g.start(t.Context(), "FullDuplexCall")
			c.Close() // without a deadline it lasts until the guest's own call ends
		})
	}
}
