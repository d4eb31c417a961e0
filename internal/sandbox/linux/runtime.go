package linux

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/Masterminds/semver/v3"
	"github.com/containerd/containerd/v2/pkg/sys"
	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/mnt"

	runc "github.com/containerd/go-runc"
	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/opencontainers/runtime-spec/specs-go/features"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/cgroup"
	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/lazyregexp"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/spec"
)

// probeDeadline limits how long an OCI runtime can take to create and delete a trivial container.
const probeDeadline = 20 * time.Second

// ociRuntime is a crun or runc that passed the probe. Its state is in our run directory, so it knows only our
// containers.
type ociRuntime struct {
	path, version string
	root          string
	systemd       bool
	// recursiveReadOnly means that the runtime supports the mount option "rro".
	recursiveReadOnly bool
	// userNamespaces is the reason why the runtime cannot run pods in user namespaces on this host; nil if it can.
	userNamespaces error
	// features are the recent parts of a specification that the runtime knows.
	features spec.Runtime
	// releases means that the runtime's start only sends a byte (see release).
	releases bool
	// sealed is nil if the program is executed by its own path.
	sealed *sealed
	cli    *runc.Runc
}

// installed returns errdefs.ErrNotFound if a program that the backend needs is not in PATH, and errdefs.ErrUnavailable if the
// node then has pods that need it: the program may be about to come back. If the configuration names a program, somebody
// wants this backend, so installed leaves the error to the search for that program.
func (c Config) installed() error {
	found := func(name string) bool {
		_, err := exec.LookPath(name)
		return !errors.Is(err, exec.ErrNotFound)
	}
	var missing string
	switch {
	case c.Runtime != "auto" || c.Conmon != "":
		return nil
	case !slices.ContainsFunc(c.runtimes(), found):
		missing = "no OCI runtime is installed: neither crun nor runc is in PATH (Debian: apt-get install crun)"
	case !found("conmon"):
		missing = "conmon is not in PATH (Debian: apt-get install conmon)"
	default:
		return nil
	}
	if pods := idsIn(c.Root); len(pods) > 0 {
		return fmt.Errorf("%s, but %d pods of this node need it: %w", missing, len(pods), errdefs.ErrUnavailable)
	}
	return fmt.Errorf("%s: %w", missing, errdefs.ErrNotFound)
}

