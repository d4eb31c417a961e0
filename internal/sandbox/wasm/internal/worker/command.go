package worker

import (
	"errors"
	"fmt"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/component/engine"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/internal/workerapi"
)

// command is a program that exits by itself (wasi:cli/run).
type command struct {
	pod   *pod
	guest *guest
	ended chan exit
}

func newCommand(p *pod) *command { return &command{pod: p, ended: make(chan exit, 1)} }

func (c *command) start() error {
	if len(c.pod.spec.Ports) > 0 {
		return fmt.Errorf("pod %s: a command serves no ports: %w", c.pod.spec.ID, errdefs.ErrInvalidArgument)
	}
	var err error
	if c.guest, err = c.pod.instantiate(c.pod.alive, c.pod.spec.Limits); err != nil {
		return startError(c.pod, err)
	}
	c.pod.counts.active.Add(1)
	go func() {
		code, err := c.guest.Run(c.pod.alive)
		c.guest.Close()
		c.pod.counts.active.Add(-1)
		c.ended <- c.exit(code, err)
	}()
	return nil
}

// startError wraps the error from a pod's first instantiation. The class of the result is ErrResourceExhausted if a
// limit was reached, and ErrFailedPrecondition otherwise.
func startError(p *pod, err error) error {
	var class error = errdefs.ErrFailedPrecondition
	if errors.Is(err, errdefs.ErrResourceExhausted) {
		class = errdefs.ErrResourceExhausted
	}
	return fmt.Errorf("pod %s: the component cannot be instantiated: %w: %w", p.spec.ID, err, class)
}

func (c *command) exit(code int, err error) exit {
	var exited *engine.Exit
	switch {
	case errors.As(err, &exited):
		code = exited.Code
	case err != nil:
		switch c.pod.count(c.pod.alive, "command", err) {
		case failedStopping:
			return killed("killed because the component had not exited when the grace period expired")
		case failedMemory:
			return exit{exitKill, reasonOOMKilled, shorten(err.Error())}
		default:
			return exit{exitTrap, reasonError, shorten(err.Error())}
		}
	}
	if code != 0 {
		return exit{code: int32(code), reason: reasonError}
	}
	return exit{reason: reasonCompleted}
}

// stop ends the command's standard input and channels, because WASI has no signals.
func (c *command) stop() {
	if c.pod.alive.Err() != nil {
		return // the grace period has expired already
	}
	if c.pod.stdin != nil {
		c.pod.stdin.end()
	}
	if c.pod.channels != nil {
		c.pod.channels.stop()
	}
}

func (c *command) wait() exit { return <-c.ended }

func (c *command) updateTLS(workerapi.TLS) error {
	return fmt.Errorf("pod %s is a command and serves no TLS: %w", c.pod.spec.ID, errdefs.ErrFailedPrecondition)
}

// updateLimits does nothing, because the limits apply to requests and a command serves none.
func (c *command) updateLimits(workerapi.Limits) error { return nil }

func (c *command) metrics() []workerapi.MethodMetrics { return nil }

var _ program = (*command)(nil)
