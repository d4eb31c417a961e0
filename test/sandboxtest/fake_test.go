package sandboxtest_test

import (
	"net"
	"path/filepath"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/cri"
	"github.com/tripod-run/tripod/internal/node"
	"github.com/tripod-run/tripod/internal/node/store"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/test/fake"
	"github.com/tripod-run/tripod/test/sandboxtest"
)

// TestFakePods runs the suite with the fake backend, for pods with many containers and for unit pods.
func TestFakePods(t *testing.T) {
	for name, unit := range map[string]int{"Many": 0, "Unit": 1} {
		t.Run(name, func(t *testing.T) {
			conn := serve(t, sandbox.Capabilities{MaxContainers: unit})
			sandboxtest.Run(t, sandboxtest.Subject{
				Conn: func() *grpc.ClientConn { return conn }, Handler: "fake", Unit: unit == 1, Container: workload,
			})
		})
	}
}

// workload sets the annotations that make a fake container behave as the workload.
func workload(c *runtimeapi.ContainerConfig, w sandboxtest.Workload) {
	c.Image.Image = "busybox"
	set := func(name, value string) { c.Annotations["fake.tripod.dev/"+name] = value }
	switch w {
	case sandboxtest.Ends:
		set("exit-after", "10ms")
		set("exit-code", "7")
	case sandboxtest.Fails:
		set("start-container", "error(no such program)")
	case sandboxtest.Deaf:
		set("ignore-stop", "true")
	case sandboxtest.Slow:
		set("start-container", "delay(500ms)")
	}
}

// serve runs a node with fake services behind a real gRPC server on a unix socket.
func serve(t *testing.T, capabilities sandbox.Capabilities) *grpc.ClientConn {
	t.Helper()
	dir := t.TempDir()
	records, err := store.Open(filepath.Join(dir, "node.db"))
	if err != nil {
		t.Fatal(err)
	}
	backend, err := fake.New(fake.Config{Dir: filepath.Join(dir, "fake"), Capabilities: capabilities})
	if err != nil {
		t.Fatal(err)
	}
	n, err := node.Open(t.Context(), node.Config{
		Store: records, Backends: map[string]sandbox.Backend{"fake": backend}, DefaultHandler: "fake",
		Network: &fake.Network{Dir: t.TempDir()}, Images: fake.Images{},
	})
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer(cri.ServerOptions()...)
	cri.New(cri.Config{Node: n, Version: "0.0.0"}).Register(server)
	socket := filepath.Join(dir, "cri.sock")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = server.Serve(listener) }()
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = conn.Close()
		server.Stop()
		_ = n.Close()
		_ = records.Close()
	})
	return conn
}
