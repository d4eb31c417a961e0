// Package toolchain runs the toolchains of the user, for commands that generate and build components. It must not know
// what they are for.
package toolchain

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
)

// Program is a program in PATH.
type Program struct {
	name string
	// needed says who needs it, for the error if it is missing.
	needed string
}

// The programs of toolchains.
var (
	Go   = Program{"go", "servers in Go need the Go toolchain (go) in PATH"}
	Node = Program{"node", "components in JavaScript need Node.js 20 or later (node) in PATH"}
	NPM  = Program{"npm", "components in JavaScript need Node.js 20 or later with npm in PATH"}

	Python = Program{"python3", "components in Python need Python 3.11 or later (python3) in PATH"}
	Cargo  = Program{"cargo",
		"components in C and Rust need Rust 1.88 or later with cargo in PATH (https://rustup.rs), which builds wit-bindgen"}
)

// At returns a program by its absolute path, or by that below the directory in which it runs.
func At(path string) Program { return Program{path, "it needs " + path} }

// Name returns the program's name or path.
func (p Program) Name() string { return p.name }

// GoWasm is the environment for Go programs that run as guests.
var GoWasm = []string{"GOOS=wasip1", "GOARCH=wasm", "CGO_ENABLED=0"}

// Run runs a program in a directory, with an environment in addition to that of this process, and returns its standard
// output. stdin can be nil. Run returns errdefs.ErrUnavailable if there is no such program, and
// errdefs.ErrInvalidArgument with what it printed if it fails.
func (p Program) Run(ctx context.Context, dir string, env []string, stdin io.Reader, args ...string) ([]byte, error) {
	c := exec.CommandContext(ctx, p.name, args...)
	c.Dir, c.WaitDelay = dir, 5*time.Second
	// The end of ctx ends what the program has started, too: npm and pip run others.
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	c.Cancel = func() error { return syscall.Kill(-c.Process.Pid, syscall.SIGKILL) }
	c.Env = append(os.Environ(), env...)
	var stderr bytes.Buffer
	c.Stdin, c.Stderr = stdin, &stderr
	out, err := c.Output()
	switch {
	case errors.Is(err, exec.ErrNotFound):
		return nil, fmt.Errorf("%s: %s: %w", dir, p.needed, errdefs.ErrUnavailable)
	case ctx.Err() != nil:
		return nil, fmt.Errorf("%s %s in %s: %w", p.name, args[0], dir, context.Cause(ctx))
	case err != nil:
		return nil, fmt.Errorf("%s %s in %s: %s: %w", p.name, args[0], dir, strings.TrimSpace(stderr.String()), errdefs.ErrInvalidArgument)
	}
	return out, nil
}
