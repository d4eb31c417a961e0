package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/component/wasmbin"
	"github.com/tripod-run/tripod/internal/image"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/artifact"
)

var errDisk = errors.New("the file is a disk")

// binary returns the WebAssembly binary in a file, or builds the Go package in a directory. For a disk it returns
// errDisk.
func (p *push) binary(ctx context.Context, path string) ([]byte, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !info.IsDir() {
		if disk, err := image.IsDiskFile(path); err != nil {
			return nil, err
		} else if disk {
			return nil, errDisk
		}
		return os.ReadFile(path)
	}
	work, err := os.MkdirTemp("", "tripod-push-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(work)
	return buildGo(ctx, path, filepath.Join(work, "server.wasm"))
}

// buildGo builds the gRPC server whose package main is in a directory, by the Go toolchain in PATH.
func buildGo(ctx context.Context, dir, output string) ([]byte, error) {
	name, err := goCommand(ctx, dir, "list", "-f", "{{.Name}}", ".")
	if err != nil {
		return nil, err
	}
	if name != "main" {
		return nil, fmt.Errorf("%s: the package is %s, not main: %w", dir, name, errdefs.ErrInvalidArgument)
	}
	// As a library, because a program would end with its first call. The flags make the same bytes from the same sources.
	if _, err := goCommand(ctx, dir, "build", "-buildmode=c-shared", "-trimpath", "-buildvcs=false", "-ldflags=-s -w -buildid=", "-o", output, "."); err != nil {
		return nil, err
	}
	binary, err := os.ReadFile(output)
	if err != nil {
		return nil, err
	}
	outline, err := wasmbin.Read(bytes.NewReader(binary), int64(len(binary)))
	if err != nil {
		return nil, err
	}
	if !artifact.IsRaw(outline) {
		return nil, fmt.Errorf("%s: the program does not import github.com/tripod-run/tripod/sdk/go (docs/wasm.md, \"A gRPC server in Go\"): %w", dir, errdefs.ErrInvalidArgument)
	}
	return binary, nil
}

// goCommand runs the Go toolchain for wasip1 in a directory and returns its output. An error contains what it printed.
func goCommand(ctx context.Context, dir string, args ...string) (string, error) {
	c := exec.CommandContext(ctx, "go", args...)
	c.Dir, c.WaitDelay = dir, 5*time.Second
	c.Env = append(os.Environ(), "GOOS=wasip1", "GOARCH=wasm", "CGO_ENABLED=0")
	var stderr bytes.Buffer
	c.Stderr = &stderr
	out, err := c.Output()
	switch {
	case errors.Is(err, exec.ErrNotFound):
		return "", fmt.Errorf("%s is a directory, and building it needs the Go toolchain (go) in PATH: %w", dir, errdefs.ErrUnavailable)
	case ctx.Err() != nil:
		return "", fmt.Errorf("go %s in %s: %w", args[0], dir, context.Cause(ctx))
	case err != nil:
		return "", fmt.Errorf("go %s in %s: %s: %w", args[0], dir, strings.TrimSpace(stderr.String()), errdefs.ErrInvalidArgument)
	}
	return strings.TrimSpace(string(out)), nil
}
