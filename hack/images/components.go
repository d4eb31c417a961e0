package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"github.com/tripod-run/tripod/internal/component/protowit/protosource"
	imagestore "github.com/tripod-run/tripod/internal/image"
	"github.com/tripod-run/tripod/internal/image/registry"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/artifact"
)

// examples is the directory of the components' sources and binaries.
const examples = "examples/wasm"

const wasm = house + "wasm/"

// component is an OCI artifact of the set. Its name has the form NAME:TAG.
type component struct {
	name string
	*artifact.Image
}

// components makes the artifacts of the examples, and artifacts that a node must refuse (fault I6 in docs/faults.md).
// Some of the latter would be rejected by `tripod push`, so components builds them without the checks of `tripod push`.
func components(ctx context.Context) ([]component, error) {
	b := builder{ctx: ctx}
	greeter, faults := b.descriptors("greeter/greeter.proto"), b.descriptors("faults-c/faults.proto")
	b.add("echo-c:1", b.example("echo-c"), b.descriptors("echo-c/echo.proto"), nil)
	b.add("greeter-c:1", b.example("greeter-c"), greeter, nil)
	b.add("greeter-js:1", b.example("greeter-js"), greeter, nil)
	b.add("faults-c:1", b.example("faults-c"), faults, nil)
	b.add("hello-http-c:1", b.example("hello-http-c"), nil, nil)
	b.add("fetch-c:1", b.example("fetch-c"), nil, nil)
	b.add("sockets-c:1", b.example("sockets-c"), nil, nil)
	b.add("command-go:1", b.example("command-go"), nil, nil)

	// Pods can run either of the next two artifacts as example.com:greet.Greeter@1.0.0: the first because of its
	// labels, the second because of its name.
	b.add("named:1", b.example("greeter-c"), greeter, map[string]string{
		"vimana.host/domain": "example.com", "vimana.host/server": "greet.Greeter", "vimana.host/version": "1.0.0",
	})
	b.add("example.com/greet.greeter:1.0.0", b.example("greeter-c"), greeter, nil)

	b.vimana("vimana:1", b.example("echo-c"))

	b.add("mismatch:1", b.example("greeter-c"), faults, nil)
	b.add("no-descriptors:1", b.example("greeter-c"), nil, nil)
	b.add("unknown-import:1", module(`env missing`, 1, "\x00\x0b"), nil, nil)
	b.add("huge-memory:1", module(``, 65536, "\x00\x0b"), nil, nil)
	b.add("invalid:1", module(``, 1, "\x00\x6a\x0b"), nil, nil) // the code adds two numbers, but the stack is empty
	return b.all, b.err
}

// builder collects artifacts. It keeps the first error.
type builder struct {
	ctx context.Context
	all []component
	err error
}

func (b *builder) keep(err error) {
	if b.err == nil {
		b.err = err
	}
}

func (b *builder) example(name string) []byte {
	data, err := os.ReadFile(filepath.Join(examples, name, name+".wasm"))
	b.keep(err)
	return data
}

func (b *builder) descriptors(file string) []byte {
	source, err := protosource.Compile(b.ctx, []string{filepath.Join(examples, file)}, nil)
	if err != nil {
		b.keep(err)
		return nil
	}
	set, err := proto.MarshalOptions{Deterministic: true}.Marshal(source.Set)
	b.keep(err)
	return set
}

func (b *builder) add(name string, binary, descriptors []byte, notes map[string]string) {
	im, err := artifact.Build(artifact.Spec{Wasm: binary, Descriptors: descriptors, Annotations: notes})
	if err != nil {
		b.keep(fmt.Errorf("%s: %w", name, err))
		return
	}
	b.all = append(b.all, component{wasm + name, im})
}

