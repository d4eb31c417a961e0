// Package guestbuild builds the programs in Go that tests run as guests, or as the clients of guests. It keeps each one
// outside the tree, by the content that it was built from, so that it is built once per machine and not once per test.
//
// The programs of the product are not its business: the tests of `tripod push` build with the product's own code.
package guestbuild

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// Wasm returns the path of a gRPC server for WebAssembly. module is the directory of its Go module, pkg is its package
// main in there, such as "." or "./interop". The program has neither symbols nor paths of the machine, like the ones
// that `tripod push` builds. The caller must not change the file.
func Wasm(t testing.TB, module, pkg string) string {
	t.Helper()
	return build(t, module, pkg, []string{"GOOS=wasip1", "GOARCH=wasm"}, "-buildmode=c-shared")
}

// Command is like Wasm, for a program that begins at main.
func Command(t testing.TB, module, pkg string) string {
	t.Helper()
	return build(t, module, pkg, []string{"GOOS=wasip1", "GOARCH=wasm"})
}

// Native is like Wasm, for a program that runs on this machine.
func Native(t testing.TB, module, pkg string) string {
	t.Helper()
	return build(t, module, pkg, nil)
}

func build(t testing.TB, module, pkg string, env []string, flags ...string) string {
	t.Helper()
	env = append(env, "CGO_ENABLED=0", "GOWORK=off")
	args := slices.Concat([]string{"build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w -buildid="}, flags)
	run := func(args ...string) ([]byte, error) {
		c := exec.CommandContext(t.Context(), "go", args...)
		c.Dir, c.Env = module, append(os.Environ(), env...)
		var said strings.Builder
		c.Stderr = &said
		out, err := c.Output()
		if err != nil {
			return nil, fmt.Errorf("go %s in %s: %w\n%s", args[0], module, err, said.String())
		}
		return out, nil
	}
	key, err := identify(module, append(args, pkg), run)
	if err != nil {
		t.Fatal(err)
	}
	path, err := open(t).get(key, func(draft string) error {
		_, err := run(append(args, "-o", draft, pkg)...)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// identify returns a name for all that determines a program: the toolchain, the arguments, the module's files and those
// of the local modules that it is built with. go.sum stands for the other modules.
func identify(module string, args []string, run func(args ...string) ([]byte, error)) (string, error) {
	toolchain, err := run("env", "GOVERSION", "GOOS", "GOARCH", "GOAMD64", "GOARM64", "GOWASM", "GOFLAGS", "GOEXPERIMENT", "GOFIPS140")
	if err != nil {
		return "", err
	}
	listed, err := run("mod", "edit", "-json")
	if err != nil {
		return "", err
	}
	var mod struct {
		Module, Require, Exclude, Tool, Godebug json.RawMessage
		Go, Toolchain                           string
		Replace                                 []struct {
			Old, New struct{ Path, Version string }
		}
	}
	if err := json.Unmarshal(listed, &mod); err != nil {
		return "", fmt.Errorf("go.mod in %s: %w", module, err)
	}
	sum := sha256.New()
	if err := hashTree(sum, module, "go.mod"); err != nil { // go.mod may have paths of this machine; mod has the rest
		return "", err
	}
	for k, r := range mod.Replace {
		if r.New.Version != "" {
			continue
		}
		dir := r.New.Path
		if !filepath.IsAbs(dir) {
			dir = filepath.Join(module, dir)
		}
		if err := hashTree(sum, dir); err != nil {
			return "", err
		}
		mod.Replace[k].New.Path = "" // its content counts, not where it lies
	}
	text, err := json.Marshal([]any{string(toolchain), args, mod})
	if err != nil {
		return "", err
	}
	sum.Write(text)
	return hex.EncodeToString(sum.Sum(nil)), nil
}

// hashTree adds the names and the content of the files in a directory to a hash. It leaves out tests, which are not in
// the program, and the files with the given names.
func hashTree(sum io.Writer, dir string, without ...string) error {
	return filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() || slices.Contains(without, d.Name()) || strings.HasSuffix(path, "_test.go") {
			return err
		}
		content, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		name, err := filepath.Rel(dir, path)
		fmt.Fprintf(sum, "%s\x00%d\x00%s", name, len(content), content)
		return err
	})
}
