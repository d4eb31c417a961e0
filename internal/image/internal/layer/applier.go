package layer

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/diff"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/pkg/archive"
	continuity "github.com/containerd/continuity/fs"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/tripod-run/tripod/internal/image/internal/failure"
	"github.com/tripod-run/tripod/internal/image/internal/readers"
)

// Applier unpacks the layers of one image (diff.Applier). Unlike containerd's applier, it checks the blob against
// its digest while reading, enforces the image's limits, rejects paths outside the root, and omits devices and the
// overlay's own attributes (fault I4).
type Applier struct {
	content  content.Provider
	progress Progress
	logger   *slog.Logger
	diffIDs  map[digest.Digest]digest.Digest
	bytes    *readers.Budget
	files    *readers.Budget
}

// Progress learns of the applier's progress.
type Progress interface {
	// Busy marks the start of work that should make progress; the returned function marks its end.
	Busy() func()
	// Touch is called when something was unpacked. It must be quick.
	Touch()
}

// Limits bounds the layers of one image together.
type Limits struct {
	// Bytes are those of the unpacked archives, and Files their entries.
	Bytes, Files int64
}

// NewApplier makes an applier. The diff IDs are those in the image's config, by the digests of the layers.
func NewApplier(from content.Provider, progress Progress, logger *slog.Logger, limits Limits,
	diffIDs map[digest.Digest]digest.Digest) *Applier {
	return &Applier{
		content: from, progress: progress, logger: logger, diffIDs: diffIDs,
		bytes: readers.NewBudget("bytes unpacked", limits.Bytes), files: readers.NewBudget("files", limits.Files),
	}
}

// Apply unpacks one layer into the writable directory of the given mounts.
func (a *Applier) Apply(ctx context.Context, desc ocispec.Descriptor, mounts []mount.Mount,
	_ ...diff.ApplyOpt) (ocispec.Descriptor, error) {
	defer a.progress.Busy()()
	root, parents, err := Dirs(mounts)
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	ra, err := a.content.ReaderAt(ctx, desc)
	if errors.Is(err, fs.ErrNotExist) || err == nil && ra.Size() != desc.Size {
		return ocispec.Descriptor{}, &failure.CorruptError{Digest: desc.Digest}
	} else if err != nil {
		return ocispec.Descriptor{}, err
	}
	defer ra.Close()
	blob := readers.NewDigest(&touchReader{content.NewReader(ra), a.progress}, desc.Digest.Algorithm())
	diffID, size, err := a.extract(ctx, desc, root, parents, blob)
	// A damaged blob can cause any error, so check the digest after every error.
	if _, readErr := io.Copy(io.Discard, blob); readErr != nil {
		return ocispec.Descriptor{}, errors.Join(err, readErr)
	}
	if blob.Sum() != desc.Digest {
		return ocispec.Descriptor{}, &failure.CorruptError{Digest: desc.Digest}
	}
	if err != nil {
		return ocispec.Descriptor{}, fmt.Errorf("layer %s: %w", desc.Digest, err)
	}
	if want := a.diffIDs[desc.Digest]; diffID != want {
		return ocispec.Descriptor{}, failure.Invalidf("layer %s unpacks to %s, but the config says %s", desc.Digest, diffID, want)
	}
	return ocispec.Descriptor{MediaType: ocispec.MediaTypeImageLayer, Digest: diffID, Size: size}, nil
}

// extract decompresses and unpacks a layer and returns the digest and size of its tar archive.
func (a *Applier) extract(ctx context.Context, desc ocispec.Descriptor, root string, parents []string,
	blob io.Reader) (digest.Digest, int64, error) {
	plain, err := decompress(desc.MediaType, blob)
	if err != nil {
		return "", 0, failure.Invalidf("%s: %v", desc.MediaType, err)
	}
	defer plain.Close()
	stream := readers.NewDigest(a.bytes.Reader(plain), digest.Canonical)
	hidden := newWhiteouts(root, parents)
	if _, err := archive.Apply(ctx, root, stream, archive.WithFilter(a.accept(ctx, desc, hidden)), archive.WithParents(parents)); err != nil {
		return "", 0, badArchive(err)
	}
	if err := hidden.apply(ctx); err != nil {
		return "", 0, fmt.Errorf("make whiteouts: %w", err)
	}
	// Read on to the end of the stream, because the digest includes the padding after the archive.
	if _, err := io.Copy(io.Discard, stream); err != nil {
		return "", 0, badArchive(err)
	}
	return stream.Sum(), stream.Size(), nil
}

// badArchive turns the error of an unreadable archive into ErrInvalidArgument. It does not change errors from the disk,
// which have an errno.
func badArchive(err error) error {
	if _, ok := errors.AsType[syscall.Errno](err); ok || failure.HasClass(err) {
		return err
	}
	return failure.Invalidf("not a readable archive: %v", err)
}

