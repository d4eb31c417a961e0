package image

import (
	"encoding/json"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/tripod-run/tripod/internal/image/disk"
	"github.com/tripod-run/tripod/internal/image/internal/failure"
	"github.com/tripod-run/tripod/internal/image/internal/layer"
)

// details is the content of an image's manifest and config. It is immutable.
type details struct {
	id          string
	kind        Kind
	size        int64
	manifest    ocispec.Descriptor
	config      ocispec.Descriptor
	layers      []ocispec.Descriptor
	image       ocispec.Image
	annotations map[string]string
	// component is the image's component; nil if it has none.
	component *Component
	// disk is the disk of a disk artifact.
	disk *disk.Layer
	// files are the names of the layers in a volume; nil for a rootfs.
	files []string
	// chain holds the chain IDs of the layers, lowest first; nil unless the image is a rootfs.
	chain []digest.Digest
}

func (d *details) chainID() string {
	if len(d.chain) == 0 {
		return ""
	}
	return d.chain[len(d.chain)-1].String()
}

// strip removes the fields of a descriptor that an image's author must not control: URLs of other hosts (fault I4),
// inline data, and annotations, which containerd would turn into labels (fault I1).
func strip(desc ocispec.Descriptor) ocispec.Descriptor {
	return ocispec.Descriptor{MediaType: desc.MediaType, Digest: desc.Digest, Size: desc.Size, Platform: desc.Platform}
}

// checkDescriptor rejects a descriptor that cannot be fetched safely. The first parameter is the descriptor's name for
// the error.
func checkDescriptor(what string, desc ocispec.Descriptor, limit int64) error {
	if err := desc.Digest.Validate(); err != nil {
		return failure.Invalidf("%s has the digest %q: %v", what, desc.Digest, err)
	}
	if algorithm := desc.Digest.Algorithm(); algorithm != digest.SHA256 { // an image's ID is a sha256, in every call of the CRI
		return failure.Invalidf("%s %s: this node stores images by sha256, not by %s", what, desc.Digest, algorithm)
	}
	if desc.Size < 0 {
		return failure.Invalidf("%s %s has the size %d", what, desc.Digest, desc.Size)
	}
	if nothing := desc.Digest.Algorithm().FromString(""); desc.Size == 0 && desc.Digest != nothing {
		return failure.Invalidf("%s %s has the size 0, and the digest of nothing is %s", what, desc.Digest, nothing)
	}
	if desc.Size > limit {
		return failure.Invalidf("%s %s has %d bytes, more than the limit of %d", what, desc.Digest, desc.Size, limit)
	}
	return nil
}

// encrypted is part of the media types of encrypted layers (containers/ocicrypt).
const encrypted = "+encrypted"

// parseManifest parses and checks the manifest that desc describes.
func parseManifest(desc ocispec.Descriptor, document []byte, limits Limits) (*details, error) {
	var m struct {
		ocispec.Manifest
		// FSLayers and Manifests reveal documents with a wrong media type.
		FSLayers  json.RawMessage `json:"fsLayers"`
		Manifests json.RawMessage `json:"manifests"`
	}
	if err := json.Unmarshal(document, &m); err != nil {
		return nil, failure.Invalidf("manifest %s: %v", desc.Digest, err)
	}
	if len(m.FSLayers) > 0 || len(m.Manifests) > 0 {
		return nil, failure.Invalidf("manifest %s is an index or has the obsolete schema 1", desc.Digest)
	}
	if len(m.Layers) == 0 {
		return nil, failure.Invalidf("manifest %s has no layers", desc.Digest)
	}
	if len(m.Layers) > limits.Layers {
		return nil, failure.Invalidf("manifest %s has %d layers, more than the limit of %d", desc.Digest, len(m.Layers), limits.Layers)
	}
	if err := checkDescriptor("config", m.Config, limits.DocumentBytes); err != nil {
		return nil, err
	}
	d := &details{manifest: strip(desc), config: strip(m.Config), size: desc.Size + m.Config.Size, annotations: m.Annotations}
	for _, layer := range m.Layers {
		if strings.Contains(layer.MediaType, encrypted) {
			return nil, failure.Invalidf("layer %s is encrypted (type %q), and this node decrypts no images", layer.Digest, layer.MediaType)
		}
		if err := checkDescriptor("layer", layer, limits.UnpackedBytes); err != nil {
			return nil, err
		}
		d.layers = append(d.layers, strip(layer))
		d.size += layer.Size
	}
	if d.size > limits.UnpackedBytes {
		return nil, failure.Invalidf("image %s has %d bytes, more than the limit of %d", desc.Digest, d.size, limits.UnpackedBytes)
	}
	var err error
	if d.kind, err = kindOf(desc.MediaType, m.Manifest); err != nil {
		return nil, err
	}
	if d.kind != KindRootfs {
		d.files = fileNames(m.Layers)
	}
	switch d.kind {
	case KindComponent:
		d.component, err = componentOf(m.Manifest, limits)
	case KindDisk:
		d.disk, err = disk.LayerOf(m.Config.MediaType, d.layers)
	}
	return d, err
}

// isConfig reports whether a manifest's config is that of a container image. Docker 1.10 and some mirrors wrote a type that says
// nothing, which artifacts have too, but no artifact has Docker's manifest.
func isConfig(manifestType string, config ocispec.Descriptor) bool {
	return images.IsConfigType(config.MediaType) ||
		config.MediaType == mediaTypeUnknown && manifestType == images.MediaTypeDockerSchema2Manifest
}

