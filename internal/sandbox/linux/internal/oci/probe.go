package oci

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/Masterminds/semver/v3"
	"github.com/containerd/containerd/v2/pkg/sys"
	"github.com/containerd/errdefs"
	runc "github.com/containerd/go-runc"
	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/opencontainers/runtime-spec/specs-go/features"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/lazyregexp"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/mnt"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/spec"
)

// probeDeadline limits how long an OCI runtime can take to create and delete a trivial container.
const probeDeadline = 20 * time.Second

// FindRuntime returns the configured runtime, or the first of crun and runc that works.
func FindRuntime(ctx context.Context, cfg Config, g cgroup.Tree) (Runtime, error) {
	var errs []error
	for _, name := range cfg.runtimes() {
		rt, err := tryRuntime(ctx, cfg, g, name)
		if err == nil {
			return rt, nil
		}
		errs = append(errs, err)
	}
	return Runtime{}, fmt.Errorf("no OCI runtime works here (Debian: apt-get install crun, or runc): %w: %w",
		errors.Join(errs...), errdefs.ErrUnavailable)
}

// runtimes lists the runtimes to try, in order.
func (c Config) runtimes() []string {
	if c.Runtime == "auto" {
		return []string{"crun", "runc"}
	}
	return []string{c.Runtime}
}

