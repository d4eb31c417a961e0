package e2e

import (
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/dynamicpb"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
)

// notImplemented are the calls of the CRI that answer Unimplemented.
var notImplemented = map[string]bool{"CheckpointContainer": true, "CheckpointPod": true, "RestorePod": true}

// TestEveryRPC calls every method of the CRI with an empty request. Only those in notImplemented may answer
// Unimplemented.
func TestEveryRPC(t *testing.T) {
	d := harness.StartDaemon(t)
	services, n := runtimeapi.File_staging_src_k8s_io_cri_api_pkg_apis_runtime_v1_api_proto.Services(), 0
	for i := range services.Len() {
		methods := services.Get(i).Methods()
		for j := range methods.Len() {
			m := methods.Get(j)
			n++
			if err := callEmpty(t, d.Conn(), m); (status.Code(err) == codes.Unimplemented) != notImplemented[string(m.Name())] {
				t.Errorf("%s: got error %v, want Unimplemented only from a call that is listed", m.FullName(), err)
			}
		}
	}
	if n < 43 {
		t.Errorf("methods of the CRI: got %d, want at least 43", n)
	}
}

// callEmpty calls a method with an empty request and returns the error. Of a stream it waits for the first message,
// unless the stream is that of events, which has none yet.
func callEmpty(t *testing.T, conn *grpc.ClientConn, m protoreflect.MethodDescriptor) error {
	t.Helper()
	path := "/" + string(m.Parent().FullName()) + "/" + string(m.Name())
	in, out := dynamicpb.NewMessage(m.Input()), dynamicpb.NewMessage(m.Output())
	if !m.IsStreamingServer() {
		return conn.Invoke(t.Context(), path, in, out)
	}
	stream, err := conn.NewStream(t.Context(), &grpc.StreamDesc{ServerStreams: true}, path)
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.SendMsg(in); err != nil {
		t.Fatal(err)
	}
	if err := stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
	if m.Name() == "GetContainerEvents" {
		_, err := stream.Header()
		return err
	}
	return stream.RecvMsg(out)
}
