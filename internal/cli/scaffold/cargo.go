package scaffold

import (
	"context"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/tripod-run/tripod/internal/cli/toolchain"
)

// cTool is the source of the program that makes components in C, by the libraries of wit-bindgen and wasm-tools in the versions
// and with the hashes of its Cargo.lock.
//
//go:embed runtime/c
var cTool embed.FS

// findCTool returns the program in the user's cache, where cargo builds it once. It returns errdefs.ErrUnavailable if cargo is missing.
func findCTool(ctx context.Context, progress io.Writer) (toolchain.Program, error) {
	source, err := fs.Sub(cTool, "runtime/c")
	if err != nil {
		return toolchain.Program{}, err
	}
	version := sha256.New()
	for _, name := range []string{"Cargo.lock", "Cargo.toml", "main.rs"} {
		text, err := fs.ReadFile(source, name)
		if err != nil {
			return toolchain.Program{}, err
		}
		fmt.Fprintf(version, "%s %d\n%s", name, len(text), text)
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return toolchain.Program{}, fmt.Errorf("no place for the tool of components in C: %w", err)
	}
	tools := filepath.Join(cache, "tripod", "tools")
	root := filepath.Join(tools, "c-"+hex.EncodeToString(version.Sum(nil)[:8]))
	if !exists(root, "bin") {
		fmt.Fprintln(progress, "building wit-bindgen, once for all components in C: it takes about a minute")
		if err := buildCTool(ctx, source, tools, root); err != nil {
			return toolchain.Program{}, err
		}
	}
	return toolchain.At(filepath.Join(root, "bin", "tripod-c")), nil
}

// buildCTool makes the directory root in tools. It appears whole or not at all.
func buildCTool(ctx context.Context, source fs.FS, tools, root string) error {
	if err := os.MkdirAll(tools, 0o755); err != nil {
		return err
	}
	work, err := os.MkdirTemp(tools, ".build-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	if err := os.CopyFS(filepath.Join(work, "source"), source); err != nil {
		return err
	}
	if _, err := toolchain.Cargo.Run(ctx, work, nil, nil, "install", "--quiet", "--locked", "--debug", "--root", "root", "--target-dir", "target", "--path", "source"); err != nil {
		return err
	}
	if err := os.Rename(filepath.Join(work, "root"), root); err != nil && !exists(root, "bin") { // otherwise, another process was faster
		return err
	}
	return nil
}
