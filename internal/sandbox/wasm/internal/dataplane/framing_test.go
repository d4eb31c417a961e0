package dataplane

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"google.golang.org/grpc/codes"
	pb "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/protobuf/proto"
)

// framed puts gRPC's prefix before a message.
func framed(flags byte, message []byte) []byte {
	return append(binary.BigEndian.AppendUint32([]byte{flags}, uint32(len(message))), message...)
}

func gzipped(b []byte) []byte {
	var out bytes.Buffer
	w := gzip.NewWriter(&out)
	_, _ = w.Write(b)
	w.Close()
	return out.Bytes()
}

// post sends a gRPC request with a raw body and returns its status.
func post(t testing.TB, c httpClient, method string, header http.Header, body io.Reader) (code, message string) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, c.base+testPath+method, body)
	if err != nil {
		t.Fatal(err)
	}
	r.Header = http.Header{"Content-Type": {"application/grpc+proto"}, "Te": {"trailers"}}
	for k, v := range header {
		r.Header[k] = v
	}
	response, err := c.Do(r)
	if err != nil {
		t.Fatalf("POST to %s = %v", method, err)
	}
	defer response.Body.Close()
	if _, err := io.Copy(io.Discard, response.Body); err != nil {
		t.Fatal(err)
	}
	for _, h := range []http.Header{response.Trailer, response.Header} {
		if code := h.Get("Grpc-Status"); code != "" {
			message, _ := url.PathUnescape(h.Get("Grpc-Message"))
			return code, message
		}
	}
	return response.Status, ""
}

// TestFaultW3_Framing checks that requests with invalid framing are refused with the right code over every protocol,
// and that the next request is served. (protowit reports faults within messages.)
func TestFaultW3_Framing(t *testing.T) {
	s := startServer(t, invokerFunc(func(_ context.Context, m *Method, c Call) error {
		for {
			b, err := c.Receive()
			if err == io.EOF {
				return c.Send(nil)
			}
			if err != nil {
				return err
			}
			if !m.Desc.IsStreamingClient() {
				return c.Send(b)
			}
		}
	}), func(o *GRPCOptions, _ *Config, _ *Material) { o.MaxMessageBytes = 1 << 20 })
	withGzip := http.Header{"Grpc-Encoding": {"gzip"}}
	tests := []struct {
		name   string
		header http.Header
		body   []byte // nil means a message of 100 MiB of zeros
		code   string
		text   string
	}{
		{"truncated prefix", nil, []byte{0, 0, 0}, "3", "middle of a message"},
		{"truncated message", nil, framed(0, make([]byte, 50))[:30], "3", "middle of a message"},
		{"prefix alone", nil, []byte{0, 0, 0, 0, 9}, "3", "middle of a message"},
		{"unknown flags", nil, framed(0x80, []byte("x")), "3", "flags 0x80"},
		{"compressed without encoding", nil, framed(1, gzipped([]byte("x"))), "13", "no grpc-encoding"},
		{"unknown encoding", http.Header{"Grpc-Encoding": {"snappy"}}, framed(0, nil), "12", "snappy"},
		{"junk for gzip", withGzip, framed(1, []byte("junk")), "13", "gzip"},
		{"truncated gzip", withGzip, framed(1, gzipped(make([]byte, 1000))[:12]), "13", "gzip"},
		{"gzip bomb", withGzip, framed(1, gzipped(make([]byte, 64<<20))), "8", "decompressed"},
		{"4 GiB announced", nil, []byte{0, 0xff, 0xff, 0xff, 0xff, 1}, "8", "over the limit of 1048576"},
		{"100 MiB", nil, nil, "8", "over the limit"},
		{"one byte too long", nil, framed(0, make([]byte, 1<<20+1)), "8", "1048577"},
		{"bad timeout", http.Header{"Grpc-Timeout": {"soon"}}, framed(0, nil), "3", "grpc-timeout"},
		{"longest timeout", http.Header{"Grpc-Timeout": {"99999999H"}}, framed(0, nil), "0", ""},
		{"just right", nil, framed(0, make([]byte, 1<<20)), "0", ""},
		{"gzip", withGzip, framed(1, gzipped([]byte("hello"))), "0", ""},
		{"empty and compressed", withGzip, framed(1, nil), "0", ""},
	}
	for way, c := range s.httpClients(t) {
		t.Run(way, func(t *testing.T) {
			for _, test := range tests {
				for _, method := range []string{"UnaryCall", "StreamingInputCall"} {
					// Each request needs its own reader, because a client can still read it after the response.
					body := io.Reader(bytes.NewReader(test.body))
					if test.body == nil {
						body = io.MultiReader(bytes.NewReader([]byte{0, 6, 0x40, 0, 0}), io.LimitReader(zeros{}, 100<<20))
					}
					if code, text := post(t, c, method, test.header, body); code != test.code || !strings.Contains(text, test.text) {
						t.Errorf("%s, %s: status = %s %q, want %s %q", method, test.name, code, text, test.code, test.text)
					}
				}
			}
			for name, body := range map[string][]byte{"no message": nil, "two messages": append(framed(0, nil), framed(0, nil)...)} {
				if code, text := post(t, c, "UnaryCall", nil, bytes.NewReader(body)); code != "12" {
					t.Errorf("%s: status = %s %q, want 12", name, code, text)
				}
			}
			if code, _ := post(t, c, "NoSuchCall", nil, bytes.NewReader(framed(0, nil))); code != "12" {
				t.Errorf("status of an unknown method = %s, want 12", code)
			}
		})
	}
}