// accept checks each entry before it is unpacked.
func (a *Applier) accept(ctx context.Context, desc ocispec.Descriptor, hidden *whiteouts) archive.Filter {
	skipped := 0
	dirs := &layerDirectories{tree: pathTree{}, headers: map[string]*tar.Header{}}
	return func(h *tar.Header) (bool, error) {
		a.progress.Touch()
		// Check the size in the header: a sparse file is small in the archive, but takes its full size on disk.
		if err := errors.Join(a.files.Spend(1), a.bytes.Allows(h.Size)); err != nil {
			return false, err
		}
		if len(h.Name) > maxPath || len(h.Linkname) > maxPath {
			return false, failure.Invalidf("an entry has a name of %d bytes, more than the limit of %d", max(len(h.Name), len(h.Linkname)), maxPath)
		}
		if outside(h.Name) || h.Typeflag == tar.TypeLink && outside(h.Linkname) {
			return false, failure.Invalidf("entry %q (link to %q) leads out of the root", h.Name, h.Linkname)
		}
		if h.Typeflag == tar.TypeBlock || h.Typeflag == tar.TypeChar {
			// Skip devices: containers get them from their pods, never from their images.
			if skipped++; skipped == 1 {
				a.logger.InfoContext(ctx, "ignoring the devices in an image's layer", "layer", desc.Digest, "first", h.Name)
			}
			return false, nil
		}
		if taken, err := hidden.take(h); taken || err != nil {
			return false, err
		}
		if err := dirs.note(h, hidden.root); err != nil {
			return false, err
		}
		hidden.wrote(h.Name)
		switch h.Typeflag {
		case tar.TypeCont:
			h.Typeflag = tar.TypeReg // POSIX: treat it so unless the system has files in one piece
		case tar.TypeLink:
			if err := a.linkTarget(ctx, h, hidden); err != nil {
				return false, err
			}
		}
		for key := range h.PAXRecords {
			// Omit trusted.*: trusted.overlay.* would control the overlay itself, and the others do not belong in
			// images.
			if strings.HasPrefix(key, "SCHILY.xattr.trusted.") {
				delete(h.PAXRecords, key)
			}
		}
		return true, nil
	}
}

// maxPath is the longest name of an entry, in bytes, that the kernel accepts (PATH_MAX).
const maxPath = 4096

// layerDirectories are the directories that a layer has listed so far.
type layerDirectories struct {
	tree    pathTree
	headers map[string]*tar.Header
}

// note notes a directory, and takes back the times of directories that another entry replaces. containerd sets them at the end,
// by name, when there may be a link.
func (d *layerDirectories) note(h *tar.Header, root string) error {
	name := path.Clean("/" + h.Name)
	if h.Typeflag == tar.TypeDir {
		d.tree.add(name)
		d.headers[name] = h
		return nil
	}
	if d.headers[name] == nil && d.tree[name] == nil {
		return nil
	}
	info, err := os.Lstat(root)
	if err != nil {
		return err
	}
	d.tree.cut(name, func(dir string) {
		if old := d.headers[dir]; old != nil {
			*old = tar.Header{Name: "/", ModTime: info.ModTime()}
			delete(d.headers, dir)
		}
	})
	return nil
}

// linkTarget makes sure that the target of a hard link is in the layer. A layer may refer to a file of a layer below, as in a
// merged tree. The target itself may be a symbolic link, which is not followed.
func (a *Applier) linkTarget(ctx context.Context, h *tar.Header, layer *whiteouts) error {
	dir, err := continuity.RootPath(layer.root, path.Dir(h.Linkname))
	if err != nil {
		return err
	}
	target := filepath.Join(dir, path.Base(h.Linkname))
	if _, err := os.Lstat(target); err == nil || !failure.IsGone(err) && !errors.Is(err, syscall.ENOTDIR) {
		return err
	}
	name := strings.TrimPrefix(target, filepath.Clean(layer.root))
	n, err := layer.copyUp(ctx, path.Clean("/"+name))
	if err != nil {
		return fmt.Errorf("entry %q, a hard link to %q: %w", h.Name, h.Linkname, err)
	}
	return a.bytes.Spend(n)
}

// outside reports whether a path climbs above its root. An absolute path starts at that root.
func outside(path string) bool {
	clean := filepath.Clean(path)
	return clean == ".." || strings.HasPrefix(clean, "../")
}

// Dirs returns the writable directory of a snapshot's mounts and the directories of the layers below. Unpacking
// writes directly to the writable directory, with whiteouts in the overlay's form, and needs no mount.
func Dirs(mounts []mount.Mount) (string, []string, error) {
	if len(mounts) != 1 {
		return "", nil, fmt.Errorf("a snapshot with %d mounts: %w", len(mounts), errdefs.ErrNotImplemented)
	}
	m := mounts[0]
	if m.Type == "bind" {
		return m.Source, nil, nil
	}
	upper, lower := OverlayDirs(m)
	if m.Type != "overlay" || upper == "" {
		return "", nil, fmt.Errorf("a snapshot with a %s mount and no upper directory: %w", m.Type, errdefs.ErrNotImplemented)
	}
	return upper, lower, nil
}

// OverlayDirs returns the directories in an overlay's options: the upper directory, which is "" if the overlay is
// read-only, and the lower directories, highest first.
func OverlayDirs(m mount.Mount) (upper string, lower []string) {
	for _, option := range m.Options {
		if dir, ok := strings.CutPrefix(option, "upperdir="); ok {
			upper = dir
		} else if dirs, ok := strings.CutPrefix(option, "lowerdir="); ok {
			lower = strings.Split(dirs, ":")
		}
	}
	return upper, lower
}

// CanUnpack reports whether a media type is that of a layer that can be unpacked.
func CanUnpack(mediaType string) bool {
	_, err := images.DiffCompression(context.Background(), mediaType)
	return err == nil
}

// decompress decompresses a layer in this process. The first bytes say how, because registries have layers whose media type is
// wrong; the diff ID proves the result. zstd's window is limited, so a malicious layer cannot exhaust
// memory.
func decompress(mediaType string, r io.Reader) (io.ReadCloser, error) {
	if !CanUnpack(mediaType) {
		return nil, errors.New("cannot be unpacked")
	}
	r, compression := readers.Sniff(r)
	if open := readers.Decompressor(compression); open != nil {
		return open(r)
	}
	return io.NopCloser(r), nil
}

// touchReader reports progress to the applier's caller.
type touchReader struct {
	r        io.Reader
	progress Progress
}

func (t *touchReader) Read(p []byte) (int, error) {
	n, err := t.r.Read(p)
	if n > 0 {
		t.progress.Touch()
	}
	return n, err
}
