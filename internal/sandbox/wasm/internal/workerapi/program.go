package workerapi

import (
	"time"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/connlimit"
)

// Namespaces are the clone(2) flags for the namespaces that each worker gets. All workers run as the same user; the PID
// namespace keeps them from signalling, tracing or slowing each other.
const Namespaces = unix.CLONE_NEWNS | unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS | unix.CLONE_NEWPID

// File descriptors that a worker inherits.
const (
	FDControl = 3 // listening socket of this protocol
	FDData    = 4 // listening socket for the router's requests
	FDReady   = 5 // the worker writes the line "ready" here
)

// WorkerConfig is the argument of `tripod-wasm worker`. Zero values mean the defaults.
type WorkerConfig struct {
	Name string `json:"name"`
	// UID and GID are the user and group that a worker switches to if it was started as root. If UID is 0, the worker
	// stays root (only for tests of the daemon).
	UID int `json:"uid,omitempty"`
	GID int `json:"gid,omitempty"`
	// Instances is the size of the pool of guest instances. MaxMemory bounds the size of each linear memory, in bytes.
	Instances int    `json:"instances,omitempty"`
	MaxMemory uint64 `json:"maxMemory,omitempty"`
	// Isolated says that the worker has its own mount namespace. The worker then switches to a root directory that
	// contains only /proc, so that it neither sees nor pins the node's mounts.
	Isolated bool `json:"isolated,omitempty"`
	// Connections limits the connections of each pod.
	Connections connlimit.Config `json:"connections,omitzero"`
	// LogLevel is a slog level: "debug", "info" …
	LogLevel string `json:"logLevel,omitempty"`
	// LogSizeMax bounds the size of a pod's log file, in bytes; 0 means no limit.
	LogSizeMax int64 `json:"logSizeMax,omitempty"`
	// Spans makes the worker send the spans of requests.
	Spans bool `json:"spans,omitempty"`
}

// DialerConfig is the argument of `tripod-wasm dialer`. The dialer inherits its listening socket as FDControl, and
// reports at FDDialerReady.
type DialerConfig struct {
	Name string `json:"name"`
	// LogLevel is a slog level.
	LogLevel string `json:"logLevel,omitempty"`
	// Isolated says that the dialer has its own mount namespace; see WorkerConfig.
	Isolated bool `json:"isolated,omitempty"`
	// Idle is how long the dialer runs without pods.
	Idle time.Duration `json:"idle"`
}

// FDDialerReady is where the dialer writes the line "ready".
const FDDialerReady = 4

// CompileConfig is the argument of `tripod-wasm compile`. Zero values mean the defaults.
type CompileConfig struct {
	// MaxInput bounds the size of the component, in bytes; default 256 MiB. MaxMemory bounds the compiler's memory, in
	// bytes; default 2 GiB. MaxCPU bounds the compiler's CPU time; default 2 min.
	MaxInput  int64         `json:"maxInput,omitempty"`
	MaxMemory int64         `json:"maxMemory,omitempty"`
	MaxCPU    time.Duration `json:"maxCPU,omitempty"`
	// Quick is that of engine.Config.
	Quick bool `json:"quick,omitempty"`
}

// Exit codes of `tripod-wasm compile`. Any other exit code, or death by a signal, means that the compiler has crashed.
const (
	CompileOK       = 0
	CompileInvalid  = 65 // invalid input (EX_DATAERR in sysexits.h)
	CompileInternal = 70 // an error of the compiler or the system (EX_SOFTWARE)
	CompileLimit    = 75 // the input exceeds a limit of CompileConfig
)
