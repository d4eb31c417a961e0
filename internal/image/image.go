package image

import (
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/tripod-run/tripod/internal/image/registry"
)

// Kind is the kind of an image's content, according to its manifest's media types.
type Kind string

const (
	// KindRootfs is a root filesystem in layers, the usual container image. A pull unpacks it.
	KindRootfs Kind = "rootfs"
	// KindDisk is a virtual machine's disk: one qcow2 or raw blob.
	KindDisk Kind = "disk"
	// KindComponent is an artifact with a WebAssembly module or component. (The entrypoint of a rootfs can also be a
	// module or component.)
	KindComponent Kind = "component"
	// KindArtifact is any other artifact: files for image volumes. (Those of the other kinds can be volumes, too.)
	KindArtifact Kind = "artifact"
)

// Image describes an image of the store. Its slices and maps are shared and must not be changed.
type Image struct {
	// ID is "sha256:…", the digest of the config or, for artifacts, of the manifest. CRI calls identify the image by
	// this ID.
	ID string
	// RepoTags are the full tags ("docker.io/library/busybox:1.36"), sorted.
	RepoTags []string
	// RepoDigests are the name@digest references under which the image was pulled. If there is an index, the digest is
	// the index's.
	RepoDigests []string
	// Size is the compressed size of the manifest, the config and the layers in bytes.
	Size uint64
	// Pinned means that the configuration protects the image from the kubelet's collection.
	Pinned bool
	// User is the user in the config, unparsed: "", "name", "1000", "1000:100" …
	User string
	Kind Kind
	// Config is the image's config. For an artifact, it has only the fields that the artifact's config shares with a
	// container image's config.
	Config ocispec.Image
	// Manifest is the digest of the manifest for this node's platform.
	Manifest digest.Digest
	// Layers are the manifest's blobs, lowest first.
	Layers []ocispec.Descriptor
	// Annotations are the manifest's annotations.
	Annotations map[string]string
	// ChainID identifies the unpacked root filesystem; empty unless Kind is KindRootfs.
	ChainID string
	// Component is the image's WebAssembly component or module; nil if it has none.
	Component *Component
	// LastUsed is the time of the last use since Open, for example by Prepare or View; zero if there was none.
	LastUsed time.Time
}

type PullOptions struct {
	// Auth is the login. Nil means the login in the docker config file or, without one, anonymous access.
	Auth *registry.Auth
	// OnProgress is called a few times a second, never concurrently. It must not block.
	OnProgress func(Progress)
}

type Progress struct {
	// Done and Total are bytes of blobs in their compressed form; Total is 0 until the manifest is known.
	Done, Total int64
	// Current is the blob that last made progress.
	Current digest.Digest
}

// FsUsage is the disk usage of a part of the store.
type FsUsage struct {
	// Mountpoint is a directory, which identifies the file system: Config.Root, or Config.ContainersDir.
	Mountpoint string
	UsedBytes  uint64
	InodesUsed uint64
	// Timestamp is the time of the measurement.
	Timestamp time.Time
}

// Usage is the disk usage of one writable layer.
type Usage struct {
	Bytes, Inodes uint64
	// Mountpoint is the Config.ContainersDir that has the layer; empty if the layer is below Config.Root.
	Mountpoint string
	// Timestamp is the time of the measurement; zero before the first measurement.
	Timestamp time.Time
}