// mediaTypeUnknown is the type of bytes about which nothing is known (RFC 2046, 4.5.1).
const mediaTypeUnknown = "application/octet-stream"

func kindOf(manifestType string, m ocispec.Manifest) (Kind, error) {
	anyLayer := func(is func(string) bool) bool {
		return slices.ContainsFunc(m.Layers, func(l ocispec.Descriptor) bool { return is(l.MediaType) })
	}
	switch {
	case strings.HasPrefix(m.Config.MediaType, mediaTypeWasmConfigPrefix), anyLayer(isWasm):
		return KindComponent, nil
	case anyLayer(disk.Is):
		return KindDisk, nil
	case !isConfig(manifestType, m.Config):
		for _, l := range m.Layers {
			if format, suffix, _ := strings.Cut(l.MediaType, "+"); disk.FormatOf(format) != "" {
				return "", failure.Invalidf("layer %s is a disk with the unknown compression %q", l.Digest, suffix)
			}
		}
		return KindArtifact, nil
	}
	for _, l := range m.Layers {
		if !layer.CanUnpack(l.MediaType) {
			return "", failure.Invalidf("layer %s has the type %q, which cannot be unpacked", l.Digest, l.MediaType)
		}
	}
	return KindRootfs, nil
}

// setConfig adds the content of the config blob, and the image's ID, to the details.
func (d *details) setConfig(document []byte, matcher platforms.Matcher) error {
	if d.kind != KindRootfs {
		// Different artifacts can have the same config, so the config's digest does not identify an artifact.
		d.id = d.manifest.Digest.String()
		if err := json.Unmarshal(document, &d.image); err != nil {
			d.image = ocispec.Image{}
		}
		return nil
	}
	d.id = d.config.Digest.String()
	if err := json.Unmarshal(document, &d.image); err != nil {
		return failure.Invalidf("config %s: %v", d.config.Digest, err)
	}
	if n := len(d.image.RootFS.DiffIDs); n != len(d.layers) {
		return failure.Invalidf("config %s lists %d layers, its manifest %d", d.config.Digest, n, len(d.layers))
	}
	for _, diffID := range d.image.RootFS.DiffIDs {
		if err := diffID.Validate(); err != nil {
			return failure.Invalidf("config %s lists the layer %q: %v", d.config.Digest, diffID, err)
		}
	}
	if p := d.image.Platform; p.OS != "" && p.Architecture != "" && !isWasmPlatform(p) && !matcher.Match(platforms.Normalize(p)) {
		return failure.Invalidf("image %s is for %s, not for this node", d.id, platforms.Format(p))
	}
	d.image.Config = asDocker(d.image.Config)
	d.component = entrypointOf(d.image.Config)
	// ChainIDs modifies its argument, so pass a copy.
	d.chain = identity.ChainIDs(slices.Clone(d.image.RootFS.DiffIDs))
	return nil
}

// asDocker reads a config as Docker does, where the specification leaves room: an entrypoint of one empty word is none, and a
// relative volume is below the root.
func asDocker(config ocispec.ImageConfig) ocispec.ImageConfig {
	if slices.Equal(config.Entrypoint, []string{""}) {
		config.Entrypoint = nil
	}
	for name := range maps.Clone(config.Volumes) {
		delete(config.Volumes, name)
		config.Volumes[path.Join("/", name)] = struct{}{}
	}
	return config
}

// choose selects the entry of an index that suits this node best: one for the node's platform, otherwise one without a
// platform, otherwise one for Wasm.
func choose(desc ocispec.Descriptor, document []byte, matcher platforms.MatchComparer) (ocispec.Descriptor, error) {
	var index struct {
		ocispec.Index
		Config json.RawMessage `json:"config"`
		Layers json.RawMessage `json:"layers"`
	}
	if err := json.Unmarshal(document, &index); err != nil {
		return ocispec.Descriptor{}, failure.Invalidf("index %s: %v", desc.Digest, err)
	}
	if len(index.Config) > 0 || len(index.Layers) > 0 {
		return ocispec.Descriptor{}, failure.Invalidf("index %s is a manifest", desc.Digest)
	}
	var native, unnamed, wasm []ocispec.Descriptor
	for _, m := range index.Manifests {
		switch {
		case !images.IsManifestType(m.MediaType) && !images.IsIndexType(m.MediaType):
		case m.Platform == nil:
			unnamed = append(unnamed, m)
		case matcher.Match(*m.Platform):
			native = append(native, m)
		case isWasmPlatform(*m.Platform):
			wasm = append(wasm, m)
		}
	}
	slices.SortStableFunc(native, func(a, b ocispec.Descriptor) int {
		switch {
		case matcher.Less(*a.Platform, *b.Platform):
			return -1
		case matcher.Less(*b.Platform, *a.Platform):
			return 1
		}
		return 0
	})
	fits := slices.Concat(native, unnamed, wasm)
	if len(fits) == 0 {
		return ocispec.Descriptor{}, noMatchingPlatform(desc, index.Manifests)
	}
	return strip(fits[0]), nil
}

// noMatchingPlatform returns an error saying that an index has no entry for this node. The error lists the index's
// platforms.
func noMatchingPlatform(index ocispec.Descriptor, has []ocispec.Descriptor) error {
	var names []string
	for _, m := range has {
		if m.Platform != nil && len(names) < 20 {
			names = append(names, platforms.Format(*m.Platform))
		}
	}
	return fmt.Errorf("index %s has no entry for this node's platform, only for %q: %w", index.Digest, names, errdefs.ErrNotFound)
}
