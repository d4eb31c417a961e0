package dataplane

import (
	"bufio"
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	pb "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/protobuf/proto"
)

// webFrame returns a message in gRPC-Web's framing.
func webFrame(t testing.TB, m proto.Message) []byte {
	t.Helper()
	b, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(b))), b...)
}

// webFrames splits a body into its messages and the text of the trailer frame.
func webFrames(t testing.TB, body []byte) (messages [][]byte, trailer string) {
	t.Helper()
	for len(body) >= 5 {
		n := 5 + int(binary.BigEndian.Uint32(body[1:]))
		if len(body) < n {
			t.Fatalf("frame of %d bytes, but only %d are left", n, len(body))
		}
		if body[0]&0x80 != 0 {
			trailer += string(body[5:n])
		} else {
			messages = append(messages, body[5:n])
		}
		body = body[n:]
	}
	if len(body) > 0 {
		t.Fatalf("%d bytes after the last frame", len(body))
	}
	return messages, trailer
}

// chunked encodes b as base64 strings of n bytes each, with padding.
func chunked(b []byte, n int) string {
	var text strings.Builder
	for len(b) > 0 {
		size := min(n, len(b))
		text.WriteString(base64.StdEncoding.EncodeToString(b[:size]))
		b = b[size:]
	}
	return text.String()
}

func decodeText(t testing.TB, text string) []byte {
	t.Helper()
	b, err := io.ReadAll(&webTextReader{ReadCloser: io.NopCloser(strings.NewReader(text))})
	if err != nil {
		t.Fatalf("%v: %q", err, text)
	}
	return b
}

func TestWebText(t *testing.T) {
	s := startServer(t, &echo{})
	clients := s.httpClients(t)
	clients["http1"] = s.http1(t)
	payload := bytes.Repeat([]byte("payload "), 5000)
	request := webFrame(t, &pb.SimpleRequest{Payload: &pb.Payload{Body: payload}})
	for way, c := range clients {
		for _, contentType := range []string{"application/grpc-web-text", "application/grpc-web-text+proto",
			"application/grpc-web-text; charset=utf-8"} {
			for _, size := range []int{1 << 20, 5, 1000, 1} {
				response, body := c.send(t, http.MethodPost, testPath+"UnaryCall", chunked(request, size), "Content-Type: "+contentType,
					"X-Grpc-Web: 1", "Echo-A: b")
				if got, want := response.Header.Get("Content-Type"), strings.TrimSuffix(contentType, "; charset=utf-8"); got != want ||
					response.Header.Get("Echo-A") != "b" {
					t.Errorf("content type over %s = %q, want %q", way, got, want)
				}
				messages, trailer := webFrames(t, decodeText(t, body))
				reply := &pb.SimpleResponse{}
				if len(messages) != 1 || proto.Unmarshal(messages[0], reply) != nil || !bytes.Equal(reply.GetPayload().GetBody(), payload) ||
					!strings.Contains(trailer, "grpc-status: 0") || !strings.Contains(trailer, "trailing-echo-a: b") {
					t.Errorf("reply to %s in strings of %d bytes over %s = %d messages, trailer %q", contentType, size, way, len(messages), trailer)
				}
			}
		}
		request := webFrame(t, &pb.SimpleRequest{ResponseStatus: &pb.EchoStatus{Code: 5, Message: "ümlaut"}})
		response, body := c.send(t, http.MethodPost, testPath+"UnaryCall", base64.StdEncoding.EncodeToString(request),
			"Content-Type: application/grpc-web-text")
		if h := response.Header; body != "" || h.Get("Grpc-Status") != "5" || h.Get("Grpc-Message") != "%C3%BCmlaut" ||
			h.Get("Content-Type") != "application/grpc-web-text" {
			t.Errorf("failed call over %s = %v, %q; want NOT_FOUND", way, h, body)
		}
		response, _ = c.send(t, http.MethodPost, testPath+"None", "", "Content-Type: application/grpc-web-text+proto")
		if h := response.Header; h.Get("Grpc-Status") != "12" || h.Get("Content-Type") != "application/grpc-web-text+proto" {
			t.Errorf("unknown method over %s = %v, want UNIMPLEMENTED", way, h)
		}
		response, body = c.send(t, http.MethodPost, testPath+"UnaryCall", "", "Content-Type: application/grpc-web-text+xml")
		if response.StatusCode != http.StatusUnsupportedMediaType {
			t.Errorf("unknown codec over %s = %s %q, want 415", way, response.Status, body)
		}
		for name, invalid := range map[string]string{"alphabet": "!!!!", "length": "AAAAAA", "url": "__--", "padding": "A==="} {
			response, body := c.send(t, http.MethodPost, testPath+"UnaryCall", invalid, "Content-Type: application/grpc-web-text")
			if h := response.Header; h.Get("Grpc-Status") != "3" {
				t.Errorf("invalid %s over %s = %v %q, want INVALID_ARGUMENT", name, way, h, body)
			}
		}
	}
}

