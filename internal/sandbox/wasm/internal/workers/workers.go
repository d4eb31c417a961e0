// Package workers keeps the worker processes of component pods, and the dialers that open connections for them.
//
//	Keeper ──Get──▶ Worker: one per scope     <Dir>/<scope>.<n>/       control.sock  data.sock  log  worker.json
//	   │ follows events, restarts, takes over
//	Dialers ──Open──▶ dialer: one per node    <DialersDir>/<name>/     control.sock  log  worker.json
//
// The processes outlive the daemon; Recover finds them by their directories. The package must not know the containers, whose
// states the backend keeps: it calls the functions of the Keeper when something happens to them.
package workers

import (
	"log/slog"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/connlimit"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/launch"
)

// Config configures a Keeper and its Dialers.
type Config struct {
	Program launch.Program
	// Dir and DialersDir hold the processes' directories, and must not survive a reboot.
	Dir, DialersDir string
	Cgroups         cgroup.Tree
	// Instances is the size of a worker's pool of guest instances. MaxMemory bounds the size of each linear memory, in
	// bytes. 0 means the worker's default.
	Instances int
	MaxMemory uint64
	// Connections limits the connections of each pod.
	Connections connlimit.Config
	// LogLevel is the processes' slog level. LogSizeMax bounds the log file of a container, in bytes; 0 means no limit.
	LogLevel   string
	LogSizeMax int64
	// Spans gets the spans of the workers' requests (a serialized OTLP ExportTraceServiceRequest); nil disables spans.
	Spans  func(otlp []byte)
	Logger *slog.Logger
}

// format is the version of the file formats.
const format ledger.Format = 1
