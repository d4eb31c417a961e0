package kube

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"sync"
	"syscall"
	"time"
)

const (
	stopTimeout  = 30 * time.Second
	restartPause = time.Second
)

// Process is a program of the cluster. Tests can stop it and start it again.
type Process struct {
	// Name is the program's name. LogPath is the log, to which every start appends.
	Name, LogPath string
	// Extra are further arguments, from the next start.
	Extra []string

	argv, env []string // env is in addition to the test's environment
	// start starts the command in the namespaces of the program's node.
	start func(*exec.Cmd) error
	// supervised is set if the program is restarted when it ends unexpectedly.
	supervised bool

	mu        sync.Mutex
	cmd       *exec.Cmd
	exited    chan struct{} // closed when cmd has ended
	shouldRun bool          // set by Start, cleared by Stop and Kill
	exits     []string      // unexpected ends
}

// Start starts the program unless it is running.
func (p *Process) Start() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.shouldRun {
		return nil
	}
	p.shouldRun = true
	return p.spawn()
}

func (p *Process) spawn() error {
	log, err := os.OpenFile(p.LogPath, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	c := exec.Command(p.argv[0], slices.Concat(p.argv[1:], p.Extra)...)
	c.Stdout, c.Stderr, c.Dir, c.Env = log, log, "/", append(os.Environ(), p.env...)
	if err := p.start(c); err != nil {
		return fmt.Errorf("start %s: %w", p.Name, err)
	}
	exited := make(chan struct{})
	p.cmd, p.exited = c, exited
	go func() {
		_ = c.Wait() // ProcessState has the result
		close(exited)
		p.handleExit(c)
	}()
	return nil
}

// Supervise makes the program restart whenever it ends unexpectedly.
func (p *Process) Supervise() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.supervised = true
}

// handleExit records an unexpected end, or restarts a supervised program.
func (p *Process) handleExit(c *exec.Cmd) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.shouldRun || p.cmd != c {
		return
	}
	if !p.supervised {
		p.exits = append(p.exits, fmt.Sprintf("%s ended unexpectedly: %v", p.Name, c.ProcessState))
		return
	}
	time.AfterFunc(restartPause, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.shouldRun && p.cmd == c {
			if err := p.spawn(); err != nil {
				p.exits = append(p.exits, err.Error())
			}
		}
	})
}

// Kill kills the program with SIGKILL. It is not restarted until Start.
func (p *Process) Kill() error { return p.end(syscall.SIGKILL) }

// Stop stops the program with SIGTERM. It is not restarted until Start.
func (p *Process) Stop() error { return p.end(syscall.SIGTERM) }

// expectEnd makes the program's end expected.
func (p *Process) expectEnd() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.shouldRun = false
}

func (p *Process) end(sig syscall.Signal) error {
	p.expectEnd()
	p.mu.Lock()
	c, exited := p.cmd, p.exited
	p.mu.Unlock()
	if c == nil {
		return nil
	}
	_ = c.Process.Signal(sig)
	select {
	case <-exited:
		return nil
	case <-time.After(stopTimeout):
		_ = c.Process.Kill()
		<-exited
		return fmt.Errorf("%s did not end within %v of signal %v", p.Name, stopTimeout, sig)
	}
}

// failures returns the unexpected ends of the program.
func (p *Process) failures() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.exits
}

// Tail returns the last n lines of the program's log.
func (p *Process) Tail(n int) string { return p.Grep("", n) }

// Grep returns the last n lines of the program's log that contain text.
func (p *Process) Grep(text string, n int) string {
	data, err := os.ReadFile(p.LogPath)
	if err != nil {
		return err.Error()
	}
	lines := slices.DeleteFunc(bytes.SplitAfter(data, []byte("\n")), func(line []byte) bool {
		return !bytes.Contains(line, []byte(text))
	})
	return string(bytes.Join(lines[max(0, len(lines)-n):], nil))
}
