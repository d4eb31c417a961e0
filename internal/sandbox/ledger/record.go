package ledger

import (
	"time"

	"github.com/tripod-run/tripod/internal/sandbox"
)

// Phase is a container's phase in its state file. Starting and Started are written before the container is started; the
// other phases are written once they are reached.
type Phase string

// The phases of a container. A backend uses Started if, after a crash of the daemon, another process knows whether the
// container was started. A backend uses Starting and Running if a start has several steps that recovery must tell
// apart.
const (
	Created  Phase = "created"
	Starting Phase = "starting"
	Started  Phase = "started"
	Running  Phase = "running"
	Exited   Phase = "exited"
)

// Record is the part of a container's state that all kinds of pod share. Each backend embeds Record in its own type of
// state.
type Record struct {
	ID    string `json:"id,omitempty"`
	Phase Phase  `json:"phase"`

	StartedAt  time.Time `json:"startedAt,omitzero"`
	FinishedAt time.Time `json:"finishedAt,omitzero"`
	ExitCode   int32     `json:"exitCode,omitempty"`
	Reason     string    `json:"reason,omitempty"`
	Message    string    `json:"message,omitempty"`
}

// StatusOf returns the container's status. While the container runs, the status has the given PID.
func (r Record) StatusOf(pid int) sandbox.Status {
	switch r.Phase {
	case Started, Running:
		return sandbox.Status{State: sandbox.StateRunning, Pid: pid, StartedAt: r.StartedAt}
	case Exited:
		return sandbox.Status{
			State: sandbox.StateExited, StartedAt: r.StartedAt, FinishedAt: r.FinishedAt,
			ExitCode: r.ExitCode, Reason: r.Reason, Message: r.Message,
		}
	default:
		return sandbox.Status{State: sandbox.StateCreated}
	}
}

// Start records that a run begins. Call it before the container is started.
func (r *Record) Start() { *r = Record{ID: r.ID, Phase: Started, StartedAt: time.Now()} }

// Exit records the end of a run. It never sets FinishedAt before StartedAt, because the given time may come from a file
// or from another process with a coarser clock.
func (r *Record) Exit(at time.Time, code int32, reason, message string) {
	r.Phase, r.ExitCode, r.Reason, r.Message = Exited, code, reason, message
	if r.FinishedAt = at; at.Before(r.StartedAt) {
		r.FinishedAt = r.StartedAt
	}
}

// FailStart records a failed start.
func (r *Record) FailStart(cause error) {
	r.StartedAt = time.Now()
	r.Exit(r.StartedAt, sandbox.ExitStartError, sandbox.ReasonStartError, cause.Error())
}
