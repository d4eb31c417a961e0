package oci

import (
	"context"
	"os/exec"
	"strings"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/health"
)

// RuntimeFindings reports which of the configured runtimes work on this host, and what is known about those. One that
// works is enough.
func RuntimeFindings(ctx context.Context, cfg Config, g cgroup.Tree) (findings []health.Finding) {
	works := false
	var more []health.Finding // about the runtimes that work
	for _, name := range cfg.runtimes() {
		f := health.Finding{Subject: "OCI runtime " + name}
		if rt, err := tryRuntime(ctx, cfg, g, name); err == nil {
			f.OK, f.Detail, works = true, rt.Path+": "+rt.Version, true
			more = append(more, advisoryFinding(rt.Version, packageOf(ctx, rt.Path)), usersFinding(name, rt))
			rt.Close()
		} else {
			f.Detail, f.Remedy = err.Error(), runtimeRemedy(name, err)
		}
		findings = append(findings, f)
	}
	for i := range findings {
		findings[i].Required = !works // one working runtime is enough
	}
	return append(findings, more...)
}

// MonitorFinding reports whether conmon can run.
func MonitorFinding(ctx context.Context, cfg Config) health.Finding {
	m, err := findMonitor(ctx, cfg)
	if err != nil {
		return health.Finding{Subject: "conmon", Required: true, Detail: err.Error(), Remedy: "apt-get install conmon"}
	}
	return health.Finding{Subject: "conmon", Required: true, OK: true, Detail: m.Path + ": " + m.version}
}

func usersFinding(name string, rt Runtime) health.Finding {
	f := health.Finding{Subject: "user namespaces with " + name, OK: rt.UserNamespaces == nil, Detail: "a trial container works"}
	if !f.OK {
		f.Detail = rt.UserNamespaces.Error() + ": pods with hostUsers: false are refused"
		f.Remedy = "use Linux 5.19 or newer, set user.max_user_namespaces above 0, and let others pass through the parents of the state directory (chmod o+x)"
	}
	return f
}

func runtimeRemedy(name string, err error) string {
	switch {
	case strings.Contains(err.Error(), exec.ErrNotFound.Error()):
		return "apt-get install " + name
	case strings.Contains(err.Error(), "hybrid"), strings.Contains(err.Error(), "cgroup"):
		return "crun needs pure cgroup v1 or v2: boot with systemd.unified_cgroup_hierarchy=1, unmount " +
			"/sys/fs/cgroup/unified, or use runc"
	}
	return "run the command manually to see more, or configure another runtime"
}
