package linux

import (
	"errors"
	"testing"

	"github.com/containerd/errdefs"
	nri "github.com/containerd/nri/pkg/api"
	"github.com/opencontainers/runtime-spec/specs-go"
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

// TestNotifierOfAnAdjustedProfile: a plugin of the node that replaces the seccomp profile does not disable the notifier.
func TestNotifierOfAnAdjustedProfile(t *testing.T) {
	b := &Backend{cfg: Config{RunDir: "/run/linux", Annotations: sandbox.AllowList{annotationNotifier}}}
	p := &sandbox.Pod{ID: "p", Config: &runtimeapi.PodSandboxConfig{Annotations: map[string]string{annotationNotifier: notifierLog}}}
	c := &sandbox.Container{ID: "c", Config: &runtimeapi.ContainerConfig{}, Adjustment: &nri.ContainerAdjustment{}}
	c.Adjustment.SetLinuxSeccompPolicy(&nri.LinuxSeccomp{DefaultAction: "SCMP_ACT_ALLOW", Syscalls: []*nri.LinuxSyscall{
		{Names: []string{"mount"}, Action: "SCMP_ACT_ERRNO"},
	}})
	config := &specs.Spec{Process: &specs.Process{}, Linux: &specs.Linux{Seccomp: &specs.LinuxSeccomp{DefaultAction: specs.ActErrno}}}
	if err := b.complete(p, c, config); err != nil {
		t.Fatal(err)
	}
	got := config.Linux.Seccomp
	if got.ListenerPath != b.cfg.notifierSocket() || got.ListenerMetadata != "p c log" || len(got.Syscalls) != 1 ||
		got.Syscalls[0].Action != specs.ActNotify {
		t.Errorf("profile = %+v, want the plugin's with the node's listener", got)
	}
}

// TestForbiddenCalls: each name is logged once per container, a failed kill is repeated at the next call, and a
// container's entry goes with it.
func TestForbiddenCalls(t *testing.T) {
	f := newForbiddenCalls()
	for i, c := range []struct {
		id, name    string
		stop        bool
		result      error
		first, kill bool
	}{
		{"a", "mount", false, nil, true, false},
		{"a", "mount", false, nil, false, false},
		{"a", "swapon", false, nil, true, false},
		{"b", "mount", true, errors.New("the freezer is busy"), true, true},
		{"b", "swapon", true, nil, true, true},
		{"b", "mount", true, nil, false, false},
	} {
		first, kill := f.note(c.id, c.name, c.stop)
		if first != c.first || kill != c.kill {
			t.Errorf("call %d: first %v, kill %v; want %v, %v", i, first, kill, c.first, c.kill)
		}
		if kill {
			f.tried(c.id, c.result)
		}
	}
	if a, b := f.forget("a"), f.forget("b"); a != "" || b != "mount" || len(f.of) != 0 {
		t.Errorf("killed for %q and %q, %d entries left; want nothing, mount and none", a, b, len(f.of))
	}
}
