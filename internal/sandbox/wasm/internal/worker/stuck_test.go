package worker

import (
	"bytes"
	"io"
	"net"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/tripod-run/tripod/internal/component/wasi"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/grpcclient"
)

// TestStuckServer: a server that allows much and then reads nothing, not even from its socket, cannot keep a call from
// ending.
func TestStuckServer(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	go func() {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		answerOnce(conn)
		<-t.Context().Done()
	}()
	transport := (&podEgress{}).transport(nil)
	require.Positive(t, transport.HTTP2.WriteByteTimeout)
	transport.HTTP2.WriteByteTimeout = 200 * time.Millisecond
	transport.DialContext = new(net.Dialer).DialContext
	transport.Protocols = new(http.Protocols)
	transport.Protocols.SetUnencryptedHTTP2(true)
	defer transport.CloseIdleConnections()
	call, st := grpcclient.Start(t.Context(), wasi.NewState(wasi.Options{}), transport, &grpcclient.Request{
		Target: "http://" + l.Addr().String(), Method: "/a.B/C", Timeout: -1, MaxReceive: 1 << 20,
	})
	require.Nil(t, st)
	message := make([]byte, 1<<20)
	require.Eventually(t, func() bool { // the socket's buffers are full
		return call.Send(message) == grpcclient.Ended || call.Next().Kind == grpcclient.End
	}, soon, time.Millisecond)
	closed := make(chan struct{})
	go func() { call.Close(); close(closed) }()
	select {
	case <-closed:
	case <-time.After(soon):
		t.Fatal("the call does not end")
	}
}

// answerOnce reads the first request of an HTTP/2 connection, allows its body any size, answers with a header and half a
// message, and reads no more.
func answerOnce(conn net.Conn) {
	if _, err := io.ReadFull(conn, make([]byte, len(http2.ClientPreface))); err != nil {
		return
	}
	f := http2.NewFramer(conn, conn)
	_ = f.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1<<31 - 1})
	_ = f.WriteWindowUpdate(0, 1<<30)
	for {
		frame, err := f.ReadFrame()
		if err != nil {
			return
		}
		h, ok := frame.(*http2.HeadersFrame)
		if !ok {
			continue
		}
		var block bytes.Buffer
		e := hpack.NewEncoder(&block)
		_ = e.WriteField(hpack.HeaderField{Name: ":status", Value: "200"})
		_ = e.WriteField(hpack.HeaderField{Name: "content-type", Value: "application/grpc"})
		_ = f.WriteHeaders(http2.HeadersFrameParam{StreamID: h.StreamID, BlockFragment: block.Bytes(), EndHeaders: true})
		_ = f.WriteData(h.StreamID, false, make([]byte, 10_000))
		return
	}
}
