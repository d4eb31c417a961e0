package oci

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/cdi"
	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/guestapi"
	"github.com/tripod-run/tripod/internal/sandbox/vm/oci/internal/guestlog"
)

var (
	fpPlugged   = failpoint.New("vm-oci.create-container.plugged")
	fpCreated   = failpoint.New("vm-oci.create-container.created")
	fpIntent    = failpoint.New("vm-oci.start-container.intent")
	fpStarted   = failpoint.New("vm-oci.start-container.started")
	fpStopped   = failpoint.New("vm-oci.stop-container.stopped")
	fpForgotten = failpoint.New("vm-oci.remove-container.forgotten")
)

// state is a container's state for recovery.
type state struct {
	ledger.Record
	// GuestStart is when the run began by the guest's clock. Reports about earlier runs have earlier times.
	GuestStart time.Time        `json:"guestStart,omitzero"`
	Resolved   sandbox.Resolved `json:"resolved"`
	// Granted are those of the container's resources that concern the machine.
	Granted grant `json:"granted,omitzero"`
}

// Status implements ledger.State. The container's PID is one of the guest's, and so of no use on the node.
func (s state) Status() sandbox.Status { return s.StatusOf(0) }

// drainTime is how long the copy of an ended container's log may make no progress.
const drainTime = 10 * time.Second

// drainMax is how long the rest of an ended container's log is copied at most, while it progresses.
const drainMax = 5 * time.Minute

// lateTime is how long after its grace period a container can take to end before its machine is killed.
const lateTime = 20 * time.Second

// stopPause is the pause before a guest is asked again to stop a container.
const stopPause = time.Second

type handle = ledger.Handle[state, life]

// life is one run of a container.
type life struct {
	pod       *sandbox.Pod
	container *sandbox.Container
	log       *guestlog.Log
	// ending is closed when the end is known, and ended when it is recorded, once the log is complete.
	ending, ended chan struct{}

	mu sync.Mutex
	// starting is set until the start of the run is recorded. Until then early has the last report about its end. claimed is
	// set by whoever ends the run.
	starting bool
	early    *sandbox.Status
	claimed  bool
}

// Status implements sandbox.Backend.
func (o *Backend) Status(_ context.Context, p *sandbox.Pod, c *sandbox.Container) (sandbox.Status, error) {
	return o.ledger.Status(p.ID, c.ID)
}

// CreateContainer implements sandbox.Backend. For an existing container it returns the stored answer.
func (o *Backend) CreateContainer(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) (sandbox.Resolved, error) {
	made, known, err := o.ledger.Known(p.ID, c.ID)
	if err != nil || known {
		return made.Resolved, err
	}
	pod, err := o.running(p.ID)
	if err != nil {
		return sandbox.Resolved{}, err
	}
	create, err := o.inGuest(ctx, pod, c)
	if err != nil {
		return sandbox.Resolved{}, err
	}
	granted := grantedTo(c)
	changed := map[string]grant{c.ID: granted}
	if err := o.fit(ctx, pod, p, changed); err != nil {
		return sandbox.Resolved{}, fmt.Errorf("the pod's machine: %w", err)
	}
	if err := o.place(pod, p, changed); err != nil {
		return sandbox.Resolved{}, err
	}
	o.warnOfMemory(p, c)
	if err := fpPlugged.Hit(ctx); err != nil {
		return sandbox.Resolved{}, err
	}
	var resolved sandbox.Resolved
	if err := o.call(ctx, p.ID, guestapi.Request{Method: guestapi.MethodCreate, Container: c.ID}, create, &resolved); err != nil {
		return sandbox.Resolved{}, err
	}
	restoreMounts(&resolved, c)
	if err := os.MkdirAll(filepath.Dir(o.containerFile(p.ID, c.ID)), 0o700); err != nil {
		return sandbox.Resolved{}, sandbox.DiskError(err)
	}
	record := ledger.Record{ID: c.ID, Phase: ledger.Created}
	err = o.ledger.Create(p.ID, c.ID, state{Record: record, Granted: granted, Resolved: resolved})
	if err != nil {
		return sandbox.Resolved{}, err
	}
	return resolved, fpCreated.Hit(ctx)
}

