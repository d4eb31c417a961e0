package manager

import (
	"bytes"
	"encoding/json"
	"fmt"
	"time"

	"github.com/tripod-run/tripod/internal/edge/wire"
)

// Bounds of the reported document.
const (
	maxReportedExit   = 2 << 10 // bytes of an exit's status
	maxReportedAbsent = 256     // desired modules that the runtime does not have
)

// States of desired modules that the runtime does not have.
const (
	reportedWaiting  = "waiting"  // it will be created: after the delay of its restart, or when what prevents it has ended
	reportedFinished = "finished" // it has ended, and its policy does not restart it
)

// problem says why a module cannot be created now, and when the next attempt is due.
type problem struct {
	err     error
	retryAt time.Time
}

// reported is the retained document that describes the state of a runtime.
type reported struct {
	Type       string           `json:"type"`
	UUID       string           `json:"uuid"`
	Name       string           `json:"name"`
	Up         bool             `json:"up"`
	Generation json.RawMessage  `json:"generation,omitempty"` // of the desired document in force
	Error      string           `json:"error,omitempty"`      // why the latest desired document was refused
	Modules    []reportedModule `json:"modules"`
	Omitted    int              `json:"omitted,omitempty"` // desired modules beyond maxReportedAbsent
}

type reportedModule struct {
	UUID     string          `json:"uuid"`
	Name     string          `json:"name"`
	Index    *int            `json:"index,omitempty"` // missing if the runtime does not have it
	State    string          `json:"state"`           // state.reported, reportedWaiting or reportedFinished
	Origin   string          `json:"origin"`
	File     string          `json:"file,omitempty"`
	Image    string          `json:"image,omitempty"`
	Restarts int             `json:"restarts"`
	Exit     json.RawMessage `json:"exit,omitempty"`   // status of its last end
	Reason   string          `json:"reason,omitempty"` // of its last end
	Error    string          `json:"error,omitempty"`  // why it could not be created
	RetryAt  *time.Time      `json:"retry_at,omitempty"`
}

// reportAll publishes the reported state as a retained message whenever it changes. It publishes nothing while the
// broker is not connected.
func (h *host) reportAll() {
	var last []byte
	for {
		select {
		case <-h.report:
		case <-h.m.ctx.Done():
			return
		}
		if !h.m.client.Connected() {
			last = nil
			continue
		}
		raw, err := json.Marshal(h.reportNow())
		if err != nil || bytes.Equal(raw, last) {
			continue
		}
		last = raw
		h.m.publish(h.m.ctx, h.m.config.Topics.Reported(h.info.UUID), 1, true, raw)
	}
}

func (h *host) reportNow() reported {
	h.orders.Lock()
	defer h.orders.Unlock()
	h.mu.Lock()
	defer h.mu.Unlock()
	r := reported{Type: "runtime", UUID: h.info.UUID, Name: h.info.Name, Up: h.up, Modules: []reportedModule{}}
	if h.refused != nil {
		r.Error = excerpt([]byte(h.refused.Error()))
	}
	for _, mod := range h.all() {
		index := mod.record.Index
		one := reportedModule{Index: &index, State: mod.state.reported(), Origin: mod.record.Origin}
		one.describe(mod.data)
		if mod.record.Origin == fromDesired {
			one.restarted(h.restarts[mod.uuid])
		}
		if mod.record.Exited != nil {
			one.exited(reportedExit(mod.record.Exited))
			one.Error = notCreated(one.Exit)
		}
		one.failed(mod.problem)
		if h.held(mod) {
			one.Error = fmt.Sprintf("held back: the runtime %s died %d times in a row while it ran; the runtime is first tried without it",
				h.info.Name, h.suspects.losses[mod.uuid])
		}
		r.Modules = append(r.Modules, one)
	}
	d := h.desired.Load()
	if d == nil {
		return r
	}
	r.Generation = d.generation
	if r.Error == "" && d.err != nil { // recorded by an earlier daemon, which accepted it
		r.Error = excerpt([]byte(d.err.Error()))
	}
	present := len(r.Modules)
	for _, data := range d.modules {
		if mod := h.byUUID[data.UUID()]; mod != nil && mod.record.Origin == fromDesired {
			continue
		}
		if len(r.Modules)-present == maxReportedAbsent {
			r.Omitted++
			continue
		}
		r.Modules = append(r.Modules, h.absent(data))
	}
	return r
}

// absent describes a desired module that the runtime does not have. The caller holds h.orders and h.mu.
func (h *host) absent(data wire.ModuleData) reportedModule {
	one := reportedModule{State: reportedWaiting, Origin: fromDesired}
	one.describe(data)
	if r := h.restarts[data.UUID()]; r != nil && bytes.Equal(r.Data, data.Bytes()) {
		one.restarted(r)
		one.Error = notCreated(r.Exit)
		if r.Ended {
			one.State = reportedFinished
		} else {
			one.failed(problem{retryAt: r.after})
		}
	}
	one.failed(h.problems[data.UUID()])
	return one
}

func (one *reportedModule) describe(data wire.ModuleData) {
	one.UUID, one.Name, one.File, one.Image = data.UUID(), excerpt([]byte(data.Name())), excerpt([]byte(data.File())),
		excerpt([]byte(data.Image()))
}

func (one *reportedModule) restarted(r *restart) {
	if r != nil && r.Exit != nil {
		one.Restarts = r.Count
		one.exited(r.Exit)
	}
}

func (one *reportedModule) exited(exit json.RawMessage) {
	one.Exit = exit
	_, one.Reason = outcome(object(map[string]any{"status": exit}))
}

// notCreated returns the message of an exit that says why the module could not be created, otherwise "".
func notCreated(exit json.RawMessage) string {
	var s exitStatus
	if json.Unmarshal(exit, &s) != nil || s.Code != wire.CodeNotCreated {
		return ""
	}
	return s.Message
}

func (one *reportedModule) failed(p problem) {
	if p.err != nil {
		one.Error = excerpt([]byte(p.err.Error()))
	}
	if !p.retryAt.IsZero() {
		at := p.retryAt.UTC().Truncate(time.Millisecond)
		one.RetryAt = &at
	}
}

// exitStatus is the object "status" of an exit.
type exitStatus struct {
	Code    int    `json:"code"`
	Reason  string `json:"reason"`
	Message string `json:"message"`
}

// reportedExit returns the status of an exit for the reported document. It shortens a status that is too large, because
// its size is the runtime's choice.
func reportedExit(payload []byte) json.RawMessage {
	var e struct {
		Status   json.RawMessage `json:"status"`
		ExitCode int             `json:"exit_code"`
		Message  string          `json:"message"`
	}
	_ = json.Unmarshal(payload, &e) // fields of another form stay empty
	var s exitStatus
	switch err := json.Unmarshal(e.Status, &s); {
	case err == nil && len(e.Status) <= maxReportedExit:
		return e.Status
	case err != nil:
		_, s.Reason = outcome(payload)
		s.Code, s.Message = e.ExitCode, e.Message
	}
	return object(map[string]any{"code": s.Code, "reason": excerpt([]byte(s.Reason)), "message": excerpt([]byte(s.Message))})
}
