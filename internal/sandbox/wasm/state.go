package wasm

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/wasm/artifact"
)

// stateVersion is the version of the files below. A file of another version is not touched: what it is of cannot be
// managed by this program, and Recover says so.
const stateVersion = 1

// phase is how far a container has come, as the file says it: written before the step begins, except for the last.
type phase string

const (
	phaseCreated phase = "created"
	phaseStarted phase = "started"
	phaseExited  phase = "exited"
)

// state is what recovery and a start need of a container: container.json in the pod's directory.
type state struct {
	Version int    `json:"version"`
	ID      string `json:"id"`
	Phase   phase  `json:"phase"`
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

	StartedAt  time.Time `json:"startedAt,omitzero"`
	FinishedAt time.Time `json:"finishedAt,omitzero"`
	ExitCode   int32     `json:"exitCode,omitempty"`
	Reason     string    `json:"reason,omitempty"`
	Message    string    `json:"message,omitempty"`
}

// podState marks a sandbox as made: pod.json.
type podState struct {
	Version int    `json:"version"`
	ID      string `json:"id"`
	// Scope is which worker its containers run in (keeper.go).
	Scope string `json:"scope"`
	// Apart is why the pod has a worker for itself, whatever the configuration says; empty when it was not set apart.
	Apart string `json:"apart,omitempty"`
}

// workerState is what is needed to end a worker that does not answer: worker.json.
type workerState struct {
	Version int        `json:"version"`
	Process process.ID `json:"process"`
	Cgroup  string     `json:"cgroup,omitempty"`
}

func (s state) status() sandbox.Status {
	st := sandbox.Status{StartedAt: s.StartedAt}
	switch s.Phase {
	case phaseStarted:
		st.State, st.Pid = sandbox.StateRunning, s.Process.Pid
	case phaseExited:
		st.State = sandbox.StateExited
		st.FinishedAt, st.ExitCode, st.Reason, st.Message = s.FinishedAt, s.ExitCode, s.Reason, s.Message
	default:
		st.State = sandbox.StateCreated
	}
	return st
}

func (c Config) containerFile(id string) string { return filepath.Join(c.podDir(id), "container.json") }
func (c Config) podFile(id string) string       { return filepath.Join(c.podDir(id), "pod.json") }

func (c Config) readState(id string) (s state, err error) {
	return s, readJSON(c.containerFile(id), &s, &s.Version)
}

func (c Config) writeState(s state) error {
	s.Version = stateVersion
	return writeJSON(c.containerFile(s.ID), s)
}

func (c Config) readPod(id string) (s podState, err error) {
	return s, readJSON(c.podFile(id), &s, &s.Version)
}

// readJSON reads a file of ours into v. One that is not there, or is torn, is errdefs.ErrNotFound.
func readJSON(path string, v any, version *int) error {
	raw, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%s: %w", path, errdefs.ErrNotFound)
	}
	if err != nil {
		return err
	}
	if err := json.Unmarshal(raw, v); err != nil {
		return fmt.Errorf("%s is damaged (%v): %w", path, err, errdefs.ErrNotFound)
	}
	if *version != stateVersion {
		return fmt.Errorf("%s is of version %d, this program writes version %d: %w", path, *version, stateVersion, errdefs.ErrFailedPrecondition)
	}
	return nil
}

// writeJSON replaces a file at once: a reader, or a crash of this process, sees the old content or the new one.
func writeJSON(path string, v any) error {
	raw, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return replaceFile(path, raw, 0o600)
}

func replaceFile(path string, content []byte, mode fs.FileMode) error {
	tmp := path + ".new"
	if err := os.WriteFile(tmp, content, mode); err != nil {
		return err
	}
	return os.Rename(tmp, path)
}

// removeFile removes a file that need not be there.
func removeFile(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
