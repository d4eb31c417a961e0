package artifact

import (
	"context"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/tripod-run/tripod/internal/component/wasmbin"
	"github.com/tripod-run/tripod/internal/image"
	"github.com/tripod-run/tripod/internal/keys"
)

// SectionDescriptors is the name of the custom section that can hold a component's FileDescriptorSet.
const SectionDescriptors = image.MediaTypeDescriptorSet

// maxDescriptors bounds a FileDescriptorSet, in bytes.
const maxDescriptors = 8 << 20

// Artifact describes the component in an image of the store. It is plain data, which a backend can record. The blobs
// stay readable while the backend holds the image (image.Store.Hold), even after the image is removed.
type Artifact struct {
	ImageID string `json:"imageID"` // in the store
	// Layout says how the image contains the component.
	Layout image.Layout `json:"layout"`
	// Wasm describes the binary, whose digest also identifies the compiled code.
	Wasm ocispec.Descriptor `json:"wasm"`
	// DescriptorSet describes the layer with the FileDescriptorSet. Its Digest is empty if there is no such layer.
	DescriptorSet ocispec.Descriptor `json:"descriptorSet,omitzero"`
	// MetadataLayer describes the layer with Vimana's Metadata message. Its Digest is empty if there is no such layer.
	MetadataLayer ocispec.Descriptor `json:"metadata,omitzero"`
	// Code describes the layer with compiled code, and Envelope the one with its signature (package codelayer). Their Digest
	// is empty if there is no such layer.
	Code        ocispec.Descriptor `json:"code,omitzero"`
	Envelope    ocispec.Descriptor `json:"envelope,omitzero"`
	Annotations map[string]string  `json:"annotations,omitempty"` // from the manifest
	// Services are the full names of the component's services. If it is empty, the component serves all services in
	// those files of the descriptor set that no other file imports.
	Services []string `json:"services,omitempty"`
	// Program is the guest's default argv[0]: the base name of the entrypoint's file, or "main.wasm" for layouts
	// without an entrypoint.
	Program string `json:"program"`
	// Entrypoint, Cmd and Env ("NAME=value") are from the image's config. Entrypoint and Cmd omit the program.
	Entrypoint []string `json:"entrypoint,omitempty"`
	Cmd        []string `json:"cmd,omitempty"`
	Env        []string `json:"env,omitempty"`
}

// Blobs opens the blobs of an Artifact. *image.Store implements it.
type Blobs interface {
	// OpenBlob opens a blob for reading, after checking it against its digest.
	OpenBlob(ctx context.Context, desc ocispec.Descriptor) (*os.File, error)
	// OpenOptionalBlob is like OpenBlob, but a damaged blob is no reason to drop the image.
	OpenOptionalBlob(ctx context.Context, desc ocispec.Descriptor) (*os.File, error)
}

// Open returns the component in an image. It returns errdefs.ErrNotFound if the image is unknown, and
// ErrInvalidArgument if the image has no component or its entrypoint is not a readable file in the image.
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
		Code: img.Component.Code, Envelope: img.Component.Envelope,
	}
	if services := keys.Value(img.Annotations, keys.Services); services != "" {
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

// Argv returns the guest's arguments. A container's command and args (CRI ContainerConfig) override the image's
// entrypoint and cmd as for any container, but they never change which binary runs.
func (a *Artifact) Argv(command, args []string) []string {
	if len(command) > 0 {
		return slices.Concat(command, args)
	}
	if len(args) == 0 {
		args = a.Cmd
	}
	return slices.Concat([]string{a.Program}, a.Entrypoint, args)
}

// OpenWasm opens the binary for reading, after checking it against its digest. It returns errdefs.ErrDataLoss if the
// blob is damaged, and ErrNotFound if the blob is missing.
func (a *Artifact) OpenWasm(ctx context.Context, blobs Blobs) (*os.File, error) {
	return blobs.OpenBlob(ctx, a.Wasm)
}

// Descriptors returns the serialized FileDescriptorSet from the image's layer or the binary's custom section, or nil if
// the image has neither. It does not validate the set.
func (a *Artifact) Descriptors(ctx context.Context, blobs Blobs) ([]byte, error) {
	if a.DescriptorSet.Digest != "" {
		return readBlob(ctx, blobs.OpenBlob, a.DescriptorSet)
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

// Metadata returns Vimana's serialized Metadata message, or nil if the image has none.
func (a *Artifact) Metadata(ctx context.Context, blobs Blobs) ([]byte, error) {
	if a.MetadataLayer.Digest == "" {
		return nil, nil
	}
	return readBlob(ctx, blobs.OpenBlob, a.MetadataLayer)
}

// ReadEnvelope returns the signature of the layer with compiled code.
func (a *Artifact) ReadEnvelope(ctx context.Context, blobs Blobs) ([]byte, error) {
	return readBlob(ctx, blobs.OpenOptionalBlob, a.Envelope)
}

func readBlob(ctx context.Context, open func(context.Context, ocispec.Descriptor) (*os.File, error),
	desc ocispec.Descriptor) ([]byte, error) {
	f, err := open(ctx, desc)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data := make([]byte, desc.Size)
	_, err = io.ReadFull(f, data)
	return data, err
}
