package image

import (
	"encoding/json"
	"fmt"

	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/tripod-run/tripod/internal/image/disk"
)

// mediaTypeDiskArtifact is the artifactType of the manifests that BuildDisk makes.
const mediaTypeDiskArtifact = "application/vnd.tripod.disk"

// BuildDisk makes an OCI artifact with a disk as its one layer. If the disk is uncompressed and a node would reject it,
// the error is errdefs.ErrInvalidArgument. The same file always makes the same artifact.
func BuildDisk(file string, annotations map[string]string) (manifest Blob, blobs []Blob, err error) {
	desc, err := disk.Describe(file)
	if err != nil {
		return manifest, nil, fmt.Errorf("%s: %w", file, err)
	}
	config, layer := NewBlob(ocispec.MediaTypeEmptyJSON, []byte("{}")), Blob{Descriptor: desc, Path: file}
	document, err := json.Marshal(ocispec.Manifest{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageManifest, ArtifactType: mediaTypeDiskArtifact,
		Config: config.Descriptor, Layers: []ocispec.Descriptor{layer.Descriptor}, Annotations: annotations,
	})
	if err != nil {
		return manifest, nil, fmt.Errorf("%s: %w", file, err)
	}
	return NewBlob(ocispec.MediaTypeImageManifest, document), []Blob{config, layer}, nil
}
