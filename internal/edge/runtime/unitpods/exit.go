package unitpods

import (
	"encoding/json"
	"maps"
	"time"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/edge/wire"
	"github.com/tripod-run/tripod/internal/node"
	"github.com/tripod-run/tripod/internal/sandbox"
)

// Reasons for an exit, as in the edge protocol's "exited" message.
const (
	reasonExited   = "exited"
	reasonKilled   = "killed"
	reasonTrap     = "trap"
	reasonOOM      = "oom"
	reasonDeadline = "deadline"
)

const (
	exitKilled = 137 // 128 + SIGKILL
	exitTrap   = 134 // 128 + SIGABRT, from tripod-wasm when a guest traps
)

// lastWords bounds the wait for the last messages of an ended module. After these messages, the module's worker closes
// the connection.
const lastWords = 5 * time.Second

// ending is the object "status" of an exited message.
type ending struct {
	Code    int32  `json:"code"`
	Reason  string `json:"reason"`
	Message string `json:"message"`
}

// lostPod is the end of a module whose pod was removed by somebody else.
var lostPod = ending{Code: exitKilled, Reason: reasonKilled, Message: "its pod was removed from the node"}

// endingOf converts a container's exit. stopReason is module.stopReason.
func endingOf(c *node.Container, stopReason string) ending {
	e := ending{Code: c.ExitCode, Reason: reasonExited, Message: c.Message}
	switch {
	case c.Reason == sandbox.ReasonOOMKilled:
		e.Reason = reasonOOM
	case stopReason != "":
		e.Reason = stopReason
	case c.Reason == sandbox.ReasonUnknown, c.ExitCode == exitKilled && c.Message != "":
		e.Reason = reasonKilled
	case c.ExitCode == exitTrap && c.Message != "":
		e.Reason = reasonTrap
	}
	switch {
	case e.Reason == reasonDeadline:
		e.Message = "it still ran at its deadline"
	case stopReason != "" && c.ExitCode != exitKilled && e.Message == "":
		e.Message = "it ended when it was told to"
	}
	return e
}

// markEnded marks the module as ended and reports its exit. Later calls do nothing.
func (m *module) markEnded(e ending) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.end != nil {
		return
	}
	m.end = &e
	if m.timer != nil {
		m.timer.Stop()
	}
	close(m.ended)
	m.r.spawn(m.reportExit)
}

// reportExit reports the exit to the manager, after the last messages and the whole log.
func (m *module) reportExit() {
	select {
	case <-m.created:
	case <-m.failed: // Create returns the error
		return
	case <-m.r.ctx.Done():
		return
	}
	timeout := time.NewTimer(m.r.lastWords)
	defer timeout.Stop()
	select {
	case <-m.channelsDone:
	case <-timeout.C:
		m.disconnect()
	case <-m.r.ctx.Done():
		return
	}
	select {
	case <-m.log.done:
	case <-m.r.ctx.Done():
		return
	}
	payload, err := json.Marshal(struct {
		Status *ending `json:"status"`
	}{m.end})
	if err != nil {
		m.r.log.Error("cannot report the end of a module", "module", m.uuid, "err", err)
		return
	}
	m.r.log.Info("module exited", "module", m.uuid, "name", m.name, "code", m.end.Code, "reason", m.end.Reason, "message", m.end.Message)
	m.r.send(outgoing{Message: channel.Message{Header: channel.Header{Control: true, Module: m.index, Arg: wire.Exited}, Payload: payload}})
}

// followEvents handles the node's events until the runtime or the node is closed.
func (r *Runtime) followEvents() {
	for {
		r.mu.Lock()
		sub := r.sub
		r.mu.Unlock()
		for e := range sub.Events() {
			r.podEvent(e)
		}
		if r.ctx.Err() != nil || !errdefs.IsResourceExhausted(sub.Err()) {
			return
		}
		r.log.Warn("missed events of the node; checking all modules", "err", sub.Err())
		r.mu.Lock()
		r.sub = r.Node.Subscribe()
		if r.ctx.Err() != nil { // Close may have missed this subscription
			r.sub.Close()
		}
		r.mu.Unlock()
		r.checkAllPods()
	}
}

func (r *Runtime) podEvent(e node.Event) {
	r.mu.Lock()
	m := r.pods[e.PodID]
	r.mu.Unlock()
	if m == nil {
		return
	}
	switch e.Type {
	case runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT:
		m.checkPod(e.Pod)
	case runtimeapi.ContainerEventType_CONTAINER_DELETED_EVENT:
		m.checkPod(e.Pod)
		m.markEnded(lostPod)
	}
}

// checkAllPods finds the modules whose end followEvents has missed, and marks them as ended.
func (r *Runtime) checkAllPods() {
	existing := map[string]*node.Pod{}
	for _, p := range r.Node.Pods() {
		existing[p.ID] = p
	}
	r.mu.Lock()
	modules := maps.Clone(r.pods)
	r.mu.Unlock()
	for id, m := range modules {
		if p := existing[id]; p != nil {
			m.checkPod(p)
		} else {
			m.markEnded(lostPod)
		}
	}
}

// checkPod marks the module as ended if its container has ended.
func (m *module) checkPod(p *node.Pod) {
	c := p.Container(m.podID)
	if c == nil || c.State != node.Stopped {
		return
	}
	m.mu.Lock()
	reason := m.stopReason
	m.mu.Unlock()
	m.markEnded(endingOf(c, reason))
}
