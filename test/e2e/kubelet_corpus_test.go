package e2e

import (
	"maps"
	"slices"
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/test/harness"
	"github.com/tripod-run/tripod/test/sandboxtest/corpus"
)

// TestModelWritesAsAKubelet compares the model's requests for a pod with default settings with those of a kubelet: they
// have the same fields, and the same security context and resources.
func TestModelWritesAsAKubelet(t *testing.T) {
	name := "plain"
	if onV2() {
		name = "plain-on-cgroup-v2"
	}
	pods := corpus.Pods(t)
	want := pods[slices.IndexFunc(pods, func(p corpus.Pod) bool { return p.Name == name })]
	d := harness.StartDaemon(t)
	d.Pull(t, harness.Busybox)
	k := newKubelet(t, d)
	c := &kubeContainer{name: "c", image: harness.Busybox}
	p := k.newPod("plain", c)
	container, sandbox := k.containerConfig(p, c, d.Pull(t, harness.Busybox), 0), k.sandboxConfig(p, 0)
	for _, r := range []*runtimeapi.LinuxContainerResources{container.Linux.Resources, want.Container.Linux.Resources} {
		r.HugepageLimits = nil // depends on the machine's page sizes
		delete(r.Unified, "memory.swap.max")
	}
	for what, pair := range map[string][2]proto.Message{
		"container security": {container.Linux.SecurityContext, want.Container.Linux.SecurityContext},
		"resources":          {container.Linux.Resources, want.Container.Linux.Resources},
		"sandbox security":   {sandbox.Linux.SecurityContext, want.Sandbox.Linux.SecurityContext},
		"sandbox resources":  {sandbox.Linux.Resources, want.Sandbox.Linux.Resources},
	} {
		if !proto.Equal(pair[0], pair[1]) {
			t.Errorf("%s: the model sends\n%v\nbut a kubelet sends\n%v", what, pair[0], pair[1])
		}
	}
	container.Envs = nil // only the model's pods have variables
	for _, m := range container.Mounts {
		m.Readonly = false // only a kubelet's pods have a token, which is read-only
	}
	if ours, theirs := fields(sandbox), fields(want.Sandbox); !slices.Equal(ours, theirs) {
		t.Errorf("fields of a sandbox: the model sets\n%q\nbut a kubelet sets\n%q", ours, theirs)
	}
	if ours, theirs := fields(container), fields(want.Container); !slices.Equal(ours, theirs) {
		t.Errorf("fields of a container: the model sets\n%q\nbut a kubelet sets\n%q", ours, theirs)
	}
}

// fields lists the set fields of a message and of the messages in it, and the keys of maps, sorted.
func fields(m proto.Message) []string {
	seen := map[string]bool{}
	var walk func(prefix string, m protoreflect.Message)
	walk = func(prefix string, m protoreflect.Message) {
		m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
			name := prefix + string(f.Name())
			seen[name] = true
			switch {
			case f.IsMap():
				v.Map().Range(func(key protoreflect.MapKey, _ protoreflect.Value) bool {
					seen[name+"."+key.String()] = true
					return true
				})
			case f.IsList() && f.Message() != nil:
				for i := range v.List().Len() {
					walk(name+".", v.List().Get(i).Message())
				}
			case f.Message() != nil:
				walk(name+".", v.Message())
			}
			return true
		})
	}
	walk("", m.ProtoReflect())
	return slices.Sorted(maps.Keys(seen))
}
