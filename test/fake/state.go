package fake

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/atomicfile"
	"github.com/tripod-run/tripod/internal/sandbox"
)

// sandboxState is the content of POD/sandbox.json below Config.Dir. Containers are in POD/containers/CONTAINER.json.
type sandboxState struct {
	ID    string `json:"id"`
	Ready bool   `json:"up"`
}

// containerState is the stored form of a sandbox.Status.
type containerState struct {
	State      sandbox.State `json:"state"`
	StartedAt  time.Time     `json:"startedAt,omitzero"`
	FinishedAt time.Time     `json:"finishedAt,omitzero"`
	ExitCode   int32         `json:"exitCode,omitempty"`
	Reason     string        `json:"reason,omitempty"`
	// EndsAt is the time at which the container exits by itself, with the code EndsWith; zero means never.
	EndsAt   time.Time `json:"endsAt,omitzero"`
	EndsWith int32     `json:"endsWith,omitempty"`
}

// now returns the current state: after EndsAt the container has exited, even if no daemon was running.
func (s containerState) now() containerState {
	if s.State == sandbox.StateRunning && !s.EndsAt.IsZero() && !time.Now().Before(s.EndsAt) {
		return s.ended(s.EndsWith, s.EndsAt)
	}
	return s
}

func (s containerState) ended(code int32, at time.Time) containerState {
	s.State, s.ExitCode, s.FinishedAt, s.Reason = sandbox.StateExited, code, at, sandbox.ReasonCompleted
	if code != 0 {
		s.Reason = sandbox.ReasonError
	}
	return s
}

func (s containerState) status() sandbox.Status {
	return sandbox.Status{State: s.State, StartedAt: s.StartedAt, FinishedAt: s.FinishedAt, ExitCode: s.ExitCode, Reason: s.Reason}
}

func (b *Backend) podDir(podID string) string { return filepath.Join(b.config.Dir, podID) }
func (b *Backend) sandboxFile(podID string) string {
	return filepath.Join(b.podDir(podID), "sandbox.json")
}
func (b *Backend) containerFile(podID, id string) string {
	return filepath.Join(b.podDir(podID), "containers", id+".json")
}

func (b *Backend) readContainer(podID, id string) (containerState, error) {
	var s containerState
	err := read(b.containerFile(podID, id), &s)
	if errors.Is(err, fs.ErrNotExist) {
		return containerState{State: sandbox.StateAbsent}, nil
	}
	return s.now(), err
}

func read(path string, into any) error {
	raw, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(raw, into); err != nil {
		return fmt.Errorf("%s: %w: %w", path, err, errdefs.ErrDataLoss)
	}
	return nil
}

// write replaces the file at path, and makes its directory.
func write(path string, value any) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	raw, err := json.Marshal(value)
	if err != nil {
		return err
	}
	return atomicfile.Replace(path, raw, 0o600)
}
