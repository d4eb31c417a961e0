package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/tripod-run/tripod/internal/cli/scaffold"
	"github.com/tripod-run/tripod/internal/component/describe"
	"github.com/tripod-run/tripod/internal/component/protowit"
	"github.com/tripod-run/tripod/internal/component/protowit/protosource"
	"github.com/tripod-run/tripod/internal/component/wasmbin"
	"github.com/tripod-run/tripod/internal/config"
	"github.com/tripod-run/tripod/internal/image"
	"github.com/tripod-run/tripod/internal/image/registry"
	"github.com/tripod-run/tripod/internal/keys"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/artifact"
)

// PushCommand returns `tripod push`, which needs no node.
func (a *App) PushCommand() *cobra.Command {
	p := push{app: a}
	c := &cobra.Command{
		Use:   "push FILE|DIRECTORY REFERENCE",
		Short: "Push a WebAssembly component or a VM's disk to a registry as an OCI artifact",
		Long: "Push a WebAssembly component, or a command for WASI preview 1, to a registry as an OCI artifact (the CNCF's\n" +
			"Wasm layout). Invalid components are rejected before the push. The same files make the same artifact;\n" +
			"content that the registry has is not sent again.\n\n" +
			"A DIRECTORY is the package of a gRPC server in Go that uses github.com/tripod-run/tripod/sdk/go. It is built with\n" +
			"the Go toolchain in PATH, and the descriptors are taken from the program. Or it has a package.json, as made by\n" +
			"`tripod component new --lang js`, or a pyproject.toml and a server.py, as made with --lang python, or a\n" +
			"compile_flags.txt and a server.c, as made with --lang c, or a Cargo.toml and a src/lib.rs, as made with --lang rust: npm,\n" +
			"python3, clang or cargo in PATH builds it, and the descriptors are those of its directory proto.\n\n" +
			"With --compiled, the image also has the machine code for nodes with the engine and processor of this machine. The key is\n" +
			"of `openssl genpkey -algorithm ed25519 -out fleet.key`; nodes need its public half (`openssl pkey -in fleet.key -pubout`) in\n" +
			"their [[wasm.compiled_layer]]. Other nodes compile the component, as without it.\n\n" +
			"A qcow2 image or a raw disk (.raw, .img, .iso), optionally compressed (.gz, .xz, .zst), is pushed as the disk of a VM.",
		Example: "  tripod push app.wasm registry.example/greeter:1 --proto greeter.proto\n" +
			"  tripod push app.wasm registry.example/greeter:1 --descriptors greeter.pb --component example.com:greet.Greeter@1.0.0\n" +
			"  tripod push ./cmd/server registry.example/greeter:1\n" +
			"  tripod push app.wasm registry.example/greeter:1 --proto greeter.proto --compiled --key fleet.key\n" +
			"  tripod push debian.qcow2 registry.example/debian:12",
		Args: cobra.ExactArgs(2),
		RunE: func(c *cobra.Command, args []string) error {
			ctx, cancel := context.WithTimeout(c.Context(), p.timeout)
			defer cancel()
			if err := p.compiled.check(); err != nil {
				return err
			}
			result, err := p.run(ctx, args[0], args[1])
			if err != nil {
				return err
			}
			return a.printPushed(result)
		},
	}
	f := c.Flags()
	p.flags(f)
	f.StringVar(&p.component, "component", "", "DOMAIN:SERVER@VERSION, the component's name in the labels of pods")
	f.StringVar(&p.prefix, "label-prefix", config.Default().Node.ComponentLabelPrefix, "prefix of the labels for --component")
	f.StringToStringVar(&p.annotations, "annotation", nil, "KEY=VALUE for the manifest")
	p.registries.flags(f)
	f.BoolVar(&p.dryRun, "dry-run", false, "check the files without pushing")
	p.compiled.flags(f)
	f.DurationVar(&p.timeout, "timeout", 10*time.Minute, "timeout")
	a.OutputFlag(c)
	return c
}

// registryFlags say how to reach a registry without a node.
type registryFlags struct {
	registry.Config
	creds string
}

