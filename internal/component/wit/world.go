package wit

// World is the kind of service that a guest implements.
type World string

// The worlds that a guest can have.
const (
	// WorldGRPC exports functions of its own interfaces.
	WorldGRPC World = "grpc"
	// WorldHTTP exports wasi:http/incoming-handler@0.2.
	WorldHTTP World = "http"
	// WorldCommand exports wasi:cli/run@0.2, or is a core module with _start (WASI preview 1).
	WorldCommand World = "command"
)
