package linux

import (
	"testing"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/notifier"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/spec"
)

// TestNotifierAnnotation: the container's annotation wins over the pod's, and has no effect unless the node allows it.
func TestNotifierAnnotation(t *testing.T) {
	allowed := sandbox.AllowList{annotationNotifier}
	able := spec.Host{SeccompNotify: true}
	for what, c := range map[string]struct {
		list           sandbox.AllowList
		host           spec.Host
		notifier       *notifier.Listener
		pod, container string
		want           string
		is             func(error) bool
	}{
		"none":              {allowed, able, &notifier.Listener{}, "", "", "", nil},
		"pod's":             {allowed, able, &notifier.Listener{}, "stop", "", "stop", nil},
		"container's":       {allowed, able, &notifier.Listener{}, "stop", "log", "log", nil},
		"not allowed":       {nil, able, &notifier.Listener{}, "stop", "junk", "", nil},
		"wrong":             {allowed, able, &notifier.Listener{}, "", "kill", "kill", errdefs.IsInvalidArgument},
		"on an old kernel":  {allowed, spec.Host{}, &notifier.Listener{}, "stop", "", "stop", errdefs.IsNotImplemented},
		"without a socket":  {allowed, able, nil, "stop", "", "stop", errdefs.IsNotImplemented},
		"wrong for the pod": {allowed, able, &notifier.Listener{}, "kill", "", "kill", errdefs.IsInvalidArgument},
	} {
		b := &Backend{cfg: Config{Annotations: c.list}, host: c.host, notifier: c.notifier}
		p := &sandbox.Pod{Config: &runtimeapi.PodSandboxConfig{Annotations: map[string]string{annotationNotifier: c.pod}}}
		container := &sandbox.Container{Config: &runtimeapi.ContainerConfig{Annotations: map[string]string{annotationNotifier: c.container}}}
		err := b.validateNotifier(p, container)
		if got := b.notifierAction(p, container); got != c.want || (err != nil) != (c.is != nil) || err != nil && !c.is(err) {
			t.Errorf("%s: action %q, error %v, want %q", what, got, err, c.want)
		}
	}
}
