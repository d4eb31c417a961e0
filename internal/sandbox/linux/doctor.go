package linux

import (
	"context"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/health"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/apparmor"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/oci"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/selinux"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/spec"
)

// Doctor tests whether this host has what the backend needs. It leaves no changes behind. If optional is set, the node has
// another backend, and it is no error if this one is not installed.
func Doctor(ctx context.Context, cfg Config, optional bool) []health.Finding {
	cfg = cfg.withDefaults()
	var findings []health.Finding
	add := func(f health.Finding) { findings = append(findings, f) }

	g, err := openCgroups(cfg.CgroupDriver, cfg.CgroupParent)
	add(cgroupFinding(g, err))
	if missing := cfg.installed(); missing != nil {
		add(health.Finding{
			Subject: "linux containers", Required: !optional || !errdefs.IsNotFound(missing), Detail: missing.Error(),
			Remedy: "install what is missing and restart the daemon, or set backends.linux to false; until then the handler \"linux\" is missing",
		})
		return findings
	}
	if err == nil {
		findings = append(findings, doctorRuntimes(ctx, cfg, g)...)
	}
	add(oci.MonitorFinding(ctx, cfg.oci()))
	if path := cfg.catatonit(); path == "" {
		add(health.Finding{Subject: "catatonit", Detail: "not found: pods whose containers share a PID namespace are refused",
			Remedy: "apt-get install catatonit"})
	} else {
		add(health.Finding{Subject: "catatonit", OK: true, Detail: path})
	}
	if host, err := spec.Probe(); err == nil {
		add(apparmor.Finding(host.AppArmor))
	}
	add(selinux.Finding())
	add(pidfdFinding())
	return findings
}

func cgroupFinding(g cgroups, err error) health.Finding {
	f := health.Finding{Subject: "cgroups", Required: true, OK: err == nil}
	if err != nil {
		f.Detail, f.Remedy = err.Error(), "mount cgroup2 at /sys/fs/cgroup"
		return f
	}
	if g.V2 {
		f.Detail = "v2, driver " + g.Driver
		return f
	}
	f.Detail = fmt.Sprintf("v1 (%s), driver %s", strings.Join(slices.Sorted(maps.Keys(g.Roots)), " "), g.Driver)
	return f
}

func doctorRuntimes(ctx context.Context, cfg Config, g cgroups) []health.Finding {
	dir, err := os.MkdirTemp("", "tripod-doctor-")
	if err != nil {
		return []health.Finding{{Subject: "temporary directory", Required: true, Detail: err.Error(), Remedy: "make it writable"}}
	}
	defer os.RemoveAll(dir)
	if err := os.Chmod(dir, 0o711); err != nil { // as Open makes it, for the trial of user namespaces
		return []health.Finding{{Subject: "temporary directory", Required: true, Detail: err.Error(), Remedy: "make it writable"}}
	}
	cfg.RunDir = dir
	if g.Driver == cgroup.DriverCgroupfs {
		defer func() {
			for _, full := range g.Dirs(g.Parent) {
				_ = unix.Rmdir(full) // fails unless the directory is empty
			}
		}()
	}
	return oci.RuntimeFindings(ctx, cfg.oci(), g.Tree)
}

// pidfdFinding tests pidfd_open(2), which the backend uses to notice that a container has ended.
func pidfdFinding() health.Finding {
	fd, err := unix.PidfdOpen(os.Getpid(), unix.PIDFD_NONBLOCK)
	if err != nil {
		return health.Finding{Subject: "pidfd", Required: true, Detail: "pidfd_open: " + err.Error(), Remedy: "use Linux 5.6 or newer"}
	}
	unix.Close(fd)
	return health.Finding{Subject: "pidfd", Required: true, OK: true, Detail: "pidfd_open works"}
}
