package e2e

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/quic-go/quic-go/http3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	reflection "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/dynamicpb"
	"k8s.io/client-go/tools/remotecommand"

	"github.com/tripod-run/tripod/test/harness"
)

// reflected contains the descriptors of a service, obtained by server reflection.
type reflected struct{ files *protoregistry.Files }

// reflect gets the files of a service and all imported files from a server.
func reflect(t *testing.T, conn *grpc.ClientConn, service string) reflected {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), waitLimit)
	defer cancel()
	stream, err := reflection.NewServerReflectionClient(conn).ServerReflectionInfo(ctx)
	if err != nil {
		t.Fatal(err)
	}
	ask := func(r *reflection.ServerReflectionRequest) *reflection.ServerReflectionResponse {
		t.Helper()
		if err := stream.Send(r); err != nil {
			t.Fatal(err)
		}
		resp, err := stream.Recv()
		if err != nil || resp.GetErrorResponse() != nil {
			t.Fatalf("reflection request %v: got %v, error %v", r, resp, err)
		}
		return resp
	}
	var names []string
	for _, s := range ask(&reflection.ServerReflectionRequest{MessageRequest: &reflection.ServerReflectionRequest_ListServices{}}).GetListServicesResponse().Service {
		names = append(names, s.Name)
	}
	if !strings.Contains(strings.Join(names, " ")+" ", service+" ") {
		t.Fatalf("services of the server: got %v, want %s among them", names, service)
	}
	var set descriptorpb.FileDescriptorSet
	resp := ask(&reflection.ServerReflectionRequest{MessageRequest: &reflection.ServerReflectionRequest_FileContainingSymbol{FileContainingSymbol: service}})
	for _, raw := range resp.GetFileDescriptorResponse().FileDescriptorProto {
		var file descriptorpb.FileDescriptorProto
		if err := proto.Unmarshal(raw, &file); err != nil {
			t.Fatal(err)
		}
		set.File = append(set.File, &file)
	}
	files, err := protodesc.NewFiles(&set)
	if err != nil {
		t.Fatal(err)
	}
	return reflected{files}
}

// method returns the descriptor of a method such as "greet.v1.Greeter/SayHello".
func (r reflected) method(t *testing.T, name string) protoreflect.MethodDescriptor {
	t.Helper()
	service, method, _ := strings.Cut(name, "/")
	d, err := r.files.FindDescriptorByName(protoreflect.FullName(service))
	if err != nil {
		t.Fatal(err)
	}
	return d.(protoreflect.ServiceDescriptor).Methods().ByName(protoreflect.Name(method))
}

// served is a running component with its clients: grpc-go over TCP and connect-go over HTTP/3.
type served struct {
	*testing.T
	ip   string
	conn *grpc.ClientConn
	h3   *http.Client
	reflected
}

// dial connects to the cleartext port of a pod, and gets its service by reflection.
func dial(t *testing.T, ip, service string) *served {
	t.Helper()
	s := dialWith(t, net.JoinHostPort(ip, "80"), insecure.NewCredentials())
	s.ip, s.reflected = ip, reflect(t, s.conn, service)
	return s
}

// anyCertificate accepts the self-signed certificates of pods.
var anyCertificate = &tls.Config{InsecureSkipVerify: true}

func dialWith(t *testing.T, target string, creds credentials.TransportCredentials) *served {
	t.Helper()
	conn, err := grpc.NewClient("passthrough:///"+target, grpc.WithTransportCredentials(creds))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return &served{T: t, conn: conn, h3: overHTTP3(t, anyCertificate)}
}

func overHTTP3(t *testing.T, config *tls.Config) *http.Client {
	transport := &http3.Transport{TLSClientConfig: config}
	t.Cleanup(func() { transport.Close() })
	return &http.Client{Transport: transport}
}

func (s *served) context() context.Context {
	ctx, cancel := context.WithTimeout(s.Context(), waitLimit)
	s.Cleanup(cancel)
	return ctx
}

// message decodes a request from JSON.
func (s *served) message(d protoreflect.MessageDescriptor, json string) *dynamicpb.Message {
	s.Helper()
	m := dynamicpb.NewMessage(d)
	if err := protojson.Unmarshal([]byte(json), m); err != nil {
		s.Fatal(err)
	}
	return m
}

// text encodes a message as JSON in a canonical form.
func text(m proto.Message) string {
	out, err := protojson.Marshal(m)
	if err != nil {
		return err.Error()
	}
	return strings.ReplaceAll(strings.ReplaceAll(string(out), `": `, `":`), `, "`, `,"`)
}

// try makes a unary call with grpc-go. Request and reply are JSON.
func (s *served) try(ctx context.Context, method, request string, opts ...grpc.CallOption) (string, error) {
	s.Helper()
	d := s.method(s.T, method)
	reply := dynamicpb.NewMessage(d.Output())
	err := s.conn.Invoke(ctx, "/"+method, s.message(d.Input(), request), reply, opts...)
	return text(reply), err
}

// call is like try, but fails the test on an error.
func (s *served) call(method, request string) string {
	s.Helper()
	reply, err := s.try(s.context(), method, request)
	if err != nil {
		s.Fatalf("%s %s: %v", method, request, err)
	}
	return reply
}

// until repeats a call until it succeeds, for a server that is starting.
func (s *served) until(method, request string) string {
	s.Helper()
	deadline := time.Now().Add(waitLimit)
	for {
		reply, err := s.try(s.context(), method, request, grpc.WaitForReady(true))
		if err == nil {
			return reply
		}
		if time.Now().After(deadline) {
			s.Fatalf("%s: %v", method, err)
		}
	}
}

