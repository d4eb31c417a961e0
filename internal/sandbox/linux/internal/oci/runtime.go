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
	"strconv"
	"strings"
	"syscall"

	"github.com/containerd/errdefs"
	runc "github.com/containerd/go-runc"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/sandbox/ledger"
)

// Runtime is a crun or runc that passed the probe (FindRuntime). Its state is in a directory of ours, so it knows only our
// containers. A Runtime that only has the exported fields can be the runtime of Monitor.Exec.
type Runtime struct {
	// Path is the program, and StateDir the directory of its state.
	Path, StateDir string
	// Systemd means that systemd manages the cgroups.
	Systemd bool
	// Tried is what its trial has shown.
	Tried
	// UserNamespaces is the reason why the runtime cannot run containers in user namespaces on this host; nil if it can.
	UserNamespaces error
	// sealed is nil if the program is executed by its own path.
	sealed *sealed
	cli    *runc.Runc
}

// globals returns the options that precede the command.
func (r Runtime) globals() []string {
	args := []string{"--root", r.StateDir}
	if r.Systemd {
		args = append(args, "--systemd-cgroup")
	}
	return args
}

// Run makes a call that go-runc does not support. The runtime logs to a file (see LastMessage) rather than to stderr,
// because the container's init inherits the runtime's stdio. This is the two ends of a pipe of its own: it must not be
// the node's /dev/null, because crun makes the container's root the owner of that file.
func (r Runtime) Run(ctx context.Context, log string, args ...string) error {
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

// LastMessage returns a runtime's last message in a log file, or "" if there is none.
func LastMessage(log string) string {
	raw, _ := os.ReadFile(log)
	return runtimeMessage(string(raw))
}

// Close releases the mount of the program.
func (r Runtime) Close() { r.sealed.close() }

// creator returns the path by which the program is executed to create containers.
func (r Runtime) creator() string {
	if r.sealed == nil {
		return r.Path
	}
	return r.sealed.path()
}

// Start runs the program of a created container, and its poststart hooks if it has any.
func (r Runtime) Start(ctx context.Context, id string, hooks bool) error {
	if r.Releases && !hooks && r.waitsForRelease(id) {
		return r.release(id)
	}
	if err := r.cli.Start(ctx, id); err != nil {
		return fmt.Errorf("%s start: %w", filepath.Base(r.Path), err)
	}
	return nil
}

// fifo returns the path of the FIFO from which crun's init reads a byte before it executes the container's program.
// Apart from hooks, "crun start" only sends this byte and removes the FIFO, and we save the execution of a program.
func (r Runtime) fifo(id string) string { return filepath.Join(r.StateDir, id, "exec.fifo") }

// waitsForRelease reports whether a created container is one of crun, which waits for release. runc's FIFO works the
// other way round.
func (r Runtime) waitsForRelease(id string) bool {
	name, _, _ := parseVersion(r.Version)
	st, err := os.Lstat(r.fifo(id))
	return name == "crun" && err == nil && st.Mode().Type() == os.ModeNamedPipe
}

// release runs the program of a container that crun has created. The FIFO goes last: as long as it exists, crun and
// recovery take the container for one that was not started, and recovery starts it afresh.
func (r Runtime) release(id string) error {
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

// Delete kills a container's processes and removes its state in the runtime. It succeeds for an unknown container.
func (r Runtime) Delete(ctx context.Context, id string) error {
	if !r.knows(id) {
		return nil
	}
	if err := r.cli.Delete(ctx, id, &runc.DeleteOpts{Force: true}); err != nil && r.knows(id) {
		return fmt.Errorf("%s delete: %w", filepath.Base(r.Path), err)
	}
	return nil
}

// Forget removes a container's state without the runtime.
func (r Runtime) Forget(id string) error { return os.RemoveAll(filepath.Join(r.StateDir, id)) }

// knows reports whether the runtime's state has a directory for a container. Both crun and runc create one.
func (r Runtime) knows(id string) bool { return ledger.Exists(filepath.Join(r.StateDir, id)) }

// Started reports whether the container's program was started.
func (r Runtime) Started(ctx context.Context, id string) bool {
	c, err := r.cli.State(ctx, id)
	return err == nil && c.Status == "running"
}

// Update changes the limits of a running container. Errors are errdefs.ErrFailedPrecondition.
func (r Runtime) Update(ctx context.Context, id string, res *specs.LinuxResources) error {
	if err := r.cli.Update(ctx, id, res); err != nil {
		return fmt.Errorf("%s update: %w: %w", filepath.Base(r.Path), err, errdefs.ErrFailedPrecondition)
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