func (r *registryFlags) flags(f *pflag.FlagSet) {
	f.BoolVar(&r.PlainHTTP, "plain-http", false, "use http for registries without a hosts.toml")
	f.StringSliceVar(&r.HostsDir, "hosts-dir", config.Default().Image.HostsDirs, "directories with hosts.toml files (certs.d)")
	f.BoolVar(&r.RefuseDowngrades, "refuse-downgrades", config.Default().Image.RefuseDowngrades,
		"refuse uploads and token servers without TLS if a registry with TLS names them")
	f.StringVar(&r.DockerConfig, "docker-config", dockerConfig(), "docker config.json with logins")
	f.StringVar(&r.creds, "creds", "", "USER:PASSWORD for the registry; @FILE reads it from a file and keeps it out of process lists")
}

// auth returns the login that the flags give, or nil.
func (r *registryFlags) auth() (*registry.Auth, error) {
	creds, err := parseCreds(r.creds)
	if creds == nil {
		return nil, err
	}
	return &registry.Auth{Username: creds.GetUsername(), Password: creds.GetPassword()}, nil
}

// dockerConfig returns the path of the file where docker login stores logins.
func dockerConfig() string {
	if dir := os.Getenv("DOCKER_CONFIG"); dir != "" {
		return filepath.Join(dir, "config.json")
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return ""
	}
	return filepath.Join(home, ".docker", "config.json")
}

type push struct {
	app *App
	description
	component, prefix string
	annotations       map[string]string
	registries        registryFlags
	dryRun            bool
	timeout           time.Duration
	compiled          compiledPush
	names             bool // a binary that is built has the names of functions
}

// description says which services a component serves.
type description struct {
	protos, imports, services []string
	descriptors               string
	// built is the component of a directory in C, JavaScript, Python or Rust, or nil.
	built *scaffold.Built
}

func (d *description) flags(f *pflag.FlagSet) {
	f.StringSliceVar(&d.protos, "proto", nil, "FILE.proto with the services that the component serves")
	f.StringSliceVarP(&d.imports, "proto-path", "I", nil, "search path of imports (default: the files' directories)")
	f.StringVar(&d.descriptors, "descriptors", "", "a FileDescriptorSet (protoc --include_imports --descriptor_set_out) instead of --proto")
	f.StringSliceVar(&d.services, "service", nil, "full name of a service (default: all)")
}

// pushed is the result of a push.
type pushed struct {
	Reference   string            `json:"reference"`
	Digest      string            `json:"digest"`
	World       artifact.World    `json:"world,omitempty"`
	Services    []string          `json:"services,omitempty"`
	Route       *artifact.Route   `json:"route,omitempty"`
	Layers      []pushedLayer     `json:"layers"`
	Annotations map[string]string `json:"annotations,omitempty"`
	Warnings    []string          `json:"warnings,omitempty"`
}

type pushedLayer struct {
	MediaType string `json:"mediaType"`
	Digest    string `json:"digest"`
	Size      int64  `json:"size"`
}

func (p *push) run(ctx context.Context, file, ref string) (*pushed, error) {
	spec, result, err := p.load(ctx, file)
	if errors.Is(err, errDisk) {
		return p.runDisk(ctx, file, ref)
	}
	if err != nil {
		return nil, err
	}
	if err := p.compiled.addTo(ctx, spec); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	built, err := artifact.Build(*spec)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	result.Digest = built.Manifest.Digest.String()
	return result, p.send(ctx, result, ref, built.Manifest, built.Blobs)
}

// load reads or builds a component, and checks that a node would run it. The result lacks what only an image has.
func (p *push) load(ctx context.Context, file string) (*artifact.Spec, *pushed, error) {
	binary, err := p.binary(ctx, file)
	if err != nil {
		return nil, nil, err
	}
	spec := &artifact.Spec{Wasm: binary}
	if spec.Annotations, err = p.manifestAnnotations(); err != nil {
		return nil, nil, err
	}
	result, err := p.judge(ctx, spec)
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", file, err)
	}
	return spec, result, nil
}

