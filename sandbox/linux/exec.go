package linux

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/sandbox"
	"github.com/tripod-run/tripod/sandbox/linux/spec"
)

const (
	// execDrain is how long output is read after the program has ended, when a child of it holds its stdio.
	execDrain = time.Second
	// execKill is how long a killed program, and then the OCI runtime, may take to end.
	execKill = 5 * time.Second
)

// Exec implements sandbox.Execer. The OCI runtime is the parent of the program and passes its exit code on; there is no
// monitor, since nobody needs to find the program again.
func (b *Backend) Exec(ctx context.Context, p *sandbox.Pod, c *sandbox.Container, req sandbox.ExecRequest) (int32, error) {
	h, _, l, err := b.runningContainer(p, c)
	if err != nil {
		return 0, err
	}
	config, err := readConfig(h.bundle)
	if err != nil {
		return 0, err
	}
	process, err := spec.Process(spec.ExecInput{Spec: config, Cmd: req.Cmd, TTY: req.TTY})
	if err != nil {
		return 0, err
	}
	dir, err := os.MkdirTemp(b.cfg.execDir(), "")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(dir)
	x := execution{
		pidFile: filepath.Join(dir, "pid"), log: filepath.Join(dir, "log"),
		cgroup: h.id, container: l,
	}
	file := filepath.Join(dir, "process.json")
	if err := writeJSON(file, process); err != nil {
		return 0, err
	}
	// The context is not the command's: it is the program that must be killed, not the runtime that waits for it.
	x.cmd = b.runtime.command(context.WithoutCancel(ctx), x.log, "exec", "--process", file, "--pid-file", x.pidFile, h.id)
	if req.TTY {
		err = x.terminal(req)
	} else {
		err = x.pipes(req)
	}
	if err != nil {
		x.closeAll()
		return 0, err
	}
	return x.run(ctx)
}

// execution is one program run by exec.
type execution struct {
	cmd          *exec.Cmd
	pidFile, log string
	cgroup       string
	container    *life

	theirs  []io.Closer    // the program's ends, closed once it has them
	ours    []io.Closer    // our ends, closed when all is over
	output  sync.WaitGroup // the copies of the program's output
	afterUp []func()       // what is started once the program runs
}

// pipes connects plain stdio. A descriptor is passed rather than a copying goroutine of os/exec, whose Wait would wait
// for every child that holds the pipe.
func (x *execution) pipes(req sandbox.ExecRequest) error {
	if req.Stdin != nil {
		r, w, err := os.Pipe()
		if err != nil {
			return err
		}
		x.cmd.Stdin = r
		x.theirs, x.ours = append(x.theirs, r), append(x.ours, w)
		x.afterUp = append(x.afterUp, func() {
			_, _ = io.Copy(w, req.Stdin)
			_ = w.Close() // half-close: the program sees the end of its input
		})
	}
	for _, out := range []struct {
		to   io.Writer
		file *io.Writer
	}{{req.Stdout, &x.cmd.Stdout}, {req.Stderr, &x.cmd.Stderr}} {
		if out.to == nil {
			continue // os/exec takes /dev/null
		}
		r, w, err := os.Pipe()
		if err != nil {
			return err
		}
		*out.file = w
		x.theirs, x.ours = append(x.theirs, w), append(x.ours, r)
		x.output.Add(1)
		x.afterUp = append(x.afterUp, func() {
			defer x.output.Done()
			_, _ = io.Copy(out.to, r)
			_, _ = io.Copy(io.Discard, r) // a client that is gone must not stop the program
		})
	}
	return nil
}

// terminal connects a pseudo-terminal of ours as the runtime's own terminal: it makes the container's, copies between
// the two and follows its size.
func (x *execution) terminal(req sandbox.ExecRequest) error {
	ours, theirs, err := openTerminal()
	if err != nil {
		return err
	}
	x.cmd.Stdin, x.cmd.Stdout, x.cmd.Stderr = theirs, theirs, theirs
	x.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	x.theirs, x.ours = append(x.theirs, theirs), append(x.ours, ours)
	if req.Stdin != nil {
		x.afterUp = append(x.afterUp, func() { _, _ = io.Copy(ours, req.Stdin) })
	}
	stop := make(chan struct{})
	x.ours = append(x.ours, closerFunc(func() error { close(stop); return nil }))
	x.afterUp = append(x.afterUp, func() { followSize(ours, req.Resize, stop) })
	out := req.Stdout
	if out == nil {
		out = io.Discard
	}
	x.output.Add(1)
	x.afterUp = append(x.afterUp, func() {
		defer x.output.Done()
		_, _ = io.Copy(out, ours) // ends with EIO when the last one has closed the terminal
	})
	return nil
}

// run starts the program, waits for its end and for its output, and gives its exit code.
func (x *execution) run(ctx context.Context) (int32, error) {
	defer x.closeAll()
	if err := ctx.Err(); err != nil {
		return 0, fmt.Errorf("exec: %w", err)
	}
	err := x.cmd.Start()
	for _, c := range x.theirs {
		_ = c.Close()
	}
	if err != nil {
		return 0, fmt.Errorf("exec: start the OCI runtime: %w", err)
	}
	for _, f := range x.afterUp {
		go f()
	}
	ended := make(chan struct{})
	go func() {
		err = x.cmd.Wait()
		close(ended)
	}()
	select {
	case <-ended:
	case <-ctx.Done():
		x.kill(ended)
		return 0, fmt.Errorf("exec: the program was killed: %w", context.Cause(ctx))
	}
	x.drain(ctx)
	return x.result(err)
}

// drain waits until the output is read, but not for ever when somebody holds it open.
func (x *execution) drain(ctx context.Context) {
	done := make(chan struct{})
	go func() { x.output.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(execDrain):
	case <-ctx.Done():
	}
}

// result tells a program's exit code from a runtime's failure: only a program that came to be has its PID in the file.
func (x *execution) result(err error) (int32, error) {
	if err == nil {
		return 0, nil
	}
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		return 0, fmt.Errorf("exec: %w", err)
	}
	if message := said(x.log); message != "" && !exists(x.pidFile) {
		if !x.container.init.alive() {
			return 0, fmt.Errorf("exec: the container has ended: %s: %w", message, errdefs.ErrFailedPrecondition)
		}
		return 0, fmt.Errorf("failed to exec: %s: %w", message, errdefs.ErrInvalidArgument)
	}
	if status, ok := exit.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		return 128 + int32(status.Signal()), nil
	}
	return int32(exit.ExitCode()), nil
}

// kill ends the program and its process group, upon which the runtime ends; if not, the runtime too.
func (x *execution) kill(ended <-chan struct{}) {
	x.killProgram()
	select {
	case <-ended:
		return
	case <-time.After(execKill):
	}
	_ = x.cmd.Process.Kill()
	<-ended
	x.killProgram() // it may have come to be in the meantime
}

func (x *execution) killProgram() {
	pid, err := readPid(x.pidFile)
	if err != nil {
		// The program is not there yet: without its runtime it will not be.
		_ = x.cmd.Process.Kill()
		return
	}
	p, err := openProcess(pid)
	if err != nil {
		return
	}
	defer p.close()
	if group, err := unix.Getpgid(pid); err == nil && group == pid && p.alive() {
		_ = unix.Kill(-pid, unix.SIGKILL)
	}
	_ = p.signal(unix.SIGKILL)
}

func (x *execution) closeAll() {
	for _, c := range append(x.ours, x.theirs...) {
		_ = c.Close()
	}
}

type closerFunc func() error

func (f closerFunc) Close() error { return f() }
