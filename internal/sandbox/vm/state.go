package vm

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/vm/machine"
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
	// Image is the image's ID, Layout what kind of image it is.
	Image  string `json:"image"`
	Layout string `json:"layout"`
	// Definition is what the driver was told.
	Definition machine.Definition `json:"definition"`
	// RootID is that of the root disk, where it is on a block device.
	RootID string `json:"rootID,omitempty"`
	// Warnings are what a person should know of the configuration.
	Warnings []string `json:"warnings,omitempty"`
	// WaitForAgent makes a start wait for the guest's agent.
	WaitForAgent bool `json:"waitForAgent,omitempty"`
	// Unbootable says what is wrong with a root disk that the firmware takes for bootable and that cannot be booted.
	Unbootable string `json:"unbootable,omitempty"`
	// NoBoot says why the present run cannot boot: it is being ended for that.
	NoBoot string `json:"noBoot,omitempty"`
	// SerialBefore is how many bytes the serial log had before the present run; Silent, that it was noted that nothing came after.
	SerialBefore int64 `json:"serialBefore,omitempty"`
	Silent       bool  `json:"silent,omitempty"`
	// Former is when the run before the present one began: what the driver still tells of that one is no news.
	Former time.Time `json:"former,omitzero"`

	Pid        int       `json:"pid,omitempty"`
	StartedAt  time.Time `json:"startedAt,omitzero"`
	FinishedAt time.Time `json:"finishedAt,omitzero"`
	ExitCode   int32     `json:"exitCode,omitempty"`
	Reason     string    `json:"reason,omitempty"`
	Message    string    `json:"message,omitempty"`
}

// podState marks a sandbox as being made: pod.json. It is written before anything else of the pod is.
type podState struct {
	Version int    `json:"version"`
	ID      string `json:"id"`
	// UID is the user and the group of the hypervisor process.
	UID    int    `json:"uid"`
	Netns  string `json:"netns"`
	Cgroup string `json:"cgroup"`
	// Made says that all of it was made.
	Made bool `json:"made"`
	// Warnings are what a person should know of the configuration.
	Warnings []string `json:"warnings,omitempty"`
}

func (s state) status() sandbox.Status {
	st := sandbox.Status{StartedAt: s.StartedAt}
	switch s.Phase {
	case phaseStarted:
		st.State, st.Pid = sandbox.StateRunning, s.Pid
	case phaseExited:
		st.State = sandbox.StateExited
		st.FinishedAt, st.ExitCode, st.Reason, st.Message = s.FinishedAt, s.ExitCode, s.Reason, s.Message
	default:
		st.State, st.StartedAt = sandbox.StateCreated, time.Time{}
	}
	return st
}

// end puts the end of a run into the state.
func (s *state) end(m machine.State) {
	s.Phase, s.Pid, s.ExitCode, s.Message = phaseExited, 0, m.ExitCode, m.Message
	s.Reason = reasonOf(m.Cause)
	switch {
	case m.Cause == machine.CauseStart || m.Cause == machine.CauseNoBoot:
		s.ExitCode = sandbox.ExitStartError
	case m.Cause == machine.CauseUnknown:
		s.ExitCode = sandbox.ExitUnknown
	case m.Cause != machine.CausePowerOff && m.ExitCode == 0:
		s.ExitCode = 1 // a panic, or a hypervisor that left as if nothing were wrong
	}
	if !m.StartedAt.IsZero() {
		s.StartedAt = m.StartedAt
	}
	if s.FinishedAt = m.FinishedAt; s.FinishedAt.IsZero() {
		s.FinishedAt = time.Now()
	}
	if s.StartedAt.IsZero() || s.FinishedAt.Before(s.StartedAt) {
		s.StartedAt = s.FinishedAt
	}
}

// reasonOf is the CRI's reason for the way in which a machine ended.
func reasonOf(c machine.Cause) string {
	switch c {
	case machine.CausePowerOff:
		return sandbox.ReasonCompleted
	case machine.CausePanic:
		return sandbox.ReasonGuestPanic
	case machine.CauseOOM:
		return sandbox.ReasonOOMKilled
	case machine.CauseNoBoot:
		return sandbox.ReasonNoBootableDevice
	case machine.CauseStart:
		return sandbox.ReasonStartError
	case machine.CauseUnknown:
		return sandbox.ReasonUnknown
	default:
		return sandbox.ReasonError
	}
}

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

func (c Config) writePod(s podState) error {
	s.Version = stateVersion
	return writeJSON(c.podFile(s.ID), s)
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

// writeJSON replaces a file at once: a reader, or a crash of this process, sees the old content or the new one. The
// files lie on a tmpfs: there is nothing to sync.
func writeJSON(path string, v any) error {
	raw, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if err := os.WriteFile(path+".new", raw, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// removeFile removes a file that need not be there.
func removeFile(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
