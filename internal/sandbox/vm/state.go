package vm

import (
	"time"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// format is the version of the files below.
const format ledger.Format = 1

// state is what recovery and a start need of a container: container.json in the pod's directory.
type state struct {
	ledger.Record
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
	// Former is when the previous run began. The driver may still report the end of that one.
	Former time.Time `json:"former,omitzero"`
	// Pid is that of the hypervisor process.
	Pid int `json:"pid,omitempty"`
}

// podState marks a sandbox as being made: pod.json. It is written before anything else of the pod is.
type podState struct {
	ID string `json:"id"`
	// UID is the user and the group of the hypervisor process.
	UID    int    `json:"uid"`
	Netns  string `json:"netns"`
	Cgroup string `json:"cgroup"`
	// Made says that all of it was made.
	Made bool `json:"made"`
	// Warnings are what a person should know of the configuration.
	Warnings []string `json:"warnings,omitempty"`
}

// Status implements ledger.State.
func (s state) Status() sandbox.Status { return s.StatusOf(s.Pid) }

// end puts the end of a run into the state.
func (s *state) end(m machine.State) {
	code := m.ExitCode
	switch {
	case m.Cause == machine.CauseStart || m.Cause == machine.CauseNoBoot:
		code = sandbox.ExitStartError
	case m.Cause == machine.CauseUnknown:
		code = sandbox.ExitUnknown
	case m.Cause != machine.CausePowerOff && m.ExitCode == 0:
		code = 1 // a panic, or a hypervisor that left as if nothing were wrong
	}
	at := m.FinishedAt
	if at.IsZero() {
		at = time.Now()
	}
	if !m.StartedAt.IsZero() {
		s.StartedAt = m.StartedAt
	}
	if s.StartedAt.IsZero() || at.Before(s.StartedAt) {
		s.StartedAt = at
	}
	s.Pid = 0
	s.Exit(at, code, reasonOf(m.Cause), m.Message)
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
