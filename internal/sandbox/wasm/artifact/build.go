package artifact

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/tripod-run/tripod/internal/component/protowit"
	"github.com/tripod-run/tripod/internal/component/wasi"
	"github.com/tripod-run/tripod/internal/component/wasmbin"
	"github.com/tripod-run/tripod/internal/component/wit"
	"github.com/tripod-run/tripod/internal/image"
)

// Spec is the input to Build.
type Spec struct {
	Wasm        []byte            // the binary
	Descriptors []byte            // a serialized FileDescriptorSet, or empty
	Annotations map[string]string // for the manifest
	// Code and Envelope are a layer with compiled code and its signature (package codelayer), or empty.
	Code, Envelope []byte
}

// Image is an artifact that can be pushed.
type Image struct {
	Manifest image.Blob
	Blobs    []image.Blob // the config and the layers
	Outline  *wasmbin.Outline
}

// config is the config blob of the CNCF's layout (TAG Runtime, "Wasm OCI Artifact layout", version 0). It omits the
// creation date, so that the same files always yield the same artifact.
type config struct {
	Architecture string          `json:"architecture"`
	OS           string          `json:"os"`
	LayerDigests []digest.Digest `json:"layerDigests"`
	Component    *interfaces     `json:"component,omitempty"`
}

type interfaces struct {
	Exports []string `json:"exports"`
	Imports []string `json:"imports"`
	Target  *string  `json:"target"`
}

// Build makes an artifact in the CNCF's layout. It returns errdefs.ErrInvalidArgument if the binary is not WebAssembly
// or is truncated.
func Build(s Spec) (*Image, error) {
	outline, err := wasmbin.Read(bytes.NewReader(s.Wasm), int64(len(s.Wasm)))
	if err != nil {
		return nil, err
	}
	layers := []image.Blob{image.NewBlob(image.MediaTypeWasm, s.Wasm)}
	if len(s.Descriptors) > maxDescriptors {
		return nil, fmt.Errorf("the descriptors have %d bytes, more than the limit of %d: %w", len(s.Descriptors), maxDescriptors,
			errdefs.ErrInvalidArgument)
	}
	if len(s.Descriptors) > 0 {
		layers = append(layers, image.NewBlob(image.MediaTypeDescriptorSet, s.Descriptors))
	}
	if len(s.Code) > 0 { // behind what other runtimes read
		layers = append(layers, image.NewBlob(image.MediaTypeWasmCode, s.Code), image.NewBlob(image.MediaTypeEnvelope, s.Envelope))
	}
	c := config{Architecture: "wasm", OS: "wasip1"}
	if outline.Component {
		c.OS = "wasip2"
		c.Component = &interfaces{Exports: outline.Exports, Imports: outline.Imports}
	}
	m := ocispec.Manifest{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageManifest, Annotations: s.Annotations}
	for _, layer := range layers {
		c.LayerDigests = append(c.LayerDigests, layer.Digest)
		m.Layers = append(m.Layers, layer.Descriptor)
	}
	document, err := json.Marshal(c)
	if err != nil {
		return nil, err
	}
	configBlob := image.NewBlob(image.MediaTypeWasmConfig, document)
	m.Config = configBlob.Descriptor
	if document, err = json.Marshal(m); err != nil {
		return nil, err
	}
	return &Image{
		Manifest: image.NewBlob(ocispec.MediaTypeImageManifest, document),
		Blobs:    append([]image.Blob{configBlob}, layers...), Outline: outline,
	}, nil
}

// World is the kind of a binary, as determined by the binary's exports.
type World = wit.World

// Exports that determine the world.
const (
	exportHTTP    = "wasi:http/incoming-handler"
	exportCommand = "wasi:cli/run"
	exportStart   = "_start"
	exportRaw     = protowit.HandlerInterface // of a core module with the suffix #handle
)

// IsRaw reports whether a binary exports tripod:grpc/handler, so that it keeps its own protobuf code.
func IsRaw(o *wasmbin.Outline) bool {
	if o.Component {
		return o.HasExport(exportRaw)
	}
	return o.HasExport(exportRaw + "#" + protowit.Handle)
}

// wasiPackages are the packages of WASI 0.2. The version alone does not identify them, because drafts of other packages
// also had version 0.2 ("wasi:keyvalue/store@0.2.0-draft").
var wasiPackages = []string{"wasi:cli", "wasi:clocks", "wasi:filesystem", "wasi:http", "wasi:io", "wasi:random", "wasi:sockets"}

// release returns the name of a WASI 0.2 interface without its version, because hosts support every 0.2.x. The second
// result is false for other interfaces and for drafts.
func release(name string) (base string, ok bool) {
	base, version, _ := strings.Cut(name, "@")
	patch, ok := strings.CutPrefix(version, "0.2.")
	if _, err := strconv.ParseUint(patch, 10, 32); err != nil {
		return base, false
	}
	pkg, _, _ := strings.Cut(base, "/")
	return base, ok && slices.Contains(wasiPackages, pkg)
}

