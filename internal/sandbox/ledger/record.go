package ledger

import (
	"time"

	"github.com/tripod-run/tripod/internal/sandbox"
)

// Phase is how far a container has come, as its state file says: written before the step begins, Running and Exited after it.
type Phase string

// The phases of a container. A kind has either Started, where whatever runs its containers can be asked about them after a crash,
// or Starting and Running, where a start has several steps that recovery must tell apart.
const (
	Created  Phase = "created"
	Starting Phase = "starting"
	Started  Phase = "started"
	Running  Phase = "running"
	Exited   Phase = "exited"
)

// Record is what the state of every kind says of a container. A kind embeds it in its own state.
type Record struct {
	ID    string `json:"id,omitempty"`
	Phase Phase  `json:"phase"`

	StartedAt  time.Time `json:"startedAt,omitzero"`
	FinishedAt time.Time `json:"finishedAt,omitzero"`
	ExitCode   int32     `json:"exitCode,omitempty"`
	Reason     string    `json:"reason,omitempty"`
	Message    string    `json:"message,omitempty"`
}

// StatusOf is the container's status; pid is that of its process while it runs.
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

// Start records the beginning of a run. It is called before the container is started.
func (r *Record) Start() { *r = Record{ID: r.ID, Phase: Started, StartedAt: time.Now()} }

// Exit puts the end of a run into the record. A container never ends before it began: the times of files and of other processes
// have a coarser grain than ours.
func (r *Record) Exit(at time.Time, code int32, reason, message string) {
	r.Phase, r.ExitCode, r.Reason, r.Message = Exited, code, reason, message
	if r.FinishedAt = at; at.Before(r.StartedAt) {
		r.FinishedAt = r.StartedAt
	}
}

// FailStart puts a start that failed into the record.
func (r *Record) FailStart(cause error) {
	r.StartedAt = time.Now()
	r.Exit(r.StartedAt, sandbox.ExitStartError, sandbox.ReasonStartError, cause.Error())
}
