package wasm

import (
	"path/filepath"
	"time"

	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/artifact"
)

// format is the version of this package's file formats.
const format ledger.Format = 1

// state is a container's record for recovery and restart: container.json in the pod's directory.
type state struct {
	ledger.Record
	// Artifact is the component. It is recorded so that the container can be restarted even after its image was
	// removed. Description is the digest of the component's descriptors or metadata, or "".
	Artifact    *artifact.Artifact `json:"artifact"`
	Component   string             `json:"component,omitempty"`
	Description string             `json:"description,omitempty"`
	// Services are the full names of the container's gRPC services, set at its last start.
	Services []string `json:"services,omitempty"`
	// Worker is the name of the worker that ran the container last, and Process is that worker's process.
	Worker  string     `json:"worker,omitempty"`
	Process process.ID `json:"process,omitzero"`
	// Dialer is the name of the dialer that the container's worker was connected to at its last start, or "".
	Dialer string `json:"dialer,omitempty"`
	// RenewAt is the time at which a generated certificate must be renewed; zero means never.
	RenewAt time.Time `json:"renewAt,omitzero"`
	// Previous is the start time of the last run that has ended. It serves to recognize repeated reports of that run's
	// end.
	Previous time.Time `json:"-"`
}

// podState is the record of a created sandbox: pod.json in the pod's directory.
type podState struct {
	ID string `json:"id"`
	// Scope is the scope of the pod's worker (workers.Keeper).
	Scope string `json:"scope"`
	// OwnWorkerReason says why the pod needs its own worker, whatever the worker mode. It is empty if the pod does not
	// need its own worker.
	OwnWorkerReason string `json:"apart,omitempty"`
}

// Status implements ledger.State.
func (s state) Status() sandbox.Status { return s.StatusOf(s.Process.Pid) }

func (c Config) containerFile(id string) string { return filepath.Join(c.podDir(id), "container.json") }
func (c Config) podFile(id string) string       { return filepath.Join(c.podDir(id), "pod.json") }
