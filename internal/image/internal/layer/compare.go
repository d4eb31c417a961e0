package layer

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/image/internal/readers"
)

// Compare compares the files of an unpacked layer to its blob and describes the first difference; "" if there is none.
func Compare(ctx context.Context, mediaType string, blob io.Reader, dir string) (string, error) {
	want, err := archiveSums(mediaType, readers.Cancel(ctx, blob))
	if err != nil {
		return "", err
	}
	root, err := openRoot(dir)
	if err != nil {
		return "", err
	}
	defer root.close()
	for _, name := range slices.Sorted(maps.Keys(want)) {
		file, err := root.Open(name, unix.O_NOFOLLOW)
		if errdefs.IsInvalidArgument(err) { // missing, or not a file
			return fmt.Sprintf("%s is missing", name), nil
		} else if err != nil {
			return "", err
		}
		sum := sha256.New()
		_, err = io.Copy(sum, readers.Cancel(ctx, file))
		if err = errors.Join(err, file.Close()); err != nil {
			return "", err
		}
		if [sha256.Size]byte(sum.Sum(nil)) != want[name] {
			return fmt.Sprintf("%s differs from the layer's blob", name), nil
		}
	}
	return "", nil
}

// archiveSums returns the checksums of the regular files that remain after all entries of a layer's archive are
// unpacked.
func archiveSums(mediaType string, blob io.Reader) (map[string][sha256.Size]byte, error) {
	plain, err := decompress(mediaType, blob)
	if err != nil {
		return nil, err
	}
	defer plain.Close()
	files, tree := map[string][sha256.Size]byte{}, pathTree{}
	for archive := tar.NewReader(plain); ; {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return files, nil
		}
		if err != nil {
			return nil, err
		}
		name := strings.TrimPrefix(filepath.Clean("/"+h.Name), "/")
		delete(files, name) // a later entry replaces an earlier one
		if h.Typeflag != tar.TypeDir {
			tree.cut("/"+name, func(gone string) { delete(files, gone[1:]) })
		}
		if noFile(name) || h.Typeflag != tar.TypeReg && h.Typeflag != tar.TypeCont {
			continue
		}
		sum := sha256.New()
		if _, err := io.Copy(sum, archive); err != nil {
			return nil, err
		}
		files[name] = [sha256.Size]byte(sum.Sum(nil))
		tree.add("/" + name)
	}
}
