package wit

// World is the kind of service that a guest implements.
type World string

// The worlds that a guest can have.
const (
	// WorldGRPC means that the guest exports functions of its own interfaces.
	WorldGRPC World = "grpc"
	// WorldRaw means that the guest exports tripod:grpc/handler@0.1: gRPC services whose messages it gets as protobuf
	// bytes.
	WorldRaw World = "grpc-raw"
	// WorldHTTP means that the guest exports wasi:http/incoming-handler@0.2.
	WorldHTTP World = "http"
	// WorldMessages means that the guest exports wasi:messaging/incoming-handler@0.2.0-draft.
	WorldMessages World = "messages"
	// WorldCommand means that the guest exports wasi:cli/run@0.2, or is a core module with _start (WASI preview 1).
	WorldCommand World = "command"
)

// Serves reports whether guests of the world serve ports. The others can be modules of the edge, with channels.
func (w World) Serves() bool { return w != WorldCommand && w != WorldMessages }
