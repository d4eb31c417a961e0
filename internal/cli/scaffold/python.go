package scaffold

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"unicode"

	"github.com/containerd/errdefs"
	"github.com/pelletier/go-toml/v2"
	"google.golang.org/protobuf/types/descriptorpb"

	"github.com/tripod-run/tripod/internal/cli/toolchain"
	"github.com/tripod-run/tripod/internal/component/protowit"
	"github.com/tripod-run/tripod/internal/component/protowit/protosource"
	"github.com/tripod-run/tripod/internal/lazyregexp"
)

// The files of a component in Python.
const (
	// projectFile says what the component serves.
	projectFile = "pyproject.toml"
	// pythonServer has the methods.
	pythonServer = "server.py"
	// requirementsFile pins the packages that are installed into environmentDir.
	requirementsFile = "requirements.txt"
	environmentDir   = ".venv"
	// witDir and genDir are generated: the component's interface, and its types in Python.
	witDir = "wit"
	genDir = "gen"
)

// pythonProject writes typed servers in Python: the node converts the messages.
type pythonProject struct {
	set      *descriptorpb.FileDescriptorSet
	services []string
	names    *pythonNames
}

func newPythonProject(source *protosource.Result) (*pythonProject, error) {
	schema, err := protowit.Compile(source.Set, source.Services...)
	if err != nil {
		return nil, err
	}
	return &pythonProject{set: source.Set, services: source.Services, names: newPythonNames(schema)}, nil
}

func (p *pythonProject) own() []string { return filesOf(p.set) }

// write also checks that the server implements the generated classes.
func (p *pythonProject) write(ctx context.Context, dir, name string) error {
	if err := writeTemplates(dir, "python", p.data(name)); err != nil {
		return err
	}
	if err := generatePython(ctx, dir, p.set); err != nil {
		return err
	}
	check := "import sys; sys.path[:0] = ['.', 'gen']; sys.dont_write_bytecode = True; import server"
	for _, s := range p.names.services {
		check += "; server." + s.Class + "()"
	}
	if _, err := toolchain.Python.Run(ctx, dir, nil, nil, "-c", check); err != nil {
		return fmt.Errorf("componentize-py makes no working Python of the names in the .proto files: %w", err)
	}
	return nil
}

// data returns the data of the templates.
func (p *pythonProject) data(name string) map[string]any {
	var methods []rpc
	for _, s := range p.names.services {
		for _, m := range s.Methods {
			methods = append(methods, m.rpc)
		}
	}
	return map[string]any{
		"Name": name, "Services": p.services, "Methods": methods, "Server": p.names.services, "Modules": p.names.used, "Call": p.names.call,
	}
}

// isPython reports whether a directory is that of a component in Python.
func isPython(dir string) bool { return exists(dir, projectFile) && exists(dir, pythonServer) }

// pythonServices returns the services in a pyproject.toml.
func pythonServices(dir string) ([]string, error) {
	return readServices(filepath.Join(dir, projectFile), `[tool.tripod] services = ["shop.v1.Cart"]`, func(text []byte) ([]string, error) {
		var content struct {
			Tool struct {
				Tripod struct {
					Services []string `toml:"services"`
				} `toml:"tripod"`
			} `toml:"tool"`
		}
		err := toml.Unmarshal(text, &content)
		return content.Tool.Tripod.Services, err
	})
}

// installPython makes the virtual environment of a directory with the packages of its requirements.txt, unless it has them.
func installPython(ctx context.Context, dir string) error {
	requirements, err := os.ReadFile(filepath.Join(dir, requirementsFile))
	if err != nil {
		return err
	}
	absolute, err := filepath.Abs(dir)
	if err != nil {
		return err
	}
	installed := filepath.Join(dir, environmentDir, "tripod-installed")
	have, err := os.ReadFile(installed)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	want := fmt.Appendf(nil, "%s\n%s", absolute, requirements)
	if bytes.Equal(have, want) {
		return nil
	}
	if err := checkPython(ctx, dir); err != nil {
		return err
	}
	args := []string{"-m", "venv", environmentDir}
	// The programs of an environment contain its path. Otherwise, what the user has installed there stays.
	if path, _, known := strings.Cut(string(have), "\n"); known && path != absolute {
		args = append(args, "--clear")
	}
	if _, err := toolchain.Python.Run(ctx, dir, nil, nil, args...); err != nil {
		return err
	}
	if _, err := environmentProgram("pip").Run(ctx, dir, nil, nil, "install", "--quiet", "--disable-pip-version-check", "--no-input",
		"--require-hashes", "--requirement", requirementsFile); err != nil {
		return err
	}
	return os.WriteFile(installed, want, 0o644)
}

