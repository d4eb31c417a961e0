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

// Process is a program of the cluster, which may come and go.
type Process struct {
	// Name is the program's, and LogPath the file with what it wrote over all its starts.
	Name, LogPath string

	argv []string
	// supervised programs are started again when they end by themselves.
	supervised bool

	mu     sync.Mutex
	cmd    *exec.Cmd
	exited chan struct{} // closed when cmd has ended
	wanted bool          // it is to run
	ends   []string      // how it ended when it was wanted
}

// Start starts the program unless it runs.
func (p *Process) Start() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.wanted {
		return nil
	}
	p.wanted = true
	return p.spawn()
}

func (p *Process) spawn() error {
	log, err := os.OpenFile(p.LogPath, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	c := exec.Command(p.argv[0], p.argv[1:]...)
	c.Stdout, c.Stderr, c.Dir = log, log, "/"
	if err := c.Start(); err != nil {
		return fmt.Errorf("start %s: %w", p.Name, err)
	}
	exited := make(chan struct{})
	p.cmd, p.exited = c, exited
	go func() {
		_ = c.Wait() // its code is in ProcessState
		close(exited)
		p.ended(c)
	}()
	return nil
}

// Supervise lets the program be started again from now on, whenever it ends by itself.
func (p *Process) Supervise() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.supervised = true
}

// ended notes an end that nobody asked for, and begins again where that is a supervisor's duty.
func (p *Process) ended(c *exec.Cmd) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.wanted || p.cmd != c {
		return
	}
	if !p.supervised {
		p.ends = append(p.ends, fmt.Sprintf("%s ended by itself: %v", p.Name, c.ProcessState))
		return
	}
	time.AfterFunc(restartPause, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.wanted && p.cmd == c {
			if err := p.spawn(); err != nil {
				p.ends = append(p.ends, err.Error())
			}
		}
	})
}

// Kill ends the program by SIGKILL; it stays away until Start.
func (p *Process) Kill() error { return p.end(syscall.SIGKILL) }

// Stop ends the program by SIGTERM; it stays away until Start.
func (p *Process) Stop() error { return p.end(syscall.SIGTERM) }

func (p *Process) end(sig syscall.Signal) error {
	p.mu.Lock()
	p.wanted = false
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

// trouble is how the program ended when it was wanted, and is empty when it did not.
func (p *Process) trouble() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.ends
}

// Tail is the end of the program's log, n lines at most.
func (p *Process) Tail(n int) string { return p.Grep("", n) }

// Grep is the last n lines of the program's log that have a text.
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
