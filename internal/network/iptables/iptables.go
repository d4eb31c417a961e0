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
	// timeout limits one execution, including the wait for the lock that all users of iptables share.
	timeout = 10 * time.Second
	// outputGrace limits the wait for output from children that outlive the program.
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

// List returns the rules of a chain in table nat, as printed by iptables -S. A missing chain is an error.
func List(ctx context.Context, family Family, chain string) ([]string, error) {
	output, err := run(ctx, family.program(), "", "--wait", "-t", "nat", "-S", chain)
	if err != nil {
		return nil, err
	}
	return strings.Split(strings.TrimSpace(output), "\n"), nil
}

// Holds reports whether table nat contains a rule.
func Holds(ctx context.Context, family Family, rule ...string) bool {
	_, err := run(ctx, family.program(), "", append([]string{"--wait", "-t", "nat", "-C"}, rule...)...)
	return err == nil
}

func run(ctx context.Context, program, stdin string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	// The kernel kills the program (Pdeathsig) when the thread that started it ends. So this goroutine keeps its thread
	// until the program has exited.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Stdin = strings.NewReader(stdin)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} // so that no rule is added after the daemon's death
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
