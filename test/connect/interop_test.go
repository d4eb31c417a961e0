package connect

import (
	"context"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	pb "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/metadata"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/guestbuild"
	"github.com/tripod-run/tripod/test/harness"
)

// caseTime limits one case, which takes milliseconds on an idle machine, or a few seconds.
const caseTime = 2 * time.Minute

// guestModule returns the directory of the module with the servers and the client.
func guestModule() string { return filepath.Join(harness.Root(), "test/guests") }

// TestInterop runs the cases of the public gRPC interop tests against a Go server, with a fresh instance for each call and
// with instances that are reused.
func TestInterop(t *testing.T) {
	client := guestbuild.Native(t, guestModule(), "./interopclient")
	d := harness.StartDaemon(t, harness.Wasm(t, "node"))
	image := push(t, "tripod/wasm/interop-go:1", "test/guests/interop")
	for _, reuse := range []string{"false", "true"} {
		c := d.RunWasm(t, &harness.PodSpec{Image: image, Pod: []harness.PodOption{func(c *runtimeapi.PodSandboxConfig) {
			c.Annotations = map[string]string{"vimana.host/reuse": reuse}
		}}})
		for _, name := range strings.Fields(output(t, "", client)) {
			for version, args := range map[string][]string{
				"HTTP2": {"-address", net.JoinHostPort(c.Pod.IP(), "80")}, "HTTP3": {"-http3", "-address", net.JoinHostPort(c.Pod.IP(), "443")},
			} {
				t.Run("reuse="+reuse+"/"+version+"/"+name, func(t *testing.T) {
					ctx, cancel := context.WithTimeout(t.Context(), caseTime)
					defer cancel()
					run := exec.CommandContext(ctx, client, append(args, "-case", name)...)
					run.Env = append(os.Environ(), "GRPC_GO_LOG_SEVERITY_LEVEL=info")
					if out, err := run.CombinedOutput(); err != nil {
						t.Errorf("%v\n%s", err, out)
					}
				})
			}
		}
	}
}

// TestInteropFromGuest runs the cases in a Go guest, which calls a grpc-go server.
func TestInteropFromGuest(t *testing.T) {
	client := guestbuild.Native(t, guestModule(), "./interopclient")
	server := guestbuild.Native(t, guestModule(), "./interop") // natively it is a grpc-go server
	d := harness.StartDaemon(t, harness.Wasm(t, "node"))
	c := d.RunWasm(t, &harness.PodSpec{Image: push(t, "tripod/wasm/interopcaller-go:1", "test/guests/interopcaller")})
	address := net.JoinHostPort(harness.NodeAddress(t, c.Pod.IP()), "50051")
	native := exec.CommandContext(t.Context(), server)
	native.Env = append(os.Environ(), "TRIPODGRPC_ADDRESS="+address)
	if err := native.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = native.Wait() }) // the context of the test has ended by then
	conn, err := grpc.NewClient(net.JoinHostPort(c.Pod.IP(), "80"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	harness.Eventually(t, caseTime, func() error {
		conn, err := net.Dial("tcp", address)
		if err == nil {
			conn.Close()
		}
		return err
	})
	for _, name := range strings.Fields(output(t, "", client)) {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(metadata.AppendToOutgoingContext(t.Context(), "x-case", name, "x-target", address), caseTime)
			defer cancel()
			if _, err := pb.NewTestServiceClient(conn).EmptyCall(ctx, &pb.Empty{}); err != nil {
				t.Errorf("%v; the guest's log:\n%s", err, harness.Text(c.Logs(), "stderr"))
			}
		})
	}
}
