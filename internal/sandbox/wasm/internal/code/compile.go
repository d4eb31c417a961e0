package code

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/launch"
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

// The defaults of Config.
const (
	defaultTimeout = 2 * time.Minute
	defaultMemory  = 2 << 30
)

func newCompiler(cfg Config) *compiler {
	cfg.Timeout, cfg.Memory = cmp.Or(cfg.Timeout, defaultTimeout), cmp.Or(cfg.Memory, defaultMemory)
	return &compiler{cfg: cfg, queue: newQueue(cmp.Or(cfg.Parallel, defaultParallel()))}
}

// engine returns the fingerprint of the program's engine. It asks the program until it gets an answer.
func (c *compiler) engine() (string, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fingerprint != "" {
		return c.fingerprint, nil
	}
	var err error
	c.fingerprint, err = c.cfg.Program.Engine()
	return c.fingerprint, err
}

// Compile compiles a component as a node does, without a cache, into a sealed memory file. It returns
// errdefs.ErrInvalidArgument with the compiler's message if the component is invalid.
func Compile(ctx context.Context, cfg Config, wasm []byte, quick bool) (*os.File, error) {
	component, err := launch.MemoryFile("component")
	if err != nil {
		return nil, err
	}
	defer component.Close()
	if _, err := component.Write(wasm); err != nil {
		return nil, err
	}
	if err := launch.Seal(component); err != nil {
		return nil, err
	}
	compiler := newCompiler(cfg)
	t := compiler.queue.enter(priorityPod)
	defer t.leave()
	return compiler.compile(ctx, component, quick, t)
}

// idlePatience is how many times longer than CompileTimeout a compilation can take while no pod waits for it, because it
// gets only the processor time that others leave. The compiler itself limits its processor time to CompileTimeout.
const idlePatience = 10

// compile compiles a component into a memory file, so that the compiler needs no access to files. The ticket must have
// been admitted. compile returns errdefs.ErrInvalidArgument with the compiler's message if the component is invalid.
func (c *compiler) compile(ctx context.Context, component *os.File, quick bool, t *ticket) (_ *os.File, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	limit := time.AfterFunc(idlePatience*c.cfg.Timeout, func() {
		cancel(fmt.Errorf("compilation takes longer than %s (wasm.compile_timeout): %w", c.cfg.Timeout, errdefs.ErrInvalidArgument))
	})
	defer limit.Stop()
	t.whenUrgent(func() { limit.Reset(c.cfg.Timeout) })
	code, err := launch.MemoryFile("code")
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
	return code, launch.Seal(code)
}

// run runs the compiler and returns the end of its standard error. The kernel kills the compiler when the thread that
// started it ends (Pdeathsig), so the goroutine that starts the compiler stays locked to its thread.
func (c *compiler) run(ctx context.Context, component, code *os.File, quick bool, t *ticket) ([]byte, error) {
	config, err := json.Marshal(workerapi.CompileConfig{
		MaxMemory: c.cfg.Memory, MaxCPU: c.cfg.Timeout, Quick: quick,
	})
	if err != nil {
		return nil, err
	}
	stderr := &launch.Tail{Limit: 4 << 10}
	cmd, err := c.cfg.Program.Unprivileged(ctx, nil, "compile", string(config))
	if err != nil {
		return nil, err
	}
	defer launch.CloseAll(cmd.ExtraFiles)
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
	return stderr.Bytes(), err
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
	line := launch.LastLine(stderr)
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