// inGuest plugs in the container's images and block devices, mounts its volumes below the pod's share, and returns the
// container as the guest sees it.
func (o *Backend) inGuest(ctx context.Context, pod *podMachine, c *sandbox.Container) (guestapi.Create, error) {
	own, err := o.plugImage(ctx, pod, c.ImageID)
	if err != nil {
		return guestapi.Create{}, err
	}
	create := guestapi.Create{Images: []guestapi.Image{own}}
	config, err := cdi.New(o.cfg.CDIDirs).AsBlocks(c.Config)
	if err != nil {
		return guestapi.Create{}, err
	}
	config.LogPath = c.ID + ".log"
	guestResources(config.GetLinux().GetResources())
	if create.Devices, err = o.plugDevices(ctx, pod, config.GetDevices()); err != nil {
		return guestapi.Create{}, err
	}
	for i, m := range config.GetMounts() {
		if ref := m.GetImage().GetImage(); ref != "" {
			img, err := o.plugImage(ctx, pod, ref)
			if err != nil {
				return guestapi.Create{}, fmt.Errorf("mounts[%d].image: %w", i, err)
			}
			m.Image.Image = img.ID
			create.Images = append(create.Images, img)
			continue
		}
		pod.volumes.Lock()
		m.HostPath, err = o.shareVolume(pod.pod.ID, c.ID, m)
		pod.volumes.Unlock()
		if err != nil {
			return guestapi.Create{}, fmt.Errorf("mounts[%d].host_path: %s: %w", i, c.Config.Mounts[i].HostPath, err)
		}
	}
	create.Container.Container = sandbox.Container{ID: c.ID, ImageID: own.ID, Config: config, Adjustment: c.Adjustment}
	return create, nil
}

// restoreMounts replaces the guest's paths in the actual mounts with the node's. It drops mounts that nobody has requested.
func restoreMounts(r *sandbox.Resolved, c *sandbox.Container) {
	var mounts []*runtimeapi.Mount
	for _, m := range r.Mounts {
		for _, requested := range c.Config.GetMounts() {
			if requested.GetContainerPath() == m.GetContainerPath() {
				m.HostPath, m.Image = requested.GetHostPath(), requested.GetImage()
				mounts = append(mounts, m)
				break
			}
		}
	}
	r.Mounts = mounts
}

// StartContainer implements sandbox.Backend.
func (o *Backend) StartContainer(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) error {
	h, err := o.ledger.Startable(p.ID, c.ID)
	if h == nil {
		return err
	}
	if _, err := o.running(p.ID); err != nil {
		return err
	}
	before, _ := h.Snapshot()
	l := o.newLife(p, c, true)
	if err := l.log.Open(); err != nil {
		return err
	}
	if err := h.Begin(l, func(s *state) { s.Start() }); err != nil {
		l.log.Close()
		return err
	}
	err = fpIntent.Hit(ctx)
	var began sandbox.Status
	if err == nil {
		began, err = o.startInGuest(ctx, p.ID, c.ID, before.Phase == ledger.Created)
	}
	if err != nil {
		return o.failStart(ctx, h, l, err)
	}
	if began.Reason == sandbox.ReasonStartError {
		cause := o.failStart(ctx, h, l, errors.New(plausible(began).Message))
		return fmt.Errorf("start container %s: %w: %w", c.ID, cause, errdefs.ErrFailedPrecondition)
	}
	o.tasks.Go(guard.Func(o.log, "log of a container", func() { l.log.Follow(o.ctx, o.logOf(p.ID, c.ID)) }))
	if _, err := h.Update(l, func(s *state) { s.StartedAt, s.GuestStart = time.Now(), began.StartedAt }); err != nil {
		o.log.Error("cannot record that a container was started", "container", c.ID, "err", err)
	}
	if early := l.started(false); early != nil && (early.StartedAt.IsZero() || !early.StartedAt.Before(began.StartedAt)) {
		o.end(h, l, *early)
	} else if began.State == sandbox.StateExited {
		o.end(h, l, began)
	}
	return fpStarted.Hit(ctx)
}

func (o *Backend) newLife(p *sandbox.Pod, c *sandbox.Container, starting bool) *life {
	log := guestlog.New(p, c, o.cursorFile(p.ID, c.ID), o.cfg.LogSizeMax, o.log)
	return &life{pod: p, container: c, log: log, ending: make(chan struct{}), ended: make(chan struct{}), starting: starting}
}

