package artifact

import (
	"context"
	"fmt"
	"io"
	"os"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"

	"github.com/tripod-run/tripod/internal/image"
)

// maxLocal bounds a binary that Import or ImportFile reads, in bytes.
const maxLocal = 256 << 20

// ImportFile imports the binary in a file as an image. The image's name is image.LocalPrefix followed by the binary's
// SHA-256, so files with the same content share one image. ImportFile returns errdefs.ErrInvalidArgument if the file is
// not WebAssembly, too large, or not a regular file.
func ImportFile(ctx context.Context, store *image.Store, file *os.File) (image.Image, error) {
	wasm, err := readLocal(file)
	if err != nil {
		return image.Image{}, err
	}
	built, err := Build(Spec{Wasm: wasm})
	if err != nil {
		return image.Image{}, fmt.Errorf("%s: %w", file.Name(), err)
	}
	return importBuilt(ctx, store, wasm, built)
}

// Import is like ImportFile, for a binary from a reader.
func Import(ctx context.Context, store *image.Store, r io.Reader) (image.Image, error) {
	wasm, err := io.ReadAll(io.LimitReader(r, maxLocal+1))
	if err != nil {
		return image.Image{}, err
	}
	if len(wasm) > maxLocal {
		return image.Image{}, fmt.Errorf("the binary has more than %d bytes: %w", maxLocal, errdefs.ErrInvalidArgument)
	}
	built, err := Build(Spec{Wasm: wasm})
	if err != nil {
		return image.Image{}, err
	}
	return importBuilt(ctx, store, wasm, built)
}

func importBuilt(ctx context.Context, store *image.Store, wasm []byte, built *Image) (image.Image, error) {
	return store.Import(ctx, image.LocalPrefix+digest.FromBytes(wasm).Encoded(), built.Manifest, built.Blobs...)
}

func readLocal(file *os.File) ([]byte, error) {
	info, err := file.Stat()
	switch {
	case err != nil:
		return nil, err
	case !info.Mode().IsRegular():
		return nil, fmt.Errorf("%s is not a regular file: %w", file.Name(), errdefs.ErrInvalidArgument)
	case info.Size() > maxLocal:
		return nil, fmt.Errorf("%s has %d bytes; the limit is %d: %w", file.Name(), info.Size(), maxLocal, errdefs.ErrInvalidArgument)
	}
	// Reading one more byte shows whether the file has grown.
	wasm, err := io.ReadAll(io.NewSectionReader(file, 0, info.Size()+1))
	if err == nil && int64(len(wasm)) != info.Size() {
		err = fmt.Errorf("%s changed while it was read: %w", file.Name(), errdefs.ErrUnavailable)
	}
	return wasm, err
}
