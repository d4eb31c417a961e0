package artifact

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"

	"github.com/tripod-run/tripod/internal/image"
)

// LocalPrefix begins the names of images that were made of files of this node: LocalPrefix and the file's SHA-256 in hex.
const LocalPrefix = "edge.local/"

// maxLocal bounds a file that Import reads, in bytes.
const maxLocal = 256 << 20

// Importer is a store that takes artifacts made on this node; *image.Store is one.
type Importer interface {
	Import(ctx context.Context, ref string, manifest image.Blob, blobs ...image.Blob) (image.Image, error)
}

// Import makes an image of a binary in a file, from its beginning. Files with the same content are the same image, and
// one that is in the store is not written again. What is not WebAssembly, too large, or not a regular file is
// errdefs.ErrInvalidArgument.
func Import(ctx context.Context, store Importer, file *os.File) (image.Image, error) {
	wasm, err := readLocal(file)
	if err != nil {
		return image.Image{}, err
	}
	sum := digest.FromBytes(wasm)
	name := LocalPrefix + sum.Encoded()
	built, err := Build(Spec{Wasm: wasm})
	if err != nil {
		return image.Image{}, fmt.Errorf("%s: %w", file.Name(), err)
	}
	return store.Import(ctx, name, built.Manifest, built.Blobs...)
}

// IsLocal tells whether a reference is one that Import made.
func IsLocal(ref string) bool { return strings.HasPrefix(ref, LocalPrefix) }

func readLocal(file *os.File) ([]byte, error) {
	info, err := file.Stat()
	switch {
	case err != nil:
		return nil, err
	case !info.Mode().IsRegular():
		return nil, fmt.Errorf("%s is not a regular file: %w", file.Name(), errdefs.ErrInvalidArgument)
	case info.Size() > maxLocal:
		return nil, fmt.Errorf("%s has %d bytes, at most %d are taken: %w", file.Name(), info.Size(), maxLocal, errdefs.ErrInvalidArgument)
	}
	// One byte more than it said shows that it grows.
	wasm, err := io.ReadAll(io.NewSectionReader(file, 0, info.Size()+1))
	if err == nil && int64(len(wasm)) != info.Size() {
		err = fmt.Errorf("%s changes while it is read: %w", file.Name(), errdefs.ErrUnavailable)
	}
	return wasm, err
}
