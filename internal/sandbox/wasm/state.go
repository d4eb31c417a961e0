package wasm

import (
	"path/filepath"
	"time"

	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/artifact"
)

// format is the version of the files below.
const format ledger.Format = 1

// state is what recovery and a start need of a container: container.json in the pod's directory.
type state struct {
	ledger.Record
	// Artifact is the component, Description the digest of what describes its services ("" for nothing): a container
	// starts again also when its image is gone.
	Artifact    *artifact.Artifact `json:"artifact"`
	Component   string             `json:"component,omitempty"`
	Description string             `json:"description,omitempty"`
	// Services are the full names of the gRPC services that it serves since its last start.
	Services []string `json:"services,omitempty"`
	// Worker is where it was started, and Process which process that was.
	Worker  string     `json:"worker,omitempty"`
	Process process.ID `json:"process,omitzero"`
	// RenewAt is when a certificate of ours must be replaced; zero: never.
	RenewAt time.Time `json:"renewAt,omitzero"`
	// Previous is when the last run that ended began: a later report of its end is no news.
	Previous time.Time `json:"-"`
}

// podState marks a sandbox as made: pod.json.
type podState struct {
	ID string `json:"id"`
	// Scope is which worker its containers run in (keeper.go).
	Scope string `json:"scope"`
	// Apart is why the pod has a worker for itself, whatever the configuration says; empty when it was not set apart.
	Apart string `json:"apart,omitempty"`
}

// workerState is what is needed to end a worker that does not answer: worker.json.
type workerState struct {
	Process process.ID `json:"process"`
	Cgroup  string     `json:"cgroup,omitempty"`
}

// Status implements ledger.State.
func (s state) Status() sandbox.Status { return s.StatusOf(s.Process.Pid) }

func (c Config) containerFile(id string) string { return filepath.Join(c.podDir(id), "container.json") }
func (c Config) podFile(id string) string       { return filepath.Join(c.podDir(id), "pod.json") }