// stream opens a stream with grpc-go.
func (s *served) stream(ctx context.Context, method string) (grpc.ClientStream, protoreflect.MethodDescriptor) {
	s.Helper()
	d := s.method(s.T, method)
	stream, err := s.conn.NewStream(ctx, &grpc.StreamDesc{ClientStreams: d.IsStreamingClient(), ServerStreams: d.IsStreamingServer()},
		"/"+method)
	if err != nil {
		s.Fatal(err)
	}
	return stream, d
}

// exchange sends requests, closes the sending side, and receives all replies.
func (s *served) exchange(method string, requests ...string) ([]string, error) {
	s.Helper()
	stream, d := s.stream(s.context(), method)
	for _, r := range requests {
		if err := stream.SendMsg(s.message(d.Input(), r)); err != nil {
			return nil, err
		}
	}
	if err := stream.CloseSend(); err != nil {
		return nil, err
	}
	var replies []string
	for {
		reply := dynamicpb.NewMessage(d.Output())
		if err := stream.RecvMsg(reply); errors.Is(err, io.EOF) {
			return replies, nil
		} else if err != nil {
			return replies, err
		}
		replies = append(replies, text(reply))
	}
}

// overQUIC returns a connect-go client that speaks gRPC over HTTP/3 to the pod's TLS port.
func (s *served) overQUIC(method string) *connect.Client[dynamicpb.Message, dynamicpb.Message] {
	s.Helper()
	return s.connect(s.h3, "https://"+net.JoinHostPort(s.ip, "443"), method, connect.WithGRPC())
}

func (s *served) connect(c *http.Client, base, method string,
	opts ...connect.ClientOption) *connect.Client[dynamicpb.Message, dynamicpb.Message] {
	s.Helper()
	d := s.method(s.T, method)
	return connect.NewClient[dynamicpb.Message, dynamicpb.Message](c, base+"/"+method, append(opts, connect.WithSchema(d),
		connect.WithResponseInitializer(func(_ connect.Spec, message any) error {
			*message.(*dynamicpb.Message) = *dynamicpb.NewMessage(d.Output())
			return nil
		}))...)
}

// callQUIC makes a unary call over HTTP/3 and fails the test on an error.
func (s *served) callQUIC(method, request string) string {
	s.Helper()
	d := s.method(s.T, method)
	resp, err := s.overQUIC(method).CallUnary(s.context(), connect.NewRequest(s.message(d.Input(), request)))
	if err != nil {
		s.Fatalf("%s %s over HTTP/3: %v", method, request, err)
	}
	return text(resp.Msg)
}

// ticks receives a stream in the background and stores the messages.
type ticks struct {
	mu   sync.Mutex
	got  []string
	err  error
	over chan struct{}
}

// follow receives messages with next until it returns an error.
func follow(next func() (string, error)) *ticks {
	k := &ticks{over: make(chan struct{})}
	go func() {
		defer close(k.over)
		for {
			one, err := next()
			k.mu.Lock()
			if err == nil {
				k.got = append(k.got, one)
			}
			k.err = err
			k.mu.Unlock()
			if err != nil {
				return
			}
		}
	}()
	return k
}

func (k *ticks) count() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return len(k.got)
}

// state returns the number of messages so far, and the error that ended the stream, if any.
func (k *ticks) state() (int, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return len(k.got), k.err
}

// more returns a condition that is true once n more messages have arrived.
func (k *ticks) more(n int) func() error {
	want := k.count() + n
	return func() error {
		if got, err := k.state(); got < want {
			return fmt.Errorf("messages: got %d, want %d; error %v", got, want, err)
		}
		return nil
	}
}

// followGRPC follows a server stream with grpc-go.
func (s *served) followGRPC(ctx context.Context, method, request string) *ticks {
	s.Helper()
	stream, d := s.stream(ctx, method)
	if err := errors.Join(stream.SendMsg(s.message(d.Input(), request)), stream.CloseSend()); err != nil {
		s.Fatal(err)
	}
	return follow(func() (string, error) {
		reply := dynamicpb.NewMessage(d.Output())
		err := stream.RecvMsg(reply)
		return text(reply), err
	})
}

// followQUIC follows a server stream with connect-go over HTTP/3.
func (s *served) followQUIC(ctx context.Context, method, request string) *ticks {
	s.Helper()
	d := s.method(s.T, method)
	stream, err := s.overQUIC(method).CallServerStream(ctx, connect.NewRequest(s.message(d.Input(), request)))
	if err != nil {
		s.Fatal(err)
	}
	return follow(func() (string, error) {
		if stream.Receive() {
			return text(stream.Msg()), nil
		}
		if err := stream.Err(); err != nil {
			return "", err
		}
		return "", io.EOF
	})
}

// lockedBuffer is a buffer for concurrent use.
type lockedBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

func streamTo(stdout, stderr io.Writer) remotecommand.StreamOptions {
	return remotecommand.StreamOptions{Stdout: stdout, Stderr: stderr}
}

// tripod returns a command of tripod's command line, as a client of the daemon.
func tripod(t *testing.T, d *harness.Daemon, args ...string) *exec.Cmd {
	t.Helper()
	bin, err := harness.Binary()
	if err != nil {
		t.Fatal(err)
	}
	return exec.Command(bin, append(args, "--endpoint", "unix://"+d.Socket)...)
}

func codeOf(err error) codes.Code { return status.Code(err) }