// checkPython returns errdefs.ErrUnavailable if python3 is too old or cannot make virtual environments.
func checkPython(ctx context.Context, dir string) error {
	const check = `import importlib.util as u, sys
print("old" if sys.version_info < (3, 11) else "" if u.find_spec("venv") and u.find_spec("ensurepip") else "venv")`
	out, err := toolchain.Python.Run(ctx, dir, nil, nil, "-c", check)
	switch {
	case err != nil:
		return err
	case strings.TrimSpace(string(out)) == "old":
		return fmt.Errorf("the python3 in PATH is older than 3.11, which components in Python need: %w", errdefs.ErrUnavailable)
	case strings.TrimSpace(string(out)) == "venv":
		return fmt.Errorf("the python3 in PATH has no module venv, which installs the packages of components in Python (Debian's package python3-venv): %w", errdefs.ErrUnavailable)
	}
	return nil
}

func environmentProgram(name string) toolchain.Program {
	return toolchain.At(filepath.Join(environmentDir, "bin", name))
}

// componentizePython runs componentize-py for the world of a schema, whose WIT must be in witDir.
func componentizePython(ctx context.Context, dir string, schema *protowit.Schema, args ...string) error {
	absolute, err := filepath.Abs(dir)
	if err != nil {
		return err
	}
	env := []string{
		"VIRTUAL_ENV=" + filepath.Join(absolute, environmentDir), // where it looks for packages
		"RUST_BACKTRACE=0", "RUST_LIB_BACKTRACE=0", // otherwise its own stack buries the error in server.py
	}
	all := append([]string{"--quiet", "--wit-path", witDir, "--world", "server"}, newPythonNames(schema).flags...)
	_, err = environmentProgram("componentize-py").Run(ctx, dir, env, nil, append(all, args...)...)
	return err
}

// generatePython writes the directories wit and gen.
func generatePython(ctx context.Context, dir string, set *descriptorpb.FileDescriptorSet) error {
	services, err := pythonServices(dir)
	if err != nil {
		return err
	}
	schema, err := writeWIT(dir, set, services)
	if err != nil {
		return err
	}
	if err := installPython(ctx, dir); err != nil {
		return err
	}
	if err := os.RemoveAll(filepath.Join(dir, genDir)); err != nil {
		return err
	}
	return componentizePython(ctx, dir, schema, "bindings", genDir)
}

// continuation matches the end of a comment that would continue in the next line in C.
var continuation = lazyregexp.New(`[ \\]*\\\n`)

// writeWIT writes witDir, the interface of a typed component, again. What it had of other .proto files would be part of the world.
func writeWIT(dir string, set *descriptorpb.FileDescriptorSet, services []string) (*protowit.Schema, error) {
	schema, err := protowit.Compile(set, services...)
	if err != nil {
		return nil, err
	}
	root := filepath.Join(dir, witDir)
	if err := os.RemoveAll(root); err != nil {
		return nil, err
	}
	for _, f := range schema.WIT() {
		if err := writeFile(filepath.Join(root, f.Path), continuation().ReplaceAll([]byte(f.Text), []byte("\n"))); err != nil {
			return nil, err
		}
	}
	return schema, nil
}

// buildPython makes the component of a directory. It writes the WIT again, so that the component has the types of the
// descriptors that are pushed with it.
func buildPython(ctx context.Context, dir string, source *protosource.Result, services []string) error {
	schema, err := writeWIT(dir, source.Set, services)
	if err != nil {
		return err
	}
	if err := installPython(ctx, dir); err != nil {
		return err
	}
	return componentizePython(ctx, dir, schema, "componentize", strings.TrimSuffix(pythonServer, ".py"), "--output", componentFile)
}

// docstring returns the docstring for a comment, or "". Each further line has the prefix.
func docstring(lines []string, prefix string) string {
	text := strings.TrimSpace(strings.Map(func(r rune) rune {
		if unicode.IsControl(r) && r != '\n' {
			return ' '
		}
		return r
	}, strings.Join(lines, "\n")))
	if text == "" {
		return ""
	}
	text = strings.NewReplacer(`\`, `\\`, `"""`, `\"\"\"`).Replace(text)
	lines = strings.Split(text, "\n")
	for i := range lines {
		if lines[i] = strings.TrimSpace(lines[i]); i > 0 && lines[i] != "" {
			lines[i] = prefix + lines[i]
		}
	}
	if len(lines) > 1 || strings.HasSuffix(text, `"`) {
		lines = append(lines, prefix)
	}
	return `"""` + strings.Join(lines, "\n") + `"""`
}

// addOnce appends a name unless it is there.
func addOnce(names []string, name string) []string {
	if slices.Contains(names, name) {
		return names
	}
	return append(names, name)
}
