package spec

import (
	"fmt"
	"slices"
	"strings"

	nrigen "github.com/containerd/nri/pkg/runtime-tools/generate"
	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// generator changes a specification for NRI's generator, which knows what an adjustment means. The embedded interface
// is nil: it stands for the setters of limits and of the cgroup's path, which apply never uses.
type generator struct {
	nrigen.UnderlyingGenerator
	spec *specs.Spec
}

func (g *generator) Spec() *specs.Spec { return g.spec }

func (g *generator) AddAnnotation(key, value string) { put(&g.spec.Annotations, key, value) }
func (g *generator) RemoveAnnotation(key string)     { delete(g.spec.Annotations, key) }

func (g *generator) AddLinuxSysctl(key, value string) { put(&g.spec.Linux.Sysctl, key, value) }
func (g *generator) RemoveLinuxSysctl(key string)     { delete(g.spec.Linux.Sysctl, key) }

func put(m *map[string]string, key, value string) {
	if *m == nil {
		*m = map[string]string{}
	}
	(*m)[key] = value
}

func (g *generator) ClearProcessEnv() { g.spec.Process.Env = nil }

func (g *generator) AddProcessEnv(name, value string) {
	env := slices.DeleteFunc(g.spec.Process.Env, func(e string) bool { return strings.HasPrefix(e, name+"=") })
	g.spec.Process.Env = append(env, name+"="+value)
}

func (g *generator) SetProcessArgs(args []string)    { g.spec.Process.Args = args }
func (g *generator) SetProcessOOMScoreAdj(score int) { g.spec.Process.OOMScoreAdj = &score }

func (g *generator) AddPreStartHook(h specs.Hook) {
	g.hooks().Prestart = append(g.hooks().Prestart, h) //nolint:staticcheck // plugins can still add it
}
func (g *generator) AddPostStartHook(h specs.Hook) {
	g.hooks().Poststart = append(g.hooks().Poststart, h)
}
func (g *generator) AddPostStopHook(h specs.Hook) {
	g.hooks().Poststop = append(g.hooks().Poststop, h)
}

func (g *generator) hooks() *specs.Hooks {
	if g.spec.Hooks == nil {
		g.spec.Hooks = &specs.Hooks{}
	}
	return g.spec.Hooks
}

func (g *generator) Mounts() []specs.Mount  { return g.spec.Mounts }
func (g *generator) ClearMounts()           { g.spec.Mounts = nil }
func (g *generator) AddMount(m specs.Mount) { g.spec.Mounts = append(g.spec.Mounts, m) }
func (g *generator) RemoveMount(dest string) {
	g.spec.Mounts = slices.DeleteFunc(g.spec.Mounts, func(m specs.Mount) bool { return m.Destination == dest })
}

func (g *generator) SetLinuxRootPropagation(mode string) error {
	g.spec.Linux.RootfsPropagation = mode
	return nil
}

func (g *generator) AddDevice(d specs.LinuxDevice) {
	g.RemoveDevice(d.Path)
	g.spec.Linux.Devices = append(g.spec.Linux.Devices, d)
}

func (g *generator) RemoveDevice(path string) {
	g.spec.Linux.Devices = slices.DeleteFunc(g.spec.Linux.Devices, func(d specs.LinuxDevice) bool { return d.Path == path })
}

func (g *generator) AddLinuxResourcesDevice(allow bool, kind string, major, minor *int64, access string) {
	if g.spec.Linux.Resources == nil {
		g.spec.Linux.Resources = &specs.LinuxResources{}
	}
	g.spec.Linux.Resources.Devices = append(g.spec.Linux.Resources.Devices, specs.LinuxDeviceCgroup{
		Allow: allow, Type: kind, Major: major, Minor: minor, Access: access,
	})
}

// namespaceTypes are the names of namespaces, which are the same for plugins and in the specification.
var namespaceTypes = []specs.LinuxNamespaceType{
	specs.PIDNamespace, specs.NetworkNamespace, specs.IPCNamespace, specs.UTSNamespace, specs.CgroupNamespace, specs.TimeNamespace,
}

func (g *generator) AddOrReplaceLinuxNamespace(kind, path string) error {
	if !slices.Contains(namespaceTypes, specs.LinuxNamespaceType(kind)) {
		return fmt.Errorf("linux.namespaces: %q is no namespace", kind)
	}
	err := g.RemoveLinuxNamespace(kind)
	g.spec.Linux.Namespaces = append(g.spec.Linux.Namespaces, specs.LinuxNamespace{Type: specs.LinuxNamespaceType(kind), Path: path})
	return err
}

func (g *generator) RemoveLinuxNamespace(kind string) error {
	g.spec.Linux.Namespaces = slices.DeleteFunc(g.spec.Linux.Namespaces, func(n specs.LinuxNamespace) bool { return string(n.Type) == kind })
	return nil
}
