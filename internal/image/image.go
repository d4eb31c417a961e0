package image

import (
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Kind says what an image is made of. It is found from the media types of its manifest.
type Kind string

// The kinds of image.
const (
	// KindRootfs is a root filesystem in layers, the usual container image. It is unpacked when it is pulled.
	KindRootfs Kind = "rootfs"
	// KindDisk is a virtual machine's disk: one qcow2 or raw blob.
	KindDisk Kind = "disk"
	// KindComponent is an artifact that is a WebAssembly module or component. (A rootfs may have one as its entrypoint.)
	KindComponent Kind = "component"
)

// Image is one image of the store. Its slices and maps are shared: read them, never change them.
type Image struct {
	// ID is "sha256:…": the digest of the config, for artifacts that of the manifest.
	// It is what every RPC of the CRI calls the image.
	ID string
	// RepoTags are the tags, in full ("docker.io/library/busybox:1.36"), sorted.
	RepoTags []string
	// RepoDigests are the name@digest references it was pulled by, with the digest of the index where there is one.
	RepoDigests []string
	// Size is the bytes of the manifest, the config and the layers as a registry has them.
	Size uint64
	// Pinned says that the configuration spares the image from the kubelet's collection.
	Pinned bool
	// User is the raw user of the config: "", "name", "1000", "1000:100" …
	User string
	Kind Kind
	// Config is the image's config; of an artifact only what it shares with one.
	Config ocispec.Image
	// Manifest is the digest of the manifest for this node's platform.
	Manifest digest.Digest
	// Layers are the blobs of the manifest, the lowest first.
	Layers []ocispec.Descriptor
	// Annotations are the manifest's.
	Annotations map[string]string
	// ChainID names the unpacked root filesystem; empty unless Kind is KindRootfs.
	ChainID string
	// Component is what the image has of a WebAssembly component or module; nil when it has none.
	Component *Component
	// LastUsed is when Prepare or View last used it since Open; zero when not.
	LastUsed time.Time
}

// Auth is a login to a registry (CRI AuthConfig). One of Username, Auth, IdentityToken and RegistryToken is used,
// in this order. It is never logged or stored.
type Auth struct {
	Username, Password string
	// Auth is base64 of "username:password".
	Auth string
	// ServerAddress is the registry that the login is for; empty is the one that the reference names.
	ServerAddress string
	// IdentityToken is traded at the registry's token server for an access token.
	IdentityToken string
	// RegistryToken is sent to the registry as it is, as a bearer token.
	RegistryToken string
}

// PullOptions are what a pull may bring along.
type PullOptions struct {
	// Auth is the login; nil looks into the docker config file, then goes anonymously.
	Auth *Auth
	// OnProgress is told of progress a few times a second, by one goroutine at a time. It must not block.
	OnProgress func(Progress)
}

// Progress is how far a pull is.
type Progress struct {
	// Done and Total are bytes of blobs as the registry has them; Total is 0 until the manifest is known.
	Done, Total int64
	// Current is the blob that last moved.
	Current digest.Digest
}

// FsUsage is how much of a file system something takes.
type FsUsage struct {
	// Mountpoint is the directory of the store, which names the file system.
	Mountpoint string
	UsedBytes  uint64
	InodesUsed uint64
	// Timestamp is when the figures were taken.
	Timestamp time.Time
}

// Usage is what one writable layer takes.
type Usage struct {
	Bytes, Inodes uint64
	// Timestamp is when the figures were taken; zero when they never were yet.
	Timestamp time.Time
}
