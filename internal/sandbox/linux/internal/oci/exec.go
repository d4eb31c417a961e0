package oci

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/tripod-run/tripod/internal/process"
	"github.com/tripod-run/tripod/internal/sandbox"
	"github.com/tripod-run/tripod/internal/sandbox/ledger"
)

const (
	// execDrain limits how long output is read after the program has exited, in case a child still holds its stdio.
	execDrain = time.Second
	// execKill limits how long a killed program, and then its monitor, can take to exit.
	execKill = 5 * time.Second
	// killPause is the interval between checks for the PID of a program that must be killed.
	killPause = 5 * time.Millisecond
	// startMax limits how long the start of a program delays those of others. startPoll is the interval between checks whether
	// it has started.
	startMax, startPoll = 10 * time.Second, 10 * time.Millisecond
)

// ExecInput is an order to run a program in a container.
type ExecInput struct {
	// ID is the container's, and Init its first process.
	ID   string
	Init *process.Process
	// Dir is the directory in which the program gets a directory of its own (see ReapExecs).
	Dir string
	// Process is the program.
	Process *specs.Process
	// Request has the streams of the program, whose command line is in Process.
	Request sandbox.ExecRequest
	// Begin waits until the program may be started. The function that it returns is called when the program has started,
	// or will not start.
	Begin func(context.Context) (started func(), err error)
}

// Exec runs a program in a container and returns its exit code. The program's parent is a conmon that only waits for it.
// The program's stdio is connected to our pipes, or to a terminal whose other end we receive. Without conmon, runc would
// wait for any child that holds the program's output, which would delay the exit code. And no process would reap the
// remains of a failed exec.
//
// If the context ends, the program is killed. Errors about the request are errdefs.ErrInvalidArgument, and
// errdefs.ErrFailedPrecondition if the container has ended.
func (m Monitor) Exec(ctx context.Context, rt Runtime, in ExecInput) (int32, error) {
	dir, err := makeExecDir(in.Dir)
	if err != nil {
		return 0, err
	}
	defer dir.remove()
	if err := ledger.WriteJSON(filepath.Join(dir.path, "process.json"), in.Process); err != nil {
		return 0, err
	}
	x := &execution{dir: dir.path, init: in.Init}
	defer x.close()
	var options []string
	if in.Request.TTY {
		options, err = x.terminal(in.Request)
	} else {
		err = x.pipes(in.Request)
	}
	if err != nil {
		return 0, err
	}
	if x.started, err = in.Begin(ctx); err != nil {
		return 0, err
	}
	return x.run(ctx, m, m.execCommand(in.ID, dir.path, rt, options))
}

// execution is one program run by exec.
type execution struct {
	dir  string
	init *process.Process // the container's
	// Started is called when the program has started, or will not start.
	started func()

	stdin, stdout, stderr *os.File       // the program's ends of the pipes (with a terminal, the runtime's); closed after the start
	onStart               []func()       // run as goroutines after the start
	output                sync.WaitGroup // goroutines that copy the program's output

	mu      sync.Mutex
	closers []io.Closer // our ends; the method close closes them
	closed  bool
}

func (x *execution) pidFile() string { return filepath.Join(x.dir, "pid") }

// closeAtEnd registers c, so that the method close closes it. If that method has already run, closeAtEnd closes c at
// once.
func (x *execution) closeAtEnd(c io.Closer) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.closed {
		_ = c.Close()
		return
	}
	x.closers = append(x.closers, c)
}

func (x *execution) close() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.closed = true
	for _, c := range x.closers {
		_ = c.Close()
	}
	x.closeProgramEnds()
}

func (x *execution) closeProgramEnds() {
	for _, f := range []*os.File{x.stdin, x.stdout, x.stderr} {
		if f != nil {
			_ = f.Close()
		}
	}
}

// pipes connects the program's stdio to pipes. If the request lacks a stream, the program gets an empty or drained pipe
// instead of the host's /dev/null. The program could change /dev/null, because crun makes the program's user the owner
// of that file.
func (x *execution) pipes(req sandbox.ExecRequest) error {
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	x.stdin = r
	x.closeAtEnd(w)
	x.onStart = append(x.onStart, func() {
		if req.Stdin != nil {
			_, _ = io.Copy(w, req.Stdin)
		}
		_ = w.Close() // the program sees the end of its input
	})
	for _, out := range []struct {
		to    io.Writer
		their **os.File
	}{{req.Stdout, &x.stdout}, {req.Stderr, &x.stderr}} {
		r, w, err := os.Pipe()
		if err != nil {
			return err
		}
		*out.their = w
		x.closeAtEnd(r)
		x.output.Add(1)
		x.onStart = append(x.onStart, func() {
			defer x.output.Done()
			if out.to != nil {
				_, _ = io.Copy(out.to, r)
			}
			_, _ = io.Copy(io.Discard, r) // discard what no client reads, so that the program does not block
		})
	}
	return nil
}

// terminal prepares to receive a terminal that the runtime creates in the container. It returns the options for the
// runtime.
func (x *execution) terminal(req sandbox.ExecRequest) ([]string, error) {
	console, err := listenConsole(x.dir)
	if err != nil {
		return nil, err
	}
	x.closeAtEnd(console)
	out := req.Stdout
	if out == nil {
		out = io.Discard
	}
	x.output.Add(1)
	x.onStart = append(x.onStart, func() {
		defer x.output.Done()
		terminal, err := console.receive()
		if err != nil {
			return // the program did not start; run reports the error
		}
		x.closeAtEnd(terminal)
		stop := make(chan struct{})
		defer close(stop)
		go FollowSize(req.Resize, stop, func(size sandbox.TermSize) { _ = setSize(terminal, size) })
		if req.Stdin != nil {
			go func() { _, _ = io.Copy(terminal, req.Stdin) }()
		}
		_, _ = io.Copy(out, terminal) // ends with EIO when the last process has closed the terminal
	})
	return []string{"--console-socket=" + console.path}, x.pipes(sandbox.ExecRequest{}) // these pipes are the runtime's, not the program's
}

