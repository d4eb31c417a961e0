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

// String returns the program that changes the family's rules.
func (f Family) String() string {
	if f == V6 {
		return "ip6tables"
	}
	return "iptables"
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
	var output, complaints bytes.Buffer // apart: a warning would be in the middle of a rule
	cmd.Stdout, cmd.Stderr = &output, &complaints
	err := cmd.Run()
	switch {
	case err == nil:
		return output.String(), nil
	case errors.Is(err, exec.ErrNotFound):
		return "", fmt.Errorf("%w (on Debian: apt-get install iptables): %w", err, errdefs.ErrFailedPrecondition)
	case ctx.Err() != nil:
		return "", fmt.Errorf("%s: %w", program, context.Cause(ctx))
	default:
		return "", fmt.Errorf("%s: %w: %s: %w", program, err, bytes.TrimSpace(append(output.Bytes(), complaints.Bytes()...)),
			errdefs.ErrUnavailable)
	}
}
