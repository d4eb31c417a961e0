package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"

	"github.com/quic-go/quic-go/http3"
)

// Procedures of examples/wasm/faults-c.
const (
	echoProcedure = "/faults.v1.Faults/Echo"
	spinProcedure = "/faults.v1.Faults/Spin"
)

// helloProcedure is of examples/wasm/greeter.
const helloProcedure = "/greet.v1.Greeter/SayHello"

// conn is a connection to one server, for gRPC calls.
type conn struct {
	base      string
	transport http.RoundTripper
	close     func()
}

// dial connects by HTTP/3.
func dial(addr string) *conn {
	// Authentication does not matter here, and the certificates are temporary.
	transport := &http3.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h3"}}}
	return &conn{base: "https://" + addr, transport: transport, close: func() { _ = transport.Close() }}
}

// dialCleartext connects by HTTP/2 without TLS.
func dialCleartext(addr string) *conn {
	transport := &http.Transport{Protocols: new(http.Protocols)}
	transport.Protocols.SetUnencryptedHTTP2(true)
	return &conn{base: "http://" + addr, transport: transport, close: transport.CloseIdleConnections}
}

// payload returns a request for Echo in gRPC's framing: one message with one field of size bytes.
func payload(size int) []byte {
	message := binary.AppendUvarint([]byte{1<<3 | 2}, uint64(size))
	data := make([]byte, size)
	_, _ = rand.Read(data) // Read never fails
	return framed(append(message, data...))
}

// greeting returns a request of SayHello. A name is UTF-8.
func greeting() []byte {
	frame := payload(smallSize)
	copy(frame[len(frame)-smallSize:], strings.Repeat("n", smallSize))
	return frame
}

// spin returns a request for Spin, which computes until the deadline.
func spin() []byte { return framed(nil) }

func framed(message []byte) []byte {
	frame := binary.BigEndian.AppendUint32([]byte{0}, uint32(len(message)))
	return append(frame, message...)
}

// status is a gRPC status other than OK.
type status struct{ code, message string }

func (s *status) Error() string { return fmt.Sprintf("gRPC status %s: %s", s.code, s.message) }

// call makes one unary call and returns the framed reply.
func (c *conn) call(ctx context.Context, procedure string, frame []byte) ([]byte, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, c.base+procedure, bytes.NewReader(frame))
	if err != nil {
		return nil, err
	}
	request.Header.Set("Content-Type", "application/grpc")
	request.Header.Set("Te", "trailers")
	response, err := c.transport.RoundTrip(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("HTTP status %s", response.Status)
	}
	reply := make([]byte, 0, len(frame)+64) // room for the reply of Echo or SayHello, and for one byte to detect EOF
	for {
		n, err := response.Body.Read(reply[len(reply):cap(reply)])
		reply = reply[:len(reply)+n]
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
		if len(reply) == cap(reply) {
			return nil, errors.New("the reply is much longer than the request")
		}
	}
	trailer := response.Trailer
	if code := response.Header.Get("Grpc-Status"); code != "" { // the response consists of trailers only
		trailer = response.Header
	}
	if code := trailer.Get("Grpc-Status"); code != "0" {
		return nil, &status{code, trailer.Get("Grpc-Message")}
	}
	return reply, nil
}

// echo calls Echo. It returns an error if the reply differs from the request.
func (c *conn) echo(ctx context.Context, frame []byte) error {
	reply, err := c.call(ctx, echoProcedure, frame)
	if err == nil && !bytes.Equal(reply, frame) {
		err = fmt.Errorf("the reply of %d bytes is not the request of %d", len(reply), len(frame))
	}
	return err
}

// hello calls SayHello. It returns an error if the reply does not end with the request's name and an exclamation mark.
func (c *conn) hello(ctx context.Context, frame []byte) error {
	reply, err := c.call(ctx, helloProcedure, frame)
	if name := frame[len(frame)-smallSize:]; err == nil && !bytes.HasSuffix(reply, append(slices.Clone(name), '!')) {
		err = fmt.Errorf("the reply %q does not greet", reply)
	}
	return err
}
