package workerapi

import (
	"time"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/connlimit"
)

// Namespaces are those that a worker is started in, each of its own (clone(2)). All workers have one user, so that it is the
// PID namespace that keeps one from signalling, tracing or slowing another: it cannot name it.
const Namespaces = unix.CLONE_NEWNS | unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS | unix.CLONE_NEWPID

// Descriptors that a worker inherits.
const (
	FDControl = 3 // listening socket of this protocol
	FDData    = 4 // listening socket of the router's requests
	FDReady   = 5 // takes the line "ready"
)

// WorkerConfig is the argument of `tripod-wasm worker`. Zero values take the defaults.
type WorkerConfig struct {
	Name string `json:"name"`
	// UID and GID are what the worker becomes, when it was started as root; 0 stays root (for tests of the daemon only).
	UID int `json:"uid,omitempty"`
	GID int `json:"gid,omitempty"`
	// Instances is how many instances of guests may live at a time, MaxMemory the most bytes that a linear memory of one
	// can have.
	Instances int    `json:"instances,omitempty"`
	MaxMemory uint64 `json:"maxMemory,omitempty"`
	// Isolated says that the worker was started in a mount namespace of its own, and is to empty it: it makes an own root of
	// nothing but /proc, so that it neither sees nor pins what is mounted on the node.
	Isolated bool `json:"isolated,omitempty"`
	// Connections bounds those of each pod.
	Connections connlimit.Config `json:"connections,omitzero"`
	// LogLevel is one of slog's: "debug", "info" …
	LogLevel string `json:"logLevel,omitempty"`
	// LogSizeMax is how large the log file of a pod may get, in bytes; 0 is no bound.
	LogSizeMax int64 `json:"logSizeMax,omitempty"`
	// Spans says that spans of requests are wanted.
	Spans bool `json:"spans,omitempty"`
}

// CompileConfig is the argument of `tripod-wasm compile`. Zero values take the defaults.
type CompileConfig struct {
	// MaxInput bounds the component in bytes (default 256 MiB), MaxMemory what the compiler may hold (default 2 GiB), MaxCPU
	// the CPU time it may use (default 2 min).
	MaxInput  int64         `json:"maxInput,omitempty"`
	MaxMemory int64         `json:"maxMemory,omitempty"`
	MaxCPU    time.Duration `json:"maxCPU,omitempty"`
}

// Exit codes of `tripod-wasm compile`. Any other, or a signal, is a crash of the compiler.
const (
	CompileOK       = 0
	CompileInvalid  = 65 // the input is not what it should be (EX_DATAERR of sysexits.h)
	CompileInternal = 70 // the compiler's or the system's fault (EX_SOFTWARE)
	CompileLimit    = 75 // the input needs more than it may have
)