// Run starts the program, waits for its exit and its output, and returns its exit code.
func (x *execution) run(ctx context.Context, m Monitor, cmd *exec.Cmd) (int32, error) {
	defer x.started()
	if err := ctx.Err(); err != nil {
		return 0, fmt.Errorf("exec: %w", err)
	}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = x.stdin, x.stdout, x.stderr
	if err := m.Spawner.start(cmd); err != nil {
		return 0, fmt.Errorf("exec: start conmon: %w", err)
	}
	x.closeProgramEnds()
	for _, f := range x.onStart {
		go f()
	}
	var err error
	ended := make(chan struct{})
	go func() {
		err = cmd.Wait()
		close(ended)
	}()
	go x.awaitStart(ended)
	select {
	case <-ended:
	case <-ctx.Done():
		x.kill(cmd, ended)
		return 0, fmt.Errorf("exec: the program was killed: %w", context.Cause(ctx))
	}
	code, err := x.result(err)
	if err == nil {
		x.drain(ctx)
	}
	return code, err
}

// awaitStart calls started once the program has started. A start that takes longer than startMax does not delay others.
func (x *execution) awaitStart(ended <-chan struct{}) {
	defer x.started()
	limit, look := time.After(startMax), time.NewTicker(startPoll)
	defer look.Stop()
	for !ledger.Exists(x.pidFile()) {
		select {
		case <-look.C:
		case <-ended:
			return
		case <-limit:
			return
		}
	}
}

// drain waits until all output is read. It waits at most execDrain, because another process may hold the output open.
func (x *execution) drain(ctx context.Context) {
	done := make(chan struct{})
	go func() { x.output.Wait(); close(done) }()
	select {
	case <-done:
	case <-time.After(execDrain):
	case <-ctx.Done():
	}
}

// result returns the program's exit code, or an error if the program was not started. The given error is the result of
// waiting for conmon, which exits with the program's code. The PID file exists only if the program was started.
func (x *execution) result(err error) (int32, error) {
	if !ledger.Exists(x.pidFile()) {
		message := LastMessage(filepath.Join(x.dir, "log"))
		switch {
		// When a container ends, the kernel kills the program, or the runtime that is starting it, before we see that
		// the container has ended.
		case message == "" && x.init.WaitFor(execKill), x.init.Ending():
			return 0, fmt.Errorf("exec: the container has ended: %w", errdefs.ErrFailedPrecondition)
		case message != "":
			return 0, fmt.Errorf("failed to exec: %s: %w", message, classifyMessage(message))
		}
		// The runtime was killed, probably by a process in the container: the runtime enters the container before it starts
		// the program.
		return 0, fmt.Errorf("exec: the OCI runtime ended before the program began: %w: %w", err, errdefs.ErrUnavailable)
	}
	var exit *exec.ExitError
	switch {
	case err == nil:
		return 0, nil
	case !errors.As(err, &exit):
		return 0, fmt.Errorf("exec: %w", err)
	case exit.Sys().(syscall.WaitStatus).Signaled():
		return 0, fmt.Errorf("exec: the program's monitor was killed: %w", err)
	}
	return int32(exit.ExitCode()), nil
}

// classifyMessage returns the error class of an OCI runtime's last message about an exec. If the host is at fault, the
// message ends with the text of an errno, which crun capitalizes. Any other message means that the request is wrong.
func classifyMessage(message string) error {
	message = strings.ToLower(message)
	for kind, numbers := range map[error][]syscall.Errno{
		errdefs.ErrResourceExhausted: {syscall.EAGAIN, syscall.ENOMEM, syscall.EMFILE, syscall.ENFILE, syscall.ENOSPC, syscall.EDQUOT},
		errdefs.ErrUnavailable:       {syscall.EPIPE, syscall.ECONNRESET, syscall.ESRCH},
	} {
		for _, n := range numbers {
			if strings.Contains(message, n.Error()) {
				return kind
			}
		}
	}
	return errdefs.ErrInvalidArgument
}

// kill kills the program and its process group, and waits until the program's monitor ends. If that takes longer than
// execKill, kill kills the monitor too.
func (x *execution) kill(cmd *exec.Cmd, ended <-chan struct{}) {
	limit, again := time.After(execKill), time.NewTicker(killPause)
	defer again.Stop()
	// The program can start before the runtime writes its PID. The monitor must live until the PID is known.
	for killed := false; ; {
		killed = killed || x.killProgram()
		if killed {
			again.Stop()
		}
		select {
		case <-again.C:
			continue
		case <-ended:
		case <-limit:
			_ = cmd.Process.Kill()
			<-ended
		}
		break
	}
	x.killProgram() // in case the program started just then
}

// killProgram kills the program and its process group. It returns false if the program's PID is not known yet.
func (x *execution) killProgram() bool {
	pid, err := ReadPid(x.pidFile())
	if err != nil {
		return false
	}
	p, err := process.Open(pid)
	if err != nil {
		return true
	}
	defer p.Close()
	// Without a terminal, the leader of the program's process group is not the program but the runtime process that
	// started it.
	group, err := syscall.Getpgid(pid)
	known := err == nil && p.Alive() && group > 1 && group != syscall.Getpgrp()
	_ = p.KillGroup()
	if known {
		_ = syscall.Kill(-group, syscall.SIGKILL)
	}
	return true
}
