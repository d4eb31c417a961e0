package unitpods

import (
	"encoding/json"
	"time"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/channel"
	"github.com/tripod-run/tripod/internal/edge/wire"
	"github.com/tripod-run/tripod/internal/node"
	"github.com/tripod-run/tripod/internal/sandbox"
)

// Reasons of an end (edge protocol, "exited").
const (
	reasonExited   = "exited"
	reasonKilled   = "killed"
	reasonTrap     = "trap"
	reasonOOM      = "oom"
	reasonDeadline = "deadline"
)

const (
	exitKilled = 137 // 128 + SIGKILL
	exitTrap   = 134 // 128 + SIGABRT: how tripod-wasm says that a guest trapped
)

// lastWords bounds the wait for the last messages of a module that has ended; its worker closes the connection after them.
const lastWords = 5 * time.Second

// ending is how a module ended: the object "status" of exited.
type ending struct {
	Code    int32  `json:"code"`
	Reason  string `json:"reason"`
	Message string `json:"message"`
}

// lostPod is the end of a module whose pod was removed by somebody else.
var lostPod = ending{Code: exitKilled, Reason: reasonKilled, Message: "its pod was removed from the node"}

// endingOf translates a container's exit; order is the reason why we ended it, if we did.
func endingOf(c *node.Container, order string) ending {
	e := ending{Code: c.ExitCode, Reason: reasonExited, Message: c.Message}
	switch {
	case c.Reason == sandbox.ReasonOOMKilled:
		e.Reason = reasonOOM
	case order != "":
		e.Reason = order
	case c.Reason == sandbox.ReasonUnknown, c.ExitCode == exitKilled && c.Message != "":
		e.Reason = reasonKilled
	case c.ExitCode == exitTrap && c.Message != "":
		e.Reason = reasonTrap
	}
	switch {
	case e.Reason == reasonDeadline:
		e.Message = "it still ran at its deadline"
	case order != "" && c.ExitCode != exitKilled && e.Message == "":
		e.Message = "it ended when it was told to"
	}
	return e
}

// over marks the module as ended, once, and reports it.
func (m *module) over(e ending) {
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
	m.r.spawn(m.sayExited)
}

// sayExited reports the end after the last messages and the whole log.
func (m *module) sayExited() {
	select {
	case <-m.begun:
	case <-m.failed: // Create returns the error
		return
	case <-m.r.ctx.Done():
		return
	}
	patience := time.NewTimer(m.r.lastWords)
	defer patience.Stop()
	select {
	case <-m.quiet:
	case <-patience.C:
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
		m.r.log.Error("the end of a module cannot be reported", "module", m.uuid, "err", err)
		return
	}
	m.r.log.Info("a module has ended", "module", m.uuid, "name", m.name, "code", m.end.Code, "reason", m.end.Reason, "message", m.end.Message)
	m.r.tell(outgoing{Message: channel.Message{Header: channel.Header{Control: true, Module: m.index, Arg: wire.Exited}, Payload: payload}})
}

// followEvents finds the ends of modules in the node's events, until the runtime or the node is closed.
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
		r.log.Warn("the node's events came too fast, checking all modules", "err", sub.Err())
		r.mu.Lock()
		r.sub = r.Node.Subscribe()
		if r.ctx.Err() != nil { // Close has missed this subscription
			r.sub.Close()
		}
		r.mu.Unlock()
		r.lookAtAll()
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
		m.look(e.Pod)
	case runtimeapi.ContainerEventType_CONTAINER_DELETED_EVENT:
		m.look(e.Pod)
		m.over(lostPod)
	}
}

// lookAtAll finds ends whose events were missed.
func (r *Runtime) lookAtAll() {
	there := map[string]*node.Pod{}
	for _, p := range r.Node.Pods() {
		there[p.ID] = p
	}
	r.mu.Lock()
	modules := make(map[string]*module, len(r.pods))
	for id, m := range r.pods {
		modules[id] = m
	}
	r.mu.Unlock()
	for id, m := range modules {
		if p := there[id]; p != nil {
			m.look(p)
		} else {
			m.over(lostPod)
		}
	}
}

// look ends the module when its container has.
func (m *module) look(p *node.Pod) {
	c := p.Container(m.podID)
	if c == nil || c.State != node.Stopped {
		return
	}
	m.mu.Lock()
	order := m.order
	m.mu.Unlock()
	m.over(endingOf(c, order))
}
