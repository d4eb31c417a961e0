package image

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/tripod-run/tripod/internal/image/qcow2"
)

// mediaTypeDiskArtifact is the artifactType of the manifests that BuildDisk makes.
const mediaTypeDiskArtifact = "application/vnd.tripod.disk"

// wasmMagic begins WebAssembly binaries.
var wasmMagic = []byte("\x00asm")

// IsDiskFile reports whether a file to be pushed is a disk: a qcow2 image or, according to its name, a raw disk (.raw,
// .img) or a CD-ROM (.iso), possibly compressed.
func IsDiskFile(file string) (bool, error) {
	r, err := os.Open(file)
	if err != nil {
		return false, err
	}
	defer r.Close()
	_, head, err := sniffDisk(r, filepath.Base(file))
	if err != nil {
		return false, fmt.Errorf("%s: %w", file, err)
	}
	name := filepath.Base(file)
	for _, packed := range []string{".gz", ".xz", ".zst"} {
		name = strings.TrimSuffix(name, packed)
	}
	named := slices.Contains([]string{".raw", ".img", ".qcow2", ".iso"}, filepath.Ext(name))
	return qcow2.Is(head) || named && !bytes.HasPrefix(head, wasmMagic), nil
}

// BuildDisk makes an OCI artifact with a disk as its one layer. If the disk is uncompressed and a node would reject it,
// the error is errdefs.ErrInvalidArgument. The same file always makes the same artifact.
func BuildDisk(file string, annotations map[string]string) (manifest Blob, blobs []Blob, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("%s: %w", file, err)
		}
	}()
	r, err := os.Open(file)
	if err != nil {
		return manifest, nil, err
	}
	defer r.Close()
	layer := Blob{Path: file}
	if layer.MediaType, _, err = sniffDisk(r, filepath.Base(file)); err != nil {
		return manifest, nil, err
	}
	if format, compression, _ := diskTypeOf(layer.MediaType); compression == "" {
		var disk DiskFiles
		if err := disk.setDisk(r, file, format); err != nil {
			return manifest, nil, err
		}
		if err := disk.checkDisk(); err != nil {
			return manifest, nil, err
		}
	}
	if _, err := r.Seek(0, io.SeekStart); err != nil {
		return manifest, nil, err
	}
	digester := digest.Canonical.Digester()
	if layer.Size, err = io.Copy(digester.Hash(), r); err != nil {
		return manifest, nil, err
	}
	layer.Digest = digester.Digest()
	config := NewBlob(ocispec.MediaTypeEmptyJSON, []byte("{}"))
	document, err := json.Marshal(ocispec.Manifest{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageManifest, ArtifactType: mediaTypeDiskArtifact,
		Config: config.Descriptor, Layers: []ocispec.Descriptor{layer.Descriptor}, Annotations: annotations,
	})
	return NewBlob(ocispec.MediaTypeImageManifest, document), []Blob{config, layer}, err
}
