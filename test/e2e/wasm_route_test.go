package e2e

import (
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/tripod-run/tripod/test/harness"
)

const (
	routeAddress   = "127.0.0.1:18443"
	routeCleartext = "127.0.0.1:18080"
)

// routed runs a named component in one pod for each of these names.
func routed(t *testing.T, d *harness.Daemon, pods ...string) map[string]*harness.Container {
	t.Helper()
	containers := map[string]*harness.Container{}
	for _, pod := range pods {
		containers[pod] = d.RunWasm(t, &harness.PodSpec{
			Name: pod, Image: harness.NamedGreeter, Pod: []harness.PodOption{labels("example.com", "greet.Greeter", "1.0.0")},
			Container: []harness.ContainerOption{env("POD_NAME", pod)},
		})
	}
	return containers
}

// TestWasmRoute: the node's own addresses route requests to a component by header, by authority and by path, over h2c
// and HTTP/3, to each of its running pods in turn.
func TestWasmRoute(t *testing.T) {
	d := harness.StartDaemon(t, harness.Wasm(t, "node"), harness.Set("route.address", routeAddress),
		harness.Set("route.cleartext_address", routeCleartext))
	pods := routed(t, d, "one", "two")
	direct := dial(t, pods["one"].Pod.IP(), greeter) // for the descriptors
	s := dialWith(t, routeCleartext, insecure.NewCredentials())
	s.reflected = direct.reflected
	const name = "example.com:greet.Greeter@1.0.0"
	byHeader := metadata.AppendToOutgoingContext(s.context(), "component", name)
	answer := func(opts ...grpc.CallOption) string {
		t.Helper()
		got, err := s.try(byHeader, greeter+"/SayHello", `{"name":"Ada"}`, opts...)
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	seen := map[string]int{}
	for range 10 {
		seen[answer()]++
	}
	if len(seen) != 2 {
		t.Errorf("pods that answered ten requests: got %v, want 2", seen)
	}
	if got := s.call(greeter+"/SayHello", `{"name":"Ada"}`); !strings.Contains(got, "Hello, Ada!") {
		t.Errorf("call by path: got %s, want \"Hello, Ada!\"", got)
	}
	conn, err := grpc.NewClient("passthrough:///"+routeCleartext, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithAuthority(strings.Replace(name, "@", "%40", 1)))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	byAuthority := &served{T: t, conn: conn, reflected: s.reflected}
	if got := byAuthority.call(greeter+"/SayHello", `{"name":"Ada"}`); !strings.Contains(got, "Hello, Ada!") {
		t.Errorf("call by authority: got %s, want \"Hello, Ada!\"", got)
	}
	const method = greeter + "/SayHello"
	request := connect.NewRequest(s.message(s.method(t, method).Input(), `{"name":"Ada"}`))
	request.Header().Set("Component", name)
	if resp, err := s.connect(s.h3, "https://"+routeAddress, method, connect.WithGRPC()).CallUnary(s.context(), request); err != nil ||
		!strings.Contains(text(resp.Msg), "Hello, Ada!") {
		t.Errorf("call over HTTP/3: got %v, error %v; want \"Hello, Ada!\"", resp, err)
	}
	s.arities()

	pods["one"].Stop(10 * time.Second)
	for range 5 {
		if got := answer(); !strings.Contains(got, `"servedBy":"two"`) {
			t.Errorf("call with one pod stopped: got %s, want an answer of pod two", got)
		}
	}
	pods["two"].Stop(10 * time.Second)
	if _, err := s.try(byHeader, method, `{}`); status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), name) {
		t.Errorf("call with both pods stopped: got error %v, want Unavailable with the component's name", err)
	}
}
