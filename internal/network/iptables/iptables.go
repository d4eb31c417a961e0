package iptables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
)

const (
	// timeout bounds one execution, waiting for other users' lock included.
	timeout = 10 * time.Second
	// outputGrace is how long output is awaited of what a program leaves behind.
	outputGrace = time.Second
)

// Family is an address family.
type Family bool

// The families.
const (
	V4 Family = false
	V6 Family = true
)

func (f Family) program() string {
	if f == V6 {
		return "ip6tables"
	}
	return "iptables"
}

// Restore applies rules as iptables-save prints them, beside those that are there: all of them, or none after an error.
// ErrFailedPrecondition: the programs are not installed; else ErrUnavailable or what ended ctx.
func Restore(ctx context.Context, family Family, rules ...string) error {
	_, err := run(ctx, family.program()+"-restore", strings.Join(rules, "\n")+"\n", "--wait", "--noflush")
	return err
}

// List returns the rules of a chain in table nat, as they would be added. One that is not there is an error.
func List(ctx context.Context, family Family, chain string) ([]string, error) {
	output, err := run(ctx, family.program(), "", "--wait", "-t", "nat", "-S", chain)
	if err != nil {
		return nil, err
	}
	return strings.Split(strings.TrimSpace(output), "\n"), nil
}

// Holds reports whether a rule is in table nat.
func Holds(ctx context.Context, family Family, rule ...string) bool {
	_, err := run(ctx, family.program(), "", append([]string{"--wait", "-t", "nat", "-C"}, rule...)...)
	return err == nil
}

func run(ctx context.Context, program, stdin string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	// The death signal is sent when the thread that forked ends, so that must not be before the program's end.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Stdin = strings.NewReader(stdin)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} // no rule comes behind a dead daemon's back
	cmd.WaitDelay = outputGrace
	output, err := cmd.CombinedOutput()
	switch {
	case err == nil:
		return string(output), nil
	case errors.Is(err, exec.ErrNotFound):
		return "", fmt.Errorf("%w (on Debian: apt-get install iptables): %w", err, errdefs.ErrFailedPrecondition)
	case ctx.Err() != nil:
		return "", fmt.Errorf("%s: %w", program, context.Cause(ctx))
	default:
		return "", fmt.Errorf("%s: %w: %s: %w", program, err, bytes.TrimSpace(output), errdefs.ErrUnavailable)
	}
}
