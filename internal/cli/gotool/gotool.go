// Package gotool runs the Go toolchain of the user, for commands that generate and build servers in Go. It must not know
// what they are for.
package gotool

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/containerd/errdefs"
)

// Wasm is the environment for programs that run as guests.
var Wasm = []string{"GOOS=wasip1", "GOARCH=wasm", "CGO_ENABLED=0"}

// Run runs the program go in PATH in a directory, with an environment in addition to that of this process, and returns
// its standard output. stdin can be nil. Run returns errdefs.ErrUnavailable if there is no such program, and
// errdefs.ErrInvalidArgument with what it printed if it fails.
func Run(ctx context.Context, dir string, env []string, stdin io.Reader, args ...string) ([]byte, error) {
	c := exec.CommandContext(ctx, "go", args...)
	c.Dir, c.WaitDelay = dir, 5*time.Second
	c.Env = append(os.Environ(), env...)
	var stderr bytes.Buffer
	c.Stdin, c.Stderr = stdin, &stderr
	out, err := c.Output()
	switch {
	case errors.Is(err, exec.ErrNotFound):
		return nil, fmt.Errorf("servers in Go, such as %s, need the Go toolchain (go) in PATH: %w", dir, errdefs.ErrUnavailable)
	case ctx.Err() != nil:
		return nil, fmt.Errorf("go %s in %s: %w", args[0], dir, context.Cause(ctx))
	case err != nil:
		return nil, fmt.Errorf("go %s in %s: %s: %w", args[0], dir, strings.TrimSpace(stderr.String()), errdefs.ErrInvalidArgument)
	}
	return out, nil
}
