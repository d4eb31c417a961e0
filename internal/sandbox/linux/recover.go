package linux

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/mnt"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/oci"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/shared"
)

func (b *Backend) Recover(ctx context.Context, known []sandbox.Known, sink sandbox.Sink) (sandbox.Found, error) {
	b.ledger.ReportTo(sink)
	found := sandbox.NewFound()
	conmons := oci.Monitors(b.cfg.Root)
	keep := map[string]bool{}
	for _, k := range known {
		keep[k.Pod.ID] = true
		b.recoverLabels(k)
		if b.recoverPod(k.Pod) {
			found.Sandboxes[k.Pod.ID] = true
		}
		for _, c := range k.Containers {
			keep[c.ID] = true
			status, err := b.recoverContainer(ctx, k.Pod.ID, c.ID, conmons)
			if err != nil {
				return found, fmt.Errorf("container %s: %w", c.ID, err)
			}
			found.Add(c.ID, status)
			if action := b.notifierAction(k.Pod, c); action != "" && status.State == sandbox.StateRunning {
				b.log.Warn("nobody is notified any more about a container's forbidden system calls, which now fail with ENOSYS, "+
					"because the daemon was restarted", "pod", k.Pod.ID, "container", c.ID, "action", action)
			}
		}
	}
	if err := b.removeOrphans(ctx, keep, conmons); err != nil {
		// The error is only logged, because known pods do not depend on this removal.
		b.log.Error("remove containers and pods that are not in the record", "err", err)
	}
	return found, nil
}

// recoverPod reports whether the pod's shared parts exist, and resumes watching its init process.
func (b *Backend) recoverPod(p *sandbox.Pod) bool {
	if !b.sandboxReady(p) {
		return false
	}
	// after an upgrade from a version that kept the files elsewhere
	if files := shared.FilesOf(p, b.cfg.podRunDir(p.ID)); !mnt.IsMounted(files.Etc) {
		labels, err := b.cfg.readLabels(p.ID)
		if err == nil {
			err = files.MakeEtc(p, b.labels.TmpfsOption(labels.Mount), b.log)
		}
		if err != nil {
			b.log.Error("recreate a pod's files for /etc", "pod", p.ID, "err", err)
			return false
		}
	}
	if !shared.SharesPID(p) {
		return true
	}
	state, err := readPodState(b.cfg.podRunDir(p.ID))
	if err != nil {
		return false
	}
	init, err := process.Adopt(state.Pause)
	if err != nil {
		return false
	}
	b.watchPause(p.ID, init)
	return true
}

// recoverContainer determines what became of a container while the daemon was down.
func (b *Backend) recoverContainer(ctx context.Context, podID, id string, conmons map[string]process.ID) (sandbox.Status, error) {
	h, err := b.ledger.Find(podID, id)
	if err != nil {
		return sandbox.Status{}, err
	}
	if h == nil {
		// The container was partly created, or its state file is damaged. The node removes the container but not its
		// conmon, so kill conmon here.
		return sandbox.Status{}, b.killMonitor(ctx, conmons[id])
	}
	s, _ := h.Snapshot()
	switch s.Phase {
	case ledger.Starting:
		err = b.recoverStarting(ctx, h, conmons[id])
	case ledger.Running:
		err = b.recoverRunning(h)
	}
	s, _ = h.Snapshot()
	return s.Status(), err
}

// recoverRunning resumes watching a container that was running when the daemon went down, or records how it ended.
func (b *Backend) recoverRunning(h *handle) error {
	s, _ := h.Snapshot()
	if s.BootID != bootID() {
		l := newLife(oci.Processes{Conmon: process.Ended(s.Conmon), Init: process.Ended(s.Init)})
		h.Adopt(l)
		b.record(h, l, end{at: time.Now(), code: sandbox.ExitUnknown, reason: sandbox.ReasonUnknown, message: "the node was restarted"})
		return nil
	}
	conmon, err := adoptOrDead(s.Conmon)
	if err != nil {
		return err
	}
	init, err := adoptOrDead(s.Init)
	if err != nil {
		conmon.Close()
		return err
	}
	l := newLife(oci.Processes{Conmon: conmon, Init: init})
	h.Adopt(l)
	if !conmon.Alive() && !init.Alive() {
		b.settle(h, l)
		b.record(h, l, b.findEnd(h, l))
		return nil
	}
	go guard.Func(b.log, "watch of a container", func() { b.watch(h, l) })()
	return nil
}

// adoptOrDead is like process.Adopt, but returns an ended process instead of errdefs.ErrNotFound. No other error proves
// that the process has ended.
func adoptOrDead(id process.ID) (*process.Process, error) {
	p, err := process.Adopt(id)
	if errdefs.IsNotFound(err) {
		return process.Ended(id), nil
	}
	return p, err
}

// recoverStarting handles a container whose start was interrupted. If its program was started, the container is adopted
// as running; otherwise the start is rolled back.
func (b *Backend) recoverStarting(ctx context.Context, h *handle, conmon process.ID) error {
	s, _ := h.Snapshot()
	if s.BootID == bootID() {
		if done, err := b.adoptStarted(ctx, h, conmon); done || err != nil {
			return err
		}
	}
	if err := b.clearEarlierRun(ctx, h); err != nil {
		return err
	}
	return h.Set(func(s *state) { s.Phase = ledger.Created })
}

