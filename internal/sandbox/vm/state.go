package vm

import (
	"time"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/hotplug"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
)

// format is the version of container.json and pod.json.
const format ledger.Format = 1

// state is what recovery and restarts need to know about a container. It is stored in container.json in the pod's
// directory.
type state struct {
	ledger.Record
	// Image is the image's ID, and Layout the image's layout (a disk.Layout).
	Image      string             `json:"image"`
	Layout     string             `json:"layout"`
	Definition machine.Definition `json:"definition"`
	// RootID identifies the root disk, if it is on a block device.
	RootID string `json:"rootID,omitempty"`
	// Warnings are warnings about the configuration, for people to read.
	Warnings []string `json:"warnings,omitempty"`
	// WaitForAgent makes a start wait for the guest's agent.
	WaitForAgent bool `json:"waitForAgent,omitempty"`
	// Unbootable says why the root disk cannot be booted, in cases that the firmware does not report.
	Unbootable string `json:"unbootable,omitempty"`
	// NoBoot says why the current run cannot boot. The machine is being killed for this reason.
	NoBoot string `json:"noBoot,omitempty"`
	// SerialBefore is the size of the serial log in bytes before the current run.
	SerialBefore int64 `json:"serialBefore,omitempty"`
	// Silent means that the container's log already has the message about the guest's silence.
	Silent bool `json:"silent,omitempty"`
	// PreviousStart is when the previous run began. The driver may still report the end of that run, which must not
	// count as the end of the current run.
	PreviousStart time.Time `json:"former,omitzero"`
	// Renew means that the guest has continued from a template and does not know its pod yet.
	Renew bool `json:"renew,omitempty"`
	// Pid is the PID of the hypervisor process.
	Pid int `json:"pid,omitempty"`
	// CPUs is the number of CPUs that the current run has, if some were added to those of the definition.
	CPUs int `json:"cpus,omitempty"`
	// Hotplugged are the disks that the current run got by AttachDisk.
	Hotplugged hotplug.Disks `json:"hotplugged,omitempty"`
}

// podState is a pod's state, in pod.json. The file is written before anything else that belongs to the pod is made.
type podState struct {
	ID string `json:"id"`
	// UID is the user ID and group ID of the hypervisor process.
	UID    int    `json:"uid"`
	Netns  string `json:"netns"`
	Cgroup string `json:"cgroup"`
	// Made means that CreateSandbox has completed.
	Made bool `json:"made"`
	// Warnings are warnings about the annotations, for people to read.
	Warnings []string `json:"warnings,omitempty"`
}

// Status implements ledger.State.
func (s state) Status() sandbox.Status { return s.StatusOf(s.Pid) }

// cpus returns the number of CPUs that the machine has.
func (s state) cpus() int { return max(s.Definition.CPUs, s.CPUs) }

// end records the end of a run in the state.
func (s *state) end(m machine.State) {
	code := m.ExitCode
	switch {
	case m.Cause == machine.CauseStart || m.Cause == machine.CauseNoBoot:
		code = sandbox.ExitStartError
	case m.Cause == machine.CauseUnknown:
		code = sandbox.ExitUnknown
	case m.Cause != machine.CausePowerOff && m.ExitCode == 0:
		code = 1 // a panic, or a hypervisor that failed but exited with 0
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
	s.Pid, s.CPUs, s.Hotplugged = 0, 0, nil
	s.Exit(at, code, reasonOf(m.Cause), m.Message)
}

// reasonOf returns the CRI exit reason for the cause of a machine's end.
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
