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

	"github.com/containerd/errdefs"
	runc "github.com/containerd/go-runc"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/tripod-run/tripod/internal/cgroup"
)

// probeDeadline is how long an OCI runtime may take to make and delete a trivial container.
const probeDeadline = 20 * time.Second

// ociRuntime is a crun or runc that was seen to work. Its own state lies in our run directory, so that what it holds
// is ours and nothing else is.
type ociRuntime struct {
	path, version string
	root          string
	systemd       bool
	// recursiveReadOnly says that it knows the mount option "rro".
	recursiveReadOnly bool
	cli               *runc.Runc
}

func newRuntime(cfg Config, path, version string) ociRuntime {
	systemd := cfg.CgroupDriver == cgroup.DriverSystemd
	return ociRuntime{path: path, version: version, root: cfg.ociDir(), systemd: systemd, cli: &runc.Runc{
		Command: path, Root: cfg.ociDir(), SystemdCgroup: systemd, Setpgid: true,
	}}
}

// findRuntime gives the runtime that the configuration names, or the first of crun and runc that works.
func findRuntime(ctx context.Context, cfg Config, g cgroups) (ociRuntime, error) {
	names := []string{cfg.Runtime}
	if cfg.Runtime == "auto" {
		names = []string{"crun", "runc"}
	}
	var errs []error
	for _, name := range names {
		rt, err := tryRuntime(ctx, cfg, g, name)
		if err == nil {
			return rt, nil
		}
		errs = append(errs, err)
	}
	return ociRuntime{}, fmt.Errorf("no OCI runtime works here (Debian: apt-get install crun, or runc): %w: %w",
		errors.Join(errs...), errdefs.ErrUnavailable)
}

// tryRuntime finds one runtime and makes it prove itself.
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
	rt := newRuntime(cfg, found, version)
	if rt.recursiveReadOnly, err = rt.probe(ctx, cfg, g); err != nil {
		return ociRuntime{}, fmt.Errorf("%s (%s) does not work on this host: %w", found, version, err)
	}
	return rt, nil
}

// probe makes and deletes a container that is never started: that takes the cgroups, namespaces and mounts of this
// host, which version numbers tell nothing of. It tells whether a mount was made read-only recursively.
func (r ociRuntime) probe(ctx context.Context, cfg Config, g cgroups) (recursive bool, err error) {
	dir, err := os.MkdirTemp(cfg.RunDir, "probe-")
	if err != nil {
		return false, err
	}
	defer os.RemoveAll(dir)
	id := filepath.Base(dir) + "-" + strconv.Itoa(os.Getpid())
	if err := writeProbeBundle(dir, id, g); err != nil {
		return false, err
	}
	log, pidFile := filepath.Join(dir, "log"), filepath.Join(dir, "pid")
	err = r.command(ctx, log, "create", "--bundle", dir, "--pid-file", pidFile, id).Run()
	if err == nil {
		recursive = readOnlyBelow(pidFile, "/rro")
	}
	defer func() { _ = g.Remove(ctx, filepath.Join(g.Parent, cgroup.Mark+id)) }()
	if delErr := r.delete(context.WithoutCancel(ctx), id); delErr != nil && err == nil {
		return false, delErr
	}
	if err != nil {
		return false, fmt.Errorf("create a container: %w: %s", err, said(log))
	}
	return recursive, nil
}

// readOnlyBelow tells whether a mount, and every mount below it, is read-only for the process in the PID file.
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

func writeProbeBundle(dir, id string, g cgroups) error {
	for _, sub := range []string{"rootfs/proc", "rootfs/dev", "rootfs/sys", "rootfs/rro"} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o755); err != nil {
			return err
		}
	}
	// The program is looked up, but never run.
	if err := os.WriteFile(filepath.Join(dir, "rootfs/probe"), []byte("#!/probe\n"), 0o755); err != nil {
		return err
	}
	path := filepath.Join(g.Parent, cgroup.Mark+id)
	if g.Driver == cgroup.DriverSystemd {
		path = filepath.Base(g.Parent) + ":tripod:" + id
	}
	config := specs.Spec{
		Version: "1.0.2",
		Root:    &specs.Root{Path: "rootfs"},
		Process: &specs.Process{Args: []string{"/probe"}, Cwd: "/", NoNewPrivileges: true},
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc"},
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "mode=755"}},
			{Destination: "/rro", Type: "bind", Source: "/dev", Options: []string{"rbind", "rprivate", "rro"}},
		},
		Linux: &specs.Linux{
			CgroupsPath: path,
			Namespaces: []specs.LinuxNamespace{
				{Type: specs.PIDNamespace}, {Type: specs.IPCNamespace}, {Type: specs.UTSNamespace}, {Type: specs.MountNamespace},
			},
		},
	}
	return writeJSON(filepath.Join(dir, "config.json"), config)
}

// globals are the options before the command.
func (r ociRuntime) globals() []string {
	args := []string{"--root", r.root}
	if r.systemd {
		args = append(args, "--systemd-cgroup")
	}
	return args
}

// command makes a call that go-runc has no form for. What the runtime has to say goes to a file (see said): a
// container's init inherits the standard files, so that these must be neither pipes nor ours.
func (r ociRuntime) command(ctx context.Context, log string, args ...string) *exec.Cmd {
	args = slices.Concat(r.globals(), []string{"--log", log, "--log-format", "json"}, args)
	cmd := exec.CommandContext(ctx, r.path, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	return cmd
}

// said gives the last words of a runtime in a log file, empty when it said nothing.
func said(log string) string {
	raw, _ := os.ReadFile(log)
	return runtimeMessage(string(raw))
}

// start lets a created container run its program.
func (r ociRuntime) start(ctx context.Context, id string) error {
	if err := r.cli.Start(ctx, id); err != nil {
		return fmt.Errorf("%s start: %w", filepath.Base(r.path), err)
	}
	return nil
}

// delete drops what the runtime holds of a container, killing what still runs of it. One that it does not know is fine.
func (r ociRuntime) delete(ctx context.Context, id string) error {
	if !r.knows(id) {
		return nil
	}
	if err := r.cli.Delete(ctx, id, &runc.DeleteOpts{Force: true}); err != nil && r.knows(id) {
		return fmt.Errorf("%s delete: %w", filepath.Base(r.path), err)
	}
	return nil
}

// knows asks without running anything: both runtimes keep a directory per container.
func (r ociRuntime) knows(id string) bool { return exists(filepath.Join(r.root, id)) }

// started tells whether the container's program was let run.
func (r ociRuntime) started(ctx context.Context, id string) bool {
	c, err := r.cli.State(ctx, id)
	return err == nil && c.Status == "running"
}

// update changes the limits of a running container.
func (r ociRuntime) update(ctx context.Context, id string, res *specs.LinuxResources) error {
	if err := r.cli.Update(ctx, id, res); err != nil {
		return fmt.Errorf("%s update: %w: %w", filepath.Base(r.path), err, errdefs.ErrFailedPrecondition)
	}
	return nil
}

// runtimeMessage takes the words of the runtime out of what it wrote as log lines: runc's time="…" level=error
// msg="…", its JSON form, and crun's plain text.
func runtimeMessage(said string) string {
	lines := strings.Split(strings.TrimSpace(said), "\n")
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
	return strings.TrimSpace(said)
}
