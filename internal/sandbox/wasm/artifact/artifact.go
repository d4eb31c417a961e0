package artifact

import (
	"context"
	"fmt"
	"io"
	"os"
	"path"
	"strings"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/tripod-run/tripod/internal/component/wasmbin"
	"github.com/tripod-run/tripod/internal/image"
)

// SectionDescriptors is the custom section of a component that holds a FileDescriptorSet.
const SectionDescriptors = image.MediaTypeDescriptorSet

// maxDescriptors bounds a FileDescriptorSet in bytes, wherever it travels.
const maxDescriptors = 8 << 20

// Artifact is the component of one image of the store. It is plain data: a backend may keep it in a record, and read
// the blobs later for as long as it holds the image (image.Store.Hold), whatever becomes of the image.
type Artifact struct {
	// ImageID is the image's ID in the store.
	ImageID string `json:"imageID"`
	// Layout is how the image carries the component.
	Layout image.Layout `json:"layout"`
	// Wasm is the binary: its digest, which names compiled code, and its size in bytes.
	Wasm ocispec.Descriptor `json:"wasm"`
	// DescriptorSet is the layer with the FileDescriptorSet; its Digest is empty when there is none.
	DescriptorSet ocispec.Descriptor `json:"descriptorSet,omitzero"`
	// MetadataLayer is the layer with the public system's Metadata message; its Digest is empty when there is none.
	MetadataLayer ocispec.Descriptor `json:"metadata,omitzero"`
	// Annotations are the manifest's.
	Annotations map[string]string `json:"annotations,omitempty"`
	// Services are the full names of the services it serves; empty: those of the files in the descriptors that no other
	// file imports.
	Services []string `json:"services,omitempty"`
	// Program is what the guest calls itself when nobody names it: the base name of the entrypoint's file, or "main.wasm".
	Program string `json:"program"`
	// Entrypoint and Cmd are the image's, without the program; Env is the image's ("NAME=value").
	Entrypoint []string `json:"entrypoint,omitempty"`
	Cmd        []string `json:"cmd,omitempty"`
	Env        []string `json:"env,omitempty"`
}

// Blobs is what the blobs of an Artifact are read from; *image.Store is one.
type Blobs interface {
	// OpenBlob opens a blob for reading, after checking it against its digest.
	OpenBlob(ctx context.Context, desc ocispec.Descriptor) (*os.File, error)
}

// Open finds the component of an image. Unknown images are errdefs.ErrNotFound; images without a component, and
// container images whose entrypoint cannot be read as a file below their root, are errdefs.ErrInvalidArgument.
func Open(ctx context.Context, store *image.Store, imageID string) (*Artifact, error) {
	img, err := store.Get(ctx, imageID)
	if err != nil {
		return nil, err
	}
	wasm, err := store.ComponentBlob(ctx, img.ID)
	if err != nil {
		return nil, err
	}
	a := &Artifact{
		ImageID: img.ID, Layout: img.Component.Layout, Wasm: wasm, Program: "main.wasm", Annotations: img.Annotations,
		DescriptorSet: img.Component.Descriptors, MetadataLayer: img.Component.Metadata,
	}
	if services := img.Annotations[AnnotationServices]; services != "" {
		a.Services = strings.Split(services, ",")
	}
	if config := img.Config.Config; img.Component.Layout == image.LayoutRootfs {
		a.Program, a.Env = path.Base(img.Component.Entrypoint), config.Env
		a.Entrypoint, a.Cmd = config.Entrypoint, config.Cmd
		if len(a.Entrypoint) > 0 {
			a.Entrypoint = a.Entrypoint[1:]
		} else {
			a.Cmd = a.Cmd[1:]
		}
	}
	return a, nil
}

// Argv is the guest's argument vector for a container's command and args (CRI ContainerConfig), which stand in for the
// image's entrypoint and cmd as they do for a container image. The program itself is the image's whatever they say.
func (a *Artifact) Argv(command, args []string) []string {
	var argv []string
	switch {
	case len(command) > 0:
		return append(append(argv, command...), args...)
	case len(args) > 0:
		argv = append(append(argv, a.Program), a.Entrypoint...)
		return append(argv, args...)
	}
	argv = append(append(argv, a.Program), a.Entrypoint...)
	return append(argv, a.Cmd...)
}

// OpenWasm opens the binary, read-only and at its beginning, checked against its digest. A damaged one is
// errdefs.ErrDataLoss, a missing one errdefs.ErrNotFound.
func (a *Artifact) OpenWasm(ctx context.Context, blobs Blobs) (*os.File, error) {
	return blobs.OpenBlob(ctx, a.Wasm)
}

// Descriptors returns the FileDescriptorSet that travels with the component, serialized: the layer's, or that of the
// binary's custom section; nil when there is neither. It is not validated.
func (a *Artifact) Descriptors(ctx context.Context, blobs Blobs) ([]byte, error) {
	if a.DescriptorSet.Digest != "" {
		return readBlob(ctx, blobs, a.DescriptorSet)
	}
	f, err := a.OpenWasm(ctx, blobs)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	section, err := wasmbin.Custom(f, a.Wasm.Size, SectionDescriptors, maxDescriptors)
	if err != nil {
		return nil, fmt.Errorf("component of image %s: %w", a.ImageID, err)
	}
	return section, nil
}

// Metadata returns the public system's Metadata message, serialized; nil when the image has none.
func (a *Artifact) Metadata(ctx context.Context, blobs Blobs) ([]byte, error) {
	if a.MetadataLayer.Digest == "" {
		return nil, nil
	}
	return readBlob(ctx, blobs, a.MetadataLayer)
}

func readBlob(ctx context.Context, blobs Blobs, desc ocispec.Descriptor) ([]byte, error) {
	f, err := blobs.OpenBlob(ctx, desc)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data := make([]byte, desc.Size)
	_, err = io.ReadFull(f, data)
	return data, err
}
