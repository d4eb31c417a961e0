package dataplane

import (
	"context"
	"errors"
	"io"
	"net/http"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/tripod-run/tripod/test/stress"
)

// sparing is an Invoker that, like the worker, reuses its send buffer as soon as Send has returned.
type sparing struct{ instances sync.Pool }

// repeats is how often StreamingOutputCall sends the request's message.
const repeats = 8

func (s *sparing) Invoke(_ context.Context, m *Method, c Call) error {
	out, _ := s.instances.Get().(*[]byte)
	if out == nil {
		out = new([]byte)
	}
	defer s.instances.Put(out)
	*out = (*out)[:0]
	for {
		message, err := c.Receive()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		if !m.Desc.IsStreamingServer() {
			*out = append(*out, message...)
			continue
		}
		times := repeats
		if m.Desc.IsStreamingClient() {
			times = 1
		}
		for range times {
			*out = append((*out)[:0], message...)
			if err := c.Send(*out); err != nil {
				return err
			}
		}
	}
	if m.Desc.IsStreamingServer() {
		return nil
	}
	return c.Send(*out)
}

// TestFaultW8_NoForeignBytes checks over all protocols that no client gets a byte of another client's messages.
func TestFaultW8_NoForeignBytes(t *testing.T) {
	s := startServer(t, &sparing{})
	var transports []stress.Transport
	base := map[string]string{}
	for name, c := range s.httpClients(t) {
		transports = append(transports, stress.Transport{Name: name, Client: c.Client})
		base[name] = c.base
	}
	h1 := &http.Transport{TLSClientConfig: s.clientTLS(), MaxIdleConnsPerHost: 64}
	t.Cleanup(h1.CloseIdleConnections)
	transports = append(transports, stress.Transport{Name: "h1", Client: &http.Client{Transport: h1}, HTTP1: true})
	base["h1"] = "http://" + s.CleartextAddress
	methods := []*stress.Method{
		{Procedure: "UnaryCall", Type: connect.StreamTypeUnary, Exchange: func(words []string) (requests, replies [][]byte) {
			return encoded(words[:1]), encoded(words[:1])
		}},
		{Procedure: "StreamingInputCall", Type: connect.StreamTypeClient, Exchange: func(words []string) (requests, replies [][]byte) {
			return encoded(words), [][]byte{slices.Concat(encoded(words)...)}
		}},
		{Procedure: "StreamingOutputCall", Type: connect.StreamTypeServer, Exchange: func(words []string) (requests, replies [][]byte) {
			return encoded(words[:1]), slices.Repeat(encoded(words[:1]), repeats)
		}},
		{Procedure: "FullDuplexCall", Type: connect.StreamTypeBidi, Exchange: func(words []string) (requests, replies [][]byte) {
			return encoded(words), encoded(words)
		}},
	}
	for _, m := range methods {
		m.Procedure, m.Base = testPath+m.Procedure, base
	}
	o := stress.Options{Streams: 16, For: 2 * time.Second}
	if os.Getenv("TRIPOD_TEST_FULL") != "" {
		o.Streams, o.For = 64, time.Minute
	}
	stress.Run(t, methods, transports, o)
}

// encoded converts words to messages, whose encoding the data plane does not check.
func encoded(words []string) [][]byte {
	all := make([][]byte, len(words))
	for i, w := range words {
		all[i] = []byte(w)
	}
	return all
}
