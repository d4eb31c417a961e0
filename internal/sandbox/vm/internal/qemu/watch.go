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

// Exit codes to report if QEMU has no useful exit code.
const (
	exitStart = 128 // as for containers that cannot be started
	exitOther = 255
)

const (
	// quitTimeout bounds the time that QEMU may take, after the quit command, to close its images and end.
	quitTimeout = 5 * time.Second
	// shareLossGrace is how long the driver waits for QEMU's end after the end of a virtiofsd. If QEMU ends within this
	// time, no share was lost, because every virtiofsd ends when its QEMU ends.
	shareLossGrace = time.Second
	// retryMin and retryMax bound the time between attempts to connect to the monitor. Connecting fails while QEMU is
	// stopped or another client holds the socket.
	retryMin, retryMax = 50 * time.Millisecond, 5 * time.Second
)

// watch observes a run until it has ended or the driver is closed. The monitor reports why a guest stopped. The pidfd
// reports the end of the process in any case.
func (h *handle) watch(r *run) {
	defer r.close()
	watching, stop := context.WithCancel(h.d.ctx)
	defer stop()
	h.d.bg.Go(func() { h.watchShares(watching, r) })
	for retry := retryMin; ; retry = min(2*retry, retryMax) {
		if r.client() != nil || h.connect(r) {
			retry = retryMin
			if cause, at := h.listen(r); cause != "" {
				h.endGuest(r, cause, at)
			}
			r.disconnected()
		}
		select {
		case <-r.reaped:
			h.recordEnd(r)
			return
		case <-h.d.ctx.Done():
			return
		case <-time.After(retry):
		}
	}
}

// watchShares kills a machine if one of its virtiofsd processes has ended and QEMU has not.
func (h *handle) watchShares(ctx context.Context, r *run) {
	lost := r.shares.Watch(ctx)
	if lost == "" || r.proc.WaitFor(shareLossGrace) {
		return
	}
	if _, rec, _ := h.snapshot(); rec.Verdict != "" || rec.Killing {
		return // QEMU is about to end
	}
	h.log.Error("killing a machine that lost a share", "reason", lost)
	h.mustSet(func(rec *record) { rec.Lost = lost })
	if err := r.proc.Signal(killSignal); err != nil {
		h.log.Error("killing the machine failed", "err", err)
	}
}

// connect tries to connect to the monitor once.
func (h *handle) connect(r *run) bool {
	ctx, cancel := context.WithTimeout(h.d.ctx, monitorTimeout)
	defer cancel()
	ctx, stop := r.whileAlive(ctx)
	defer stop()
	if err := r.connect(ctx); err != nil {
		if !r.proc.Ending() && h.d.ctx.Err() == nil {
			h.log.Debug("connecting to a machine's monitor failed", "pid", r.proc.Pid, "err", err)
		}
		return false
	}
	return true
}

// listen reads monitor events until the guest has ended, and returns the cause and time of the guest's end. It returns
// "" if the monitor or the process ends first. It begins with a query, because events from before the connection are
// lost.
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
				return cause, eventTime(e)
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

