package linux

import (
	"errors"
	"os"
	"path"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/oci"
	"github.com/tripod-run/tripod/internal/stats"
)

// drainTime limits how long conmon can run after its container has ended. In that time conmon drains the output into
// the log and writes the exit file. This takes milliseconds unless the disk hangs.
const drainTime = 10 * time.Second

type end struct {
	at      time.Time
	code    int32
	reason  string
	message string
}

// exitFile returns the path of the file that conmon writes, atomically, when the container has ended.
func (b *Backend) exitFile(id string) string { return filepath.Join(b.cfg.exitDir(), id) }

// watch waits until a container has ended, then records and reports the end. It watches two processes by pidfd, without
// polling: init, which ends with the container, and conmon, which ends after it has written the exit file.
func (b *Backend) watch(h *handle, l *life) {
	select {
	case <-l.Init.Dead:
	case <-l.Conmon.Dead:
	}
	b.settle(h, l)
	status := b.record(h, l, b.asForbidden(h.ID, b.findEnd(h, l)))
	b.ledger.Report(sandbox.Event{PodID: h.PodID, ContainerID: h.ID, Status: status})
}

// settle waits until both init and conmon have ended. One of the two must already have ended. settle kills what is
// still running in the container.
func (b *Backend) settle(h *handle, l *life) {
	s, _ := h.Snapshot()
	if l.Init.Alive() {
		// Without conmon, no process reads the container's output or records its exit code, so the container must
		// not continue. If the exit file exists, the kernel is about to report init's end.
		if !ledger.Exists(b.exitFile(h.ID)) {
			b.log.Error("conmon exited before its container; killing the container", "container", h.ID, "conmon", l.Conmon.Pid)
		}
		b.killLife(h, l)
		if !l.Init.WaitFor(drainTime) {
			b.log.Error("the container's init cannot be killed", "container", h.ID, "pid", l.Init.Pid)
			<-l.Init.Dead
		}
		return
	}
	if !s.OwnPID {
		b.killLife(h, l) // the processes that the container left in a shared PID namespace
	}
	if !l.Conmon.WaitFor(drainTime) {
		b.log.Error("conmon does not exit; killing it", "container", h.ID, "conmon", l.Conmon.Pid)
		_ = l.Conmon.KillGroup()
		<-l.Conmon.Dead
	}
}

// record stores the end in the handle and on disk.
func (b *Backend) record(h *handle, l *life, e end) sandbox.Status {
	status, _ := h.End(l, func(s *state) { s.Exit(e.at, e.code, e.reason, e.message) })
	l.mu.Lock()
	if l.kill != nil {
		l.kill.Stop()
	}
	l.mu.Unlock()
	close(l.ended)
	return status
}

// findEnd determines how a container ended, once its processes are gone.
func (b *Backend) findEnd(h *handle, l *life) end {
	s, _ := h.Snapshot()
	code, at, err := oci.ReadExit(b.exitFile(h.ID))
	if err != nil {
		message := "its monitor was killed"
		if !errors.Is(err, os.ErrNotExist) {
			message = err.Error()
		}
		return end{at: time.Now(), code: sandbox.ExitUnknown, reason: sandbox.ReasonUnknown, message: message}
	}
	e := end{at: at, code: code, reason: sandbox.ReasonCompleted}
	if code != 0 {
		e.reason = sandbox.ReasonError
		l.mu.Lock()
		ordered := l.killed
		l.mu.Unlock()
		// The count includes children, which the container may have outlived.
		if code == 128+int32(unix.SIGKILL) && !ordered && b.oomKilled(s) {
			e.reason = sandbox.ReasonOOMKilled
		}
	}
	return e
}

// oomKilled reports whether the kernel has killed processes of an ended container for lack of memory. Its cgroup exists until
// the runtime deletes the container, so the cgroup's counter belongs to this run. A scope is gone when its last process has
// ended. Then the pod's slice, whose count includes those of cgroups that are gone, has more kills than when the container was
// started, not counting those of the pod's other containers.
func (b *Backend) oomKilled(s state) bool {
	if kills, err := stats.OOMKills(s.Cgroup); err == nil {
		return kills > 0
	}
	now := b.podOOMKills(s.Cgroup)
	if now <= s.EarlierOOMKills {
		return false
	}
	for _, h := range b.siblings(s.Cgroup) { // these kills are none of theirs
		if _, l := h.Snapshot(); l != nil {
			_, _ = h.Update(l, func(other *state) { other.EarlierOOMKills += now - s.EarlierOOMKills }) // at worst, another one is blamed too
		}
	}
	return true
}

// siblings returns the containers in the same pod's slice as the one with the given cgroup.
func (b *Backend) siblings(container string) (others []*handle) {
	for _, h := range b.ledger.All() {
		if s, _ := h.Snapshot(); s.Cgroup != container && path.Dir(s.Cgroup) == path.Dir(container) {
			others = append(others, h)
		}
	}
	return others
}

// podOOMKills returns how many processes in a pod the kernel has killed for lack of memory, without those of the containers that
// have a cgroup now, except the given one. It returns 0 if the container's cgroup is not a scope.
func (b *Backend) podOOMKills(container string) uint64 {
	if b.cgroups.Driver != cgroup.DriverSystemd {
		return 0
	}
	kills, err := stats.OOMKills(path.Dir(container))
	if err != nil {
		return 0 // made with the first container
	}
	for _, h := range b.siblings(container) {
		other, _ := h.Snapshot()
		if own, err := stats.OOMKills(other.Cgroup); err == nil {
			kills -= min(own, kills)
		}
	}
	return kills
}
