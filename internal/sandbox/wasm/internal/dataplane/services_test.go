package dataplane

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/base64"
	"io"
	"net"
	"net/http"
	"net/url"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"go.opentelemetry.io/otel/attribute"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	pb "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/reflection/grpc_reflection_v1alpha"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"
)

// TestHealth calls the health service with grpc-go, like the kubelet's probes.
func TestHealth(t *testing.T) {
	health := NewHealth("grpc.testing.TestService")
	s := startServer(t, &echo{}, func(o *GRPCOptions, _ *Config, _ *Material) {
		o.Health = health
		o.Limiter = NewLimiter(1, 0)
		o.MaxTimeout = 50 * time.Millisecond // neither limit applies to health
	})
	s.metrics.method("x")
	client := healthpb.NewHealthClient(s.dialConn(t, true))
	for _, service := range []string{"", "grpc.testing.TestService"} {
		got, err := client.Check(t.Context(), &healthpb.HealthCheckRequest{Service: service})
		if err != nil || got.Status != healthpb.HealthCheckResponse_SERVING {
			t.Errorf("Check(%q) = %v, %v; want SERVING", service, got, err)
		}
	}
	if _, err := client.Check(t.Context(), &healthpb.HealthCheckRequest{Service: "none"}); status.Code(err) != codes.NotFound {
		t.Errorf("Check of an unknown service = %v, want NotFound", err)
	}
	watch, err := client.Watch(t.Context(), &healthpb.HealthCheckRequest{})
	if err != nil {
		t.Fatal(err)
	}
	unknown, err := client.Watch(t.Context(), &healthpb.HealthCheckRequest{Service: "none"})
	if err != nil {
		t.Fatal(err)
	}
	expect := func(w healthpb.Health_WatchClient, want healthpb.HealthCheckResponse_ServingStatus) {
		t.Helper()
		if got, err := w.Recv(); err != nil || got.Status != want {
			t.Errorf("Recv from Watch = %v, %v; want %v", got, err, want)
		}
	}
	expect(unknown, healthpb.HealthCheckResponse_SERVICE_UNKNOWN)
	expect(watch, healthpb.HealthCheckResponse_SERVING)
	health.SetServing(true) // sends nothing, because nothing changes
	health.SetServing(false)
	expect(watch, healthpb.HealthCheckResponse_NOT_SERVING)
	list, err := client.List(t.Context(), &healthpb.HealthListRequest{})
	if err != nil || len(list.Statuses) != 2 || list.Statuses[""].Status != healthpb.HealthCheckResponse_NOT_SERVING {
		t.Errorf("List = %v, %v; want two services that are NOT_SERVING", list, err)
	}
	// The package's own descriptor must equal the official one.
	theirs, ours := protodesc.ToFileDescriptorProto(healthpb.File_grpc_health_v1_health_proto), protodesc.ToFileDescriptorProto(healthFile())
	theirs.Options, theirs.Name, ours.Name = nil, nil, nil
	if !proto.Equal(theirs, ours) {
		t.Errorf("healthFile() =\n%v\nwant\n%v", ours, theirs)
	}
	// The service is also available as JSON.
	response, err := http.Post("http://"+s.CleartextAddress+"/grpc.health.v1.Health/Check", "application/json", strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if b, _ := io.ReadAll(response.Body); !strings.Contains(string(b), "NOT_SERVING") {
		t.Errorf("Check with JSON = %s %s, want NOT_SERVING", response.Status, b)
	}
}

// TestReflection calls server reflection like grpcurl: it lists the services and then gets the files with their
// symbols.
func TestReflection(t *testing.T) {
	conn := startServer(t, &echo{}).dialConn(t, false)
	stream, err := grpc_reflection_v1.NewServerReflectionClient(conn).ServerReflectionInfo(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ask := func(r *grpc_reflection_v1.ServerReflectionRequest) *grpc_reflection_v1.ServerReflectionResponse {
		t.Helper()
		if err := stream.Send(r); err != nil {
			t.Fatal(err)
		}
		response, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		return response
	}
	var names []string
	for _, s := range ask(&grpc_reflection_v1.ServerReflectionRequest{MessageRequest: &grpc_reflection_v1.ServerReflectionRequest_ListServices{}}).GetListServicesResponse().GetService() {
		names = append(names, s.Name)
	}
	if !slices.Equal(names, []string{
		"grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection", "grpc.testing.TestService",
	}) {
		t.Errorf("listed services = %v", names)
	}
	files := map[string]bool{}
	for _, symbol := range []string{"grpc.testing.TestService", "grpc.testing.TestService.UnaryCall", "grpc.testing.SimpleRequest",
		"grpc.health.v1.Health", "grpc.health.v1.HealthCheckRequest"} {
		response := ask(&grpc_reflection_v1.ServerReflectionRequest{MessageRequest: &grpc_reflection_v1.ServerReflectionRequest_FileContainingSymbol{FileContainingSymbol: symbol}})
		for _, b := range response.GetFileDescriptorResponse().GetFileDescriptorProto() {
			fd := &descriptorpb.FileDescriptorProto{}
			if err := proto.Unmarshal(b, fd); err != nil {
				t.Fatal(err)
			}
			files[fd.GetName()] = true
		}
		if response.GetErrorResponse() != nil {
			t.Errorf("FileContainingSymbol(%s) = %v", symbol, response)
		}
	}
	for _, want := range []string{"grpc/testing/test.proto", "grpc/testing/messages.proto", "grpc/testing/empty.proto",
		"grpc/health/v1/health.proto"} {
		if !files[want] {
			t.Errorf("files = %v, want %s among them", files, want)
		}
	}
	none := ask(&grpc_reflection_v1.ServerReflectionRequest{MessageRequest: &grpc_reflection_v1.ServerReflectionRequest_FileContainingSymbol{FileContainingSymbol: "none.Such"}})
	if codes.Code(none.GetErrorResponse().GetErrorCode()) != codes.NotFound {
		t.Errorf("FileContainingSymbol(none.Such) = %v, want NotFound", none)
	}
	alpha, err := grpc_reflection_v1alpha.NewServerReflectionClient(conn).ServerReflectionInfo(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := alpha.Send(&grpc_reflection_v1alpha.ServerReflectionRequest{MessageRequest: &grpc_reflection_v1alpha.ServerReflectionRequest_ListServices{}}); err != nil { //nolint:staticcheck // old clients use v1alpha
		t.Fatal(err)
	}
	if r, err := alpha.Recv(); err != nil ||
		len(r.GetListServicesResponse().GetService()) != len(names) { //nolint:staticcheck // old clients use v1alpha
		t.Errorf("ListServices of v1alpha = %v, %v; want %d services", r, err, len(names))
	}
}

// TestReflectionDescribesTheHost checks that a component without descriptors of the host's services is listed with them,
// once each, and that their descriptors equal the official ones.
func TestReflectionDescribesTheHost(t *testing.T) {
	own := new(protoregistry.Files)
	for _, fd := range []protoreflect.FileDescriptor{pb.File_grpc_testing_empty_proto, pb.File_grpc_testing_messages_proto,
		pb.File_grpc_testing_test_proto} {
		if err := own.RegisterFile(fd); err != nil {
			t.Fatal(err)
		}
	}
	conn := startServer(t, &echo{}, func(o *GRPCOptions, _ *Config, _ *Material) {
		o.Files, o.Methods = own, append(o.Methods, healthMethods()...) // the component serves health itself
	}).dialConn(t, false)
	stream, err := grpc_reflection_v1.NewServerReflectionClient(conn).ServerReflectionInfo(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	list := &grpc_reflection_v1.ServerReflectionRequest{MessageRequest: &grpc_reflection_v1.ServerReflectionRequest_ListServices{}}
	if err := stream.Send(list); err != nil {
		t.Fatal(err)
	}
	response, err := stream.Recv()
	if err != nil || len(response.GetListServicesResponse().GetService()) != 4 {
		t.Fatalf("ListServices = %v, %v; want four services", response, err)
	}
	for _, s := range response.GetListServicesResponse().GetService() {
		of := &grpc_reflection_v1.ServerReflectionRequest_FileContainingSymbol{FileContainingSymbol: s.Name}
		if err := stream.Send(&grpc_reflection_v1.ServerReflectionRequest{MessageRequest: of}); err != nil {
			t.Fatal(err)
		}
		if r, err := stream.Recv(); err != nil || len(r.GetFileDescriptorResponse().GetFileDescriptorProto()) == 0 {
			t.Errorf("FileContainingSymbol(%s) = %v, %v; want a file", s.Name, r, err)
		}
	}
	for version, official := range map[string]protoreflect.FileDescriptor{
		"v1":      grpc_reflection_v1.File_grpc_reflection_v1_reflection_proto,
		"v1alpha": grpc_reflection_v1alpha.File_grpc_reflection_v1alpha_reflection_proto,
	} {
		theirs, ours := protodesc.ToFileDescriptorProto(official), protodesc.ToFileDescriptorProto(reflectionFile(version))
		theirs.Options, ours.Options = nil, nil
		if !proto.Equal(theirs, ours) {
			t.Errorf("reflectionFile(%s) =\n%v\nwant\n%v", version, ours, theirs)
		}
	}
}

// TestCurl calls a method with curl: Connect's JSON over HTTP/1.1, HTTP/2 and h2c. It also checks the Alt-Svc header.
func TestCurl(t *testing.T) {
	curl, err := exec.LookPath("curl")
	if err != nil {
		t.Fatal("curl is missing; run apt-get install curl")
	}
	s := startServer(t, &echo{})
	_, port, _ := strings.Cut(s.QUICAddress, ":")
	for name, test := range map[string]struct {
		args []string
		want []string
	}{
		"http1":     {[]string{"--http1.1", "http://" + s.CleartextAddress}, []string{"HTTP/1.1 200"}},
		"h2c":       {[]string{"--http2-prior-knowledge", "http://" + s.CleartextAddress}, []string{"HTTP/2 200"}},
		"tls":       {[]string{"-k", "--http2", "https://" + s.TLSAddress}, []string{"HTTP/2 200", `alt-svc: h3=":` + port + `"`}},
		"tls-http1": {[]string{"-k", "--http1.1", "https://" + s.TLSAddress}, []string{"HTTP/1.1 200", `Alt-Svc: h3=":` + port + `"`}},
	} {
		t.Run(name, func(t *testing.T) {
			args := append([]string{"-sS", "-i", "--max-time", "10", "-H", "Content-Type: application/json", "-d",
				`{"payload":{"body":"aGVsbG8="}}`}, test.args...)
			args[len(args)-1] += testPath + "UnaryCall"
			out, err := exec.CommandContext(t.Context(), curl, args...).CombinedOutput()
			if err != nil {
				t.Fatalf("curl %q = %v: %s", args, err, out)
			}
			for _, want := range append(test.want, `"body":"aGVsbG8="`) {
				if !strings.Contains(string(out), want) {
					t.Errorf("output of curl has no %q:\n%s", want, out)
				}
			}
		})
	}
}

// TestAltSvc checks that the port of HTTP/3 is advertised only to clients that know the server's own port.
func TestAltSvc(t *testing.T) {
	s := startServer(t, &echo{})
	_, port, _ := net.SplitHostPort(s.TLSAddress)
	h1 := &http.Transport{TLSClientConfig: s.clientTLS()}
	t.Cleanup(h1.CloseIdleConnections)
	h1.TLSClientConfig.NextProtos = []string{"http/1.1"}
	for way, c := range map[string]*http.Client{"h2": s.httpClients(t)["h2"].Client, "http1": {Transport: h1}} {
		for host, want := range map[string]bool{
			s.TLSAddress: true, "pod.example:" + port: true, "[::1]:" + port: true, "pod.example:1": false, "pod.example": false, "[::1]": false,
			"127.0.0.1": false,
		} {
			r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://"+s.TLSAddress+"/", nil)
			if err != nil {
				t.Fatal(err)
			}
			r.Host = host
			response, err := c.Do(r)
			if err != nil {
				t.Fatal(err)
			}
			response.Body.Close()
			if got := response.Header.Get("Alt-Svc"); (got != "") != want {
				t.Errorf("Alt-Svc for %s over %s = %q, want one: %t", host, way, got, want)
			}
		}
	}
}

// TestTracing checks that a request's span is a child of its traceparent, and that the component gets the span's
// traceparent.
func TestTracing(t *testing.T) {
	spans := tracetest.NewInMemoryExporter()
	provider := sdktrace.NewTracerProvider(sdktrace.WithSyncer(spans))
	seen := make(chan string, 4)
	s := startServer(t, invokerFunc(func(_ context.Context, _ *Method, c Call) error {
		seen <- c.RequestHeader().Get("Traceparent")
		if _, err := c.Receive(); err != nil {
			return err
		}
		return Errorf(codes.DataLoss, "gone")
	}), func(o *GRPCOptions, _ *Config, _ *Material) { o.Tracer = provider })
	const trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
	ctx := metadata.AppendToOutgoingContext(t.Context(), "traceparent", "00-"+trace+"-"+parent+"-01")
	if _, err := s.dial(t, false).UnaryCall(ctx, &pb.SimpleRequest{}); status.Code(err) != codes.DataLoss {
		t.Fatal(err)
	}
	client := s.httpClients(t)["h2c"]
	request := connect.NewRequest(&pb.SimpleRequest{})
	request.Header().Set("Traceparent", "00-"+trace+"-"+parent+"-01")
	_, _ = connect.NewClient[pb.SimpleRequest, pb.SimpleResponse](client, client.base+testPath+"UnaryCall").CallUnary(t.Context(), request)
	eventually(t, "two spans", func() bool { return len(spans.GetSpans()) == 2 })
	for i, system := range []string{"grpc", "connect"} {
		span := spans.GetSpans()[i]
		if got := span.SpanContext.TraceID().String(); got != trace || span.Parent.SpanID().String() != parent {
			t.Errorf("trace, parent of the span = %s, %s; want %s, %s", got, span.Parent.SpanID(), trace, parent)
		}
		if got, want := <-seen, "00-"+trace+"-"+span.SpanContext.SpanID().String()+"-01"; got != want {
			t.Errorf("traceparent at the component = %s, want %s", got, want)
		}
		if span.Name != "grpc.testing.TestService/UnaryCall" || !slices.Contains(span.Attributes, attribute.String("rpc.system", system)) ||
			!slices.Contains(span.Attributes, attribute.Int("rpc.grpc.status_code", int(codes.DataLoss))) ||
			span.Status.Description != "DATA_LOSS: gone" {
			t.Errorf("span = %s %v %v", span.Name, span.Attributes, span.Status)
		}
	}
}

// TestHTTP serves a plain HTTP handler, like those of wasi:http components.
func TestHTTP(t *testing.T) {
	hold, entered := make(chan struct{}), make(chan struct{}, 1)
	metrics := NewMetrics()
	handler := NewHTTP(Options{Metrics: metrics, Limiter: NewLimiter(1, 0), MaxTimeout: time.Minute},
		http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			switch r.URL.Path {
			case "/hold":
				entered <- struct{}{}
				<-hold
			case "/panic":
				panic("in the component's host")
			}
			b, _ := io.ReadAll(r.Body)
			w.WriteHeader(http.StatusTeapot)
			_, _ = w.Write(b)
		}))
	s := startServer(t, nil, func(o *GRPCOptions, c *Config, _ *Material) { c.Handler = handler })
	for way, c := range s.httpClients(t) {
		response, err := c.Post(c.base+"/", "text/plain", strings.NewReader("hello"))
		if err != nil {
			t.Fatal(err)
		}
		b, _ := io.ReadAll(response.Body)
		response.Body.Close()
		if response.StatusCode != http.StatusTeapot || string(b) != "hello" {
			t.Errorf("POST over %s = %s %q, want 418 hello", way, response.Status, b)
		}
	}
	if _, err := http.Get("http://" + s.CleartextAddress + "/panic"); err == nil {
		t.Error("GET of a handler that panics = nil, want an aborted response")
	}
	go http.Get("http://" + s.CleartextAddress + "/hold")
	<-entered
	response, err := http.Get("http://" + s.CleartextAddress + "/")
	if err != nil || response.StatusCode != http.StatusServiceUnavailable || response.Header.Get("Retry-After") == "" {
		t.Errorf("GET over the limit = %v, %v; want 503 with Retry-After", response, err)
	}
	response.Body.Close()
	close(hold)
	eventually(t, "all requests are counted", func() bool {
		m := metrics.Snapshot()[0]
		return m.Procedure == "HTTP" && m.InFlight == 0 && m.Codes["418"] == 4 && m.Codes["503"] == 1 && m.Codes["500"] == 1 &&
			m.ReceivedBytes == 15
	})
}

// startCacheable serves TestService with a UnaryCall that the .proto declares free of side effects.
func startCacheable(t *testing.T, invoker Invoker, change ...func(*GRPCOptions, *Config, *Material)) *testServer {
	t.Helper()
	file := protodesc.ToFileDescriptorProto(pb.File_grpc_testing_test_proto)
	for _, s := range file.Service {
		for _, m := range s.Method {
			if m.GetName() == "UnaryCall" {
				m.Options = &descriptorpb.MethodOptions{IdempotencyLevel: descriptorpb.MethodOptions_NO_SIDE_EFFECTS.Enum()}
			}
		}
	}
	declared, err := protodesc.NewFile(file, protoregistry.GlobalFiles)
	if err != nil {
		t.Fatal(err)
	}
	return startServer(t, invoker, append(change, func(o *GRPCOptions, _ *Config, _ *Material) {
		o.Methods = Methods(declared.Services().ByName("TestService"))
	})...)
}

// TestConnectGet checks GET: only for methods that the .proto declares free of side effects, with the message as text,
// base64 or gzip, and within the limits of a URL and of a message.
func TestConnectGet(t *testing.T) {
	s := startCacheable(t, &echo{}, func(o *GRPCOptions, _ *Config, _ *Material) { o.MaxMessageBytes = 100_000 })
	clients := s.httpClients(t)
	clients["http1"] = s.http1(t)
	compress := func(b []byte) string {
		var out bytes.Buffer
		z := gzip.NewWriter(&out)
		_, _ = z.Write(b)
		_ = z.Close()
		return base64.RawURLEncoding.EncodeToString(out.Bytes())
	}
	binary, err := proto.Marshal(&pb.SimpleRequest{Payload: &pb.Payload{Body: []byte("hello")}})
	if err != nil {
		t.Fatal(err)
	}
	plain := `{"payload":{"body":"aGVsbG8="}}`
	for name, test := range map[string]struct {
		method, query string
		want          int
		contains      string
	}{
		"JSON": {"UnaryCall", "connect=v1&encoding=json&message=" + url.QueryEscape(plain), http.StatusOK, `"aGVsbG8="`},
		"JSON in UTF-8": {"UnaryCall", "connect=v1&encoding=" + url.QueryEscape("json; charset=utf-8") + "&message=" + url.QueryEscape(plain),
			http.StatusOK, `"aGVsbG8="`},
		"no version": {"UnaryCall", "encoding=json&message=" + url.QueryEscape(plain), http.StatusOK, `"aGVsbG8="`},
		"base64": {"UnaryCall", "connect=v1&encoding=proto&base64=1&message=" + base64.RawURLEncoding.EncodeToString(binary),
			http.StatusOK, "hello"},
		"padded base64": {"UnaryCall",
			"connect=v1&encoding=proto&base64=1&message=" + url.QueryEscape(base64.URLEncoding.EncodeToString(binary)), http.StatusOK, "hello"},
		"gzip": {"UnaryCall", "connect=v1&encoding=json&base64=1&compression=gzip&message=" + compress([]byte(plain)), http.StatusOK,
			`"aGVsbG8="`},
		"bomb": {"UnaryCall", "connect=v1&encoding=json&base64=1&compression=gzip&message=" + compress(make([]byte, 10<<20)),
			http.StatusTooManyRequests, "resource_exhausted"},
		"unknown gzip": {"UnaryCall", "connect=v1&encoding=json&base64=1&compression=zip&message=AAAA", http.StatusNotImplemented,
			"unimplemented"},
		"no message":      {"UnaryCall", "connect=v1&encoding=json", http.StatusBadRequest, "invalid_argument"},
		"no encoding":     {"UnaryCall", "connect=v1&message=%7B%7D", http.StatusUnsupportedMediaType, ""},
		"unknown version": {"UnaryCall", "connect=v2&encoding=json&message=%7B%7D", http.StatusBadRequest, "invalid_argument"},
		"invalid base64":  {"UnaryCall", "connect=v1&encoding=json&base64=1&message=!!", http.StatusBadRequest, "invalid_argument"},
		"invalid JSON":    {"UnaryCall", "connect=v1&encoding=json&message=%7B", http.StatusBadRequest, "invalid_argument"},
		"side effects":    {"EmptyCall", "connect=v1&encoding=json&message=%7B%7D", http.StatusMethodNotAllowed, ""},
		"stream":          {"StreamingOutputCall", "connect=v1&encoding=json&message=%7B%7D", http.StatusMethodNotAllowed, ""},
	} {
		for way, c := range clients {
			response, body := c.send(t, http.MethodGet, testPath+test.method+"?"+test.query, "")
			if response.StatusCode != test.want || !strings.Contains(body, test.contains) {
				t.Errorf("GET, %s over %s = %s %q, want %d with %q", name, way, response.Status, body, test.want, test.contains)
			}
			if test.want == http.StatusMethodNotAllowed && response.Header.Get("Allow") != http.MethodPost {
				t.Errorf("GET, %s over %s: Allow = %q, want POST", name, way, response.Header.Get("Allow"))
			}
			if test.want == http.StatusOK && !slices.Contains(list(response.Header, "Vary"), "accept-encoding") {
				t.Errorf("GET, %s over %s: Vary = %v, want Accept-Encoding", name, way, response.Header["Vary"])
			}
		}
	}
	for way, c := range clients { // HEAD is GET without a body
		path := testPath + "UnaryCall?encoding=json&message=" + url.QueryEscape(plain)
		got, body := c.send(t, http.MethodHead, path, "")
		want, _ := c.send(t, http.MethodGet, path, "")
		if got.StatusCode != http.StatusOK || body != "" || got.Header.Get("Content-Type") != want.Header.Get("Content-Type") {
			t.Errorf("HEAD over %s = %s %v %q, want what GET has: %v", way, got.Status, got.Header, body, want.Header)
		}
		if response, _ := c.send(t, http.MethodHead, testPath+"EmptyCall?encoding=json&message=%7B%7D",
			""); response.StatusCode != http.StatusMethodNotAllowed {
			t.Errorf("HEAD of a method with side effects over %s = %s, want 405", way, response.Status)
		}
		if response, _ := c.send(t, http.MethodPut, path, ""); response.StatusCode != http.StatusMethodNotAllowed ||
			response.Header.Get("Allow") != "GET, HEAD, POST" {
			t.Errorf("PUT over %s = %s, Allow = %q; want 405 with GET, HEAD, POST", way, response.Status, response.Header.Get("Allow"))
		}
	}
	for way, c := range clients { // a URL beyond the limit for headers, 64 KiB
		response, err := c.Get(c.base + testPath + "UnaryCall?encoding=json&message=" + strings.Repeat("a", 100_000))
		if err == nil {
			response.Body.Close()
		}
		if err == nil && response.StatusCode != http.StatusRequestHeaderFieldsTooLarge {
			t.Errorf("GET with a long URL over %s = %s, want 431 or a closed stream", way, response.Status)
		}
	}
}

// TestConnectCache checks that a component controls the caches by its metadata: a client with the current entity tag
// gets 304 and no body.
func TestConnectCache(t *testing.T) {
	s := startCacheable(t, invokerFunc(func(_ context.Context, _ *Method, c Call) error {
		for key, value := range map[string]string{"etag": `W/"7"`, "cache-control": "max-age=60"} {
			if err := SetMetadata(c.ResponseHeader(), key, []byte(value)); err != nil {
				return err
			}
		}
		if c.RequestHeader().Get("Fail") != "" {
			return Errorf(codes.NotFound, "none")
		}
		return send(c, &pb.SimpleResponse{Username: "ada"})
	}))
	clients := s.httpClients(t)
	clients["http1"] = s.http1(t)
	for way, c := range clients {
		for fields, want := range map[string]int{
			"": 200, `If-None-Match: W/"7"`: 304, `If-None-Match: "6", "7"`: 304, "If-None-Match: *": 304, `If-None-Match: "77"`: 200,
			`If-None-Match: "7`: 200,
		} {
			path := testPath + "UnaryCall?encoding=json&message=%7B%7D"
			response, body := c.send(t, http.MethodGet, path, "", fields)
			h := response.Header
			if response.StatusCode != want || h.Get("Etag") != `W/"7"` || h.Get("Cache-Control") != "max-age=60" || (body == "") != (want == 304) {
				t.Errorf("GET with %q over %s = %s %v %q, want %d", fields, way, response.Status, h, body, want)
			}
		}
		if response, _ := c.send(t, http.MethodPost, testPath+"UnaryCall", "{}", "Content-Type: application/json",
			`If-None-Match: "7"`); response.StatusCode != http.StatusOK {
			t.Errorf("POST over %s = %s, want 200", way, response.Status)
		}
		response, _ := c.send(t, http.MethodGet, testPath+"UnaryCall?encoding=json&message=%7B%7D", "", "Fail: 1", `If-None-Match: "7"`)
		if h := response.Header; response.StatusCode != http.StatusNotFound || h.Get("Cache-Control") != "no-store" || h.Get("Etag") != "" {
			t.Errorf("failed GET over %s = %s %v, want 404 that no cache keeps", way, response.Status, h)
		}
	}
}
