package wasihttp

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/component/engine"
	"github.com/tripod-run/tripod/internal/component/wasi"
)

// Guest is the interface that the value in InstanceOptions.Host must implement if the instance gets its host functions
// from Host or WASI.
type Guest interface{ WASI() *wasi.State }

// Host returns the host functions of WASI and of wasi:http. Pass them to engine.Engine.Load. Guests of all worlds can send
// requests. To answer them, the Guest must be a *Session.
func Host() engine.Host {
	all, bound := interfaces()
	var h engine.Host
	for _, i := range all {
		for _, name := range i.Resources {
			h.Resources = append(h.Resources, engine.HostResource{Interface: i.Name, Name: name, Drop: func(host any, rep uint32) {
				if g, ok := host.(Guest); ok {
					g.WASI().Drop(rep)
				}
			}})
		}
	}
	for _, f := range bound {
		h.Funcs = append(h.Funcs, hostFunc(f))
	}
	return h
}

func hostFunc(f wasi.Bound) engine.HostFunc {
	var role engine.Role
	if strings.HasPrefix(f.Interface, "wasi:cli/environment@") { // of the pod
		role = engine.RoleConstant
	}
	return engine.HostFunc{Interface: f.Interface, Name: f.Name, Params: f.Params, Result: f.Result, Role: role,
		Call: func(c *engine.HostCall, args []byte) ([]byte, error) {
			g, ok := c.Host().(Guest)
			if !ok {
				return nil, fmt.Errorf("%s was called in an instance without a State: %w", f.Name, errdefs.ErrInternal)
			}
			out, err := f.Invoke(c.Context(), g.WASI(), args, c.Renew)
			if exit := (*wasi.Exit)(nil); errors.As(err, &exit) {
				return nil, &engine.Exit{Code: exit.Code}
			}
			return out, err
		}}
}

// Provided reports whether Host includes an interface of that name, in any compatible version. Pre-release versions are
// compatible only with themselves.
func Provided(iface string) bool {
	if wasi.IsDraft(iface) {
		return slices.Contains(wasi.Drafts(), iface)
	}
	all, _ := interfaces()
	name, version, _ := strings.Cut(iface, "@")
	return strings.HasPrefix(version, "0.2.") && slices.ContainsFunc(all, func(i *wasi.Interface) bool {
		known, _, _ := strings.Cut(i.Name, "@")
		return known == name && !wasi.IsDraft(i.Name)
	})
}

// Signature returns the signature of the guest's handle function, which Session.Serve needs.
func Signature() engine.Signature {
	f := handle()
	return engine.Signature{Interface: handlerInterface, Name: f.Name, Params: f.Params, Result: f.Result}
}
