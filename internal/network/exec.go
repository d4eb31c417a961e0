package network

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/version"
	"golang.org/x/sys/unix"
)

const (
	// maxPluginOutput bounds what is taken of a plugin's stdout; results are a few KiB.
	maxPluginOutput = 1 << 20
	// maxPluginStderr is how much of the end of stderr is kept for the error or the log.
	maxPluginStderr = 4 << 10
	// outputGrace is how long output is awaited of children that outlive their plugin.
	outputGrace = time.Second
	// busyPatience is how long a plugin is tried again whose file is being written (ETXTBSY).
	busyPatience, busyPause = 2 * time.Second, 20 * time.Millisecond
)

// PluginError is a CNI plugin that did not do what it was asked.
type PluginError struct {
	Plugin, Command string
	// Code, Msg and Details are the plugin's own words (CNI SPEC "Error"), when it printed any.
	Code         uint
	Msg, Details string
	// Stderr is the end of what it wrote there.
	Stderr string
	// Cause is how the process ended, or why it was not heard.
	Cause error
}

func (e *PluginError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s: ", e.Plugin, e.Command)
	if e.Msg != "" {
		b.WriteString(e.Msg)
		if e.Details != "" {
			fmt.Fprintf(&b, "; %s", e.Details)
		}
		fmt.Fprintf(&b, " (CNI error code %d)", e.Code)
	} else {
		b.WriteString(e.Cause.Error())
	}
	if e.Stderr != "" {
		fmt.Fprintf(&b, "; stderr: %q", e.Stderr)
	}
	return b.String()
}

// Unwrap gives the class beside the cause: what the configuration must be changed for is a failed precondition,
// anything else may go better at the next attempt.
func (e *PluginError) Unwrap() []error {
	switch e.Code {
	case types.ErrIncompatibleCNIVersion, types.ErrUnsupportedField, types.ErrInvalidNetworkConfig:
		return []error{e.Cause, errdefs.ErrFailedPrecondition}
	}
	if errors.Is(e.Cause, context.Canceled) || errors.Is(e.Cause, context.DeadlineExceeded) {
		return []error{e.Cause}
	}
	return []error{e.Cause, errdefs.ErrUnavailable}
}

// pluginExec runs plugins for libcni: in this process, where plan says so (inprocess.go), else as executables. Each
// executable is the leader of a process group of its own that is killed as a whole when the context ends or the
// plugin's time is over, and dies with the daemon: a plugin that worked on behind a dead daemon could take a lease
// after the next daemon has given everything back.
type pluginExec struct {
	version.PluginDecoder
	timeout time.Duration
	log     *slog.Logger
	// plan reads an execution for what is done in this process; nil: nothing is.
	plan func(path string, stdin []byte, environ []string) (inProcessCall, error)
	// attachments are busy for as long as a plugin works on them, be it behind the back of a caller that has given up.
	containers keyLocks
}

var _ invoke.Exec = (*pluginExec)(nil)

// FindInPath finds the executable of a plugin type.
func (e *pluginExec) FindInPath(plugin string, dirs []string) (string, error) {
	path, err := invoke.FindInPath(plugin, dirs)
	if err != nil {
		return "", fmt.Errorf("CNI plugin %q is not in %s (install it, on Debian: apt-get install containernetworking-plugins): %w",
			plugin, strings.Join(dirs, ", "), errdefs.ErrFailedPrecondition)
	}
	return path, nil
}

// ExecPlugin runs a plugin and returns its output: for ADD that is a JSON object, or there is an error.
func (e *pluginExec) ExecPlugin(ctx context.Context, path string, stdin []byte, environ []string) ([]byte, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, e.timeout, pluginTimeout(e.timeout))
	defer cancel()
	free, err := e.lockContainer(ctx, cniVariable(environ, "CNI_CONTAINERID"))
	if err != nil {
		return nil, err
	}
	if e.plan != nil {
		call, why := e.plan(path, stdin, environ)
		if why == nil {
			return e.runInProcess(ctx, call, path, environ, free)
		}
		e.log.Debug("CNI plugin is run as an executable", "plugin", path, "because", why)
	}
	defer free()
	return e.execute(ctx, path, stdin, environ)
}

// occupy waits until no plugin works for the container any more. VERSION, STATUS and GC are for no container.
func (e *pluginExec) lockContainer(ctx context.Context, container string) (free func(), err error) {
	if container == "" {
		return func() {}, nil
	}
	return e.containers.lock(ctx, container)
}

// execute runs the executable.
func (e *pluginExec) execute(ctx context.Context, path string, stdin []byte, environ []string) ([]byte, error) {
	start := time.Now()
	run := pluginRun{path: path, command: cniVariable(environ, "CNI_COMMAND"), stdin: stdin, environ: environ}
	err := run.start(ctx)
	for errors.Is(err, unix.ETXTBSY) && time.Since(start) < busyPatience {
		select {
		case <-time.After(busyPause):
			err = run.start(ctx)
		case <-ctx.Done():
			err = context.Cause(ctx)
		}
	}
	e.log.Debug("CNI plugin ran", "plugin", path, "command", run.command, "took", time.Since(start), "err", err)
	return run.outcome(ctx, err)
}

