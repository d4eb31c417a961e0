package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/cli/scaffold"
	"github.com/tripod-run/tripod/internal/cli/toolchain"
	"github.com/tripod-run/tripod/internal/component/wasmbin"
	"github.com/tripod-run/tripod/internal/image/disk"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/artifact"
)

var errDisk = errors.New("the file is a disk")

// binary returns the WebAssembly binary in a file, or builds the Go package or the component in C, JavaScript, Python or Rust
// in a directory. For a disk it returns errDisk.
func (p *push) binary(ctx context.Context, path string) ([]byte, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !info.IsDir() {
		if disk, err := disk.IsFile(path); err != nil {
			return nil, err
		} else if disk {
			return nil, errDisk
		}
		return os.ReadFile(path)
	}
	if scaffold.CanBuild(path) {
		if p.built, err = scaffold.Build(ctx, path, p.app.Stderr); err != nil {
			return nil, err
		}
		return p.built.Wasm, nil
	}
	work, err := os.MkdirTemp("", "tripod-push-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(work)
	return buildGo(ctx, path, filepath.Join(work, "server.wasm"), p.names)
}

// buildGo builds the gRPC server whose package main is in a directory, by the Go toolchain in PATH. With names, the binary has
// the names of functions.
func buildGo(ctx context.Context, dir, output string, names bool) ([]byte, error) {
	ldflags := "-s -w -buildid="
	if names {
		ldflags = "-w -buildid="
	}
	out, err := toolchain.Go.Run(ctx, dir, toolchain.GoWasm, nil, "list", "-f", "{{.Name}}", ".")
	if err != nil {
		return nil, err
	}
	if name := strings.TrimSpace(string(out)); name != "main" {
		return nil, fmt.Errorf("%s: the package is %s, not main: %w", dir, name, errdefs.ErrInvalidArgument)
	}
	// As a library, because a program would end with its first call. The flags make the same bytes from the same sources.
	if _, err := toolchain.Go.Run(ctx, dir, toolchain.GoWasm, nil, "build", "-buildmode=c-shared", "-trimpath", "-buildvcs=false",
		"-ldflags="+ldflags, "-o", output, "."); err != nil {
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
		return nil, fmt.Errorf("%s: the program does not import github.com/tripod-run/tripod/sdk/go (docs/wasm-guests.md, \"A gRPC server in Go\"): %w", dir, errdefs.ErrInvalidArgument)
	}
	return binary, nil
}
