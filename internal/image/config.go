package image

import (
	"cmp"
	"fmt"
	"log/slog"
	"path/filepath"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	"github.com/distribution/reference"

	"github.com/tripod-run/tripod/internal/image/registry"
)

// Config configures the store. Only Root is required.
type Config struct {
	// Root is the directory of the store, <state root>/image. It is created with mode 0700.
	Root string
	// ContainersDir is a directory on another file system than Root, for the containers' writable layers. Empty: they are
	// below Root.
	ContainersDir string
	// DerivedDirs are directories of files that other parts make from images, and delete with them. FsInfo counts them.
	DerivedDirs []string
	// HostsDir are directories of hosts.toml files in containerd's certs.d layout; the first directory with an entry
	// for a host applies.
	HostsDir []string
	// PinnedImages are references that the kubelet's image collection must not remove (CRI Image.pinned).
	PinnedImages []string
	// MaxConcurrentDownloads limits the blobs that one pull fetches at a time; 0 means 3.
	MaxConcurrentDownloads int
	// RangesPerBlob limits the simultaneous requests for one large blob; 0 means 1. A registry that ignores ranges gets one
	// request.
	RangesPerBlob int
	// PullTimeout limits the duration of a pull, regardless of its progress; 0 means six hours.
	PullTimeout time.Duration
	// ProgressTimeout ends a pull in which no byte has arrived or been unpacked for this long; 0 means one minute.
	ProgressTimeout time.Duration
	// ResumeWindow is how long a failed pull's downloads are kept for the next pull; 0 means a day.
	ResumeWindow time.Duration
	// DockerConfig is the path of a docker config.json whose "auths" apply to pulls without a login of their own.
	DockerConfig string
	// RefuseDowngrades is that of registry.Config.
	RefuseDowngrades bool
	// SignaturePolicy is the path of a policy.json (containers-policy.json(5)) that every pulled image must meet. It is
	// read at each pull; a missing or invalid file refuses every pull. Empty means that no signature is checked.
	SignaturePolicy string
	// RegistriesDir is the directory of containers-registries.d(5), which says where the signatures of "signedBy" are.
	RegistriesDir string
	// Peers are other nodes from which pulls may take images.
	Peers Peers
	// Translation maps names to disks that are downloaded by HTTP(S).
	Translation Translation
	// Platform ("linux/arm64") selects the entry of a multi-platform image's index; empty means the host's platform.
	Platform string
	// Limits bounds the size and shape of images.
	Limits Limits
	// Logger receives the messages of the store and of the libraries that it uses; nil means slog.Default.
	Logger *slog.Logger
}

// Peers configures from which other nodes a pull may take images (see ServeMirror).
type Peers struct {
	// Hosts are the URLs of mirrors, http://HOST:PORT or https://HOST:PORT. A name stands for all of its addresses.
	Hosts []string
	// First asks peers before the registry for everything that is named by a digest. Otherwise peers are asked only if
	// the registry is unavailable.
	First bool
	// Tags lets peers say what a tag refers to while the registry is unavailable. Their answer can be old.
	Tags bool
	// CA is a file with the authorities of the peers' certificates; empty means those of the system.
	CA string
	// Certificate and Key are files in PEM that are shown to peers; empty means none.
	Certificate, Key string
}

// Limits bounds what the store accepts from a registry. A zero field means its default.
type Limits struct {
	// DocumentBytes bounds an index, a manifest, a config or the descriptors of a component; the default is 8 MiB.
	DocumentBytes int64
	// ComponentBytes bounds the binary of a component; the default is 128 MiB.
	ComponentBytes int64
	// IndexDepth bounds how many indexes may be nested above a manifest; the default is 4.
	IndexDepth int
	// Layers bounds the layers of an image; the default is 128. The kernel supports at most 500 layers in one overlay.
	Layers int
	// UnpackedBytes bounds the decompressed size of an image's layers together, and the size of a download; the default
	// is 64 GiB.
	UnpackedBytes int64
	// UnpackedFiles bounds the number of entries in all layers of an image; the default is 8 Mi.
	UnpackedFiles int64
}

func (c *Config) setDefaults() {
	setDefault(&c.MaxConcurrentDownloads, 3)
	setDefault(&c.RangesPerBlob, 1)
	setDefault(&c.PullTimeout, 6*time.Hour)
	setDefault(&c.ProgressTimeout, time.Minute)
	setDefault(&c.ResumeWindow, 24*time.Hour)
	setDefault(&c.Limits.DocumentBytes, registry.MaxDocumentBytes)
	setDefault(&c.Limits.ComponentBytes, 128<<20)
	setDefault(&c.Limits.IndexDepth, 4)
	setDefault(&c.Limits.Layers, 128)
	setDefault(&c.Limits.UnpackedBytes, 64<<30)
	setDefault(&c.Limits.UnpackedFiles, 8<<20)
	setDefault(&c.Logger, slog.Default())
}

func setDefault[T comparable](field *T, value T) { *field = cmp.Or(*field, value) }

// check rejects invalid settings. It returns the parsed platform and the parsed pinned references.
func (c *Config) check() (platforms.MatchComparer, map[string]bool, error) {
	if !filepath.IsAbs(c.Root) {
		return nil, nil, fmt.Errorf("image store: root %q is not an absolute path: %w", c.Root, errdefs.ErrInvalidArgument)
	}
	if c.ContainersDir != "" && !filepath.IsAbs(c.ContainersDir) {
		return nil, nil, fmt.Errorf("image store: containers directory %q is not an absolute path: %w", c.ContainersDir,
			errdefs.ErrInvalidArgument)
	}
	for name, value := range map[string]int64{
		"max concurrent downloads": int64(c.MaxConcurrentDownloads), "ranges per blob": int64(c.RangesPerBlob),
		"pull timeout":     int64(c.PullTimeout),
		"progress timeout": int64(c.ProgressTimeout), "resume window": int64(c.ResumeWindow),
		"document bytes": c.Limits.DocumentBytes, "component bytes": c.Limits.ComponentBytes,
		"index depth": int64(c.Limits.IndexDepth), "layers": int64(c.Limits.Layers),
		"unpacked bytes": c.Limits.UnpackedBytes, "unpacked files": c.Limits.UnpackedFiles,
	} {
		if value < 0 {
			return nil, nil, fmt.Errorf("image store: %s is negative: %w", name, errdefs.ErrInvalidArgument)
		}
	}
	matcher := platforms.Default()
	if c.Platform != "" {
		p, err := platforms.Parse(c.Platform)
		if err != nil {
			return nil, nil, fmt.Errorf("image store: platform %q: %v: %w", c.Platform, err, errdefs.ErrInvalidArgument)
		}
		matcher = platforms.Only(p)
	}
	pinned := map[string]bool{}
	for _, ref := range c.PinnedImages {
		named, err := reference.ParseDockerRef(ref)
		if err != nil {
			return nil, nil, fmt.Errorf("image store: pinned image %q: %v: %w", ref, err, errdefs.ErrInvalidArgument)
		}
		pinned[named.String()] = true
	}
	return matcher, pinned, nil
}
