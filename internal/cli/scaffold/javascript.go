package scaffold

import (
	"bytes"
	"context"
	"embed"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/pluginpb"

	"github.com/tripod-run/tripod/internal/cli/toolchain"
	"github.com/tripod-run/tripod/internal/component/protowit"
	"github.com/tripod-run/tripod/internal/component/protowit/protosource"
)

// packageFile is the file of a component in JavaScript that says what it serves.
const packageFile = "package.json"

// runtime is the code between the host and the functions of a server.
//
//go:embed runtime/js
var runtime embed.FS

// jsProject writes servers in JavaScript. Messages are of Protobuf-ES (@bufbuild/protobuf), whose generator is one of the
// packages that package-lock.json pins.
type jsProject struct {
	set      *descriptorpb.FileDescriptorSet
	services []jsService
	files    []string
}

type jsService struct {
	protoreflect.ServiceDescriptor
	Methods []jsMethod
}

type jsMethod struct {
	rpc
	Function string
	Comment  []string // lines, each with the space at its beginning
	Echo     bool     // the reply is the request
}

// newJSProject returns errdefs.ErrInvalidArgument if two methods would be one function.
func newJSProject(source *protosource.Result) (*jsProject, error) {
	files, err := protodesc.NewFiles(source.Set)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", err, errdefs.ErrInvalidArgument)
	}
	p := &jsProject{set: source.Set, files: filesOf(source.Set)}
	for _, name := range source.Services {
		d, err := files.FindDescriptorByName(protoreflect.FullName(name))
		if err != nil {
			return nil, err
		}
		s := jsService{ServiceDescriptor: d.(protoreflect.ServiceDescriptor)}
		functions := map[string]protoreflect.Name{}
		for i := range s.ServiceDescriptor.Methods().Len() {
			m := jsMethod{rpc: rpc{s.ServiceDescriptor.Methods().Get(i)}}
			m.Function, m.Echo = functionName(string(m.Name())), m.Input() == m.Output()
			m.Comment = commentLines(m.MethodDescriptor)
			if other, taken := functions[m.Function]; taken {
				return nil, fmt.Errorf("the methods %s and %s of %s have the same name in JavaScript, %s: %w", other, m.Name(), name, m.Function,
					errdefs.ErrInvalidArgument)
			}
			functions[m.Function] = m.Name()
			s.Methods = append(s.Methods, m)
		}
		p.services = append(p.services, s)
	}
	return p, nil
}

// functionName returns the name that Protobuf-ES gives a method. Any keyword can be the name of a function in an object;
// what each object has gets a $.
func functionName(method string) string {
	name := lowerFirst(method)
	if slices.Contains([]string{"constructor", "toString", "toJSON", "valueOf"}, name) {
		name += "$"
	}
	return name
}

func (p *jsProject) own() []string { return p.files }

// data returns the data of the templates.
func (p *jsProject) data(name string) map[string]any {
	var methods []rpc
	var services []string
	for _, s := range p.services {
		services = append(services, string(s.FullName()))
		for _, m := range s.Methods {
			methods = append(methods, m.rpc)
		}
	}
	return map[string]any{"Name": name, "Server": p.services, "Services": services, "Methods": methods}
}

func (p *jsProject) write(ctx context.Context, dir, name string) error {
	if err := writeTemplates(dir, "js", p.data(name)); err != nil {
		return err
	}
	return generateJS(ctx, dir, p.set)
}

// installPackages installs the packages of a package-lock.json, unless they are installed.
func installPackages(ctx context.Context, dir string) error {
	want, err := os.Stat(filepath.Join(dir, "package-lock.json"))
	if err != nil {
		return err
	}
	if have, err := os.Stat(filepath.Join(dir, "node_modules", ".package-lock.json")); err == nil && !have.ModTime().Before(want.ModTime()) {
		return nil
	}
	// Not `npm ci`: it wants the lock file to have the optional packages of all platforms, some of which were never published.
	_, err = toolchain.NPM.Run(ctx, dir, nil, nil, "install", "--prefer-offline", "--no-audit", "--no-fund", "--loglevel=error")
	return err
}

// generateJS writes the directory gen: the code of Protobuf-ES's generator, and the runtime.
func generateJS(ctx context.Context, dir string, set *descriptorpb.FileDescriptorSet) error {
	if err := installPackages(ctx, dir); err != nil {
		return err
	}
	files := filesOf(set)
	request, err := proto.Marshal(&pluginpb.CodeGeneratorRequest{
		FileToGenerate: files, ProtoFile: set.File, Parameter: new("target=js+dts,import_extension=js"),
	})
	if err != nil {
		return err
	}
	gen := filepath.Join(dir, "gen")
	out, err := toolchain.Node.Run(ctx, dir, nil, bytes.NewReader(request),
		filepath.Join("node_modules", "@bufbuild", "protoc-gen-es", "bin", "protoc-gen-es"))
	if err != nil {
		return err
	}
	if err := writeGenerated("protoc-gen-es", out, gen); err != nil {
		return err
	}
	static, err := fs.Sub(runtime, "runtime/js")
	if err != nil {
		return err
	}
	written := map[string]string{"services.js": servicesModule(files)}
	for _, name := range []string{"main.js", "platform.js", "tripod.js", "warm.js", "world.wit"} {
		text, err := fs.ReadFile(static, name)
		if err != nil {
			return err
		}
		written[name] = string(text)
	}
	written["world.wit"] = protowit.RawDocument() + "\n" + written["world.wit"]
	for name, text := range written {
		if err := os.WriteFile(filepath.Join(gen, name), []byte(text), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// servicesModule returns the module that exports the descriptors of all services.
func servicesModule(files []string) string {
	var imports, names strings.Builder
	for i, f := range files {
		path, _ := json.Marshal("./" + strings.TrimSuffix(f, ".proto") + "_pb.js") // a string never fails
		fmt.Fprintf(&imports, "import * as file%d from %s;\n", i, path)
		fmt.Fprintf(&names, "  file%d,\n", i)
	}
	return "// The services of the directory proto.\n// Generated by `tripod component generate`; do not edit.\n" + imports.String() +
		"\nexport const services = [\n" + names.String() + "].flatMap((file) => Object.values(file)).filter((d) => d.kind === 'service');\n"
}

// isJavaScript reports whether a directory is the package of a component in JavaScript.
func isJavaScript(dir string) bool { return exists(dir, packageFile) }

// buildJS makes the component of a package by its script build.
func buildJS(ctx context.Context, dir string) error {
	if err := installPackages(ctx, dir); err != nil {
		return err
	}
	_, err := toolchain.NPM.Run(ctx, dir, nil, nil, "run", "--silent", "build")
	return err
}

// packageServices returns the services in a package.json.
func packageServices(dir string) ([]string, error) {
	return readServices(filepath.Join(dir, packageFile), `"tripod": {"services": ["shop.v1.Cart"]}`, func(text []byte) ([]string, error) {
		var content struct {
			Tripod struct {
				Services []string `json:"services"`
			} `json:"tripod"`
		}
		err := json.Unmarshal(text, &content)
		return content.Tripod.Services, err
	})
}
