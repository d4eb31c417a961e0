package wasm

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

// compiler runs `tripod-wasm compile` in an unprivileged process with limits, because components are untrusted.
type compiler struct {
	cfg Config
	// queue bounds the number of concurrent compilations, because each can use hundreds of megabytes.
	queue *queue

	mu          sync.Mutex
	fingerprint string // empty until the program has answered
}

func newCompiler(cfg Config) *compiler {
	return &compiler{cfg: cfg, queue: newQueue(cmp.Or(cfg.CompileParallel, defaultParallel()))}
}

// engine returns the fingerprint of the program's engine. It asks the program until it gets an answer.
func (c *compiler) engine() (string, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fingerprint != "" {
		return c.fingerprint, nil
	}
	var err error
	c.fingerprint, err = askFingerprint(c.cfg)
	return c.fingerprint, err
}

// fingerprintTimeout bounds how long `tripod-wasm fingerprint` can run.
const fingerprintTimeout = 30 * time.Second

func askFingerprint(cfg Config) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), fingerprintTimeout)
	defer cancel()
	cmd, err := cfg.unprivileged(ctx, nil, "fingerprint")
	if err != nil {
		return "", err
	}
	defer closeAll(cmd.ExtraFiles)
	out, err := cmd.Output()
	line := strings.TrimSpace(string(out))
	if err != nil || line == "" {
		return "", fmt.Errorf("%s fingerprint: %w: %w", cfg.Program, withStderr(err), errdefs.ErrUnavailable)
	}
	return line, nil
}

// unprivileged returns a command that runs tripod-wasm as the unprivileged user, in new namespaces, without the
// daemon's environment. Without root privileges, the command runs as the user of this process, in the same namespaces. It
// inherits the given files from file descriptor 3 on. The command runs the program through a file descriptor, because the
// user may lack access to the program's directory. The caller closes the command's ExtraFiles, which include the given
// files; if unprivileged fails, it has closed them.
func (c Config) unprivileged(ctx context.Context, inherited []*os.File, args ...string) (*exec.Cmd, error) {
	fd, err := unix.Open(c.Program, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		closeAll(inherited)
		return nil, fmt.Errorf("%s: %w: %w", c.Program, err, errdefs.ErrUnavailable)
	}
	const firstFD = 3 // of ExtraFiles
	cmd := exec.CommandContext(ctx, fmt.Sprintf("/proc/self/fd/%d", firstFD+len(inherited)), args...)
	cmd.Args[0] = ProgramName
	cmd.ExtraFiles = append(inherited, os.NewFile(uintptr(fd), c.Program))
	cmd.Env, cmd.Dir = programEnv, "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if os.Geteuid() == 0 {
		cmd.SysProcAttr.Credential, cmd.SysProcAttr.Cloneflags = c.credential(), workerapi.Namespaces&^unix.CLONE_NEWNS
	}
	return cmd, nil
}

// withStderr adds the last line of a program's standard error to its exit error.
func withStderr(err error) error {
	var exit *exec.ExitError
	if errors.As(err, &exit) && len(exit.Stderr) > 0 {
		return fmt.Errorf("%w: %s", err, lastLine(exit.Stderr))
	}
	if err == nil {
		return errors.New("it printed nothing")
	}
	return err
}

// programEnv is the environment of tripod-wasm. It contains nothing from the daemon's environment. Only tests add to it.
var programEnv = []string{"RUST_BACKTRACE=0", "PATH=/usr/bin:/bin"}

// idlePatience is how many times longer than CompileTimeout a compilation can take while no pod waits for it, because it
// gets only the processor time that others leave. The compiler itself limits its processor time to CompileTimeout.
const idlePatience = 10

// compile compiles a component into a memory file, so that the compiler needs no access to files. The ticket must have
// been admitted. compile returns errdefs.ErrInvalidArgument with the compiler's message if the component is invalid.
func (c *compiler) compile(ctx context.Context, component *os.File, quick bool, t *ticket) (_ *os.File, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	limit := time.AfterFunc(idlePatience*c.cfg.CompileTimeout, func() {
		cancel(fmt.Errorf("compilation takes longer than %s (wasm.compile_timeout): %w", c.cfg.CompileTimeout, errdefs.ErrInvalidArgument))
	})
	defer limit.Stop()
	t.whenUrgent(func() { limit.Reset(c.cfg.CompileTimeout) })
	code, err := memoryFile("code")
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			code.Close()
		}
	}()
	stderr, err := c.run(ctx, component, code, quick, t)
	if err != nil {
		return nil, compileError(ctx, err, stderr)
	}
	return code, seal(code)
}