// findRuntime returns the configured runtime, or the first of crun and runc that works.
func findRuntime(ctx context.Context, cfg Config, g cgroups) (ociRuntime, error) {
	var errs []error
	for _, name := range cfg.runtimes() {
		rt, err := tryRuntime(ctx, cfg, g, name)
		if err == nil {
			return rt, nil
		}
		errs = append(errs, err)
	}
	return ociRuntime{}, fmt.Errorf("no OCI runtime works here (Debian: apt-get install crun, or runc): %w: %w",
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
func tryRuntime(ctx context.Context, cfg Config, g cgroups, name string) (ociRuntime, error) {
	found, err := exec.LookPath(name)
	if err != nil {
		return ociRuntime{}, fmt.Errorf("OCI runtime %s: %w", name, err)
	}
	if found, err = filepath.Abs(found); err != nil {
		return ociRuntime{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, probeDeadline)
	defer cancel()
	out, err := exec.CommandContext(ctx, found, "--version").Output()
	if err != nil {
		return ociRuntime{}, fmt.Errorf("%s --version: %w", found, err)
	}
	version, _, _ := strings.Cut(string(out), "\n")
	systemd := cfg.CgroupDriver == cgroup.DriverSystemd
	rt := ociRuntime{path: found, version: version, root: cfg.ociDir(), systemd: systemd, sealed: seal(found, version), cli: &runc.Runc{
		Command: found, Root: cfg.ociDir(), SystemdCgroup: systemd, Setpgid: true,
	}}
	probed, users, both := rt, errNoUsers, guard.Group{}
	both.Go(func() error { return probed.try(ctx, cfg, g) })
	if !cfg.NoUserNamespaces {
		both.Go(func() error {
			users = rt.probeUserNamespace(ctx, cfg, g)
			return nil
		})
	}
	if err := both.Wait(); err != nil {
		rt.sealed.close()
		return ociRuntime{}, fmt.Errorf("%s (%s) does not work on this host: %w", found, version, err)
	}
	probed.userNamespaces = users
	return probed, nil
}

// try finds out what the runtime can do on this host, unless that is known.
func (r *ociRuntime) try(ctx context.Context, cfg Config, g cgroups) (err error) {
	if known, ok := cfg.tried(r.version); ok {
		r.features, r.recursiveReadOnly, r.releases = known.Features, known.RecursiveReadOnly, known.Releases
		return nil
	}
	if out, err := exec.CommandContext(ctx, r.path, "features").Output(); err == nil { // crun 1.8 does not have the command
		r.features = parseFeatures(out)
	}
	r.recursiveReadOnly, r.releases, err = r.probe(ctx, cfg, g)
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

// sweepProbes ends and removes the trial containers of daemons that no longer run.
func (b *Backend) sweepProbes(ctx context.Context) error {
	names, err := os.ReadDir(b.cfg.RunDir)
	if err != nil {
		return err
	}
	ids := map[string]bool{}
	for _, e := range names {
		ids[e.Name()] = true
	}
	for _, name := range b.cgroups.Names() {
		ids[name] = true
	}
	var errs []error
	for id := range ids {
		m := staleProbe().FindStringSubmatch(id)
		if m == nil || ledger.Exists("/proc/"+m[1]) {
			continue
		}
		group := filepath.Join(b.cgroups.Parent, cgroup.Mark+id)
		if b.cgroups.Driver == cgroup.DriverSystemd {
			group = filepath.Join(cgroup.ExpandSlice(filepath.Base(b.cgroups.Parent)), cgroup.Mark+id+".scope")
		}
		err := errors.Join(b.cgroups.Kill(ctx, group), b.runtime.forget(id), b.cgroups.Remove(ctx, group))
		if err == nil { // otherwise the directory leads to them next time
			err = os.RemoveAll(filepath.Join(b.cfg.RunDir, id))
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// probe creates and deletes a container without starting it. This tests the host's cgroups, namespaces and mounts.
// probe reports whether recursive read-only mounts work, and whether release does.
func (r ociRuntime) probe(ctx context.Context, cfg Config, g cgroups) (recursive, releases bool, err error) {
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

// probeUserNamespace creates and deletes a container in a user namespace of its own.
func (r ociRuntime) probeUserNamespace(ctx context.Context, cfg Config, g cgroups) error {
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
	return sys.UnshareAfterEnterUserns(mapping(ids), mapping(ids), flags, func(pid int) error {
		ns := fmt.Sprintf("/proc/%d/ns/", pid)
		if err := mnt.ProbeMapped(ns+"user", cfg.Root, "/", cfg.RunDir); err != nil {
			return err
		}
		return r.tryBundle(ctx, dir, g, usersProbeSpec(ns, ids), func(_, _ string) {})
	})
}

// tryBundle creates and deletes a container in a directory. In between, it calls check with the container's ID and the
// name of the file that contains the PID.
func (r ociRuntime) tryBundle(ctx context.Context, dir string, g cgroups, config *specs.Spec, check func(id, pidFile string)) error {
	id := filepath.Base(dir)
	if err := writeProbeBundle(dir, id, g, config); err != nil {
		return err
	}
	log, pidFile := filepath.Join(dir, "log"), filepath.Join(dir, "pid")
	err := r.run(ctx, log, "create", "--bundle", dir, "--pid-file", pidFile, id)
	if err == nil {
		check(id, pidFile)
	}
	defer func() { _ = g.Remove(ctx, filepath.Join(g.Parent, cgroup.Mark+id)) }()
	if delErr := r.delete(context.WithoutCancel(ctx), id); delErr != nil && err == nil {
		return delErr
	}
	if err != nil {
		return fmt.Errorf("create a container: %w: %s", err, lastMessage(log))
	}
	return nil
}

// readOnlyBelow reports whether a mount and every mount below it are read-only for the process whose PID is in the
// file.
func readOnlyBelow(pidFile, dir string) bool {
	pid, err := readPid(pidFile)
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

func writeProbeBundle(dir, id string, g cgroups, config *specs.Spec) error {
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
		{Type: specs.UserNamespace, Path: ns + "user"}, {Type: specs.NetworkNamespace, Path: ns + "net"}, {Type: specs.IPCNamespace, Path: ns + "ipc"},
		{Type: specs.UTSNamespace, Path: ns + "uts"}, {Type: specs.PIDNamespace}, {Type: specs.MountNamespace},
	}
	return s
}

// globals returns the options that precede the command.
func (r ociRuntime) globals() []string {
	args := []string{"--root", r.root}
	if r.systemd {
		args = append(args, "--systemd-cgroup")
	}
	return args
}

// run makes a call that go-runc does not support. The runtime logs to a file (see lastMessage) rather than to stderr,
// because the container's init inherits the runtime's stdio. This is the two ends of a pipe of its own: it must not be
// the node's /dev/null, because crun makes the container's root the owner of that file.
func (r ociRuntime) run(ctx context.Context, log string, args ...string) error {
	in, out, err := os.Pipe()
	if err != nil {
		return err
	}
	defer in.Close()
	defer out.Close()
	args = slices.Concat(r.globals(), []string{"--log", log, "--log-format", "json"}, args)
	cmd := exec.CommandContext(ctx, r.creator(), args...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = in, out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	return cmd.Run()
}

// lastMessage returns a runtime's last message in a log file, or "" if there is none.
func lastMessage(log string) string {
	raw, _ := os.ReadFile(log)
	return runtimeMessage(string(raw))
}

// creator returns the path by which the program is executed to create containers.
func (r ociRuntime) creator() string {
	if r.sealed == nil {
		return r.path
	}
	return r.sealed.path()
}

// start runs the program of a created container, and its poststart hooks if it has any.
func (r ociRuntime) start(ctx context.Context, id string, hooks bool) error {
	if r.releases && !hooks && r.waitsForRelease(id) {
		return r.release(id)
	}
	if err := r.cli.Start(ctx, id); err != nil {
		return fmt.Errorf("%s start: %w", filepath.Base(r.path), err)
	}
	return nil
}

// fifo returns the path of the FIFO from which crun's init reads a byte before it executes the container's program.
// Apart from hooks, "crun start" only sends this byte and removes the FIFO, and we save the execution of a program.
func (r ociRuntime) fifo(id string) string { return filepath.Join(r.root, id, "exec.fifo") }

// waitsForRelease reports whether a created container is one of crun, which waits for release. runc's FIFO works the
// other way round.
func (r ociRuntime) waitsForRelease(id string) bool {
	name, _, _ := parseVersion(r.version)
	st, err := os.Lstat(r.fifo(id))
	return name == "crun" && err == nil && st.Mode().Type() == os.ModeNamedPipe
}

// release runs the program of a container that crun has created. The FIFO goes last: as long as it exists, crun and
// recovery take the container for one that was not started, and recovery starts it afresh.
func (r ociRuntime) release(id string) error {
	f, err := os.OpenFile(r.fifo(id), os.O_WRONLY|unix.O_NONBLOCK, 0)
	if errors.Is(err, unix.ENXIO) {
		return errors.New("the container's first process ended before it was started")
	}
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := f.Write([]byte{0}); err != nil {
		return err
	}
	return os.Remove(r.fifo(id))
}

// delete kills a container's processes and removes its state in the runtime. It succeeds for an unknown container.
func (r ociRuntime) delete(ctx context.Context, id string) error {
	if !r.knows(id) {
		return nil
	}
	if err := r.cli.Delete(ctx, id, &runc.DeleteOpts{Force: true}); err != nil && r.knows(id) {
		return fmt.Errorf("%s delete: %w", filepath.Base(r.path), err)
	}
	return nil
}

// forget removes a container's state without the runtime.
func (r ociRuntime) forget(id string) error { return os.RemoveAll(filepath.Join(r.root, id)) }

// knows reports whether the runtime's state has a directory for a container. Both crun and runc create one.
func (r ociRuntime) knows(id string) bool { return ledger.Exists(filepath.Join(r.root, id)) }

// started reports whether the container's program was started.
func (r ociRuntime) started(ctx context.Context, id string) bool {
	c, err := r.cli.State(ctx, id)
	return err == nil && c.Status == "running"
}

func (r ociRuntime) update(ctx context.Context, id string, res *specs.LinuxResources) error {
	if err := r.cli.Update(ctx, id, res); err != nil {
		return fmt.Errorf("%s update: %w: %w", filepath.Base(r.path), err, errdefs.ErrFailedPrecondition)
	}
	return nil
}

// runtimeMessage extracts the runtime's last message from its log. The log is JSON, runc's text format (time="…"
// level=error msg="…") or crun's plain text.
func runtimeMessage(log string) string {
	log = strings.TrimSpace(log)
	lines := strings.Split(log, "\n")
	last := lines[len(lines)-1]
	var entry struct {
		Msg string `json:"msg"`
	}
	if json.Unmarshal([]byte(last), &entry) == nil && entry.Msg != "" {
		return entry.Msg
	}
	if _, quoted, ok := strings.Cut(last, " msg="); ok {
		if text, err := strconv.Unquote(quoted); err == nil {
			return text
		}
		return quoted
	}
	return log
}
