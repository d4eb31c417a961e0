package image

import (
	"context"
	"fmt"
	"path"
	"slices"
	"strings"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/tripod-run/tripod/internal/component/wasmbin"
	"github.com/tripod-run/tripod/internal/image/internal/failure"
)

// Media types of artifacts with a component.
const (
	// MediaTypeWasmConfig is the type of the config in the CNCF's Wasm OCI artifact layout (TAG Runtime, version 0).
	MediaTypeWasmConfig = "application/vnd.wasm.config.v0+json"
	// MediaTypeWasm is the type of a binary: a component or a core module.
	MediaTypeWasm = "application/wasm"
	// MediaTypeDescriptorSet is our type for a google.protobuf.FileDescriptorSet.
	MediaTypeDescriptorSet = "application/vnd.tripod.protobuf.descriptorset.v1+protobuf"
	// MediaTypeWasmCode is our type for compiled code, compressed with zstd (package codelayer). MediaTypeEnvelope is the
	// type of its signature (DSSE, envelope.md).
	MediaTypeWasmCode = "application/vnd.tripod.wasm.code.v1+zstd"
	MediaTypeEnvelope = "application/vnd.dsse.envelope.v1+json"
	// MediaTypeMetadata is the type of Vimana's Metadata message.
	MediaTypeMetadata = "application/protobuf"

	mediaTypeWasmConfigPrefix = "application/vnd.wasm.config"
	// mediaTypeWasmLayerPrefix is the common prefix of the layer types that predate the standard layout.
	mediaTypeWasmLayerPrefix = "application/vnd.wasm.content.layer"
)

// Layout is the arrangement of a component in an image.
type Layout string

const (
	// LayoutCNCF is the CNCF's Wasm OCI artifact layout, optionally with a layer of descriptors.
	LayoutCNCF Layout = "cncf"
	// LayoutVimana is a binary and a Metadata message in two layers.
	LayoutVimana Layout = "vimana"
	// LayoutRootfs is a container image whose entrypoint is a .wasm file.
	LayoutRootfs Layout = "rootfs"
)

// Component describes the WebAssembly component or module of an image.
type Component struct {
	Layout Layout
	// Wasm is the layer with the binary; zero for LayoutRootfs (see Store.ComponentBlob).
	Wasm ocispec.Descriptor
	// Descriptors and Metadata are the layers that describe the component's services. A missing layer has an empty
	// Digest.
	Descriptors, Metadata ocispec.Descriptor
	// Code is the layer with compiled code, and Envelope the one with its signature. A missing layer has an empty Digest.
	Code, Envelope ocispec.Descriptor
	// Entrypoint is the binary's absolute path in the root filesystem; only for LayoutRootfs.
	Entrypoint string
}

// isWasmPlatform recognises the platforms that builders give to images of components: wasi/wasm, wasip1/wasm32 …
func isWasmPlatform(p ocispec.Platform) bool {
	return p.Architecture == "wasm" || p.Architecture == "wasm32"
}

// componentOf classifies the layers of an artifact. It rejects an artifact with two binaries or with a layer of an
// unknown type, because the node could not run such an artifact as its author intended.
func componentOf(m ocispec.Manifest, limits Limits) (*Component, error) {
	c := &Component{Layout: LayoutCNCF}
	for _, layer := range m.Layers {
		into, limit := &c.Wasm, limits.ComponentBytes
		switch {
		case isWasm(layer.MediaType):
		case layer.MediaType == MediaTypeDescriptorSet:
			into, limit = &c.Descriptors, limits.DocumentBytes
		case layer.MediaType == MediaTypeMetadata:
			into, limit = &c.Metadata, limits.DocumentBytes
			c.Layout = LayoutVimana
		case layer.MediaType == MediaTypeWasmCode:
			into, limit = &c.Code, limits.UnpackedBytes
		case layer.MediaType == MediaTypeEnvelope:
			into, limit = &c.Envelope, limits.DocumentBytes
		default:
			return nil, failure.Invalidf("a Wasm artifact has a layer of the type %q; it may have %s, %s, %s, %s and %s",
				layer.MediaType, MediaTypeWasm, MediaTypeDescriptorSet, MediaTypeMetadata, MediaTypeWasmCode, MediaTypeEnvelope)
		}
		if into.Digest != "" {
			return nil, failure.Invalidf("a Wasm artifact has two layers of the type %q, %s and %s", layer.MediaType, into.Digest, layer.Digest)
		}
		if err := checkDescriptor("layer", layer, limit); err != nil {
			return nil, err
		}
		*into = strip(layer)
	}
	if c.Wasm.Digest == "" {
		return nil, failure.Invalidf("a Wasm artifact (config type %q) has no layer of the type %s", m.Config.MediaType, MediaTypeWasm)
	}
	return c, nil
}

func isWasm(mediaType string) bool {
	return mediaType == MediaTypeWasm || strings.HasPrefix(mediaType, mediaTypeWasmLayerPrefix)
}

// entrypointOf returns a component if a container image's program is a .wasm file; otherwise nil.
func entrypointOf(config ocispec.ImageConfig) *Component {
	argv := slices.Concat(config.Entrypoint, config.Cmd)
	if len(argv) == 0 || !strings.HasSuffix(argv[0], ".wasm") {
		return nil
	}
	file := argv[0]
	if !path.IsAbs(file) {
		file = path.Join(config.WorkingDir, file)
	}
	return &Component{Layout: LayoutRootfs, Entrypoint: path.Join("/", file)}
}

// checkBinary rejects an artifact whose binary is truncated or not WebAssembly, before the image is recorded.
func (s *Store) checkBinary(ctx context.Context, d *details) error {
	ra, err := s.content.ReaderAt(ctx, d.component.Wasm)
	if err != nil {
		return err
	}
	defer ra.Close()
	if _, err := wasmbin.Read(ra, ra.Size()); err != nil {
		return fmt.Errorf("layer %s of the type %s: %w", d.component.Wasm.Digest, MediaTypeWasm, err)
	}
	return nil
}
