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
	"github.com/tripod-run/tripod/internal/component/protowit"
	"github.com/tripod-run/tripod/internal/component/protowit/protosource"
)

// servicesComment begins a line of a server in C or Rust that says what the component serves.
const servicesComment = "// tripod:services "

// boundLanguage is a language for which wit-bindgen writes bindings: the node converts the messages.
type boundLanguage struct {
	name string // of its templates and, for the tool, of its bindings
	// server has the methods, and lines that begin with servicesComment. bindings is the file below genDir that declares what
	// the methods must be.
	server, bindings string
	// find returns an error if there is no compiler for the components in a directory.
	find func(ctx context.Context, dir string) error
	// code returns the code of the methods, for the templates.
	code func(methods []*protowit.Method, bindings string) (any, error)
}

// services returns the services in the server of a directory.
func (l *boundLanguage) services(dir string) ([]string, error) {
	return readServices(filepath.Join(dir, l.server), servicesComment+"shop.v1.Cart", func(text []byte) (services []string, _ error) {
		for line := range strings.Lines(string(text)) {
			if names, found := strings.CutPrefix(line, servicesComment); found {
				services = append(services, strings.Fields(names)...)
			}
		}
		return services, nil
	})
}

// generate writes the directories wit and gen.
func (l *boundLanguage) generate(ctx context.Context, dir string, set *descriptorpb.FileDescriptorSet, progress io.Writer) error {
	services, err := l.services(dir)
	if err != nil {
		return err
	}
	_, err = l.generateBindings(ctx, dir, set, services, progress)
	return err
}

// generateBindings is generate for given services. It returns the tool that has written the bindings.
func (l *boundLanguage) generateBindings(ctx context.Context, dir string, set *descriptorpb.FileDescriptorSet, services []string,
	progress io.Writer) (tool toolchain.Program, err error) {
	if _, err := writeWIT(dir, set, services); err != nil {
		return tool, err
	}
	if tool, err = findBindgen(ctx, progress); err != nil {
		return tool, err
	}
	if err := os.RemoveAll(filepath.Join(dir, genDir)); err != nil {
		return tool, err
	}
	_, err = tool.Run(ctx, dir, nil, nil, l.name, witDir, genDir)
	return tool, err
}

// boundProject writes typed servers in a boundLanguage.
type boundProject struct {
	*boundLanguage
	source   *protosource.Result
	schema   *protowit.Schema
	progress io.Writer
}

func (l *boundLanguage) newProject(source *protosource.Result, progress io.Writer) (*boundProject, error) {
	schema, err := protowit.Compile(source.Set, source.Services...)
	if err != nil {
		return nil, err
	}
	return &boundProject{l, source, schema, progress}, nil
}

func (p *boundProject) own() []string { return filesOf(p.source.Set) }

func (p *boundProject) write(ctx context.Context, dir, name string) error {
	if err := p.find(ctx, dir); err != nil { // before the tool is built
		return err
	}
	if _, err := p.generateBindings(ctx, dir, p.source.Set, p.source.Services, p.progress); err != nil {
		return err
	}
	bindings, err := os.ReadFile(filepath.Join(dir, genDir, p.bindings))
	if err != nil {
		return err
	}
	return p.writeServer(dir, name, string(bindings))
}

// writeServer writes the files that are the user's, with the names in the bindings.
func (p *boundProject) writeServer(dir, name, bindings string) error {
	server, err := p.code(p.schema.Methods, bindings)
	if err != nil {
		return err
	}
	var methods []rpc
	for _, m := range p.schema.Methods {
		methods = append(methods, rpc{m.Desc})
	}
	return writeTemplates(dir, p.name, map[string]any{
		"Name": name, "Crate": crateName(name), "Services": p.source.Services, "Methods": methods, "Server": server,
		"ServicesComment": servicesComment,
	})
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
	if _, err := toolchain.Cargo.Run(ctx, work, []string{"RUSTC=rustc"}, nil, "install", "--quiet", "--locked", "--debug", "--root", "root",
		"--target-dir", "target", "--path", "source"); err != nil {
		return err
	}
	if err := os.Rename(filepath.Join(work, "root"), root); err != nil && !exists(root, "bin") { // otherwise, another process was faster
		return err
	}
	return nil
}
