package scaffold

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/cli/toolchain"
	"github.com/tripod-run/tripod/internal/component/protowit"
	"github.com/tripod-run/tripod/internal/component/protowit/protosource"
)

// The files of a component in C.
const (
	// cServer has the methods, and says what the component serves.
	cServer = "server.c"
	// flagsFile has the compiler's flags, for the build and for editors (clangd).
	flagsFile = "compile_flags.txt"
)

// inC are typed servers in C.
var inC = boundLanguage{
	name: "c", server: cServer, bindings: "server.h",
	find: func(ctx context.Context, dir string) error { _, err := findClang(ctx, dir); return err },
	code: func(methods []*protowit.Method, header string) (any, error) {
		var server []*cMethod
		for _, m := range methods {
			c, err := newCMethod(m, header)
			if err != nil {
				return nil, err
			}
			server = append(server, c)
		}
		return server, nil
	},
}

// isC reports whether a directory is that of a component in C.
func isC(dir string) bool { return exists(dir, flagsFile) && exists(dir, cServer) }

// buildC makes the component of a directory from its .c files. It generates the bindings again, so that the component has the
// types of the descriptors that are pushed with it.
func buildC(ctx context.Context, dir string, source *protosource.Result, services []string, progress io.Writer) error {
	clang, err := findClang(ctx, dir)
	if err != nil {
		return err
	}
	tool, err := inC.generateBindings(ctx, dir, source.Set, services, progress)
	if err != nil {
		return err
	}
	files, err := fs.Glob(os.DirFS(dir), "*.c")
	if err != nil {
		return err
	}
	work, err := os.MkdirTemp("", "tripod-c-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	module := filepath.Join(work, "module.wasm")
	link := []string{"--target=wasm32-wasi", "-mexec-model=reactor", "-fuse-ld=" + clang.linker, "-o", module,
		filepath.Join(genDir, "server_component_type.o")}
	for i, file := range append(files, filepath.Join(genDir, "server.c")) {
		object := filepath.Join(work, strconv.Itoa(i)+".o")
		args := []string{"@" + flagsFile, "-c", file, "-o", object}
		if filepath.Dir(file) == genDir {
			args = append(args, "-w") // not the user's warnings
		}
		if _, err := clang.Run(ctx, dir, nil, nil, args...); err != nil {
			return err
		}
		link = append(link, object)
	}
	// Without an -O, for which clang runs wasm-opt, if it is in PATH: not all have it.
	if _, err := clang.Run(ctx, dir, nil, nil, link...); err != nil {
		return err
	}
	_, err = tool.Run(ctx, dir, nil, nil, "component", module, componentFile)
	return err
}

// clang is a compiler that has what it needs for components.
type clang struct {
	toolchain.Program
	linker string // the path of its wasm-ld
}

// minClang is the first version of clang that is tested.
const minClang = 14

// findClang returns the clang of the WASI SDK at $WASI_SDK_PATH, $CC if it is a clang, or one in PATH. It returns
// errdefs.ErrUnavailable if what it needs is missing.
func findClang(ctx context.Context, dir string) (*clang, error) {
	var names []string
	if sdk := os.Getenv("WASI_SDK_PATH"); sdk != "" {
		names = append(names, filepath.Join(sdk, "bin", "clang"))
	}
	if cc := os.Getenv("CC"); strings.HasPrefix(filepath.Base(cc), "clang") {
		names = append(names, cc)
	}
	names = append(names, "clang")
	for v := 30; v >= minClang; v-- {
		names = append(names, "clang-"+strconv.Itoa(v))
	}
	missing := "clang " + strconv.Itoa(minClang) + " or later"
	for _, name := range names {
		path, err := exec.LookPath(name)
		if err != nil {
			continue
		}
		if path, err = filepath.Abs(path); err != nil {
			return nil, err
		}
		c := &clang{Program: toolchain.At(path)}
		switch missing, err = c.check(ctx, dir); {
		case err != nil:
			return nil, err
		case missing == "":
			return c, nil
		}
	}
	return nil, fmt.Errorf("components in C need clang %d or later with wasm-ld, wasi-libc and compiler-rt for wasm32 (Debian's packages clang, lld, wasi-libc and libclang-rt-dev-wasm32; "+
		"or the WASI SDK, with its directory in $WASI_SDK_PATH); what is missing: %s: %w", minClang, missing, errdefs.ErrUnavailable)
}

// check returns what is missing, or "", and finds the linker.
func (c *clang) check(ctx context.Context, dir string) (missing string, err error) {
	ask := func(question ...string) string {
		if err != nil {
			return ""
		}
		var out []byte
		out, err = c.Run(ctx, dir, nil, nil, question...)
		return strings.TrimSpace(string(out))
	}
	major, _, _ := strings.Cut(ask("-dumpversion"), ".")
	libc, builtins := ask("--target=wasm32-wasi", "-print-file-name=crt1-reactor.o"),
		ask("--target=wasm32-wasi", "--rtlib=compiler-rt", "-print-libgcc-file-name")
	c.linker = ask("-print-prog-name=wasm-ld") // for the host, whose tools have the same directory: for WASI, Debian's does not look there
	if err != nil {
		return "", err
	}
	if v, err := strconv.Atoi(major); err != nil || v < minClang {
		return fmt.Sprintf("%s is clang %s", c.Name(), major), nil
	}
	// clang answers with a path, or with what it was asked for.
	for _, f := range []struct{ path, what string }{{c.linker, "wasm-ld"}, {libc, "wasi-libc"}, {builtins, "compiler-rt for wasm32"}} {
		if _, err := os.Stat(f.path); errors.Is(err, fs.ErrNotExist) || !filepath.IsAbs(f.path) {
			return f.what + " of " + c.Name(), nil
		} else if err != nil {
			return "", err
		}
	}
	return "", nil
}