// vimana adds an artifact in Vimana's layout. It has a component, and a Metadata message (see
// internal/component/protowit) that describes the component's method echo.v1.Echo/Echo. The messages of the method have
// one field, of type bytes and number 1.
func (b *builder) vimana(name string, binary []byte) {
	text := func(n protowire.Number, s string) []byte {
		return protowire.AppendString(protowire.AppendTag(nil, n, protowire.BytesType), s)
	}
	entry := func(n protowire.Number, key string, value []byte) []byte {
		return text(n, string(text(1, key))+string(text(2, string(value))))
	}
	number := protowire.AppendVarint(protowire.AppendTag(nil, 1, protowire.VarintType), 1)
	service := entry(2, "Echo", text(1, "echo"))
	message := text(1, string(number)+string(text(2, "data"))+"\x18\x00") // coding 0: bytes without presence
	metadata := slices.Concat(entry(1, "echo.v1.Echo", service), text(2, string(message)))

	config := imagestore.NewBlob(ocispec.MediaTypeEmptyJSON, []byte("{}"))
	layers := []imagestore.Blob{imagestore.NewBlob(imagestore.MediaTypeWasm, binary),
		imagestore.NewBlob(imagestore.MediaTypeMetadata, metadata)}
	document, err := json.Marshal(ocispec.Manifest{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageManifest,
		Config: config.Descriptor, Layers: []ocispec.Descriptor{layers[0].Descriptor, layers[1].Descriptor},
	})
	b.keep(err)
	b.all = append(b.all, component{wasm + name, &artifact.Image{
		Manifest: imagestore.NewBlob(ocispec.MediaTypeImageManifest, document), Blobs: append(layers, config),
	}})
}

// module assembles a core module with a function _start. The parameter imports is "MODULE NAME" of one imported
// function, or "". The initial memory has the given number of pages. The given code is the locals and instructions of
// _start.
func module(imports string, pages uint64, code string) []byte {
	var m bytes.Buffer
	m.WriteString("\x00asm\x01\x00\x00\x00")
	section := func(id byte, content string) {
		m.WriteByte(id)
		m.Write(leb(uint64(len(content))))
		m.WriteString(content)
	}
	name := func(s string) string { return string(leb(uint64(len(s)))) + s }
	section(1, "\x01\x60\x00\x00") // one type: func()
	start := byte(0)
	if imports != "" {
		var from, what string
		_, _ = fmt.Sscan(imports, &from, &what)
		section(2, "\x01"+name(from)+name(what)+"\x00\x00")
		start = 1
	}
	section(3, "\x01\x00")
	section(5, "\x01\x00"+string(leb(pages)))
	section(7, "\x01"+name("_start")+"\x00"+string(start))
	section(10, "\x01"+name(code))
	return m.Bytes()
}

// leb encodes an unsigned LEB128 number.
func leb(n uint64) []byte {
	var b []byte
	for ; n >= 0x80; n >>= 7 {
		b = append(b, byte(n)|0x80)
	}
	return append(b, byte(n))
}

// push sends the artifact to the registry at addr.
func (c component) push(ctx context.Context, addr string) error {
	_, err := imagestore.Push(ctx, registry.Config{PlainHTTP: true}, addr+"/"+c.name, nil, nil, c.Manifest, c.Blobs...)
	return err
}

// wasmRootfs adds a container image whose entrypoint is a symbolic link to a .wasm file, as in real images.
func (s *set) wasmRootfs() {
	data, err := os.ReadFile(filepath.Join(examples, "command-go", "command-go.wasm"))
	if err != nil {
		s.err = err
		return
	}
	t := tree{}
	t.dir(0o755, "opt", "srv")
	t.file("opt/command-go.wasm", 0o644, data)
	t.symlink("srv/app.wasm", "/opt/command-go.wasm")
	s.images = append(s.images, image{name: wasm + "rootfs:1", layers: []v1.Layer{s.layer(t)}, config: v1.Config{
		Env: []string{"GREETING=hello from the image"}, WorkingDir: "/srv",
		Entrypoint: []string{"app.wasm"}, Cmd: []string{"env", "GREETING", "args"},
	}})
}
