package scaffold

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/cli/toolchain"
	"github.com/tripod-run/tripod/internal/component/protowit"
	"github.com/tripod-run/tripod/internal/component/protowit/protosource"
)

// The files of a component in Rust.
const (
	// rustServer has the methods, and says what the component serves.
	rustServer   = "src/lib.rs"
	rustManifest = "Cargo.toml"
)

// inRust are typed servers in Rust.
var inRust = boundLanguage{
	name: "rust", server: rustServer, bindings: "server.rs",
	find: func(ctx context.Context, dir string) error { _, err := findRust(ctx, dir, rustCompilers()); return err },
	code: func(methods []*protowit.Method, bindings string) (any, error) { return newRustCode(methods, bindings) },
}

// crateName returns cargo's name for a component's, which can have dots and begin with a digit.
func crateName(name string) string {
	name = strings.ReplaceAll(name, ".", "-")
	if name[0] >= '0' && name[0] <= '9' {
		return "server-" + name
	}
	return name
}

// isRust reports whether a directory is that of a component in Rust.
func isRust(dir string) bool { return exists(dir, rustManifest) && exists(dir, rustServer) }

// buildRust makes the component of a directory, of its crate. It generates the bindings again, so that the component has the
// types of the descriptors that are pushed with it.
func buildRust(ctx context.Context, dir string, source *protosource.Result, services []string, progress io.Writer) error {
	rust, err := findRust(ctx, dir, rustCompilers())
	if err != nil {
		return err
	}
	tool, err := inRust.generateBindings(ctx, dir, source.Set, services, progress)
	if err != nil {
		return err
	}
	if _, err := rust.cargo.Run(ctx, dir, []string{"RUSTC=" + rust.compiler}, nil, "build", "--quiet", "--release", "--target", rust.target,
		"--target-dir", "target"); err != nil {
		return err
	}
	_, err = tool.Run(ctx, dir, nil, nil, "component", filepath.Join("target", rust.target, "release", "server.wasm"), componentFile)
	return err
}

// rust is a compiler that has the standard library of a target with WASI preview 1.
type rust struct {
	compiler, target string
	cargo            toolchain.Program
}

// rustCompilers returns $RUSTC, the compiler in PATH, and Debian's, which rustup's can hide.
func rustCompilers() (names []string) {
	if rustc := os.Getenv("RUSTC"); rustc != "" {
		names = append(names, rustc)
	}
	return append(names, "rustc", "/usr/bin/rustc")
}

// findRust returns the first compiler that has what it needs, or errdefs.ErrUnavailable.
func findRust(ctx context.Context, dir string, names []string) (*rust, error) {
	for _, name := range names {
		path, err := exec.LookPath(name)
		if err != nil {
			continue
		}
		if path, err = filepath.Abs(path); err != nil {
			return nil, err
		}
		for _, target := range []string{"wasm32-wasip1", "wasm32-wasi"} {
			if found, err := hasStd(ctx, dir, path, target); err != nil {
				return nil, err
			} else if found {
				return &rust{path, target, cargoOf(path)}, nil
			}
		}
	}
	return nil, fmt.Errorf("components in Rust need rustc with the standard library for WASI preview 1 (`rustup target add wasm32-wasip1`; or Debian's packages rustc, cargo, "+
		"libstd-rust-dev-wasm32 and lld), which is none of %s: %w", strings.Join(names, ", "), errdefs.ErrUnavailable)
}

// hasStd reports whether a compiler has the standard library of a target. Old and new ones do not know all targets.
func hasStd(ctx context.Context, dir, compiler, target string) (bool, error) {
	out, err := toolchain.At(compiler).Run(ctx, dir, nil, nil, "--print", "target-libdir", "--target", target)
	if errdefs.IsInvalidArgument(err) {
		return false, nil
	} else if err != nil {
		return false, err
	}
	found, err := filepath.Glob(filepath.Join(strings.TrimSpace(string(out)), "libstd-*.rlib"))
	return len(found) > 0, err
}

// cargoOf returns the cargo beside a compiler, because cargo gives options to the compiler that older ones do not know.
func cargoOf(compiler string) toolchain.Program {
	if dir := filepath.Dir(compiler); exists(dir, "cargo") {
		return toolchain.At(filepath.Join(dir, "cargo"))
	}
	return toolchain.Cargo
}
