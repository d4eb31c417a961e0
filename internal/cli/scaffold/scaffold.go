package scaffold

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"text/template"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/dynamicpb"
	"google.golang.org/protobuf/types/pluginpb"

	"github.com/tripod-run/tripod/internal/component/protowit/protosource"
	"github.com/tripod-run/tripod/internal/lazyregexp"
)

// SDKModule is the Go module that servers in Go use.
const SDKModule = "github.com/tripod-run/tripod/sdk/go"

// TestsFile is the name of the file with the test cases.
const TestsFile = "tests.yaml"

// Languages are the languages of new components, and the files with their methods.
var Languages = map[string]string{"c": cServer, "go": "main.go", "js": "server.js", "python": pythonServer, "rust": rustServer}

// Options says what to write.
type Options struct {
	// Language is one of Languages.
	Language string
	// Dir is the directory to write, which must not exist. Its base is the component's name.
	Dir string
	// Protos are the files with the services. ImportPaths are those of protosource.Compile.
	Protos, ImportPaths []string
	// Module is the path of the Go module; example.com/NAME by default. Module and SDK are only for Go.
	Module string
	// SDK is a directory with the SDK's sources. If it is empty, the SDK's latest version is fetched.
	SDK string
	// Progress gets what takes long.
	Progress io.Writer
}

//go:embed all:templates
var templates embed.FS

// componentName matches names that fit into module paths, image references and labels.
var componentName = lazyregexp.New(`^[a-z0-9]+([-.][a-z0-9]+)*$`)

// project writes components in one language.
type project interface {
	// own returns the names of the .proto files for which code is generated.
	own() []string
	// write writes all files but the .proto files, which are in the directory already.
	write(ctx context.Context, dir, name string) error
}

// New writes the directory of a server. If New fails, it leaves nothing behind. It returns errdefs.ErrAlreadyExists if the
// directory exists, errdefs.ErrInvalidArgument if the .proto files do not compile, have no service or do not fit the
// language, and errdefs.ErrUnavailable if there is no toolchain.
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
	p, err := newProject(o, source)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(o.Dir), 0o755); err != nil {
		return err
	}
	// In its place, because a virtual environment of Python does not work after a rename.
	if err := os.Mkdir(o.Dir, 0o755); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			os.RemoveAll(o.Dir)
		}
	}()
	if err := copyProtos(o.Dir, p.own(), o); err != nil {
		return err
	}
	return p.write(ctx, o.Dir, name)
}

func newProject(o Options, source *protosource.Result) (project, error) {
	switch o.Language {
	case "c":
		return inC.newProject(source, o.Progress)
	case "js":
		return newJSProject(source)
	case "python":
		return newPythonProject(source)
	case "rust":
		return inRust.newProject(source, o.Progress)
	default:
		return newGoProject(o, source)
	}
}

// Generate generates the code again, for the .proto files in the directory of a component, and writes what takes long to
// progress. It returns errdefs.ErrNotFound if there are no such files.
func Generate(ctx context.Context, dir string, progress io.Writer) error {
	source, err := compileProtos(ctx, dir)
	if err != nil {
		return err
	}
	switch {
	case isJavaScript(dir):
		return generateJS(ctx, dir, source.Set)
	case isPython(dir):
		return generatePython(ctx, dir, source.Set)
	case isC(dir):
		return inC.generate(ctx, dir, source.Set, progress)
	case isRust(dir):
		return inRust.generate(ctx, dir, source.Set, progress)
	default:
		return generateGo(ctx, dir, source.Set)
	}
}

// compileProtos compiles the .proto files in the directory of a component.
func compileProtos(ctx context.Context, dir string) (*protosource.Result, error) {
	root := filepath.Join(dir, protoDir)
	var files []string
	err := filepath.WalkDir(root+string(filepath.Separator), func(p string, _ fs.DirEntry, err error) error {
		if filepath.Ext(p) == ".proto" {
			files = append(files, p)
		}
		return err
	})
	if errors.Is(err, fs.ErrNotExist) || err == nil && len(files) == 0 {
		return nil, fmt.Errorf("%s contains no .proto file: %w", root, errdefs.ErrNotFound)
	}
	if err != nil {
		return nil, err
	}
	return protosource.Compile(ctx, files, []string{root})
}

// writeGenerated writes the files in the output of one of protoc's plugins into a directory.
func writeGenerated(plugin string, output []byte, dir string) error {
	var response pluginpb.CodeGeneratorResponse
	if err := proto.Unmarshal(output, &response); err != nil {
		return fmt.Errorf("output of %s: %w", plugin, err)
	}
	if response.Error != nil {
		return fmt.Errorf("%s: %s: %w", plugin, response.GetError(), errdefs.ErrInvalidArgument)
	}
	for _, f := range response.File {
		if !filepath.IsLocal(f.GetName()) {
			return fmt.Errorf("%s wants to write %q: %w", plugin, f.GetName(), errdefs.ErrInvalidArgument)
		}
		if err := writeFile(filepath.Join(dir, f.GetName()), []byte(f.GetContent())); err != nil {
			return err
		}
	}
	return nil
}

