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

// Lines at which the daemon may die.
var (
	createAsked    = failpoint.New("edge.manager.create.asked")
	createRecorded = failpoint.New("edge.manager.create.recorded")
	createDone     = failpoint.New("edge.manager.create.done")
	deleteRecorded = failpoint.New("edge.manager.delete.recorded")
	deleteDone     = failpoint.New("edge.manager.delete.done")
	adoptDone      = failpoint.New("edge.manager.adopt.done")
)

// create records a module and has it created. It returns when it is recorded. A uuid that is taken is errdefs.ErrAlreadyExists,
// a runtime without a free index errdefs.ErrResourceExhausted.
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
	if again, err := h.again(uuid, objectID); again || err != nil {
		return err
	}
	r := record{Runtime: h.info.UUID, State: created, Origin: origin, ObjectID: objectID, Data: data.Bytes()}
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
	h.update(func() { mod.recorded = true })
	h.begin(mod)
	return nil
}

// again tells whether a create message is the same that made the live module, or is the orchestrator's for a module that the
// manager has created again by itself. Any other module of that uuid is an error, on whichever runtime it is.
func (h *host) again(uuid, objectID string) (bool, error) {
	for _, other := range h.m.hosts {
		other.mu.Lock()
		mod := other.byUUID[uuid]
		same := mod != nil && other == h && mod.phase != ended && (mod.restored || objectID != "" && mod.record.ObjectID == objectID)
		if same {
			mod.restored = false
		}
		other.mu.Unlock()
		switch {
		case same:
			h.m.log.Info("edge: a module is created already", "runtime", h.info.Name, "module", uuid)
			return true, nil
		case mod != nil:
			return false, fmt.Errorf("create module %s: a module of that uuid is on the runtime %s: %w", uuid, other.info.Name, errdefs.ErrAlreadyExists)
		}
	}
	return false, nil
}

// begin creates the module, or goes on with it, if the runtime is up; else the runtime's next start does.
func (h *host) begin(mod *module) {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case mod.unfinished:
		mod.unfinished = false
		h.m.wg.Go(guard.Func(h.m.log, "end of a module", func() { h.conclude(mod, mod.record.Exited) }))
	case h.up && mod.recorded && !mod.beginning && mod.phase == pending:
		mod.beginning = true
		run := h.run
		h.calls.Add(1)
		h.m.wg.Go(func() {
			defer h.calls.Done()
			guard.Func(h.m.log, "start of a module", func() { h.launch(run, mod) })()
			h.update(func() { mod.beginning = false })
		})
	}
}

// launch brings a module up, as often as it takes while its runtime is up.
func (h *host) launch(run context.Context, mod *module) {
	delay := backoff{min: h.m.config.BackoffMin, max: h.m.config.BackoffMax}
	for run.Err() == nil {
		if h.goOn(run, mod) {
			return
		}
		if h.stateOf(mod) == deleting {
			h.finish(mod, status(codeKilled, "killed", "deleted before it ran"))
			return
		}
		err := h.createOnce(run, mod)
		switch {
		case err == nil:
			h.launched(run, mod)
			return
		case run.Err() != nil:
			return
		case errdefs.IsUnavailable(err):
			h.m.refuse("create", "a module cannot be created now", "runtime", h.info.Name, "module", mod.uuid, "err", err)
			h.set(mod, pending)
			pause(run, delay.delay(), mod.nudge)
		default:
			h.m.fail("create", wire.Envelope{ObjectID: mod.record.ObjectID}, mod.data.Bytes(), fmt.Errorf("create module %s: %w", mod.uuid, err))
			h.finish(mod, status(codeNotCreated, "exited", err.Error()))
			return
		}
	}
}

// pause waits for the time, a token, or the context.
func pause(ctx context.Context, d time.Duration, nudge <-chan struct{}) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-nudge:
	case <-ctx.Done():
	}
}