// askStatus asks QEMU whether the guest has ended. It returns the cause, or "" if the guest has not ended. If the
// monitor does not answer, askStatus closes the connection and returns ""; watch then connects again.
func (h *handle) askStatus(r *run, m *qmp.Client) machine.Cause {
	ctx, cancel := context.WithTimeout(h.d.ctx, monitorTimeout)
	defer cancel()
	status, err := queryStatus(ctx, m)
	if err != nil {
		if !r.proc.Ending() && h.d.ctx.Err() == nil {
			h.log.Warn("querying a machine's state failed", "pid", r.proc.Pid, "err", err)
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

// causeOf returns the cause that an event gives for the guest's end, or "" if it gives none. A SHUTDOWN that the guest
// did not cause gives none: a signal or another client's command ended QEMU, and only QEMU's exit status tells the
// cause.
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

// eventTime returns the time of an event by QEMU's clock, or the current time if QEMU's clock gives a time in the
// future or more than an hour ago.
func eventTime(e qmp.Event) time.Time {
	if age := time.Since(e.Time); age < 0 || age > time.Hour {
		return time.Now()
	}
	return e.Time
}

// endGuest records why a guest has ended, and then ends its QEMU.
func (h *handle) endGuest(r *run, cause machine.Cause, at time.Time) {
	h.mustSet(func(rec *record) { rec.Verdict, rec.FinishedAt = cause, at })
	if err := fpVerdict.Hit(h.d.ctx); err != nil {
		h.log.Error("recording a machine's end failed", "err", err)
	}
	ctx, cancel := context.WithTimeout(h.d.ctx, quitTimeout)
	defer cancel()
	// On quit, QEMU closes its disks and ends. If it does not end in time, kill it.
	_ = r.execute(ctx, "quit", nil)
	if r.proc.Wait(ctx) != nil && h.d.ctx.Err() == nil {
		h.log.Warn("killing QEMU, which did not quit after its guest ended", "pid", r.proc.Pid)
		_ = r.proc.Signal(killSignal)
	}
	select {
	case <-r.reaped:
	case <-h.d.ctx.Done():
	case <-time.After(killTimeout):
	}
}

// recordEnd records and reports the end of a run whose process has ended.
func (h *handle) recordEnd(r *run) {
	def, rec, _ := h.snapshot()
	if err := r.shares.End(h.d.ctx); err != nil {
		h.log.Error("recording a machine's end failed", "err", err)
	}
	h.mustSet(func(have *record) { *have = endedRecord(*have, r, oomKilled(def, rec), logPath(def)) })
	if err := fpEnded.Hit(h.d.ctx); err != nil {
		h.log.Error("recording a machine's end failed", "err", err)
	}
	h.mu.Lock()
	h.run = nil
	h.mu.Unlock()
	s := h.state()
	h.log.Info("machine ended", "cause", s.Cause, "exitCode", s.ExitCode, "message", s.Message)
	h.d.report(h.name, s)
	close(r.recorded) // last, so that nobody starts the machine again before its end is reported
}

// endedRecord returns the record of a run whose process has ended.
func endedRecord(rec record, r *run, oom bool, log string) record {
	words, starting := lastWords(log), rec.Step == stepStarting
	if rec.FinishedAt.IsZero() {
		rec.FinishedAt = time.Now()
	}
	if rec.StartedAt.IsZero() { // the guest never ran
		rec.StartedAt = rec.FinishedAt
	}
	rec.Step, rec.Cause = stepEnded, rec.Verdict
	switch {
	case rec.Verdict == machine.CausePowerOff:
		rec.ExitCode, rec.Message = 0, "the guest turned itself off"
	case rec.Verdict == machine.CausePanic:
		rec.ExitCode, rec.Message = machine.ExitPanic, "the guest's kernel panicked; see the last lines of its console"
	case rec.Verdict != "":
		rec.ExitCode, rec.Message = exitOther, "QEMU stopped the guest because of an internal error: "+words
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
		rec.ExitCode, rec.Message = r.exitCode()
		if words != "" {
			rec.Message += ": " + words
		}
	}
	return rec
}

// exitCode returns the container's exit code and a message, for a QEMU process that the daemon did not end.
func (r *run) exitCode() (int32, string) {
	switch {
	case r == nil || !r.statusKnown:
		return machine.ExitKilled, "QEMU ended for an unknown reason"
	case r.status.Signaled():
		return 128 + int32(r.status.Signal()), fmt.Sprintf("QEMU was ended by signal %d (%s)", r.status.Signal(), r.status.Signal())
	case r.status.ExitStatus() == 0:
		return exitOther, "QEMU ended by itself, on request of another process"
	default:
		return int32(r.status.ExitStatus()), fmt.Sprintf("QEMU ended by itself with code %d", r.status.ExitStatus())
	}
}

// oomKilled reports whether, since QEMU's start, the kernel has killed a process in the machine's cgroup for lack of
// memory.
func oomKilled(def machine.Definition, rec record) bool {
	kills, err := stats.OOMKills(def.Cgroup)
	return err == nil && kills > rec.OOMKills
}

// destroy kills the machine's QEMU, if it is running, and waits until the end is recorded and reported.
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
	ctx, cancel := context.WithTimeout(ctx, killTimeout)
	defer cancel()
	select {
	case <-r.recorded:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("machine %.64s (pid %d) was killed but has not ended: %w (%w)", h.name, r.proc.Pid, context.Cause(ctx),
			errdefs.ErrUnavailable)
	case <-h.d.ctx.Done():
		return fmt.Errorf("the driver is closed: %w", errdefs.ErrUnavailable)
	}
}