// writeFile writes a file and makes its directory.
func writeFile(path string, content []byte) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, content, 0o644)
}

// exists reports whether a directory has a file.
func exists(dir, name string) bool {
	_, err := os.Lstat(filepath.Join(dir, name))
	return err == nil
}

// filesOf returns the names of the files of a set that are the component's: all but the well-known types, which each
// language has.
func filesOf(set *descriptorpb.FileDescriptorSet) (names []string) {
	for _, f := range set.File {
		if !strings.HasPrefix(f.GetName(), "google/protobuf/") {
			names = append(names, f.GetName())
		}
	}
	return names
}

// commentLines returns the lines of the comment before a declaration. JavaScript ends lines at more characters than protobuf.
func commentLines(d protoreflect.Descriptor) []string {
	text := d.ParentFile().SourceLocations().ByDescriptor(d).LeadingComments
	text = strings.TrimRight(strings.NewReplacer("\r", "", "\u2028", "\n", "\u2029", "\n").Replace(text), "\n")
	if text == "" {
		return nil
	}
	return strings.Split(text, "\n")
}

// rpc is a method in the templates.
type rpc struct{ protoreflect.MethodDescriptor }

// Procedure returns the method's name in the test cases.
func (m rpc) Procedure() string { return fmt.Sprintf("%s/%s", m.Parent().FullName(), m.Name()) }

// EmptyRequest and EmptyReply return messages without content as protobuf's JSON.
func (m rpc) EmptyRequest() string { return emptyJSON(m.Input()) }
func (m rpc) EmptyReply() string   { return emptyJSON(m.Output()) }

// emptyJSON knows the forms of the well-known types: a google.protobuf.StringValue is "". A google.protobuf.Value has none
// without content; null is one with a null.
func emptyJSON(d protoreflect.MessageDescriptor) string {
	text, err := protojson.MarshalOptions{AllowPartial: true}.Marshal(dynamicpb.NewMessage(d))
	if err != nil {
		return "null"
	}
	return string(text)
}

// Kind returns the method's arity.
func (m rpc) Kind() string {
	switch client, server := m.IsStreamingClient(), m.IsStreamingServer(); {
	case client && server:
		return "bidi"
	case client:
		return "client"
	case server:
		return "server"
	default:
		return "unary"
	}
}

// checkOptions fills in defaults and returns the component's name.
func checkOptions(o *Options) (name string, err error) {
	if o.Dir, err = filepath.Abs(o.Dir); err != nil {
		return "", err
	}
	name = filepath.Base(o.Dir)
	if !componentName().MatchString(name) {
		return "", fmt.Errorf("the name %q is not of lower-case letters, digits, and single - or . between them: %w", name,
			errdefs.ErrInvalidArgument)
	}
	if _, err := os.Lstat(o.Dir); err == nil {
		return "", fmt.Errorf("%s exists: %w", o.Dir, errdefs.ErrAlreadyExists)
	} else if !errors.Is(err, fs.ErrNotExist) {
		return "", err
	}
	if o.Language == "" {
		o.Language = "go"
	}
	if _, ok := Languages[o.Language]; !ok {
		return "", fmt.Errorf("--lang %q: only c, go, js, python and rust are supported; for others, begin with `tripod wit gen` (docs/wasm.md): %w", o.Language, errdefs.ErrInvalidArgument)
	}
	if o.Language != "go" && (o.Module != "" || o.SDK != "") {
		return "", fmt.Errorf("--module and --sdk are for --lang go: %w", errdefs.ErrInvalidArgument)
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
		return "", fmt.Errorf("--sdk %s is not a directory with the module %s (sdk/go in a clone of Tripod): %w", o.SDK, SDKModule,
			errdefs.ErrInvalidArgument)
	}
	return name, nil
}

// protoDir is the directory for .proto files, below the component's.
const protoDir = "proto"

// copyProtos copies .proto files.
func copyProtos(dir string, names []string, o Options) error {
	paths := o.ImportPaths
	if len(paths) == 0 {
		for _, p := range o.Protos {
			paths = append(paths, filepath.Dir(p))
		}
	}
	for _, name := range names {
		text, err := readFirst(paths, name)
		if err != nil {
			return err
		}
		if err := writeFile(filepath.Join(dir, protoDir, filepath.FromSlash(name)), text); err != nil {
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

// writeTemplates executes the templates of a language and those of all, whose names are those of the files with the suffix
// .tmpl.
func writeTemplates(dir, language string, data any) error {
	all, err := template.ParseFS(templates, "templates/*.tmpl", "templates/"+language+"/*.tmpl")
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
		if place, ok := places[name]; ok {
			name = place
		}
		content, err := formatted(name, text.String())
		if err != nil {
			return err
		}
		if err := writeFile(filepath.Join(dir, name), content); err != nil {
			return err
		}
	}
	return nil
}

// places are the paths of files whose templates have another name.
var places = map[string]string{"gitignore": ".gitignore", "lib.rs": rustServer}
