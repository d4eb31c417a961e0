package manager

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/edge/wire"
	"github.com/tripod-run/tripod/internal/failpoint"
	"github.com/tripod-run/tripod/internal/guard"
)

// Fail points.
var (
	createAsked    = failpoint.New("edge.manager.create.asked")
	createRecorded = failpoint.New("edge.manager.create.recorded")
	createDone     = failpoint.New("edge.manager.create.done")
	deleteRecorded = failpoint.New("edge.manager.delete.recorded")
	deleteDone     = failpoint.New("edge.manager.delete.done")
	adoptDone      = failpoint.New("edge.manager.adopt.done")
)

// create records a module and starts to create it. It returns once the module is recorded. It returns
// errdefs.ErrAlreadyExists if the uuid is in use, and errdefs.ErrResourceExhausted if the runtime has no free index.
func (h *host) create(objectID, origin string, data wire.ModuleData) error {
	if err := data.Validate(); err != nil {
		return err
	}
	h.orders.Lock()
	defer h.orders.Unlock()
	return h.createLocked(objectID, origin, data)
}

func (h *host) createLocked(objectID, origin string, data wire.ModuleData) error {
	if err := createAsked.Hit(h.m.ctx); err != nil {
		return err
	}
	uuid := data.UUID()
	if repeated, err := h.isRepeat(uuid, objectID); repeated || err != nil {
		return err
	}
	r := record{Runtime: h.info.UUID, State: recordCreated, Origin: origin, ObjectID: objectID, Data: data.Bytes()}
	mod, err := h.add(uuid, data, r)
	if err != nil {
		return err
	}
	if err := h.m.put(uuid, mod.record); err != nil {
		h.remove(mod)
		return err
	}
	if err := createRecorded.Hit(h.m.ctx); err != nil {
		return err
	}
	h.applyAndLaunch(mod, evRecorded)
	h.admit()
	poke(h.report)
	return nil
}

// isRepeat reports whether a create message is for a module that already exists. Either the message repeats the
// module's own create message, or it is the orchestrator's new order for a lost module that the manager has already
// recreated. If any other module has the uuid, on any runtime, isRepeat returns an error.
func (h *host) isRepeat(uuid, objectID string) (bool, error) {
	for _, other := range h.m.hosts {
		other.mu.Lock()
		mod := other.byUUID[uuid]
		same := mod != nil && other == h && mod.state.recorded() != recordExited &&
			(mod.repeatable || objectID != "" && mod.record.ObjectID == objectID)
		if same {
			mod.repeatable = false
		}
		other.mu.Unlock()
		switch {
		case same:
			h.m.log.Info("edge: module exists already", "runtime", h.info.Name, "module", uuid)
			return true, nil
		case mod != nil:
			return false, fmt.Errorf("create module %s: the runtime %s has a module with this uuid: %w", uuid, other.info.Name,
				errdefs.ErrAlreadyExists)
		}
	}
	return false, nil
}

// applyAndLaunch applies an event, and starts the launcher or the clean-up if the event calls for it.
func (h *host) applyAndLaunch(mod *module, e event) {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch do := mod.apply(e); {
	case do == conclude:
		h.m.wg.Go(guard.Func(h.m.log, "end of a module", func() { h.conclude(mod, mod.record.Exited) }))
	case do == launch && h.up && !mod.launching && !h.held(mod):
		h.startLauncher(mod)
	}
}

// startLauncher starts the launcher of a module. The caller holds h.mu, and the runtime is up.
func (h *host) startLauncher(mod *module) {
	mod.launching = true
	run := h.run
	h.calls.Add(1)
	h.m.wg.Go(func() {
		defer h.calls.Done()
		guard.Func(h.m.log, "start of a module", func() { h.launch(run, mod) })()
		h.update(func() { mod.launching = false })
		h.admit()
	})
}

// apply applies an event to a module.
func (h *host) apply(mod *module, e event) (do action) {
	h.update(func() { do = mod.apply(e) })
	return do
}

// launch creates or adopts a module. It retries while the runtime is up.
func (h *host) launch(run context.Context, mod *module) {
	delay := backoff{min: h.m.config.BackoffMin, max: h.m.config.BackoffMax}
	for run.Err() == nil {
		switch h.apply(mod, evLaunch) {
		case adopt:
			if !h.adopt(run, mod) {
				return
			}
		case create:
			h.beginTrial(mod)
			err := h.createOnce(run, mod)
			if err == nil {
				h.probation(run, mod)
				return
			}
			wait := delay.delay()
			h.update(func() { mod.problem = problem{err: err, retryAt: time.Now().Add(wait)} })
			h.awaitRetry(run, mod, wait)
		case settle:
			h.settle(mod, status(wire.CodeKilled, "killed", "deleted before it ran"))
			return
		default:
			return
		}
	}
}

// pause sleeps for d, or until wake has a token or ctx ends.
func pause(ctx context.Context, d time.Duration, wake <-chan struct{}) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-wake:
	case <-ctx.Done():
	}
}