// TestDamagedGzip checks that damaged gzip is INTERNAL in the protocols of gRPC and INVALID_ARGUMENT in Connect.
func TestDamagedGzip(t *testing.T) {
	s := startServer(t, &echo{})
	whole := gzipped(make([]byte, 1000))
	for way, c := range s.httpClients(t) {
		for name, damaged := range map[string][]byte{"junk": []byte("junk"), "truncated": whole[:12],
			"bad checksum": append(bytes.Clone(whole[:len(whole)-8]), make([]byte, 8)...)} {
			for _, test := range []struct {
				media, encoding, method string
				body                    []byte
				want                    string
			}{
				{"application/grpc+json", "Grpc-Encoding", "UnaryCall", framed(1, damaged), "13"},
				{"application/grpc-web", "Grpc-Encoding", "UnaryCall", framed(1, damaged), "13"},
				{"application/grpc-web+json", "Grpc-Encoding", "StreamingInputCall", framed(1, damaged), "13"},
				{"application/connect+proto", "Connect-Content-Encoding", "StreamingInputCall", framed(1, damaged), "invalid_argument"},
				{"application/json", "Content-Encoding", "UnaryCall", damaged, "invalid_argument"},
			} {
				response, body := c.send(t, http.MethodPost, testPath+test.method, string(test.body), "Content-Type: "+test.media,
					test.encoding+": gzip")
				if got := body + response.Header.Get("Grpc-Status") + response.Trailer.Get("Grpc-Status"); !strings.Contains(got, test.want) {
					t.Errorf("%s with %s over %s = %s %q, want %q", test.media, name, way, response.Status, got, test.want)
				}
			}
			text := "grpc-status: 0\r\n"
			good := string(framed(1, gzipped(nil)))
			if _, body := c.send(t, http.MethodPost, testPath+"UnaryCall", good, "Content-Type: application/grpc-web",
				"Grpc-Encoding: gzip"); !strings.Contains(body, text) {
				t.Errorf("gzip after %s over %s = %q, want %q", name, way, body, text)
			}
		}
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

// TestFaultW3_HTTP checks that requests that are not valid gRPC requests get HTTP errors.
func TestFaultW3_HTTP(t *testing.T) {
	s := startServer(t, &echo{})
	h2c := s.httpClients(t)["h2c"]
	h1 := httpClient{http.DefaultClient, h2c.base}
	for _, test := range []struct {
		name                      string
		client                    httpClient
		method, path, contentType string
		want                      int
	}{
		{"GET of a gRPC method", h2c, http.MethodGet, testPath + "UnaryCall", "application/grpc", 405},
		{"gRPC over HTTP/1.1", h1, http.MethodPost, testPath + "UnaryCall", "application/grpc", 505},
		{"unknown content type", h2c, http.MethodPost, testPath + "UnaryCall", "text/plain", 415},
		{"no content type", h1, http.MethodPost, testPath + "UnaryCall", "", 415},
		{"unknown path", h1, http.MethodGet, "/favicon.ico", "", 404},
		{"bad JSON", h1, http.MethodPost, testPath + "UnaryCall", "application/json", 400},
	} {
		r, err := http.NewRequestWithContext(t.Context(), test.method, test.client.base+test.path, strings.NewReader("not JSON"))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Content-Type", test.contentType)
		response, err := test.client.Do(r)
		if err != nil {
			t.Errorf("%s: request = %v", test.name, err)
			continue
		}
		response.Body.Close()
		if response.StatusCode != test.want {
			t.Errorf("%s: status = %s, want %d", test.name, response.Status, test.want)
		}
	}
}

// TestMediaTypes checks over every protocol that a content-type can have parameters and capitals, and that an unknown
// codec is refused with 415.
func TestMediaTypes(t *testing.T) {
	s := startServer(t, invokerFunc(func(_ context.Context, _ *Method, c Call) error {
		if _, err := c.Receive(); err != nil {
			return err
		}
		return c.Send(nil)
	}))
	json, empty := framed(0, []byte("{}")), framed(0, nil)
	for _, test := range []struct {
		media, method string
		body          []byte
	}{
		{"application/json", "UnaryCall", []byte("{}")}, {"application/proto", "UnaryCall", nil},
		{"application/connect+json", "StreamingOutputCall", json}, {"application/connect+proto", "StreamingOutputCall", empty},
		{"application/grpc", "UnaryCall", empty}, {"application/grpc+proto", "UnaryCall", empty}, {"application/grpc+json", "UnaryCall", json},
		{"application/grpc-web", "UnaryCall", empty}, {"application/grpc-web+proto", "UnaryCall", empty},
		{"application/grpc-web+json", "UnaryCall", json},
		{"application/grpc-web-text", "UnaryCall", []byte(base64.StdEncoding.EncodeToString(empty))},
		{"application/grpc-web-text+json", "UnaryCall", []byte(base64.StdEncoding.EncodeToString(json))},
	} {
		for way, c := range s.httpClients(t) {
			for _, given := range []string{
				test.media, test.media + "; charset=utf-8", test.media + ";charset=UTF-8", test.media + " ; charset=\"utf-8\"; v=1",
				strings.ToUpper(test.media),
			} {
				r := postAs(t, c, test.method, given, test.body, nil)
				if got := r.Header.Get("Content-Type"); r.StatusCode != http.StatusOK || got != test.media {
					t.Errorf("POST of %q over %s = %s %q, want 200 %q", given, way, r.Status, got, test.media)
				}
				for _, h := range []http.Header{r.Header, r.Trailer} {
					if code := h.Get("Grpc-Status"); code != "" && code != "0" {
						t.Errorf("POST of %q over %s: status %s %s", given, way, code, h.Get("Grpc-Message"))
					}
				}
			}
		}
	}
	for _, refused := range []string{
		"application/grpc+foo", "application/grpc+json2", "application/grpc+", "application/grpc-web+foo", "application/grpc-web-text+foo",
		"application/grpcfoo",
		"application/connect+foo", "application/foo", "application/json+foo; charset=utf-8",
	} {
		for way, c := range s.httpClients(t) {
			if r := postAs(t, c, "UnaryCall", refused, empty, nil); r.StatusCode != http.StatusUnsupportedMediaType {
				t.Errorf("POST of %q over %s = %s, want 415", refused, way, r.Status)
			}
		}
	}
}

// postAs sends a request with a raw content-type and body, and reads the response to its end.
func postAs(t *testing.T, c httpClient, method, contentType string, body []byte, header http.Header) *http.Response {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, c.base+testPath+method, bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	r.Header = http.Header{"Content-Type": {contentType}, "Te": {"trailers"}}
	maps.Copy(r.Header, header)
	response, err := c.Do(r)
	if err != nil {
		t.Fatalf("POST of %q = %v", contentType, err)
	}
	defer response.Body.Close()
	if _, err := io.Copy(io.Discard, response.Body); err != nil {
		t.Fatalf("POST of %q = %v", contentType, err)
	}
	return response
}

// TestMaxMessage checks over every protocol that the limit applies to requests, not to responses.
func TestMaxMessage(t *testing.T) {
	s := startServer(t, &echo{}, func(o *GRPCOptions, _ *Config, _ *Material) { o.MaxMessageBytes = 1000 })
	request := &pb.StreamingOutputCallRequest{ResponseParameters: []*pb.ResponseParameters{{Size: 20_000}}}
	for way, c := range s.httpClients(t) {
		for name, options := range map[string][]connect.ClientOption{
			"grpc": {connect.WithGRPC()}, "grpcweb": {connect.WithGRPCWeb()}, "connect": {}, "connect+json": {connect.WithProtoJSON()},
		} {
			client := connect.NewClient[pb.StreamingOutputCallRequest, pb.StreamingOutputCallResponse](c, c.base+testPath+"StreamingOutputCall",
				options...)
			stream, err := client.CallServerStream(t.Context(), connect.NewRequest(request))
			if err != nil {
				t.Fatal(err)
			}
			if !stream.Receive() || len(stream.Msg().GetPayload().GetBody()) != 20_000 {
				t.Errorf("%s/%s: large response = %d bytes, %v; want 20000", way, name, len(stream.Msg().GetPayload().GetBody()), stream.Err())
			}
			stream.Close()
			large := &pb.StreamingOutputCallRequest{Payload: payload(2000)}
			if stream, err = client.CallServerStream(t.Context(), connect.NewRequest(large)); err != nil {
				t.Fatal(err)
			}
			if stream.Receive() || connect.CodeOf(stream.Err()) != connect.CodeResourceExhausted {
				t.Errorf("%s/%s: large request = %v, want ResourceExhausted", way, name, stream.Err())
			}
			stream.Close()
		}
	}
}

// TestMetadataWithoutMessage checks that header metadata is sent in the header, not in the trailer, even if the
// response has no message.
func TestMetadataWithoutMessage(t *testing.T) {
	s := startServer(t, invokerFunc(func(_ context.Context, _ *Method, c Call) error {
		if err := SetMetadata(c.ResponseHeader(), "x-head", []byte("1")); err != nil {
			return err
		}
		if err := SetMetadata(c.ResponseTrailer(), "x-tail", []byte("2")); err != nil {
			return err
		}
		return Errorf(codes.Aborted, "no message")
	}))
	message := framed(0, nil)
	for way, c := range s.httpClients(t) {
		for _, test := range []struct {
			contentType string
			body        []byte
			methods     []string
			tail        func(r *http.Response, body string) bool
		}{
			{"application/grpc", message, []string{"UnaryCall", "StreamingInputCall", "StreamingOutputCall", "FullDuplexCall"},
				func(r *http.Response, _ string) bool { return r.Trailer.Get("X-Tail") == "2" }},
			{"application/grpc+json", message, []string{"UnaryCall", "StreamingInputCall", "StreamingOutputCall", "FullDuplexCall"},
				func(r *http.Response, _ string) bool { return r.Trailer.Get("X-Tail") == "2" }},
			{"application/grpc-web+proto", message, []string{"UnaryCall", "StreamingInputCall", "StreamingOutputCall", "FullDuplexCall"},
				func(_ *http.Response, body string) bool {
					return strings.Contains(body, "x-tail: 2") && !strings.Contains(body, "x-head")
				}},
			{"application/connect+proto", message, []string{"StreamingInputCall", "StreamingOutputCall", "FullDuplexCall"},
				func(_ *http.Response, body string) bool {
					return strings.Contains(body, `"X-Tail":["2"]`) && !strings.Contains(body, "X-Head")
				}},
			{"application/proto", nil, []string{"UnaryCall"},
				func(r *http.Response, _ string) bool { return r.Header.Get("Trailer-X-Tail") == "2" }},
		} {
			for _, method := range test.methods {
				r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, c.base+testPath+method, bytes.NewReader(test.body))
				if err != nil {
					t.Fatal(err)
				}
				r.Header = http.Header{"Content-Type": {test.contentType}, "Te": {"trailers"}}
				response, err := c.Do(r)
				if err != nil {
					t.Fatal(err)
				}
				body, err := io.ReadAll(response.Body)
				response.Body.Close()
				if err != nil || response.Header.Get("X-Head") != "1" || response.Header.Get("X-Tail") != "" || response.Trailer.Get("X-Head") != "" {
					t.Errorf("%s, %s %s: header = %v, trailer = %v, %v", way, test.contentType, method, response.Header, response.Trailer, err)
				}
				if !test.tail(response, string(body)) {
					t.Errorf("%s, %s %s: trailer metadata is missing in header %v, trailer %v, body %q", way, test.contentType, method, response.Header,
						response.Trailer, body)
				}
			}
		}
	}
}

func TestPercentEncode(t *testing.T) {
	for in, want := range map[string]string{"": "", "plain text ~": "plain text ~", "100 %": "100 %25", "ü\n": "%C3%BC%0A",
		"\x7f\xff": "%7F%FF"} {
		if got := percentEncode(in); got != want {
			t.Errorf("percentEncode(%q) = %q, want %q", in, got, want)
		}
	}
}

// TestEchoedMetadata checks over every protocol that a component can send on all metadata that it gets, whatever HTTP
// allows in the client's header.
func TestEchoedMetadata(t *testing.T) {
	s := startServer(t, &echo{})
	clients := s.httpClients(t)
	clients["http1"] = s.http1(t)
	for way, c := range clients {
		for media, body := range map[string][]byte{"application/json": []byte("{}"), "application/grpc": framed(0, nil),
			"application/grpc-web": framed(0, nil)} {
			if way == "http1" && media == "application/grpc" {
				continue
			}
			r := postAs(t, c, "UnaryCall", media, body, http.Header{
				"Echo-Tab": {"a\tb"}, "Echo-High": {"S\u00e3o Paulo"}, "Echo-Latin": {"\xff"}, "Echo-X!y": {"1"}, "Echo-Empty": {""},
				"Echo-Both": {"\x80", "good"}, "Echo-Raw-Bin": {"\xff", "AAE"},
			})
			for key, want := range map[string][]string{
				"Echo-Tab": {"a b"}, "Echo-High": nil, "Echo-Latin": nil, "Echo-X!y": nil, "Echo-Empty": {""}, "Echo-Both": {"good"},
				"Echo-Raw-Bin": {"AAE"},
			} {
				if got := r.Header[key]; r.StatusCode != http.StatusOK || !slices.Equal(got, want) {
					t.Errorf("%s over %s: %s, %s = %q, want %q", media, way, r.Status, key, got, want)
				}
			}
		}
	}
}

func TestMetadataRules(t *testing.T) {
	h := http.Header{}
	for key, value := range map[string]string{
		"Upper": "x", "": "x", "grpc-status": "0", "content-type": "x", "te": "x", "a b": "x", "key": "new\nline", "x-ü": "x", ":path": "x",
	} {
		if err := SetMetadata(h, key, []byte(value)); err == nil {
			t.Errorf("SetMetadata(%q, %q) = nil, want an error", key, value)
		}
	}
	if len(h) != 0 {
		t.Errorf("header after refused metadata = %v, want none", h)
	}
	for k := range Metadata(http.Header{"X-Bin": {"!!", "?"}, "Grpc-Timeout": {"1S"}, "Content-Type": {"x"}}) {
		t.Errorf("Metadata yields %s, want nothing", k)
	}
	n := 0
	for k, v := range Metadata(http.Header{"X-Bin": {"AQ==, Ag", "Aw"}}) {
		if n++; k != "x-bin" || len(v) != 1 || v[0] != byte(n) {
			t.Errorf("value %d = %s %v", n, k, v)
		}
	}
	if n != 3 {
		t.Errorf("Metadata yields %d values, want 3", n)
	}
}

// TestMetadataLists: a list in a header does not become many times as large as the header.
func TestMetadataLists(t *testing.T) {
	for what, header := range map[string]http.Header{
		"a long key": {strings.Repeat("K", 30<<10) + "-Bin": {strings.Repeat("AQ,", 10<<10)}},
		"no values":  {"X-Bin": {strings.Repeat(",", 60<<10)}},
		"two fields": {"X-Bin": {strings.Repeat("AQ,", 500)}, "Y-Bin": {strings.Repeat("AQ,", 500)}},
	} {
		size := 0
		for k, v := range Metadata(header) {
			if size += len(k) + len(v) + valueCost; size > 2*maxListed {
				t.Fatalf("%s: Metadata yields more than %d bytes", what, 2*maxListed)
			}
		}
	}
	n := 0
	for range Metadata(http.Header{"X-Bin": {strings.Repeat("AQ,", 60<<10), "AQ"}, "Y": {"a,b"}}) {
		n++
	}
	if n != 2 {
		t.Errorf("Metadata yields %d values beside a list that is too long, want 2", n)
	}
}

// FuzzReceive checks that arbitrary bytes do not make Receive panic or return more than the limit.
func FuzzReceive(f *testing.F) {
	message, _ := proto.Marshal(&pb.SimpleRequest{Payload: payload(10)})
	f.Add(framed(0, message), false)
	f.Add(framed(1, gzipped(message)), true)
	f.Add([]byte{0, 0xff, 0xff, 0xff, 0xff}, false)
	f.Fuzz(func(t *testing.T, body []byte, compressed bool) {
		const limit = 4096
		c := &grpcCall{
			request: &http.Request{Body: io.NopCloser(bytes.NewReader(body)), Header: http.Header{}}, max: limit,
			clientStreams: true, compressedIn: compressed,
		}
		defer c.free()
		for {
			b, err := c.Receive()
			if len(b) > limit {
				t.Fatalf("Receive returned %d bytes, over the limit of %d", len(b), limit)
			}
			if err != nil {
				if _, ok := errors.AsType[*Status](err); !ok && err != io.EOF {
					t.Fatalf("Receive = %v, want a Status or EOF", err)
				}
				return
			}
		}
	})
}