// judge checks that a node would run a component, and completes its spec. It returns what is known without the image.
func (d *description) judge(ctx context.Context, spec *artifact.Spec) (*pushed, error) {
	outline, err := wasmbin.Read(bytes.NewReader(spec.Wasm), int64(len(spec.Wasm)))
	if err != nil {
		return nil, err
	}
	served, err := d.describe(ctx, spec, outline)
	if err != nil {
		return nil, err
	}
	result := &pushed{Services: served.services, Annotations: spec.Annotations}
	if !artifact.IsRaw(outline) { // otherwise the guest reads and writes integers itself
		result.Warnings = artifact.Warnings(spec.Wasm, served.methods)
	}
	if result.World, err = artifact.Check(outline, served.interfaces); err != nil {
		return nil, err
	}
	if result.Route, err = artifact.RouteOf(spec.Wasm, outline, result.World); err != nil {
		return nil, err
	}
	if served.noSnapshot != "" {
		result.Route.RefuseSnapshot(served.noSnapshot)
		result.Warnings = append(result.Warnings, "each request will initialize the component again: "+served.noSnapshot)
	}
	if served.noWarmUp != "" {
		result.Warnings = append(result.Warnings, "the warm-up will be undone: "+served.noWarmUp)
	}
	return result, nil
}

// runDisk implements run for the disk of a VM.
func (p *push) runDisk(ctx context.Context, file, ref string) (*pushed, error) {
	if len(p.protos) > 0 || p.descriptors != "" || len(p.services) > 0 || p.component != "" || p.compiled.wanted {
		return nil, fmt.Errorf("%s is a disk; --proto, --descriptors, --service, --component and --compiled are for WebAssembly components: %w",
			file, errdefs.ErrInvalidArgument)
	}
	manifest, blobs, err := image.BuildDisk(file, p.annotations)
	if err != nil {
		return nil, err
	}
	result := &pushed{Digest: manifest.Digest.String(), Annotations: p.annotations}
	return result, p.send(ctx, result, ref, manifest, blobs)
}

// send pushes the artifact and completes the result. With --dry-run it only completes the result.
func (p *push) send(ctx context.Context, result *pushed, ref string, manifest image.Blob, blobs []image.Blob) (err error) {
	for _, b := range blobs {
		result.Layers = append(result.Layers, pushedLayer{b.MediaType, b.Digest.String(), b.Size})
	}
	result.Reference, err = p.transfer(ctx, ref, manifest, blobs)
	return err
}

func (p *push) transfer(ctx context.Context, ref string, manifest image.Blob, blobs []image.Blob) (string, error) {
	if p.dryRun {
		return image.DigestReference(ref, manifest.Digest)
	}
	auth, err := p.registries.auth()
	if err != nil {
		return "", err
	}
	shown := p.app.newProgress("pushing " + ref)
	name, err := image.Push(ctx, p.registries.Config, ref, auth, func(sent image.Progress) { shown.set(sent.Done, sent.Total) }, manifest,
		blobs...)
	shown.end(err)
	return name, err
}

// manifestAnnotations returns the annotations of the manifest.
func (p *push) manifestAnnotations() (map[string]string, error) {
	annotations := map[string]string{}
	maps.Copy(annotations, p.annotations)
	if p.component != "" {
		named, err := artifact.NameAnnotations(p.prefix, p.component)
		if err != nil {
			return nil, fmt.Errorf("--component: %w", err)
		}
		maps.Copy(annotations, named)
	}
	if len(annotations) == 0 {
		return nil, nil
	}
	return annotations, nil
}

// served is what a component serves. The interfaces are those that it exports for this; a component of the raw world has
// none. All are sorted.
type served struct {
	interfaces, services []string
	methods              []protoreflect.MethodDescriptor
	noSnapshot, noWarmUp string // why each request will initialize the component, or do what the warm-up did, or ""
}

// describe sets the component's descriptors in spec and returns what it serves, which is nothing for a component without
// services.
func (d *description) describe(ctx context.Context, spec *artifact.Spec, outline *wasmbin.Outline) (served, error) {
	services, noSnapshot, noWarmUp := d.services, "", ""
	var err error
	switch {
	case len(spec.Descriptors) > 0: // those of an image
	case len(d.protos) > 0 && d.descriptors != "":
		return served{}, fmt.Errorf("use either --proto or --descriptors: %w", errdefs.ErrInvalidArgument)
	case len(d.protos) > 0:
		source, err := protosource.Compile(ctx, d.protos, d.imports)
		if err != nil {
			return served{}, err
		}
		if len(services) == 0 {
			services = source.Services
		}
		if spec.Descriptors, err = (proto.MarshalOptions{Deterministic: true}).Marshal(source.Set); err != nil {
			return served{}, err
		}
	case d.descriptors != "":
		if spec.Descriptors, err = os.ReadFile(d.descriptors); err != nil {
			return served{}, err
		}
	case d.built != nil:
		if services, err = chooseServices(services, d.built.Services); err != nil {
			return served{}, err
		}
		if spec.Descriptors, err = (proto.MarshalOptions{Deterministic: true}).Marshal(d.built.Source.Set); err != nil {
			return served{}, err
		}
	case artifact.IsRaw(outline):
		own, err := describeItself(ctx, spec, outline)
		if err != nil {
			return served{}, err
		}
		if services, err = chooseServices(services, own.Services); err != nil {
			return served{}, err
		}
		noSnapshot, noWarmUp = own.NoSnapshot, own.NoWarmUp
	case len(services) > 0:
		return served{}, fmt.Errorf("--service needs --proto or --descriptors: %w", errdefs.ErrInvalidArgument)
	default:
		return served{}, nil
	}
	s, err := serves(spec, services, artifact.IsRaw(outline))
	s.noSnapshot, s.noWarmUp = noSnapshot, noWarmUp
	return s, err
}