// run runs the compiler and returns the end of its standard error. The kernel kills the compiler when the thread that
// started it ends (Pdeathsig), so the goroutine that starts the compiler stays locked to its thread.
func (c *compiler) run(ctx context.Context, component, code *os.File, quick bool, t *ticket) ([]byte, error) {
	config, err := json.Marshal(workerapi.CompileConfig{
		MaxMemory: c.cfg.CompileMemory, MaxCPU: c.cfg.CompileTimeout, Quick: quick,
	})
	if err != nil {
		return nil, err
	}
	stderr := &tail{limit: 4 << 10}
	cmd, err := c.cfg.unprivileged(ctx, nil, "compile", string(config))
	if err != nil {
		return nil, err
	}
	defer closeAll(cmd.ExtraFiles)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = component, code, stderr
	cmd.WaitDelay = time.Second
	cmd.SysProcAttr.Pdeathsig = unix.SIGKILL
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and not unlocked, so the thread ends with its nice value
		err := t.start(cmd)
		if err == nil {
			err = cmd.Wait()
			t.ended()
		}
		done <- err
	}()
	err = <-done
	return stderr.bytes(), err
}

// refusal is the compiler's own judgement of a component, which another attempt would repeat.
type refusal struct{ error }

func (r refusal) Unwrap() error { return r.error }

func refuse(format string, args ...any) error {
	return refusal{fmt.Errorf(format+": %w", append(args, errdefs.ErrInvalidArgument)...)}
}

// compileError returns the error for a failed compilation. It distinguishes invalid components, exceeded limits, and
// failures of the node.
func compileError(ctx context.Context, err error, stderr []byte) error {
	line := lastLine(stderr)
	var exit *exec.ExitError
	if ctx.Err() != nil || !errors.As(err, &exit) {
		return fmt.Errorf("compile the component: %w", errors.Join(context.Cause(ctx), err))
	}
	status, _ := exit.Sys().(syscall.WaitStatus)
	switch {
	case exit.ExitCode() == workerapi.CompileInvalid:
		return refuse("the image's component cannot run on this node: %s", line)
	case exit.ExitCode() == workerapi.CompileLimit:
		return refuse("the component cannot be compiled within the limits of this node: %s", line)
	case status.Signaled() && (status.Signal() == unix.SIGXCPU || status.Signal() == unix.SIGKILL):
		return fmt.Errorf("the component cannot be compiled within the limits of this node (%s killed the compiler): %w",
			status.Signal(), errdefs.ErrInvalidArgument)
	default:
		return fmt.Errorf("the compiler failed (%w): %s", err, line)
	}
}

func lastLine(text []byte) string {
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	return strings.TrimSpace(lines[len(lines)-1])
}

// tail is a writer that keeps only the last bytes written, up to its limit.
type tail struct {
	mu    sync.Mutex
	limit int
	buf   bytes.Buffer
}

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.buf.Write(p)
	if over := t.buf.Len() - t.limit; over > 0 {
		t.buf.Next(over)
	}
	return len(p), nil
}

func (t *tail) bytes() []byte {
	t.mu.Lock()
	defer t.mu.Unlock()
	return bytes.Clone(t.buf.Bytes())
}

// memoryFile creates a file in memory (memfd_create(2)).
func memoryFile(name string) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("memfd: %w", err)
	}
	return os.NewFile(uintptr(fd), name), nil
}

// seal makes the content of a memory file immutable, even for a child that has kept a file descriptor, and rewinds the
// file.
func seal(f *os.File) error {
	const all = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_WRITE | unix.F_SEAL_SEAL
	if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, all); err != nil {
		return fmt.Errorf("seal the code: %w", err)
	}
	_, err := f.Seek(0, io.SeekStart)
	return err
}