// tryRuntime finds one runtime and probes it.
func tryRuntime(ctx context.Context, cfg Config, g cgroup.Tree, name string) (Runtime, error) {
	found, err := exec.LookPath(name)
	if err != nil {
		return Runtime{}, fmt.Errorf("OCI runtime %s: %w", name, err)
	}
	if found, err = filepath.Abs(found); err != nil {
		return Runtime{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, probeDeadline)
	defer cancel()
	out, err := exec.CommandContext(ctx, found, "--version").Output()
	if err != nil {
		return Runtime{}, fmt.Errorf("%s --version: %w", found, err)
	}
	version, _, _ := strings.Cut(string(out), "\n")
	systemd := g.Driver == cgroup.DriverSystemd
	rt := Runtime{Path: found, StateDir: cfg.StateDir, Systemd: systemd, Tried: Tried{Version: version}, sealed: seal(found, version),
		cli: &runc.Runc{
			Command: found, Root: cfg.StateDir, SystemdCgroup: systemd, Setpgid: true,
		}}
	probed, users, both := rt, errNoUsers, guard.Group{}
	both.Go(func() error { return probed.try(ctx, cfg, g) })
	if !cfg.NoUserNamespaces {
		both.Go(func() error {
			users = rt.ProbeUserNamespace(ctx, cfg, g)
			return nil
		})
	}
	if err := both.Wait(); err != nil {
		rt.sealed.close()
		return Runtime{}, fmt.Errorf("%s (%s) does not work on this host: %w", found, version, err)
	}
	probed.UserNamespaces = users
	return probed, nil
}

// try finds out what the runtime can do on this host, unless that is known.
func (r *Runtime) try(ctx context.Context, cfg Config, g cgroup.Tree) (err error) {
	if known, ok := cfg.tried(r.Version); ok {
		r.Tried = known
		return nil
	}
	if out, err := exec.CommandContext(ctx, r.Path, "features").Output(); err == nil { // crun 1.8 does not have the command
		r.Features = parseFeatures(out)
	}
	r.RecursiveReadOnly, r.Releases, err = r.probe(ctx, cfg, g)
	return err
}

// parseFeatures reads the answer of the runtime's command "features" (runtime-spec, features.md).
func parseFeatures(answer []byte) (known spec.Runtime) {
	var f features.Features
	if json.Unmarshal(answer, &f) != nil {
		return known
	}
	latest, err := semver.NewVersion(f.OCIVersionMax)
	known.Processes = err == nil && !latest.LessThan(semver.New(1, 1, 0, "", ""))
	if l := f.Linux; l != nil {
		known.MemoryPolicy = l.MemoryPolicy != nil
		known.NetDevice = l.NetDevices != nil && l.NetDevices.Enabled != nil && *l.NetDevices.Enabled
	}
	return known
}

// probeName begins the name of a trial container and of its directory. It names this process, so that a later one can tell what
// a daemon left that was killed during a probe.
func probeName(kind string) string { return fmt.Sprintf("%s-%d-", kind, os.Getpid()) }

// staleProbe matches the names of trial containers, with the process that made them.
var staleProbe = lazyregexp.New(`^probe-(?:users-)?([0-9]+)-[0-9]+$`)

// SweepProbes ends and removes the trial containers of daemons that no longer run. They are in runDir.
func (r Runtime) SweepProbes(ctx context.Context, runDir string, g cgroup.Tree) error {
	names, err := os.ReadDir(runDir)
	if err != nil {
		return err
	}
	ids := map[string]bool{}
	for _, e := range names {
		ids[e.Name()] = true
	}
	for _, name := range g.Names() {
		ids[name] = true
	}
	var errs []error
	for id := range ids {
		m := staleProbe().FindStringSubmatch(id)
		if m == nil || ledger.Exists("/proc/"+m[1]) {
			continue
		}
		group := filepath.Join(g.Parent, cgroup.Mark+id)
		if g.Driver == cgroup.DriverSystemd {
			group = filepath.Join(cgroup.ExpandSlice(filepath.Base(g.Parent)), cgroup.Mark+id+".scope")
		}
		err := errors.Join(g.Kill(ctx, group), r.Forget(id), g.Remove(ctx, group))
		if err == nil { // otherwise the directory leads to them next time
			err = os.RemoveAll(filepath.Join(runDir, id))
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// probe creates and deletes a container without starting it. This tests the host's cgroups, namespaces and mounts.
// probe reports whether recursive read-only mounts work, and whether release does.
func (r Runtime) probe(ctx context.Context, cfg Config, g cgroup.Tree) (recursive, releases bool, err error) {
	dir, err := os.MkdirTemp(cfg.RunDir, probeName("probe"))
	if err != nil {
		return false, false, err
	}
	defer os.RemoveAll(dir)
	err = r.tryBundle(ctx, dir, g, probeSpec(), func(id, pidFile string) {
		recursive, releases = readOnlyBelow(pidFile, "/rro"), r.waitsForRelease(id)
	})
	return recursive, releases, err
}

// ProbeUserNamespace creates and deletes a container in a user namespace of its own.
func (r Runtime) ProbeUserNamespace(ctx context.Context, cfg Config, g cgroup.Tree) error {
	dir, err := os.MkdirTemp(cfg.RunDir, probeName("probe-users"))
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if err := os.Chmod(dir, 0o711); err != nil {
		return err
	}
	ids := sandbox.IDRange{First: 1 << 30, Length: sandbox.IDMapLength}
	const flags = unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS
	mapping := fmt.Sprintf("0:%d:%d", ids.First, ids.Length) // containerd's notation: first ID in the namespace, first ID of the node, length
	return sys.UnshareAfterEnterUserns(mapping, mapping, flags, func(pid int) error {
		ns := fmt.Sprintf("/proc/%d/ns/", pid)
		if err := mnt.ProbeMapped(ns+"user", cfg.Bundles, "/", cfg.RunDir); err != nil {
			return err
		}
		return r.tryBundle(ctx, dir, g, usersProbeSpec(ns, ids), func(_, _ string) {})
	})
}

// tryBundle creates and deletes a container in a directory. In between, it calls check with the container's ID and the
// name of the file that contains the PID.
func (r Runtime) tryBundle(ctx context.Context, dir string, g cgroup.Tree, config *specs.Spec, check func(id, pidFile string)) error {
	id := filepath.Base(dir)
	if err := writeProbeBundle(dir, id, g, config); err != nil {
		return err
	}
	log, pidFile := filepath.Join(dir, "log"), filepath.Join(dir, "pid")
	err := r.Run(ctx, log, "create", "--bundle", dir, "--pid-file", pidFile, id)
	if err == nil {
		check(id, pidFile)
	}
	defer func() { _ = g.Remove(ctx, filepath.Join(g.Parent, cgroup.Mark+id)) }()
	if delErr := r.Delete(context.WithoutCancel(ctx), id); delErr != nil && err == nil {
		return delErr
	}
	if err != nil {
		return fmt.Errorf("create a container: %w: %s", err, LastMessage(log))
	}
	return nil
}

// readOnlyBelow reports whether a mount and every mount below it are read-only for the process whose PID is in the
// file.
func readOnlyBelow(pidFile, dir string) bool {
	pid, err := ReadPid(pidFile)
	if err != nil {
		return false
	}
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", pid))
	if err != nil {
		return false
	}
	found := false
	for line := range strings.Lines(string(raw)) {
		f := strings.Fields(line) // proc_pid_mountinfo(5): the fifth field is the mount point, the sixth its options
		if len(f) < 6 || f[4] != dir && !strings.HasPrefix(f[4], dir+"/") {
			continue
		}
		if found = slices.Contains(strings.Split(f[5], ","), "ro"); !found {
			return false
		}
	}
	return found
}

func writeProbeBundle(dir, id string, g cgroup.Tree, config *specs.Spec) error {
	for _, sub := range []string{"rootfs/proc", "rootfs/dev", "rootfs/sys", "rootfs/rro"} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o755); err != nil {
			return err
		}
	}
	// The runtime looks the program up but never runs it.
	if err := os.WriteFile(filepath.Join(dir, "rootfs/probe"), []byte("#!/probe\n"), 0o755); err != nil {
		return err
	}
	path := filepath.Join(g.Parent, cgroup.Mark+id)
	if g.Driver == cgroup.DriverSystemd {
		path = filepath.Base(g.Parent) + ":tripod:" + id
	}
	config.Root.Path, config.Linux.CgroupsPath = filepath.Join(dir, "rootfs"), path
	return ledger.WriteJSON(filepath.Join(dir, "config.json"), config)
}

func probeSpec() *specs.Spec {
	return &specs.Spec{
		Version: "1.0.2",
		Root:    &specs.Root{},
		Process: &specs.Process{Args: []string{"/probe"}, Cwd: "/", NoNewPrivileges: true},
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc"},
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "mode=755"}},
			{Destination: "/rro", Type: "bind", Source: "/dev", Options: []string{"rbind", "rprivate", "rro"}},
		},
		Linux: &specs.Linux{
			Namespaces: []specs.LinuxNamespace{
				{Type: specs.PIDNamespace}, {Type: specs.IPCNamespace}, {Type: specs.UTSNamespace}, {Type: specs.MountNamespace},
			},
		},
	}
}

// usersProbeSpec is the specification of a trial container in the user namespace among the namespaces in a directory. It
// mounts the file systems that only the owner of the other namespaces can mount.
func usersProbeSpec(ns string, ids sandbox.IDRange) *specs.Spec {
	s := probeSpec()
	s.Mounts = append(s.Mounts[:2],
		specs.Mount{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"nosuid", "noexec", "nodev", "ro"}},
		specs.Mount{Destination: "/dev/mqueue", Type: "mqueue", Source: "mqueue"})
	s.Linux.UIDMappings = []specs.LinuxIDMapping{{HostID: ids.First, Size: ids.Length}}
	s.Linux.GIDMappings = s.Linux.UIDMappings
	s.Linux.Namespaces = []specs.LinuxNamespace{
		{Type: specs.UserNamespace, Path: ns + "user"}, {Type: specs.NetworkNamespace, Path: ns + "net"},
		{Type: specs.IPCNamespace, Path: ns + "ipc"},
		{Type: specs.UTSNamespace, Path: ns + "uts"}, {Type: specs.PIDNamespace}, {Type: specs.MountNamespace},
	}
	return s
}
