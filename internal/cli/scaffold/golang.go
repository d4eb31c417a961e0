package scaffold

import (
	"bytes"
	"context"
	"embed"
	"fmt"
	"go/format"
	"go/token"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/compiler/protogen"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/pluginpb"

	"github.com/tripod-run/tripod/internal/cli/toolchain"
	"github.com/tripod-run/tripod/internal/component/protowit/protosource"
	"github.com/tripod-run/tripod/internal/lazyregexp"
)

// plugins are protoc's generators of Go code, as tools of the module in plugins.mod, which pins them. Generated code needs
// the versions of protobuf and grpc-go in the template of go.mod, or later ones.
var plugins = []string{"protoc-gen-go", "protoc-gen-go-grpc"}

// env keeps a workspace around a new directory, of which the directory is no part, from making the toolchain fail.
var env = []string{"GOWORK=off"}

//go:embed plugins.mod plugins.sum
var pluginModule embed.FS

// writePluginModule makes a directory with the module of the plugins. The caller removes it.
func writePluginModule() (dir string, err error) {
	if dir, err = os.MkdirTemp("", "tripod-plugins-"); err != nil {
		return "", err
	}
	for from, to := range map[string]string{"plugins.mod": "go.mod", "plugins.sum": "go.sum"} {
		text, err := pluginModule.ReadFile(from)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, to), text, 0o600)
		}
		if err != nil {
			os.RemoveAll(dir)
			return "", err
		}
	}
	return dir, nil
}

// goCode is the Go code of a set of .proto files.
type goCode struct {
	request *pluginpb.CodeGeneratorRequest
	plugin  *protogen.Plugin
	// own are the names of the files for which code is generated. The others have Go packages of their own.
	own []string
}

// newGoCode decides on Go packages: each protobuf package becomes a directory below gen. The set must contain all
// imports.
func newGoCode(module string, set *descriptorpb.FileDescriptorSet) (*goCode, error) {
	parameters := []string{"module=" + module}
	c := &goCode{}
	for _, f := range set.File {
		if strings.HasPrefix(f.GetName(), "google/") && f.GetOptions().GetGoPackage() != "" {
			continue
		}
		if strings.ContainsAny(f.GetName(), ",=") {
			return nil, fmt.Errorf("the name %q contains a comma or an equals sign, which protoc's plugins do not accept: %w", f.GetName(),
				errdefs.ErrInvalidArgument)
		}
		c.own = append(c.own, f.GetName())
		dir := path.Join("gen", strings.ReplaceAll(f.GetPackage(), ".", "/"))
		parameters = append(parameters, fmt.Sprintf("M%s=%s/%s;%s", f.GetName(), module, dir, packageName(f.GetPackage())))
	}
	c.request = &pluginpb.CodeGeneratorRequest{
		FileToGenerate: c.own, ProtoFile: set.File, Parameter: new(strings.Join(parameters, ",")),
	}
	var err error
	if c.plugin, err = (protogen.Options{}).New(c.request); err != nil {
		return nil, fmt.Errorf("%w: %w", err, errdefs.ErrInvalidArgument)
	}
	return c, nil
}

var version = lazyregexp.New(`^v[0-9]+`)

// packageName returns the name of the Go package for a protobuf package: greetv1 for shop.greet.v1.
func packageName(protoPackage string) string {
	words := strings.Split(protoPackage, ".")
	name := words[len(words)-1]
	if len(words) > 1 && version().MatchString(name) {
		name = words[len(words)-2] + name
	}
	name = strings.ToLower(strings.ReplaceAll(name, "_", ""))
	if name == "" || token.IsKeyword(name) || name == "main" {
		name += "pb"
	}
	return name
}

// generate runs the plugins and writes their output into a directory.
func (c *goCode) generate(ctx context.Context, dir string) error {
	request, err := proto.Marshal(c.request)
	if err != nil {
		return err
	}
	module, err := writePluginModule()
	if err != nil {
		return err
	}
	defer os.RemoveAll(module)
	for _, p := range plugins {
		out, err := toolchain.Go.Run(ctx, module, env, bytes.NewReader(request), "tool", p)
		if err != nil {
			return err
		}
		if err := writeGenerated(p, out, dir); err != nil {
			return err
		}
	}
	return nil
}

// generateGo generates the Go code of the module in a directory again.
func generateGo(ctx context.Context, dir string, set *descriptorpb.FileDescriptorSet) error {
	module, err := toolchain.Go.Run(ctx, dir, env, nil, "list", "-m")
	if err != nil {
		return err
	}
	code, err := newGoCode(strings.TrimSpace(string(module)), set)
	if err != nil {
		return err
	}
	return code.generate(ctx, dir)
}

