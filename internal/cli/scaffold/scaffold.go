package scaffold

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"text/template"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/component/protowit/protosource"
)

// SDKModule is the Go module that servers in Go use.
const SDKModule = "github.com/tripod-run/tripod/sdk/go"

// TestsFile is the name of the file with the test cases.
const TestsFile = "tests.yaml"

// Options says what to write.
type Options struct {
	// Dir is the directory to write, which must not exist. Its base is the component's name.
	Dir string
	// Protos are the files with the services. ImportPaths are those of protosource.Compile.
	Protos, ImportPaths []string
	// Module is the path of the Go module; example.com/NAME by default.
	Module string
	// SDK is a directory with the SDK's sources. If it is empty, the SDK's latest version is fetched.
	SDK string
}

//go:embed all:templates
var templates embed.FS

// componentName matches names that fit into module paths, image references and labels.
var componentName = regexp.MustCompile(`^[a-z0-9]+([-.][a-z0-9]+)*$`)

// New writes the directory of a server in Go. If New fails, it leaves nothing behind. It returns errdefs.ErrAlreadyExists
// if the directory exists, errdefs.ErrInvalidArgument if the .proto files do not compile or have no service, and
// errdefs.ErrUnavailable if there is no Go toolchain.
func New(ctx context.Context, o Options) (err error) {
	name, err := checkOptions(&o)
	if err != nil {
		return err
	}
	source, err := protosource.Compile(ctx, o.Protos, o.ImportPaths)
	if err != nil {
		return err
	}
	if len(source.Services) == 0 {
		return fmt.Errorf("no service in %s: %w", strings.Join(o.Protos, ", "), errdefs.ErrInvalidArgument)
	}
	code, err := newGoCode(o.Module, source.Set)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(o.Dir), 0o755); err != nil {
		return err
	}
	work, err := os.MkdirTemp(filepath.Dir(o.Dir), ".tripod-new-") // in the same file system, for the rename
	if err != nil {
		return err
	}
	defer os.RemoveAll(work) // without effect after the rename
	if err := os.Chmod(work, 0o755); err != nil {
		return err
	}
	if err := copyProtos(work, code, o); err != nil {
		return err
	}
	if err := code.generate(ctx, work); err != nil {
		return err
	}
	if err := writeTemplates(work, map[string]any{
		"Name": name, "Module": o.Module, "SDKModule": SDKModule, "SDK": o.SDK, "Code": code, "Server": code.server(source.Services),
	}); err != nil {
		return err
	}
	if err := finish(ctx, work, o.SDK == ""); err != nil {
		return err
	}
	if err := os.Rename(work, o.Dir); err != nil {
		return fmt.Errorf("%s: %w", o.Dir, err)
	}
	return nil
}

// checkOptions fills in defaults and returns the component's name.
func checkOptions(o *Options) (name string, err error) {
	if o.Dir, err = filepath.Abs(o.Dir); err != nil {
		return "", err
	}
	name = filepath.Base(o.Dir)
	if !componentName.MatchString(name) {
		return "", fmt.Errorf("the name %q is not of lower-case letters, digits, and single - or . between them: %w", name, errdefs.ErrInvalidArgument)
	}
	if _, err := os.Lstat(o.Dir); err == nil {
		return "", fmt.Errorf("%s exists: %w", o.Dir, errdefs.ErrAlreadyExists)
	} else if !errors.Is(err, fs.ErrNotExist) {
		return "", err
	}
	if o.Module == "" {
		o.Module = "example.com/" + name
	}
	if strings.ContainsAny(o.Module, " \t\n\"`,;=\\") {
		return "", fmt.Errorf("--module %q is not a module path: %w", o.Module, errdefs.ErrInvalidArgument)
	}
	if o.SDK == "" {
		return name, nil
	}
	if o.SDK, err = filepath.Abs(o.SDK); err != nil {
		return "", err
	}
	text, err := os.ReadFile(filepath.Join(o.SDK, "go.mod"))
	if err != nil || !strings.HasPrefix(string(text), "module "+SDKModule+"\n") {
		return "", fmt.Errorf("--sdk %s is not a directory with the module %s (sdk/go in a clone of Tripod): %w", o.SDK, SDKModule, errdefs.ErrInvalidArgument)
	}
	return name, nil
}

// protoDir is the directory for .proto files, below the component's.
const protoDir = "proto"

// copyProtos copies the .proto files and their imports, except those that protoc's plugins know.
func copyProtos(dir string, code *goCode, o Options) error {
	paths := o.ImportPaths
	if len(paths) == 0 {
		for _, p := range o.Protos {
			paths = append(paths, filepath.Dir(p))
		}
	}
	for _, name := range code.own {
		text, err := readFirst(paths, name)
		if err != nil {
			return err
		}
		path := filepath.Join(dir, protoDir, filepath.FromSlash(name))
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, text, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// readFirst returns the content of a file in the first directory that has it.
func readFirst(dirs []string, name string) (text []byte, err error) {
	for _, dir := range dirs {
		text, err = os.ReadFile(filepath.Join(dir, filepath.FromSlash(name)))
		if !errors.Is(err, fs.ErrNotExist) {
			return text, err
		}
	}
	return nil, err
}

// writeTemplates executes the templates, whose names are those of the files with the suffix .tmpl.
func writeTemplates(dir string, data any) error {
	all, err := template.ParseFS(templates, "templates/*.tmpl")
	if err != nil {
		return err
	}
	for _, t := range all.Templates() {
		name, isFile := strings.CutSuffix(t.Name(), ".tmpl")
		if !isFile {
			continue // defined in a file
		}
		var text strings.Builder
		if err := t.Execute(&text, data); err != nil {
			return err
		}
		if name == "gitignore" {
			name = ".gitignore"
		}
		content, err := formatted(name, text.String())
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o644); err != nil {
			return err
		}
	}
	return nil
}