// adoptStarted adopts a container whose program was started although the start was not recorded. It returns false if
// the program was not started.
func (b *Backend) adoptStarted(ctx context.Context, h *handle, id process.ID) (bool, error) {
	conmon, err := adoptOrDead(id)
	if err != nil {
		return false, err
	}
	if !conmon.Alive() {
		return b.endUnrecorded(h, conmon), nil
	}
	pid, err := oci.InitPid(b.bundleOf(h))
	if err != nil || !b.runtime.Started(ctx, h.ID) {
		conmon.Close()
		return false, nil
	}
	init, err := process.Open(pid)
	if err != nil && !errdefs.IsNotFound(err) {
		conmon.Close()
		return false, err
	}
	began := time.Now()
	if parent, parentErr := process.ParentOf(pid); err != nil || parentErr != nil || parent != conmon.Pid {
		init.Close() // init has ended, and its PID may have been reused
		init = process.Ended(process.ID{Pid: pid})
	} else {
		began = process.StartedAt(init.Start)
	}
	return true, b.watchRunning(h, oci.Processes{Conmon: conmon, Init: init}, began)
}

// endUnrecorded records the end of a program whose start was not recorded. An exit file proves that the program ran:
// conmon writes no exit file if the creation fails, and nobody but us starts a created container.
func (b *Backend) endUnrecorded(h *handle, conmon *process.Process) bool {
	_, at, err := oci.ReadExit(b.exitFile(h.ID))
	if err != nil {
		return false
	}
	l := newLife(oci.Processes{Conmon: conmon, Init: process.Ended(process.ID{})})
	h.Adopt(l)
	h.UpdateInMemory(l, func(s *state) { s.StartedAt = at })
	b.record(h, l, b.findEnd(h, l))
	return true
}

// killMonitor kills a conmon and the OCI runtime that it runs.
func (b *Backend) killMonitor(ctx context.Context, id process.ID) error {
	p, err := adoptOrDead(id)
	if err != nil || !p.Alive() {
		return err
	}
	if err := p.KillGroup(); err != nil {
		return err
	}
	return p.Wait(ctx)
}

// removeOrphans removes everything that has one of our names but is not in the record.
func (b *Backend) removeOrphans(ctx context.Context, keep map[string]bool, conmons map[string]process.ID) error {
	var errs []error
	for id, conmon := range conmons {
		if !keep[id] {
			errs = append(errs, b.killMonitor(ctx, conmon))
		}
	}
	pods := map[string]bool{}
	for _, pod := range idsIn(b.cfg.Root) {
		for _, id := range idsIn(b.cfg.podDir(pod)) {
			if !keep[id] {
				b.log.Info("removing a container that is not in the record", "pod", pod, "container", id)
				errs = append(errs, b.removeContainer(ctx, pod, id, ""))
			}
		}
		pods[pod] = true
	}
	for _, id := range append(idsIn(b.cfg.ociDir()), idsIn(b.cfg.exitDir())...) {
		if !keep[id] {
			errs = append(errs, b.runtime.Delete(ctx, id), ledger.RemoveFile(b.exitFile(id)))
		}
	}
	for _, pod := range idsIn(b.cfg.podsDir()) {
		pods[pod] = true
	}
	for pod := range pods {
		if !keep[pod] {
			b.log.Info("removing a pod that is not in the record", "pod", pod)
			errs = append(errs, b.removeSandbox(ctx, pod, ""))
		}
	}
	errs = append(errs, b.removeOrphanCgroups(ctx, keep), b.runtime.SweepProbes(ctx, b.cfg.RunDir, b.cgroups.Tree),
		b.releaseOrphans(ctx, keep), oci.ReapExecs(b.cfg.execDir()))
	return errors.Join(errs...)
}

func (b *Backend) removeOrphanCgroups(ctx context.Context, keep map[string]bool) error {
	if b.cgroups.Driver == cgroup.DriverSystemd {
		return b.cgroups.RemoveSlices(ctx, "", keep) // systemd removes scopes itself
	}
	var errs []error
	for _, id := range b.cgroups.Names() {
		if keep[id] || !cgroup.ID().MatchString(id) {
			continue
		}
		dir := filepath.Join(b.cgroups.Parent, cgroup.Mark+id)
		errs = append(errs, b.cgroups.Kill(ctx, dir), b.cgroups.Remove(ctx, dir))
	}
	return errors.Join(errs...)
}

func (b *Backend) releaseOrphans(ctx context.Context, keep map[string]bool) error {
	keys, err := b.images.Snapshots(ctx)
	if err != nil {
		return err
	}
	var errs []error
	for _, key := range keys {
		if id := containerOfKey(key); id != "" && !keep[id] {
			errs = append(errs, b.images.Release(ctx, key))
		}
	}
	return errors.Join(errs...)
}

// idsIn lists the entries of a directory whose names look like IDs.
func idsIn(dir string) (ids []string) {
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		if cgroup.ID().MatchString(e.Name()) {
			ids = append(ids, e.Name())
		}
	}
	return ids
}
