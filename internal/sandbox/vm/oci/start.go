package oci

import (
	"context"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/guestapi"
)

// restartTime is how long it takes at most until tripod-guest serves again after it has ended: tripod-init's longest pause, and
// the recovery of the containers in an emulated machine.
const restartTime = 30 * time.Second

// startTries is how often a container is started if tripod-guest ends in each start.
const startTries = 3

// startInGuest starts a container and returns its status. If tripod-guest ends meanwhile, the next one knows whether the
// container's program was started, which must happen only once. First says that it is the container's first run, so that an
// end that the guest knows is the end of this run.
func (o *Backend) startInGuest(ctx context.Context, pod, id string, first bool) (began sandbox.Status, err error) {
	for range startTries {
		began = sandbox.Status{}
		err = o.call(ctx, pod, guestapi.Request{Method: guestapi.MethodStart, Container: id}, nil, &began)
		if ctx.Err() != nil || !errdefs.IsUnavailable(err) {
			return began, err
		}
		o.log.Warn("a guest has not answered whether a container was started; asking it", "container", id, "err", err)
		says, asked := o.awaitRestart(ctx, pod)
		if asked != nil {
			return began, err
		}
		switch s := says[id]; {
		case s.State == sandbox.StateRunning, s.State == sandbox.StateExited && first && s.Reason != sandbox.ReasonStartError:
			return s, nil
		case s.State != sandbox.StateCreated:
			return began, err
		}
	}
	return began, err
}

// awaitRestart asks the guest for the statuses of its containers until it answers, or for restartTime.
func (o *Backend) awaitRestart(ctx context.Context, pod string) (map[string]sandbox.Status, error) {
	ctx, cancel := context.WithTimeout(ctx, restartTime)
	defer cancel()
	for {
		var says map[string]sandbox.Status
		err := o.call(ctx, pod, guestapi.Request{Method: guestapi.MethodStatuses}, nil, &says)
		if !errdefs.IsUnavailable(err) {
			return says, err
		}
		select {
		case <-time.After(rewatchMin):
		case <-ctx.Done():
			return nil, err
		}
	}
}

// statuses asks the guest for the statuses of its containers by their IDs.
func (o *Backend) statuses(ctx context.Context, pod string) (says map[string]sandbox.Status, err error) {
	ctx, cancel := context.WithTimeout(ctx, guestTime)
	defer cancel()
	err = o.call(ctx, pod, guestapi.Request{Method: guestapi.MethodStatuses}, nil, &says)
	return says, err
}

// failStart records a failed start. If the caller went away, the container returns to Created. A start that failed on the
// way to the guest or back may have succeeded there, so failStart undoes it.
func (o *Backend) failStart(ctx context.Context, h *handle, l *life, cause error) error {
	if ctx.Err() != nil || errdefs.IsUnavailable(cause) {
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), restartTime)
		defer cancel()
		_, err := o.awaitRestart(undo, h.PodID)
		if err == nil {
			err = o.call(undo, h.PodID, guestapi.Request{Method: guestapi.MethodStop, Container: h.ID}, guestapi.Stop{}, nil)
		}
		if err != nil {
			o.log.Warn("cannot undo the start of a container", "container", h.ID, "err", err)
		}
	}
	l.started(true)
	l.log.Close()
	h.End(l, func(s *state) {
		if ctx.Err() != nil {
			s.Record = ledger.Record{ID: s.ID, Phase: ledger.Created}
			return
		}
		s.FailStart(cause)
	})
	close(l.ended)
	return cause
}
