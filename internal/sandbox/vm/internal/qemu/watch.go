package qemu

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/machine"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/qmp"
	"github.com/tripod-run/tripod/internal/stats"
)

var (
	fpVerdict = failpoint.New("qemu.end.verdict")
	fpEnded   = failpoint.New("qemu.end.ended")
	fpKilling = failpoint.New("qemu.destroy.intent")
	fpKilled  = failpoint.New("qemu.destroy.killed")
)

// Exit codes of machines whose QEMU has none that says something.
const (
	exitStart = 128 // as of containers that cannot be started
	exitOther = 255
)

const (
	// quitTime is how long QEMU may take to close its images when its guest has ended.
	quitTime = 5 * time.Second
	// lostTime is how long QEMU may take to end after its virtiofsd, which ends as soon as QEMU lets go of it.
	lostTime = time.Second
	// The monitor is connected to again after these times: QEMU may be stopped, or somebody else holds the socket.
	retryFirst, retryMost = 50 * time.Millisecond, 5 * time.Second
)

// watch looks after a run until it is over or the driver is closed: by the monitor, which knows why a guest stopped, and
// by the process, whose end cannot be hidden.
func (h *handle) watch(r *run) {
	defer r.close()
	watching, stop := context.WithCancel(h.d.ctx)
	defer stop()
	h.d.bg.Go(func() { h.watchShares(watching, r) })
	for retry := retryFirst; ; retry = min(2*retry, retryMost) {
		if r.client() != nil || h.connect(r) {
			retry = retryFirst
			if cause, at := h.listen(r); cause != "" {
				h.endGuest(r, cause, at)
			}
			r.disconnected()
		}
		select {
		case <-r.reaped:
			h.ended(r)
			return
		case <-h.d.ctx.Done():
			return
		case <-time.After(retry):
		}
	}
}

// watchShares ends a machine of which a virtiofsd has ended while QEMU goes on. QEMU's own end ends it too, so that is given
// the time to be seen.
func (h *handle) watchShares(ctx context.Context, r *run) {
	lost := r.shares.Watch(ctx)
	if lost == "" || r.proc.WaitFor(lostTime) {
		return
	}
	if _, rec, _ := h.snapshot(); rec.Verdict != "" || rec.Killing {
		return // it is about to end, in order or by force
	}
	h.log.Error("a machine has lost a share; killing it", "reason", lost)
	h.mustSet(func(rec *record) { rec.Lost = lost })
	if err := r.proc.Signal(killSignal); err != nil {
		h.log.Error("kill a machine that has lost a share", "err", err)
	}
}

// connect tries for the monitor once.
func (h *handle) connect(r *run) bool {
	ctx, cancel := context.WithTimeout(h.d.ctx, askTime)
	defer cancel()
	ctx, stop := r.whileAlive(ctx)
	defer stop()
	if err := r.connect(ctx); err != nil {
		if !r.proc.Ending() && h.d.ctx.Err() == nil {
			h.log.Debug("the monitor of a machine is not there", "pid", r.proc.Pid, "err", err)
		}
		return false
	}
	return true
}

// listen follows the monitor until it ends, which gives "", or the guest has: why, and when. It begins with a question,
// for what happened before nobody heard.
func (h *handle) listen(r *run) (machine.Cause, time.Time) {
	m := r.client()
	lost := uint64(0)
	if cause := h.askStatus(r, m); cause != "" {
		return cause, time.Now()
	}
	for {
		select {
		case <-h.d.ctx.Done():
			return "", time.Time{}
		case <-r.reaped:
			return "", time.Time{}
		case e, ok := <-m.Events():
			if !ok {
				return "", time.Time{}
			}
			if cause := causeOf(e); cause != "" {
				return cause, whenOf(e)
			}
			if n := m.Lost(); n != lost {
				lost = n
				if cause := h.askStatus(r, m); cause != "" {
					return cause, time.Now()
				}
			}
		}
	}
}

// askStatus asks whether the guest has ended. A monitor that does not answer is closed, and connected to again.
func (h *handle) askStatus(r *run, m *qmp.Client) machine.Cause {
	ctx, cancel := context.WithTimeout(h.d.ctx, askTime)
	defer cancel()
	status, err := queryStatus(ctx, m)
	if err != nil {
		if !r.proc.Ending() && h.d.ctx.Err() == nil {
			h.log.Warn("a machine does not tell its state", "pid", r.proc.Pid, "err", err)
		}
		m.Close()
		return ""
	}
	switch status {
	case "shutdown":
		return machine.CausePowerOff
	case "guest-panicked":
		return machine.CausePanic
	case "internal-error":
		return machine.CauseFailed
	default:
		return ""
	}
}

// causeOf says what an event means for the machine; "" when it goes on. A SHUTDOWN that is not the guest's is QEMU's own
// end, by a signal or a command of somebody else, which the process will tell.
func causeOf(e qmp.Event) machine.Cause {
	switch e.Name {
	case "GUEST_PANICKED":
		return machine.CausePanic
	case "SHUTDOWN":
		var data struct {
			Guest  bool   `json:"guest"`
			Reason string `json:"reason"`
		}
		if err := json.Unmarshal(e.Data, &data); err != nil || !data.Guest || data.Reason == "guest-reset" {
			return ""
		}
		if data.Reason == "guest-panic" {
			return machine.CausePanic
		}
		return machine.CausePowerOff
	default:
		return ""
	}
}

// whenOf is when an event happened: by QEMU's clock, unless that says nonsense.
func whenOf(e qmp.Event) time.Time {
	if age := time.Since(e.Time); age < 0 || age > time.Hour {
		return time.Now()
	}
	return e.Time
}