// pluginTimeout is the cause of a context whose plugin took too long.
type pluginTimeout time.Duration

func (t pluginTimeout) Error() string {
	return fmt.Sprintf("killed, as it was not done within the plugin timeout of %s", time.Duration(t))
}
func (pluginTimeout) Unwrap() error { return context.DeadlineExceeded }

// pluginRun is one execution.
type pluginRun struct {
	path, command string
	stdin         []byte
	environ       []string
	stdout        capped
	stderr        tail
}

// start runs the plugin to its end; nil is exit status 0.
func (r *pluginRun) start(ctx context.Context) error {
	// The death signal is sent when the thread that forked ends, so that must not be before the plugin's end.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	r.stdout, r.stderr = capped{}, tail{}
	cmd := exec.CommandContext(ctx, r.path)
	cmd.Env = r.environ
	cmd.Stdin = bytes.NewReader(r.stdin)
	cmd.Stdout, cmd.Stderr = &r.stdout, &r.stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return unix.Kill(-cmd.Process.Pid, unix.SIGKILL) }
	cmd.WaitDelay = outputGrace
	err := cmd.Run()
	if errors.Is(err, exec.ErrWaitDelay) {
		return nil // it succeeded; a helper that it left behind keeps its stdout open
	}
	return err
}

// outcome turns the end of the process into libcni's terms.
func (r *pluginRun) outcome(ctx context.Context, err error) ([]byte, error) {
	failure := &PluginError{Plugin: r.path, Command: r.command, Stderr: strings.TrimSpace(string(r.stderr.data)), Cause: err}
	output := r.stdout.data.Bytes()
	switch {
	case r.stdout.exceeded:
		failure.Cause = fmt.Errorf("printed more than %d bytes, beginning with %s", maxPluginOutput, excerpt(output))
	case err != nil && ctx.Err() != nil:
		failure.Cause = fmt.Errorf("%w (%w)", context.Cause(ctx), err)
	case err != nil:
		failure.readOutput(output)
	case r.command == "ADD":
		if err := checkResult(output); err != nil {
			failure.Cause = fmt.Errorf("exited with status 0 but printed no result that can be read (%w): %s", err, excerpt(output))
			break
		}
		return output, nil
	default:
		return output, nil
	}
	return nil, failure
}

// hear takes what a failed plugin printed on stdout.
func (e *PluginError) readOutput(output []byte) {
	var printed types.Error
	if err := json.Unmarshal(output, &printed); err == nil && printed.Msg != "" {
		e.Code, e.Msg, e.Details = printed.Code, printed.Msg, printed.Details
		return
	}
	if len(bytes.TrimSpace(output)) > 0 {
		e.Cause = fmt.Errorf("%w, and printed %s", e.Cause, excerpt(output))
	}
}

// readable looks for what is no result of any version, before libcni says the same in fewer words.
func checkResult(output []byte) error {
	var object map[string]json.RawMessage
	if err := json.Unmarshal(output, &object); err != nil {
		return err
	}
	if object == nil {
		return errors.New("not an object")
	}
	var result types100.Result // whose fields are those of every version since 0.3.0
	if err := json.Unmarshal(output, &result); err != nil {
		return err
	}
	// Nobody after us, libcni's conversions included, reckons with these.
	if slices.Contains(result.Interfaces, nil) || slices.Contains(result.IPs, nil) || slices.Contains(result.Routes, nil) {
		return errors.New("an interface, address or route is null")
	}
	return nil
}

func excerpt(data []byte) string {
	const most = 200
	if len(data) > most {
		return fmt.Sprintf("%q…", data[:most])
	}
	return fmt.Sprintf("%q", data)
}

func cniVariable(environ []string, name string) string {
	for _, entry := range environ {
		if value, ok := strings.CutPrefix(entry, name+"="); ok {
			return value
		}
	}
	return ""
}

// capped keeps maxPluginOutput bytes and refuses the rest, upon which os/exec closes the pipe.
type capped struct {
	data     bytes.Buffer
	exceeded bool
}

func (c *capped) Write(p []byte) (int, error) {
	if room := maxPluginOutput - c.data.Len(); len(p) > room {
		c.data.Write(p[:room])
		c.exceeded = true
		return room, errors.New("too much output")
	}
	return c.data.Write(p)
}

// tail keeps the last maxPluginStderr bytes.
type tail struct{ data []byte }

func (t *tail) Write(p []byte) (int, error) {
	t.data = append(t.data, p...)
	if over := len(t.data) - maxPluginStderr; over > 0 {
		t.data = append(t.data[:0], t.data[over:]...)
	}
	return len(p), nil
}