// TestWebTextStream checks that each message of a server stream is readable when it is sent, although three bytes are
// four characters.
func TestWebTextStream(t *testing.T) {
	s := startServer(t, &echo{})
	clients := s.httpClients(t)
	clients["http1"] = s.http1(t)
	const pause = 200 * time.Millisecond
	request := &pb.StreamingOutputCallRequest{}
	for size := range int32(4) {
		request.ResponseParameters = append(request.ResponseParameters,
			&pb.ResponseParameters{Size: size, IntervalUs: int32(pause.Microseconds())})
	}
	for way, c := range clients {
		response, err := c.Post(c.base+testPath+"StreamingOutputCall", "application/grpc-web-text",
			strings.NewReader(chunked(webFrame(t, request), 4)))
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		r := bufio.NewReader(&webTextReader{ReadCloser: response.Body})
		last := time.Now()
		for i := range request.ResponseParameters {
			header := make([]byte, 5)
			if _, err := io.ReadFull(r, header); err != nil {
				t.Fatalf("message %d over %s: %v", i, way, err)
			}
			if _, err := r.Discard(int(binary.BigEndian.Uint32(header[1:]))); err != nil {
				t.Fatal(err)
			}
			if now := time.Now(); i > 0 && now.Sub(last) < pause/4 {
				t.Errorf("message %d over %s came with the previous one", i, way)
			} else {
				last = now
			}
		}
		rest, err := io.ReadAll(r)
		if _, trailer := webFrames(t, rest); err != nil || !strings.Contains(trailer, "x-count: done") {
			t.Errorf("trailer over %s = %q, %v", way, trailer, err)
		}
	}
}

func TestWebTextReader(t *testing.T) {
	want := bytes.Repeat([]byte{0, 0xfb, 0xff, 'a'}, 5000)
	for _, size := range []int{1, 2, 3, 4, 5, 3071, 3072, 3073, len(want)} {
		for name, through := range map[string]func(io.Reader) io.Reader{"byte": iotest.OneByteReader, "half": iotest.HalfReader,
			"data with EOF": iotest.DataErrReader} {
			text := strings.ReplaceAll(chunked(want, size), "AP", "A\r\nP") + "\n"
			got, err := io.ReadAll(&webTextReader{ReadCloser: io.NopCloser(through(strings.NewReader(text)))})
			if err != nil || !bytes.Equal(got, want) {
				t.Errorf("strings of %d bytes by %s = %d bytes, %v; want %d", size, name, len(got), err, len(want))
			}
		}
	}
}

func FuzzWebTextReader(f *testing.F) {
	f.Add([]byte("hello"), 3)
	f.Fuzz(func(t *testing.T, b []byte, size int) {
		got, err := io.ReadAll(&webTextReader{ReadCloser: io.NopCloser(strings.NewReader(chunked(b, max(size, 1))))})
		if err != nil || !bytes.Equal(got, b) {
			t.Errorf("read %q, %v; want %q", got, err, b)
		}
		_, _ = io.ReadAll(&webTextReader{ReadCloser: io.NopCloser(bytes.NewReader(b))})
	})
}