// goServer is the data of the templates for the server.
type goServer struct {
	Imports  []goImport
	Services []goService
	// Names of packages, by import path.
	names map[protogen.GoImportPath]string
}

type goImport struct{ Name, Path string }

type goService struct {
	*protogen.Service
	Package string // the name of its Go package
	Type    string // the name of its implementation
	Methods []goMethod
}

type goMethod struct {
	*protogen.Method
	Request, Reply string // qualified names
	Echo           bool   // the reply is the request
}

// Kind returns the method's arity.
func (m goMethod) Kind() string { return rpc{m.Desc}.Kind() }

// Has reports whether a method has one of the arities.
func (s *goServer) Has(kinds ...string) bool {
	return slices.ContainsFunc(s.Services, func(service goService) bool {
		return slices.ContainsFunc(service.Methods, func(m goMethod) bool { return slices.Contains(kinds, m.Kind()) })
	})
}

// server returns the data for a server of the given services.
func (c *goCode) server(services []string) *goServer {
	s := &goServer{names: map[protogen.GoImportPath]string{}}
	types := map[string]bool{"main": true}
	for _, f := range c.plugin.Files {
		for _, service := range f.Services {
			if !slices.Contains(services, string(service.Desc.FullName())) {
				continue
			}
			g := goService{Service: service, Package: s.packageOf(c, f.GoImportPath), Type: unique(types, lowerFirst(service.GoName)+"Server")}
			for _, m := range service.Methods {
				g.Methods = append(g.Methods, goMethod{
					Method: m, Request: s.qualified(c, m.Input), Reply: s.qualified(c, m.Output), Echo: m.Input == m.Output,
				})
			}
			s.Services = append(s.Services, g)
		}
	}
	for p, name := range s.names {
		s.Imports = append(s.Imports, goImport{name, string(p)})
	}
	slices.SortFunc(s.Imports, func(a, b goImport) int { return strings.Compare(a.Path, b.Path) })
	return s
}

func (s *goServer) qualified(c *goCode, m *protogen.Message) string {
	return s.packageOf(c, m.GoIdent.GoImportPath) + "." + m.GoIdent.GoName
}

// packageOf returns the name of an imported package, which differs from those of the other imports.
func (s *goServer) packageOf(c *goCode, p protogen.GoImportPath) string {
	if name, ok := s.names[p]; ok {
		return name
	}
	name := path.Base(string(p))
	for _, f := range c.plugin.Files {
		if f.GoImportPath == p {
			name = string(f.GoPackageName)
		}
	}
	taken := map[string]bool{"context": true, "io": true, "log": true, "grpc": true, "tripodgrpc": true}
	for _, n := range s.names {
		taken[n] = true
	}
	s.names[p] = unique(taken, name)
	return s.names[p]
}

// unique returns the name, or with a number if it is taken, and takes it.
func unique(taken map[string]bool, name string) string {
	chosen := name
	for i := 2; taken[chosen]; i++ {
		chosen = fmt.Sprint(name, i)
	}
	taken[chosen] = true
	return chosen
}

func lowerFirst(s string) string { return strings.ToLower(s[:1]) + s[1:] }

// formatted formats Go sources, and returns other files as they are.
func formatted(name, text string) ([]byte, error) {
	if filepath.Ext(name) != ".go" {
		return []byte(text), nil
	}
	return format.Source([]byte(text))
}

// goProject writes servers in Go.
type goProject struct {
	code     *goCode
	services []string
	// module and sdk are those of Options.
	module, sdk string
}

func newGoProject(o Options, source *protosource.Result) (*goProject, error) {
	code, err := newGoCode(o.Module, source.Set)
	return &goProject{code: code, services: source.Services, module: o.Module, sdk: o.SDK}, err
}

func (p *goProject) own() []string { return p.code.own }

// write also fetches the latest SDK without a directory with the SDK, and checks that the server compiles.
func (p *goProject) write(ctx context.Context, dir, name string) error {
	if err := p.code.generate(ctx, dir); err != nil {
		return err
	}
	server := p.code.server(p.services)
	var methods []rpc
	for _, s := range server.Services {
		for _, m := range s.Methods {
			methods = append(methods, rpc{m.Desc})
		}
	}
	if err := writeTemplates(dir, "go", map[string]any{
		"Name": name, "Module": p.module, "SDKModule": SDKModule, "SDK": p.sdk, "Server": server, "Methods": methods,
	}); err != nil {
		return err
	}
	if p.sdk == "" {
		if _, err := toolchain.Go.Run(ctx, dir, env, nil, "get", SDKModule+"@latest"); err != nil {
			return fmt.Errorf("%w (--sdk names a directory with the SDK, such as sdk/go in a clone of Tripod)", err)
		}
	}
	_, err := toolchain.Go.Run(ctx, dir, env, nil, "vet", ".")
	return err
}
