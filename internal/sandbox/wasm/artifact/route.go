package artifact

import (
	"fmt"
	"slices"
	"strings"

	"github.com/tripod-run/tripod/internal/component/wasi"
	"github.com/tripod-run/tripod/internal/component/wasmbin"
	"github.com/tripod-run/tripod/internal/component/wit"
)

// The values of Route.Path.
const (
	PathCore      = "core"
	PathComponent = "component"
)

// Route says how nodes run a guest, as far as its binary shows it.
type Route struct {
	// Path is PathCore if the guest is called on its linear memory, in a worker that pods can share. It is PathComponent if
	// the engine's component model calls it, which is slower, in a worker of its own; PathReason says why.
	Path       string `json:"path"`
	PathReason string `json:"pathReason,omitempty"`
	// Snapshot is true if instances can begin from a snapshot of their pod. Otherwise, SnapshotReason says why not.
	Snapshot       bool   `json:"snapshot"`
	SnapshotReason string `json:"snapshotReason,omitempty"`
	// Interfaces are those that the guest imports and that a pod must provide for, or that not every version of Tripod has:
	// egress, channels, and proposals of WASI.
	Interfaces []string `json:"interfaces,omitempty"`
}

// String describes the route in one line.
func (r *Route) String() string {
	path := "core path, in workers that pods share"
	if r.Path == PathComponent {
		path = "component path, slower and in a worker of its own (" + r.PathReason + ")"
	}
	begin := "instances begin from a snapshot of their pod"
	if !r.Snapshot {
		begin = "no snapshots (" + r.SnapshotReason + ")"
	}
	optional := "no optional interfaces"
	if len(r.Interfaces) > 0 {
		optional = "optional interfaces: " + strings.Join(r.Interfaces, ", ")
	}
	return fmt.Sprintf("%s; %s; %s", path, begin, optional)
}

// RefuseSnapshot records why there will be no snapshots, unless there is a reason already.
func (r *Route) RefuseSnapshot(why string) {
	if r.Snapshot && why != "" {
		r.Snapshot, r.SnapshotReason = false, why
	}
}

// RouteOf returns the route of a binary of a world. It returns errdefs.ErrInvalidArgument for a binary that it cannot read.
func RouteOf(binary []byte, o *wasmbin.Outline, world World) (*Route, error) {
	b, err := wasmbin.Parse(binary)
	if err != nil {
		return nil, err
	}
	r := &Route{Path: PathCore, Snapshot: true, Interfaces: optionalInterfaces(o)}
	var module wasmbin.Module
	var exports func(name string) bool
	if !b.Component {
		module = b.Modules[0]
		exports = functions(module)
	} else {
		plan, why, err := wasmbin.NewPlan(binary)
		if err != nil {
			return nil, err
		}
		if why != "" {
			r.Path, r.PathReason = PathComponent, why
			r.RefuseSnapshot("the guest is not called on its linear memory")
			return r, nil
		}
		exports = func(name string) bool { _, ok := plan.Exports[name]; return ok }
		if module = plan.Module; len(b.Modules) > 0 && wasmbin.WhyNoSnapshot(nil, functions(b.Modules[0])) == "" {
			module = b.Modules[0] // the engine calls it alone
		}
	}
	if world == wit.WorldCommand {
		r.RefuseSnapshot("a command runs once")
	}
	if r.RefuseSnapshot(wasmbin.WhyNoSnapshot(binary, exports)); !r.Snapshot {
		return r, nil
	}
	_, why, err := wasmbin.Detach(module.Code)
	r.RefuseSnapshot(why)
	return r, err
}

// functions returns a function that reports whether a core module exports a function.
func functions(m wasmbin.Module) func(name string) bool {
	return func(name string) bool { return m.HasExport(name, wasmbin.Func) }
}

// optionalInterfaces returns the imports that Route.Interfaces lists, sorted. The interfaces of sockets count as one.
func optionalInterfaces(o *wasmbin.Outline) (names []string) {
	for _, name := range o.Imports {
		if !o.Component {
			name, _, _ = strings.Cut(name, " ")
		}
		switch base, isRelease := release(name); {
		case strings.HasPrefix(base, "wasi:sockets/") && isRelease:
			names = append(names, "wasi:sockets")
		case base == "wasi:http/outgoing-handler" && isRelease, slices.Contains(wasi.Drafts(), name),
			strings.HasPrefix(name, "tripod:grpc/client@"), strings.HasPrefix(name, "tripod:edge/"):
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}