// logOf returns the guest's log of a container.
func (o *Backend) logOf(pod, id string) guestlog.Source {
	return func(ctx context.Context, offset int64, acks io.Reader, out io.Writer) error {
		return o.receive(ctx, pod, guestapi.Request{Method: guestapi.MethodLog, Container: id, Offset: offset}, acks, out)
	}
}

// started ends the start of a run, which has failed or not, and returns the last report about it, if any. A run that failed
// to start is ended by failStart alone.
func (l *life) started(failed bool) *sandbox.Status {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.starting, l.claimed = false, failed
	return l.early
}

func (l *life) isStarting() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.starting
}

func (l *life) isEnding() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.claimed
}

// claim reports whether the caller is the one that ends the run. While the run starts, it keeps the report for the caller of
// StartContainer instead.
func (l *life) claim(report sandbox.Status) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.starting {
		l.early = &report
		return false
	}
	if l.claimed {
		return false
	}
	l.claimed = true
	close(l.ending)
	return true
}

// guestReports handles the guest's report about a container.
func (o *Backend) guestReports(p *sandbox.Pod, e guestapi.Event) {
	h := o.ledger.Loaded(e.Container)
	if h == nil || h.PodID != p.ID || e.Status.State != sandbox.StateExited {
		return
	}
	s, l := h.Snapshot()
	if l == nil {
		return
	}
	if !e.Status.StartedAt.Before(s.GuestStart) {
		o.end(h, l, e.Status)
	}
}

// end records and reports the end of a run, once its log is complete. It does not wait.
func (o *Backend) end(h *handle, l *life, status sandbox.Status) {
	if !l.claim(status) {
		return
	}
	o.tasks.Go(guard.Func(o.log, "end of a container", func() {
		l.log.Await(drainTime, drainMax)
		if !l.log.Whole() {
			if o.ctx.Err() != nil {
				return // the next daemon copies the rest of the log, and then records the end
			}
			o.log.Error("the log of an ended container is incomplete", "container", h.ID)
		}
		l.log.Close()
		recorded, current := h.End(l, func(s *state) {
			p := plausible(status)
			s.Exit(p.FinishedAt, p.ExitCode, p.Reason, p.Message)
		})
		o.leave(l.pod)
		if current { // before those who wait for the end, one of whom reports the end of the pod
			o.ledger.Report(sandbox.Event{PodID: h.PodID, ContainerID: h.ID, Status: recorded})
		}
		close(l.ended)
	}))
}

const (
	// maxMessage and maxReason are the most bytes of a guest's message and reason for the end of a container that are recorded.
	maxMessage = 4 << 10
	maxReason  = 64
)

// plausible returns what the guest says about the end of a container, in a form that is safe to record. A reason that does not
// look like one is replaced by that of the exit code.
func plausible(s sandbox.Status) sandbox.Status {
	s.FinishedAt = plausibleEnd(s.FinishedAt)
	if len(s.Message) > maxMessage {
		s.Message = strings.ToValidUTF8(s.Message[:maxMessage], "")
	}
	odd := func(r rune) bool { return r != ' ' && (r < 'A' || r > 'z' || r > 'Z' && r < 'a') }
	switch {
	case len(s.Reason) > 0 && len(s.Reason) <= maxReason && strings.IndexFunc(s.Reason, odd) < 0:
	case s.ExitCode == 0:
		s.Reason = sandbox.ReasonCompleted
	default:
		s.Reason = sandbox.ReasonError
	}
	return s
}

// plausibleEnd returns the time of an end by the guest's clock, unless that is in the future.
func plausibleEnd(at time.Time) time.Time {
	if now := time.Now(); at.IsZero() || at.After(now) {
		return now
	}
	return at
}

// endAll records that the pod's containers have ended with their machine. It does not wait, and returns the runs.
func (o *Backend) endAll(pod string, machine sandbox.Status) (lives []*life) {
	for _, h := range o.ledger.All() {
		if _, l := h.Snapshot(); l != nil && h.PodID == pod {
			l.log.Stop()
			o.end(h, l, endWithMachine(machine))
			lives = append(lives, l)
		}
	}
	return lives
}

