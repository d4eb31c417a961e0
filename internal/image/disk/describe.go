package disk

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/tripod-run/tripod/internal/image/disk/qcow2"
)

// wasmMagic begins WebAssembly binaries.
var wasmMagic = []byte("\x00asm")

// IsFile reports whether a file to be pushed is a disk: a qcow2 image or, according to its name, a raw disk (.raw,
// .img) or a CD-ROM (.iso), possibly compressed.
func IsFile(file string) (bool, error) {
	r, err := os.Open(file)
	if err != nil {
		return false, err
	}
	defer r.Close()
	_, head, err := Sniff(r, filepath.Base(file))
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

// Describe describes the layer of an artifact with a disk. If the disk is uncompressed and a node would reject it, the
// error is errdefs.ErrInvalidArgument.
func Describe(file string) (layer ocispec.Descriptor, err error) {
	r, err := os.Open(file)
	if err != nil {
		return layer, err
	}
	defer r.Close()
	if layer.MediaType, _, err = Sniff(r, filepath.Base(file)); err != nil {
		return layer, err
	}
	if format, compression, _ := typeOf(layer.MediaType); compression == "" {
		var disk Files
		if err := disk.setDisk(r, file, format); err != nil {
			return layer, err
		}
		if err := disk.Check(); err != nil {
			return layer, err
		}
	}
	if _, err := r.Seek(0, io.SeekStart); err != nil {
		return layer, err
	}
	digester := digest.Canonical.Digester()
	layer.Size, err = io.Copy(digester.Hash(), r)
	layer.Digest = digester.Digest()
	return layer, err
}