// adopt asks the runtime to adopt the module. It reports true if the runtime does not have the module.
func (h *host) adopt(run context.Context, mod *module) (missing bool) {
	mod.box.start(run)
	runs, err := h.rt.Adopt(run, mod.record.Index, h.dataOf(mod))
	if run.Err() != nil {
		return false
	}
	if err != nil {
		h.m.refuse("adopt", "cannot adopt a module", "runtime", h.info.Name, "module", mod.uuid, "err", err)
	}
	if runs && err == nil {
		if adoptDone.Hit(run) == nil {
			h.confirm(mod)
			h.runs(run, mod)
		}
		return false
	}
	if h.apply(mod, evMissing) == reportLost {
		h.reportLost(mod)
	}
	return true
}

// createOnce asks the runtime to create the module. It returns an error if the caller is to try again.
func (h *host) createOnce(run context.Context, mod *module) error {
	mod.box.start(run)
	err := errors.Join(h.rt.Create(run, mod.record.Index, h.dataOf(mod)), createDone.Hit(run))
	switch {
	case err == nil:
		h.confirm(mod)
		h.runs(run, mod)
	case run.Err() != nil:
	case errdefs.IsUnavailable(err):
		h.m.refuse("create", "cannot create a module now", "runtime", h.info.Name, "module", mod.uuid, "err", err)
		h.apply(mod, evRetry)
		return err
	default:
		failed := fmt.Errorf("create module %s: %w", mod.uuid, err)
		if mod.record.Confirmed {
			h.m.refuse("create", "cannot create a module again", "err", failed) // its peer learns of the end
		} else if mod.record.Origin == fromScene {
			h.answerScene("create", wire.ActionCreate, mod.record.ObjectID, mod.data, failed)
		} else {
			h.m.fail("create", wire.Envelope{ObjectID: mod.record.ObjectID}, mod.data.Bytes(), failed)
		}
		h.finish(mod, status(wire.CodeNotCreated, "exited", err.Error()))
	}
	return nil
}

// dataOf returns the module's data for its runtime: all fields verbatim, the index, and channels for the standard streams
// of a module that has a scene.
func (h *host) dataOf(mod *module) wire.ModuleData {
	data, err := mod.data.WithStreams(h.m.config.Topics).With("index", mod.record.Index)
	if err != nil { // a number always has a JSON form
		panic(err)
	}
	return data
}

// runs is called once the module is running, and records this state. If the deletion of the module has been ordered
// meanwhile, runs ends the module.
func (h *host) runs(run context.Context, mod *module) {
	var do action
	h.update(func() { do, mod.problem = mod.apply(evRuns), problem{} })
	if do == end {
		h.end(run, mod)
	}
}

// delete records the deletion of a module, and ends the module. The object_id is that of the request if its sender wants
// an answer when the module has ended. It returns errdefs.ErrNotFound for an unknown uuid.
func (h *host) delete(uuid, objectID string) error {
	h.orders.Lock()
	defer h.orders.Unlock()
	h.mu.Lock()
	mod := h.byUUID[uuid]
	if mod != nil && mod.record.Asked == "" {
		mod.record.Asked = objectID
	}
	h.mu.Unlock()
	if mod == nil {
		return fmt.Errorf("delete module %q: the runtime %s has no such module: %w", uuid, h.info.Name, errdefs.ErrNotFound)
	}
	return h.deleteLocked(mod)
}

func (h *host) deleteLocked(mod *module) error {
	h.mu.Lock()
	r, recorded := mod.record, mod.state.recorded()
	h.mu.Unlock()
	if recorded == recordExited {
		return nil // the module is ending already
	}
	if recorded != recordDeleting {
		r.State = recordDeleting
		if err := h.m.put(mod.uuid, r); err != nil {
			return err
		}
		if err := deleteRecorded.Hit(h.m.ctx); err != nil {
			return err
		}
	}
	var run context.Context
	now := false
	h.update(func() {
		switch do := mod.apply(evDelete); {
		case do == end && h.up:
			run = h.run
			h.calls.Add(1)
		case do == cancel:
			now = !h.up || !mod.launching
		case do == release && !h.info.Durable:
			now = !h.up
		}
	})
	poke(mod.wake)
	if now {
		h.finish(mod, status(wire.CodeKilled, "killed", "deleted before it ran"))
	}
	if run != nil {
		h.m.wg.Go(func() {
			defer h.calls.Done()
			guard.Func(h.m.log, "end of a module", func() { h.end(run, mod) })()
		})
	}
	return nil
}

// end asks the runtime to end a module. The runtime reports the exit in a message.
func (h *host) end(run context.Context, mod *module) {
	err := h.rt.Delete(run, mod.record.Index, mod.uuid)
	if err = errors.Join(err, deleteDone.Hit(run)); err == nil || run.Err() != nil {
		return
	}
	if errdefs.IsNotFound(err) {
		h.finish(mod, status(wire.CodeKilled, "killed", "the runtime did not have the module"))
		return
	}
	h.m.fail("delete", wire.Envelope{}, object(map[string]any{"type": "module", "uuid": mod.uuid}),
		fmt.Errorf("delete module %s: %w", mod.uuid, err))
}
