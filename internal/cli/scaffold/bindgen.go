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
	"strings"

	"google.golang.org/protobuf/types/descriptorpb"

	"github.com/tripod-run/tripod/internal/cli/toolchain"
)

// servicesComment begins a line of a server in C or Rust that says what the component serves.
const servicesComment = "// tripod:services "

// commentServices returns the services in a file.
func commentServices(path string) ([]string, error) {
	return readServices(path, servicesComment+"shop.v1.Cart", func(text []byte) (services []string, _ error) {
		for line := range strings.Lines(string(text)) {
			if names, found := strings.CutPrefix(line, servicesComment); found {
				services = append(services, strings.Fields(names)...)
			}
		}
		return services, nil
	})
}

// generateBindings writes the directories wit and gen of a component in C or Rust ("c" or "rust"), and returns the tool that has
// written the bindings.
func generateBindings(ctx context.Context, dir, language string, set *descriptorpb.FileDescriptorSet, services []string, progress io.Writer) (tool toolchain.Program, err error) {
	if _, err := writeWIT(dir, set, services); err != nil {
		return tool, err
	}
	if tool, err = findBindgen(ctx, progress); err != nil {
		return tool, err
	}
	if err := os.RemoveAll(filepath.Join(dir, genDir)); err != nil {
		return tool, err
	}
	_, err = tool.Run(ctx, dir, nil, nil, language, witDir, genDir)
	return tool, err
}

// bindgen is the source of the program that makes components in C and Rust, by the libraries of wit-bindgen and wasm-tools in
// the versions and with the hashes of its Cargo.lock.
//
//go:embed runtime/bindgen
var bindgen embed.FS

// findBindgen returns the program in the user's cache, where cargo builds it once. It returns errdefs.ErrUnavailable if cargo is missing.
func findBindgen(ctx context.Context, progress io.Writer) (toolchain.Program, error) {
	source, err := fs.Sub(bindgen, "runtime/bindgen")
	if err != nil {
		return toolchain.Program{}, err
	}
	version := sha256.New()
	for _, name := range []string{"Cargo.lock", "Cargo.toml", "main.rs", "rt.rs"} {
		text, err := fs.ReadFile(source, name)
		if err != nil {
			return toolchain.Program{}, err
		}
		fmt.Fprintf(version, "%s %d\n%s", name, len(text), text)
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		return toolchain.Program{}, fmt.Errorf("no place for the tool of components in C and Rust: %w", err)
	}
	tools := filepath.Join(cache, "tripod", "tools")
	root := filepath.Join(tools, "bindgen-"+hex.EncodeToString(version.Sum(nil)[:8]))
	if !exists(root, "bin") {
		fmt.Fprintln(progress, "building wit-bindgen, once for all components in C and Rust: it takes about a minute")
		if err := buildBindgen(ctx, source, tools, root); err != nil {
			return toolchain.Program{}, err
		}
	}
	return toolchain.At(filepath.Join(root, "bin", "tripod-bindgen")), nil
}

// buildBindgen makes the directory root in tools. It appears whole or not at all.
func buildBindgen(ctx context.Context, source fs.FS, tools, root string) error {
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
	// By the compiler in PATH, because $RUSTC is for components.
	if _, err := toolchain.Cargo.Run(ctx, work, []string{"RUSTC=rustc"}, nil, "install", "--quiet", "--locked", "--debug", "--root", "root", "--target-dir", "target", "--path", "source"); err != nil {
		return err
	}
	if err := os.Rename(filepath.Join(work, "root"), root); err != nil && !exists(root, "bin") { // otherwise, another process was faster
		return err
	}
	return nil
}