// endWithMachine is how a container has ended whose machine has.
func endWithMachine(machine sandbox.Status) sandbox.Status {
	s := sandbox.Status{State: sandbox.StateExited, ExitCode: sandbox.ExitKilled, Reason: sandbox.ReasonError,
		Message: "the pod's machine has ended", FinishedAt: machine.FinishedAt}
	switch {
	case machine.Reason == sandbox.ReasonGuestPanic, machine.Reason == sandbox.ReasonOOMKilled:
		s.Reason = machine.Reason
	case machine.Reason == sandbox.ReasonUnknown, machine.State == sandbox.StateAbsent:
		s.Reason, s.ExitCode = sandbox.ReasonUnknown, sandbox.ExitUnknown
	}
	if machine.Message != "" {
		s.Message += ": " + machine.Message
	}
	return s
}

// StopContainer implements sandbox.Backend. If the guest has not stopped the container some time after the grace period, it
// does not work as it should, and its machine is killed.
func (o *Backend) StopContainer(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, grace time.Duration) error {
	h, l, err := o.ledger.FindRun(p.ID, c.ID)
	if l == nil {
		return err
	}
	asking, cancel := context.WithCancel(ctx)
	defer cancel()
	go guard.Func(o.log, "stop of a container", func() { o.askToStop(asking, h, l, grace) })()
	late := time.NewTimer(max(grace, 0) + lateTime)
	defer late.Stop()
	ending := l.ending
	for {
		select {
		case <-ending: // what is left is to copy the log
			late.Stop()
			ending = nil
		case <-l.ended:
			return fpStopped.Hit(ctx)
		case <-late.C:
			if l.isEnding() {
				continue // both cases of the select were ready
			}
			o.log.Error("killing a machine whose guest does not stop a container", "pod", p.ID, "container", c.ID)
			cancel()
			o.syncVolumes(ctx, p)
			mp, mc := o.machine(p)
			if err := o.machines.StopContainer(ctx, mp, mc, 0); err != nil {
				return err
			}
		case <-ctx.Done():
			return fmt.Errorf("wait for the end of container %s: %w", c.ID, context.Cause(ctx))
		}
	}
}

// askToStop asks the guest to stop a container until the guest has done it, or the end is known. A guest that cannot be reached,
// or has no room for another call, may answer the next time.
func (o *Backend) askToStop(ctx context.Context, h *handle, l *life, grace time.Duration) {
	for over := time.Now().Add(grace); ; {
		err := o.call(ctx, h.PodID, guestapi.Request{Method: guestapi.MethodStop, Container: h.ID},
			guestapi.Stop{Grace: max(time.Until(over), 0)}, nil)
		switch {
		case err == nil, ctx.Err() != nil: // the guest's report about the end is on its way, or nobody waits
			return
		case errdefs.IsNotFound(err):
			o.end(h, l, sandbox.Status{ExitCode: sandbox.ExitUnknown, Reason: sandbox.ReasonUnknown,
				Message: "the guest no longer knows the container"})
			return
		}
		o.log.Warn("a guest has not stopped a container", "container", h.ID, "err", err)
		select {
		case <-time.After(stopPause):
		case <-l.ending:
			return
		case <-ctx.Done():
			return
		}
	}
}

// RemoveContainer implements sandbox.Backend.
func (o *Backend) RemoveContainer(ctx context.Context, p *sandbox.Pod, c *sandbox.Container) error {
	if _, err := o.running(p.ID); err == nil {
		err := o.call(ctx, p.ID, guestapi.Request{Method: guestapi.MethodRemove, Container: c.ID}, nil, nil)
		if _, gone := o.running(p.ID); err != nil && gone == nil {
			return err
		}
	}
	if _, l, err := o.ledger.FindRun(p.ID, c.ID); err != nil {
		return err
	} else if l != nil {
		select {
		case <-l.ended:
		case <-ctx.Done():
			return fmt.Errorf("wait for the end of container %s: %w", c.ID, context.Cause(ctx))
		}
	}
	if err := fpForgotten.Hit(ctx); err != nil {
		return err
	}
	if err := o.unshare(p.ID, c.ID); err != nil {
		return err
	}
	o.sampler.Forget(c.ID)
	return errors.Join(ledger.RemoveFile(o.cursorFile(p.ID, c.ID)), o.ledger.Remove(p.ID, c.ID))
}