// Check checks whether a node can run a binary, and returns the binary's world. It judges only by the names of the
// binary's imports and exports. If no node can run the binary, the error is errdefs.ErrInvalidArgument and says what is
// missing or unsupported. The given services are the interfaces that the component must export according to its
// descriptors ("proto:greet-v1/greeter"). Without descriptors, there are none. A binary of the raw world (IsRaw) exports
// none of them.
func Check(o *wasmbin.Outline, services []string) (World, error) {
	if err := o.CheckWASI(); err != nil {
		return "", err
	}
	switch {
	case !o.Component && IsRaw(o):
		return checkRawModule(o)
	case !o.Component:
		return checkModule(o, services)
	case IsRaw(o):
		services = nil
	}
	for _, name := range services {
		if !o.HasExport(name) {
			return "", fmt.Errorf("the component does not export %s, which its descriptors require; it exports %s: %w",
				name, list(o.Exports), errdefs.ErrInvalidArgument)
		}
	}
	if len(services) == 0 && !IsRaw(o) && slices.Contains(o.Custom, SectionDescriptors) {
		return wit.WorldGRPC, nil // the caller has not read the section
	}
	world := worldOf(o, services)
	if world == "" {
		return "", fmt.Errorf("the component exports %s: none of wasi:http/incoming-handler@0.2, %s and wasi:cli/run@0.2, and no descriptors name a gRPC service (--proto): %w",
			list(o.Exports), wasi.MessageHandler().Name, errdefs.ErrInvalidArgument)
	}
	for _, name := range o.Imports {
		if !provided(name, world, services) {
			return "", fmt.Errorf("the component imports %s, which no node provides%s: %w", name, otherVersions(name), errdefs.ErrInvalidArgument)
		}
	}
	return world, nil
}

func worldOf(o *wasmbin.Outline, services []string) World {
	has := func(name string) bool {
		return slices.ContainsFunc(o.Exports, func(e string) bool {
			base, ok := release(e)
			return ok && base == name
		})
	}
	switch {
	case len(services) > 0:
		return wit.WorldGRPC
	case IsRaw(o):
		return wit.WorldRaw
	case has(exportHTTP):
		return wit.WorldHTTP
	case o.HasExport(wasi.MessageHandler().Name):
		return wit.WorldMessages
	case has(exportCommand):
		return wit.WorldCommand
	}
	return ""
}

func checkModule(o *wasmbin.Outline, services []string) (World, error) {
	switch {
	case len(services) > 0:
		return "", fmt.Errorf("a core module cannot serve %s; convert it to a component: %w", list(services), errdefs.ErrInvalidArgument)
	case !o.HasExport(exportStart):
		return "", fmt.Errorf("the core module does not export _start, so it is not a command; if it exports interfaces, convert it to a component: %w", errdefs.ErrInvalidArgument)
	}
	return checkModuleImports(o, wit.WorldCommand, preview1)
}

const preview1 = "wasi_snapshot_preview1"

// checkRawModule checks a core module of the raw world.
func checkRawModule(o *wasmbin.Outline) (World, error) {
	if o.HasExport(exportStart) {
		return "", fmt.Errorf("the core module exports %s, but also %s; build it as a library (a reactor): %w", exportRaw, exportStart,
			errdefs.ErrInvalidArgument)
	}
	for _, name := range []string{"memory", "cabi_realloc"} {
		if !o.HasExport(name) {
			return "", fmt.Errorf("the core module exports %s, but not %s, which the canonical ABI needs: %w", exportRaw, name,
				errdefs.ErrInvalidArgument)
		}
	}
	return checkModuleImports(o, wit.WorldRaw, slices.Concat([]string{preview1}, protowit.ModuleInterfaces, wasi.ModuleDrafts())...)
}

// checkModuleImports returns the world of a core module that imports only from the given modules.
func checkModuleImports(o *wasmbin.Outline, world World, provided ...string) (World, error) {
	for _, name := range o.Imports {
		if module, _, _ := strings.Cut(name, " "); !slices.Contains(provided, module) {
			return "", fmt.Errorf("the module imports %q from %q, which no node provides to a core module: %w", name[len(module)+1:], module,
				errdefs.ErrInvalidArgument)
		}
	}
	return world, nil
}

// otherVersions names the versions of a proposal that nodes provide, if an import has another one.
func otherVersions(name string) string {
	base, _, _ := strings.Cut(name, "@")
	var others []string
	for _, draft := range wasi.Drafts() {
		if known, _, _ := strings.Cut(draft, "@"); known == base {
			others = append(others, draft)
		}
	}
	if len(others) == 0 {
		return ""
	}
	return fmt.Sprintf(" (they provide %s)", strings.Join(others, " and "))
}

// provided reports whether nodes provide the named import of a component. Nodes provide WASI 0.2, some proposals in
// certain versions (wasi.Drafts), the packages tripod:grpc and, to modules of the edge, tripod:edge, and the types and streams
// in the packages of the component's services.
func provided(name string, world World, services []string) bool {
	if strings.HasPrefix(name, "wasi:") {
		_, ok := release(name)
		return ok || slices.Contains(wasi.Drafts(), name)
	}
	pkg, _, _ := strings.Cut(name, "/")
	return pkg == "tripod:grpc" || pkg == "tripod:edge" && !world.Serves() ||
		slices.ContainsFunc(services, func(s string) bool { return strings.HasPrefix(s, pkg+"/") })
}

func list(names []string) string {
	if len(names) == 0 {
		return "nothing"
	}
	return strings.Join(names, ", ")
}