// goOn adopts a module that still runs. One that ran, and does no more, is told lost where an earlier connection knew it.
func (h *host) goOn(run context.Context, mod *module) bool {
	h.mu.Lock()
	known, lost := mod.known, mod.lost
	mod.known = false
	h.mu.Unlock()
	if !known {
		return false
	}
	mod.box.start(run)
	goesOn, err := h.rt.Adopt(run, mod.record.Index, h.dataOf(mod))
	switch {
	case run.Err() != nil:
		h.mu.Lock()
		mod.known = true
		h.mu.Unlock()
		return true
	case err != nil:
		h.m.refuse("adopt", "a module cannot be adopted", "runtime", h.info.Name, "module", mod.uuid, "err", err)
	case goesOn:
		if err := adoptDone.Hit(run); err != nil {
			return true
		}
		h.launched(run, mod)
		return true
	}
	if lost && h.stateOf(mod) != deleting {
		h.tellLost(mod)
	}
	return false
}

// createOnce asks the runtime to create the module.
func (h *host) createOnce(run context.Context, mod *module) error {
	if !h.set(mod, creating) {
		return nil
	}
	mod.box.start(run)
	err := h.rt.Create(run, mod.record.Index, h.dataOf(mod))
	return errors.Join(err, createDone.Hit(run))
}

// dataOf is the module's data as its runtime has it: every field verbatim, and the index (Seed 4, "Create Module").
func (h *host) dataOf(mod *module) wire.ModuleData {
	data, err := mod.data.With("index", mod.record.Index)
	if err != nil { // a number always has a JSON form
		panic(err)
	}
	return data
}

// launched follows a module that runs; one that was deleted meanwhile is told so.
func (h *host) launched(run context.Context, mod *module) {
	if h.set(mod, running) && h.stateOf(mod) == deleting {
		h.end(run, mod)
	}
}

// set changes the phase of a module that has not ended; false: it has.
func (h *host) set(mod *module, p phase) bool {
	ok := false
	h.update(func() {
		if ok = mod.phase != ended; ok {
			mod.phase = p
			mod.known = mod.known || p == running
		}
	})
	return ok
}

func (h *host) stateOf(mod *module) state {
	h.mu.Lock()
	defer h.mu.Unlock()
	return mod.record.State
}

// delete records that a module is to end and has it ended. A uuid that is not here is errdefs.ErrNotFound.
func (h *host) delete(uuid string) error {
	h.orders.Lock()
	defer h.orders.Unlock()
	h.mu.Lock()
	mod := h.byUUID[uuid]
	h.mu.Unlock()
	if mod == nil {
		return fmt.Errorf("delete module %q: the runtime %s has no such module: %w", uuid, h.info.Name, errdefs.ErrNotFound)
	}
	return h.deleteLocked(mod)
}

func (h *host) deleteLocked(mod *module) error {
	h.mu.Lock()
	r := mod.record
	h.mu.Unlock()
	if r.State == exited {
		return nil // on its way
	}
	if r.State != deleting {
		r.State = deleting
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
		if mod.record.State == created {
			mod.record.State = deleting
		}
		switch {
		case mod.phase == running && h.up:
			run = h.run
			h.calls.Add(1)
		case mod.phase == pending && !h.up:
			now = !h.info.Durable || !mod.known
		}
	})
	mod.wake()
	if now {
		h.finish(mod, status(codeKilled, "killed", "deleted before it ran"))
	}
	if run != nil {
		h.m.wg.Go(func() {
			defer h.calls.Done()
			guard.Func(h.m.log, "end of a module", func() { h.end(run, mod) })()
		})
	}
	return nil
}

// end asks the runtime to end a module; its exit follows as a message.
func (h *host) end(run context.Context, mod *module) {
	err := h.rt.Delete(run, mod.record.Index, mod.uuid)
	if err = errors.Join(err, deleteDone.Hit(run)); err == nil || run.Err() != nil {
		return
	}
	if errdefs.IsNotFound(err) {
		h.finish(mod, status(codeKilled, "killed", "the runtime did not have it"))
		return
	}
	h.m.fail("delete", wire.Envelope{}, object(map[string]any{"type": "module", "uuid": mod.uuid}), fmt.Errorf("delete module %s: %w", mod.uuid, err))
}
