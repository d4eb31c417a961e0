// Package tripodgrpc lets an ordinary gRPC server in Go run as a WebAssembly guest of Tripod. [Server] replaces
// [grpc.Server] and [Serve] its method Serve; services, handlers and interceptors stay as they are:
//
//	func main() {
//		server := tripodgrpc.NewServer()
//		pb.RegisterGreeterServer(server, &greeter{})
//		tripodgrpc.Serve(server)
//	}
//
// `tripod push DIRECTORY REFERENCE` builds such a program with the ordinary toolchain (GOOS=wasip1 GOARCH=wasm go build
// -buildmode=c-shared) and makes an image of it. On all other platforms, Serve runs a real [grpc.Server], so that the
// same main can be tested natively.
//
// # How a guest works
//
// The host terminates HTTP/2, HTTP/3, TLS and compression, and passes serialized messages through the WIT interface
// tripod:grpc/raw:
//
//	client ──► host ──handle──► dispatch.go ──► interceptors ──► handler
//	             ▲                                                  │
//	             └── receive, send (raw_wasip1.go) ◄── stream.go ◄──┘
//
// The first call of an instance starts main in a goroutine and waits until main calls Serve. Usually the host does so
// once for a pod, and the instances of the pod begin in the state that main has left (snapshot_wasip1.go). An instance
// serves one call at a time. Goroutines run only during a call, so a goroutine that outlives its call pauses until the next one,
// if there is one: by default each call gets a fresh instance.
//
// # Limits
//
// A guest has no sockets. Calls to other servers begin with [NewClient], and end with the call that the guest serves. A
// stream's SendMsg blocks all goroutines of the instance while the client does not read.
package tripodgrpc