// describeItself takes the descriptors from a guest of the raw world, and returns its description.
func describeItself(ctx context.Context, spec *artifact.Spec, outline *wasmbin.Outline) (*describe.Description, error) {
	if outline.Component {
		return nil, fmt.Errorf("a component that exports %s needs --proto or --descriptors: %w", protowit.HandlerInterface,
			errdefs.ErrInvalidArgument)
	}
	d, err := describe.Run(ctx, spec.Wasm)
	if errors.Is(err, describe.ErrNoExport) {
		return nil, fmt.Errorf("%w; use --proto or --descriptors", err)
	}
	if err != nil {
		return nil, err
	}
	spec.Descriptors = d.Files
	return d, nil
}

// chooseServices returns the services in names, or all that a program serves if there are none.
func chooseServices(names, own []string) ([]string, error) {
	if len(names) == 0 {
		return own, nil
	}
	for _, name := range names {
		if !slices.Contains(own, name) {
			return nil, fmt.Errorf("--service: the program does not serve %s; it serves %s: %w", name, strings.Join(own, ", "),
				errdefs.ErrInvalidArgument)
		}
	}
	return names, nil
}

// serves reads the descriptors as a node does. It adds the services to the annotations if a node would choose different
// services by itself.
func serves(spec *artifact.Spec, names []string, raw bool) (served, error) {
	_, services, err := protowit.ParseServices(spec.Descriptors, names...)
	if err != nil {
		return served{}, err
	}
	s := served{services: serviceNames(services)}
	for _, sd := range services {
		for k := range sd.Methods().Len() {
			s.methods = append(s.methods, sd.Methods().Get(k))
		}
	}
	if !raw {
		schema, err := protowit.Parse(spec.Descriptors, names...)
		if err != nil {
			return served{}, err
		}
		for _, m := range schema.Methods {
			s.interfaces = append(s.interfaces, m.Interface)
		}
		slices.Sort(s.interfaces)
		s.interfaces = slices.Compact(s.interfaces)
	}
	if _, chosen, err := protowit.ParseServices(spec.Descriptors); err == nil && slices.Equal(serviceNames(chosen), s.services) {
		return s, nil
	}
	if spec.Annotations == nil {
		spec.Annotations = map[string]string{}
	}
	spec.Annotations[keys.Services] = strings.Join(s.services, ",")
	return s, nil
}

// serviceNames returns the full names of services that have methods, sorted.
func serviceNames(services []protoreflect.ServiceDescriptor) (names []string) {
	for _, s := range services {
		if s.Methods().Len() > 0 {
			names = append(names, string(s.FullName()))
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// printPushed prints the digest reference, or a table of the blobs.
func (a *App) printPushed(p *pushed) error {
	return a.Print(p, func(wide bool) error {
		for _, w := range p.Warnings {
			fmt.Fprintln(a.Stderr, "tripod push: warning:", w)
		}
		if p.Route != nil {
			fmt.Fprintln(a.Stderr, "tripod push:", p.Route)
		}
		if !wide {
			_, err := fmt.Fprintln(a.Stdout, p.Reference)
			return err
		}
		t := newTable(a.Stdout, "REFERENCE", "MEDIA TYPE", "DIGEST", "SIZE")
		for _, l := range p.Layers {
			t.row(p.Reference, l.MediaType, l.Digest, size(uint64(l.Size)))
		}
		return t.flush()
	})
}
