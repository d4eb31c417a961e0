package linux

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

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

// reportForbidden logs and counts a call that a container's profile has failed, and kills the container if its pod asks
// for that.
func (b *Backend) reportForbidden(e notifier.Event) {
	podID, rest, _ := strings.Cut(e.Metadata, " ")
	id, action, _ := strings.Cut(rest, " ")
	b.forbiddenCalls.WithLabelValues(e.Syscall).Inc()
	b.log.Warn("a container made a system call that its seccomp profile forbids", "pod", podID, "container", id, "syscall", e.Syscall, "pid", e.PID, "action", action)
	if action != notifierStop {
		return
	}
	h, err := b.ledger.Find(podID, id)
	if h == nil {
		b.log.Error("find the container of a forbidden system call", "container", id, "err", err)
		return
	}
	if _, before := b.forbidden.LoadOrStore(id, e.Syscall); before {
		return
	}
	s, _ := h.Snapshot() // the container may be starting, so kill it by its cgroup
	ctx, cancel := context.WithTimeout(context.Background(), cleanupTime)
	defer cancel()
	if err := b.cgroups.Kill(ctx, s.Cgroup); err != nil {
		b.log.Error("kill a container that made a forbidden system call", "container", id, "err", err)
	}
}

// asForbidden returns how a container ended if it was killed for a forbidden system call, otherwise e.
func (b *Backend) asForbidden(id string, e end) end {
	if name, killed := b.forbidden.LoadAndDelete(id); killed {
		e.reason, e.message = sandbox.ReasonSeccomp, fmt.Sprintf("used a system call that its seccomp profile forbids: %s", name)
	}
	return e
}

func newForbiddenCalls() *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "tripod_seccomp_forbidden_calls_total",
		Help: "System calls that seccomp profiles of containers with a notifier have failed.",
	}, []string{"syscall"})
}

// Collector returns the backend's own metrics.
func (b *Backend) Collector() prometheus.Collector { return b.forbiddenCalls }
