package linux

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/fields"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/notifier"
)

// annotationNotifier is CRI-O's annotation for the calls that a container's seccomp profile forbids. Of a pod, it
// applies to all containers without one of their own.
const annotationNotifier = "io.kubernetes.cri-o.seccompNotifierAction"

// The values of annotationNotifier.
const (
	notifierLog  = "log"  // calls are logged and counted
	notifierStop = "stop" // the first call also kills the container
)

// notifierAction returns the value of annotationNotifier for a container, or "" if there is none or it is not allowed.
func (b *Backend) notifierAction(p *sandbox.Pod, c *sandbox.Container) string {
	if !b.cfg.Annotations.Allows(annotationNotifier) {
		return ""
	}
	return cmp.Or(c.Config.GetAnnotations()[annotationNotifier], p.Config.GetAnnotations()[annotationNotifier])
}

// validateNotifier checks annotationNotifier of the container or, if c is nil, does nothing.
func (b *Backend) validateNotifier(p *sandbox.Pod, c *sandbox.Container) error {
	if c == nil {
		return nil
	}
	const field = "annotation " + annotationNotifier
	switch action := b.notifierAction(p, c); {
	case action == "":
		return nil
	case !slices.Contains([]string{notifierLog, notifierStop}, action):
		return fields.Invalid(field, "%q is neither %q nor %q", action, notifierLog, notifierStop)
	case !b.host.SeccompNotify:
		return fields.Unsupported(field, "the kernel of this node cannot notify about system calls (Linux 5.0)")
	case b.notifier == nil:
		return fields.Unsupported(field, "the node's socket for notifications could not be made (see the daemon's log)")
	}
	return nil
}

// notifierMetadata is the text that comes back with each forbidden call of a container.
func notifierMetadata(podID, id, action string) string { return podID + " " + id + " " + action }

// forbidden is what is known about the forbidden calls of one container.
type forbidden struct {
	logged map[string]bool // names of calls
	// killed is the call for which the container was killed, or is to be killed; killing means that one caller does it.
	killed  string
	killing bool
}

// forbiddenCalls holds the forbidden calls of containers, by the container's ID. A container's entry is removed with it.
type forbiddenCalls struct {
	mu   sync.Mutex
	of   map[string]*forbidden
	made *prometheus.CounterVec
}

func newForbiddenCalls() *forbiddenCalls {
	return &forbiddenCalls{of: map[string]*forbidden{}, made: prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "tripod_seccomp_forbidden_calls_total",
		Help: "System calls that seccomp profiles of containers with a notifier have failed.",
	}, []string{"syscall"})}
}

// note counts a call. It reports whether the call is the container's first with this name, and whether the caller shall
// kill the container; the caller then calls tried.
func (f *forbiddenCalls) note(id, name string, stop bool) (first, kill bool) {
	f.made.WithLabelValues(name).Inc()
	f.mu.Lock()
	defer f.mu.Unlock()
	e := f.of[id]
	if e == nil {
		e = &forbidden{logged: map[string]bool{}}
		f.of[id] = e
	}
	first = !e.logged[name]
	e.logged[name] = true
	if !stop || e.killing {
		return first, false
	}
	e.killed, e.killing = cmp.Or(e.killed, name), true
	return first, true
}

// tried records the result of a kill. After a failure, the container's next forbidden call kills it.
func (f *forbiddenCalls) tried(id string, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if e := f.of[id]; e != nil && err != nil {
		e.killing = false
	}
}

// forget removes a container's entry, and returns the call for which the container was killed, or "".
func (f *forbiddenCalls) forget(id string) string {
	f.mu.Lock()
	defer f.mu.Unlock()
	e := f.of[id]
	delete(f.of, id)
	if e == nil {
		return ""
	}
	return e.killed
}

// reportForbidden logs and counts a call that a container's profile has failed, and kills the container if its pod asks
// for that. A program can make such calls without end, so only the first of each name is logged.
func (b *Backend) reportForbidden(e notifier.Event) {
	podID, rest, _ := strings.Cut(e.Metadata, " ")
	id, action, _ := strings.Cut(rest, " ")
	h, err := b.ledger.Find(podID, id)
	if h == nil {
		b.log.Error("find the container of a forbidden system call", "container", id, "syscall", e.Syscall, "err", err)
		return
	}
	first, kill := b.forbidden.note(id, e.Syscall, action == notifierStop)
	if first {
		b.log.Warn("a container made a system call that its seccomp profile forbids", "pod", podID, "container", id, "syscall", e.Syscall, "pid",
			e.PID, "action", action)
	}
	if !kill {
		return
	}
	s, _ := h.Snapshot() // the container may be starting, so kill it by its cgroup
	ctx, cancel := context.WithTimeout(context.Background(), cleanupTime)
	defer cancel()
	err = b.cgroups.Kill(ctx, s.Cgroup)
	b.forbidden.tried(id, err)
	if err != nil {
		b.log.Error("kill a container that made a forbidden system call", "container", id, "err", err)
	}
}

// asForbidden returns how a container ended if it was killed for a forbidden system call, otherwise e.
func (b *Backend) asForbidden(id string, e end) end {
	if name := b.forbidden.forget(id); name != "" {
		e.reason, e.message = sandbox.ReasonSeccomp, fmt.Sprintf("used a system call that its seccomp profile forbids: %s", name)
	}
	return e
}

// Collector returns the backend's own metrics.
func (b *Backend) Collector() prometheus.Collector { return b.forbidden.made }
