package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/tripod-run/tripod/internal/edge/broker"
)

// TestUpload runs a file of the current directory: the node gets its content, and the create message names the image and
// the node's runtime.
func TestUpload(t *testing.T) {
	var received []byte
	var fail error
	service := &grpc.ServiceDesc{ServiceName: "tripod.image.v1.Images", HandlerType: (*any)(nil), Streams: []grpc.StreamDesc{{
		StreamName: "ImportModule", ClientStreams: true, Handler: func(_ any, stream grpc.ServerStream) error {
			for received = nil; ; {
				m := &wrapperspb.BytesValue{}
				err := stream.RecvMsg(m)
				if errors.Is(err, io.EOF) {
					break
				}
				if err != nil {
					return err
				}
				received = append(received, m.GetValue()...)
			}
			if fail != nil {
				return fail
			}
			return stream.SendMsg(wrapperspb.String("edge.local/m@sha256:00"))
		},
	}}}
	serveRuntime(t, &otherRuntime{}, service)
	b, err := broker.New(broker.Config{Address: "127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.Close(context.Background()) })
	runtimes := `{"uuid":"rt-1","status":"A","runtime_type":"tripod/wasm"},{"uuid":"rt-2","status":"A","runtime_type":"linux/minimal"}`
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintf(w, `{"count":%d,"start":0,"results":[%s]}`, strings.Count(runtimes, "uuid"), runtimes)
	}))
	defer server.Close()
	t.Chdir(t.TempDir())
	content := strings.Repeat("module", pieceSize/3) // two pieces
	if err := os.WriteFile("m.wasm", []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	run := func(args ...string) (string, error) {
		return edge(t, append([]string{"run", "--upload", "--detach", "--uuid", "m-1", "--broker", b.URL(), "--orchestrator", server.URL, "-o",
			"json"}, args...)...)
	}
	out, err := run("m.wasm", "--", "x")
	if err != nil || string(received) != content {
		t.Fatalf("run --upload: got error %v and %d bytes, want %d", err, len(received), len(content))
	}
	for _, want := range []string{`"image": "edge.local/m@sha256:00"`, `"parent": "rt-1"`, `"name": "m"`} {
		if !strings.Contains(out, want) || strings.Contains(out, "filename") {
			t.Errorf("run --upload: got\n%s\nwant %s, and no file", out, want)
		}
	}
	fail = status.Error(codes.InvalidArgument, "not WebAssembly")
	if _, err := run("m.wasm"); err == nil || !strings.Contains(Explain(err), "upload m.wasm: not WebAssembly") {
		t.Errorf("run --upload of what the node refuses: got error %v", err)
	}
	if _, err := run("other.wasm"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("run --upload of a missing file: got error %v, want that it is missing", err)
	}
	runtimes += `,{"uuid":"rt-3","status":"A","runtime_type":"tripod/wasm"}`
	if _, err := run("m.wasm"); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "rt-1, rt-3") {
		t.Errorf("run --upload with runtimes of two nodes: got error %v, want a request for --runtime", err)
	}
	_, err = run("m.wasm", "--endpoint", filepath.Join(t.TempDir(), "none.sock"))
	if err == nil || !strings.Contains(err.Error(), "no socket at") ||
		!strings.Contains(err.Error(), "copy the file below its edge.module_roots") {
		t.Errorf("run --upload without a node: got error %v, want what to do", err)
	}
}