// endGuest ends the QEMU of a guest that has ended: the reason is written down first.
func (h *handle) endGuest(r *run, cause machine.Cause, at time.Time) {
	h.mustSet(func(rec *record) { rec.Verdict, rec.FinishedAt = cause, at })
	if err := fpVerdict.Hit(h.d.ctx); err != nil {
		h.log.Error("end of a machine", "err", err)
	}
	ctx, cancel := context.WithTimeout(h.d.ctx, quitTime)
	defer cancel()
	// It closes its disks and ends. One that does not is killed.
	_ = r.execute(ctx, "quit", nil)
	if r.proc.Wait(ctx) != nil && h.d.ctx.Err() == nil {
		h.log.Warn("QEMU does not end by itself after its guest", "pid", r.proc.Pid)
		_ = r.proc.Signal(killSignal)
	}
	select {
	case <-r.reaped:
	case <-h.d.ctx.Done():
	case <-time.After(endTime):
	}
}

// ended records the end of a run whose process has ended, and reports it.
func (h *handle) ended(r *run) {
	def, rec, _ := h.snapshot()
	if err := r.shares.End(h.d.ctx); err != nil {
		h.log.Error("end of a machine", "err", err)
	}
	h.mustSet(func(have *record) { *have = verdict(*have, r, oomKilled(def, rec), logPath(def)) })
	if err := fpEnded.Hit(h.d.ctx); err != nil {
		h.log.Error("end of a machine", "err", err)
	}
	h.mu.Lock()
	h.run = nil
	h.mu.Unlock()
	close(r.over)
	s := h.state()
	h.log.Info("a machine ended", "cause", s.Cause, "exitCode", s.ExitCode, "message", s.Message)
	h.d.tell(h.name, s)
}

// verdict is the record of a run whose process has ended.
func verdict(rec record, r *run, oom bool, log string) record {
	words, starting := lastWords(log), rec.Step == stepStarting
	if rec.FinishedAt.IsZero() {
		rec.FinishedAt = time.Now()
	}
	if rec.StartedAt.IsZero() { // it came no further
		rec.StartedAt = rec.FinishedAt
	}
	rec.Step, rec.Cause = stepEnded, rec.Verdict
	switch {
	case rec.Verdict == machine.CausePowerOff:
		rec.ExitCode, rec.Message = 0, "the guest turned itself off"
	case rec.Verdict == machine.CausePanic:
		rec.ExitCode, rec.Message = machine.ExitPanic, "the guest's kernel panicked; the last lines of its console tell more"
	case rec.Verdict != "":
		rec.ExitCode, rec.Message = exitOther, "QEMU stopped the guest for an error of its own: "+words
	case oom && rec.Lost != "":
		rec.Cause, rec.ExitCode, rec.Message = machine.CauseOOM, machine.ExitKilled, "the machine's cgroup was out of memory: "+rec.Lost
	case rec.Lost != "":
		rec.Cause, rec.ExitCode, rec.Message = machine.CauseFailed, machine.ExitKilled, rec.Lost
	case rec.Killing:
		rec.Cause, rec.ExitCode, rec.Message = machine.CauseKilled, machine.ExitKilled, "killed"
	case oom:
		rec.Cause, rec.ExitCode, rec.Message = machine.CauseOOM, machine.ExitKilled, "QEMU was killed: its cgroup was out of memory"
	default:
		rec.Cause = machine.CauseFailed
		if starting {
			rec.Cause = machine.CauseStart
		}
		rec.ExitCode, rec.Message = r.exit()
		if words != "" {
			rec.Message += ": " + words
		}
	}
	return rec
}

// exit is the exit code of a process that nobody of us has ended, in a container's terms, and what it is.
func (r *run) exit() (int32, string) {
	switch {
	case r == nil || !r.known:
		return machine.ExitKilled, "QEMU ended while nobody could see why"
	case r.status.Signaled():
		return 128 + int32(r.status.Signal()), fmt.Sprintf("QEMU was ended by signal %d (%s)", r.status.Signal(), r.status.Signal())
	case r.status.ExitStatus() == 0:
		return exitOther, "QEMU ended by itself, as somebody has told it"
	default:
		return int32(r.status.ExitStatus()), fmt.Sprintf("QEMU ended by itself with code %d", r.status.ExitStatus())
	}
}

// oomKilled tells whether something in the cgroup was killed for want of memory since QEMU started.
func oomKilled(def machine.Definition, rec record) bool {
	kills, err := stats.OOMKills(def.Cgroup)
	return err == nil && kills > rec.OOMKills
}

// destroy kills the machine, whatever state it is in.
func (h *handle) destroy(ctx context.Context) error {
	_, _, r := h.snapshot()
	if r == nil {
		return nil
	}
	h.mustSet(func(rec *record) { rec.Killing = true })
	if err := fpKilling.Hit(ctx); err != nil {
		return err
	}
	if err := r.proc.Signal(killSignal); err != nil {
		return fmt.Errorf("kill machine %.64s: %w", h.name, err)
	}
	if err := fpKilled.Hit(ctx); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, endTime)
	defer cancel()
	select {
	case <-r.over:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("machine %.64s (pid %d) was killed and has not ended: %w (%w)", h.name, r.proc.Pid, context.Cause(ctx), errdefs.ErrUnavailable)
	case <-h.d.ctx.Done():
		return fmt.Errorf("the driver is closed: %w", errdefs.ErrUnavailable)
	}
}
