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
	// maxPluginOutput limits a plugin's stdout, in bytes; results are a few KiB.
	maxPluginOutput = 1 << 20
	// maxPluginStderr limits how much of the end of a plugin's stderr is kept for the error, in bytes.
	maxPluginStderr = 4 << 10
	// outputGrace limits the wait for output from children that outlive their plugin.
	outputGrace = time.Second
	// busyPatience limits how long to retry a plugin whose file is still being written (ETXTBSY); busyPause is the
	// pause between attempts.
	busyPatience, busyPause = 2 * time.Second, 20 * time.Millisecond
)

// PluginError reports that a CNI plugin failed.
type PluginError struct {
	Plugin, Command string
	// Code, Msg and Details are the error that the plugin printed (CNI SPEC "Error"), if any.
	Code         uint
	Msg, Details string
	// Stderr is the end of the plugin's stderr.
	Stderr string
	// Cause says how the process ended, or why its output was refused.
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

// Unwrap returns the cause and an error class: ErrFailedPrecondition if the configuration must change, otherwise
// ErrUnavailable, which means that a retry may succeed. If the context ended, it returns only the cause.
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

// pluginExec runs plugins for libcni: in this process if plan allows it (inprocess.go), otherwise as executables. Each
// executable has its own process group, which is killed when ctx ends or the plugin times out. Executables die with the
// daemon, because a plugin that survived could take a lease for the pod after the next daemon has released all of the
// pod's leases.
type pluginExec struct {
	version.PluginDecoder
	timeout time.Duration
	log     *slog.Logger
	// plan returns a call to run instead of the executable, or an error that says why the executable must run. If plan
	// is nil, every plugin runs as an executable.
	plan func(path string, stdin []byte, environ []string) (inProcessCall, error)
	// containers locks each container while a plugin works for that container, even after the caller has given up.
	containers keyLocks
}

var _ invoke.Exec = (*pluginExec)(nil)

// FindInPath finds the executable of a plugin in dirs.
func (e *pluginExec) FindInPath(plugin string, dirs []string) (string, error) {
	path, err := invoke.FindInPath(plugin, dirs)
	if err != nil {
		return "", fmt.Errorf("CNI plugin %q is not in %s (install it, on Debian: apt-get install containernetworking-plugins): %w",
			plugin, strings.Join(dirs, ", "), errdefs.ErrFailedPrecondition)
	}
	return path, nil
}

// ExecPlugin runs a plugin and returns its output. For ADD, the output is always a JSON object.
func (e *pluginExec) ExecPlugin(ctx context.Context, path string, stdin []byte, environ []string) ([]byte, error) {
	timedOut := fmt.Errorf("killed after the plugin timeout of %s: %w", e.timeout, context.DeadlineExceeded)
	ctx, cancel := context.WithTimeoutCause(ctx, e.timeout, timedOut)
	defer cancel()
	if rehearsal, ok := ctx.Value(rehearsalKey{}).(*rehearsal); ok {
		return nil, rehearsal.note(e.plan(path, stdin, environ))
	}
	free, err := e.lockContainer(ctx, cniVariable(environ, "CNI_CONTAINERID"))
	if err != nil {
		return nil, err
	}
	if e.plan != nil {
		call, why := e.plan(path, stdin, environ)
		if why == nil {
			return e.runInProcess(ctx, call, path, environ, free)
		}
		e.log.Debug("running CNI plugin as an executable", "plugin", path, "because", why)
	}
	defer free()
	return e.execute(ctx, path, stdin, environ)
}

// lockContainer waits until no other plugin works for the container, and locks it. VERSION, STATUS and GC have no
// container, and so no lock.
func (e *pluginExec) lockContainer(ctx context.Context, container string) (free func(), err error) {
	if container == "" {
		return func() {}, nil
	}
	return e.containers.lock(ctx, container)
}

// execute runs a plugin as an executable, and retries while its file is being written.
func (e *pluginExec) execute(ctx context.Context, path string, stdin []byte, environ []string) ([]byte, error) {
	start := time.Now()
	run := pluginRun{path: path, command: cniVariable(environ, "CNI_COMMAND"), stdin: stdin, environ: environ}
	err := run.runOnce(ctx)
	for errors.Is(err, unix.ETXTBSY) && time.Since(start) < busyPatience {
		select {
		case <-time.After(busyPause):
			err = run.runOnce(ctx)
		case <-ctx.Done():
			err = context.Cause(ctx)
		}
	}
	e.log.Debug("CNI plugin ran", "plugin", path, "command", run.command, "took", time.Since(start), "err", err)
	return run.outcome(ctx, err)
}

// pluginRun is one execution of an executable.
type pluginRun struct {
	path, command string
	stdin         []byte
	environ       []string
	stdout        capped
	stderr        tail
}

// runOnce runs the plugin and waits until it exits. It returns nil if the plugin exited with status 0.
func (r *pluginRun) runOnce(ctx context.Context) error {
	// The kernel kills the plugin (Pdeathsig) when the thread that started it ends. So this goroutine keeps its thread
	// until the plugin has exited.
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
		return nil // the plugin succeeded, but a helper that it left behind keeps stdout open
	}
	return err
}

// outcome returns the plugin's output, or a *PluginError. It takes the error that runOnce returned.
func (r *pluginRun) outcome(ctx context.Context, err error) ([]byte, error) {
	failure := &PluginError{Plugin: r.path, Command: r.command, Stderr: strings.TrimSpace(string(r.stderr.data)), Cause: err}
	output := r.stdout.data.Bytes()
	switch {
	case r.stdout.exceeded:
		failure.Cause = fmt.Errorf("printed more than %d bytes, beginning with %.200q", maxPluginOutput, output)
	case err != nil && ctx.Err() != nil:
		failure.Cause = fmt.Errorf("%w (%w)", context.Cause(ctx), err)
	case err != nil:
		failure.readOutput(output)
	case r.command == "ADD":
		if err := checkResult(output); err != nil {
			failure.Cause = fmt.Errorf("exited with status 0 but printed an invalid result (%w): %.200q", err, output)
			break
		}
		return output, nil
	default:
		return output, nil
	}
	return nil, failure
}

// readOutput fills in the error from the stdout of a failed plugin.
func (e *PluginError) readOutput(output []byte) {
	var printed types.Error
	if err := json.Unmarshal(output, &printed); err == nil && printed.Msg != "" {
		e.Code, e.Msg, e.Details = printed.Code, printed.Msg, printed.Details
		return
	}
	if len(bytes.TrimSpace(output)) > 0 {
		e.Cause = fmt.Errorf("%w, and printed %.200q", e.Cause, output)
	}
}

// checkResult refuses output that is not a result of any CNI version. Its errors are more detailed than libcni's.
func checkResult(output []byte) error {
	var object map[string]json.RawMessage
	if err := json.Unmarshal(output, &object); err != nil {
		return err
	}
	if object == nil {
		return errors.New("not an object")
	}
	var result types100.Result // has the fields of every version since 0.3.0
	if err := json.Unmarshal(output, &result); err != nil {
		return err
	}
	// Refuse null here, because later code, including libcni's conversions, does not check for it.
	if slices.Contains(result.Interfaces, nil) || slices.Contains(result.IPs, nil) || slices.Contains(result.Routes, nil) {
		return errors.New("an interface, address or route is null")
	}
	return nil
}

func cniVariable(environ []string, name string) string {
	for _, entry := range environ {
		if value, ok := strings.CutPrefix(entry, name+"="); ok {
			return value
		}
	}
	return ""
}

// capped keeps the first maxPluginOutput bytes. After that it returns an error, so that os/exec closes the pipe.
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
