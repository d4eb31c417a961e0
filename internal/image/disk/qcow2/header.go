package qcow2

import (
	"encoding/binary"
	"fmt"
	"io"
	"math/bits"
	"strings"

	"github.com/containerd/errdefs"
)

// Magic begins every qcow2 image.
const Magic = "QFI\xfb"

// Sizes, in bytes, and limits of the format.
const (
	headerV2 = 72
	headerV3 = 104
	// headerCompression is the size of the largest header in use. That header ends with the compression type and
	// padding.
	headerCompression = 112

	minClusterBits = 9
	minCluster     = 1 << minClusterBits
	maxClusterBits = 21
	maxL1Bytes     = 32 << 20
	maxRefcount    = 8 << 20
	maxSnapshots   = 65536
	// maxSize is QEMU's limit for the size of a disk.
	maxSize = 1<<63 - 1<<30
)

// Bits of incompatible features.
const (
	featureDirty = 1 << iota
	featureCorrupt
	featureDataFile
	featureCompression
	featureExtendedL2

	featuresKnown = featureExtendedL2<<1 - 1
)

// Types of header extensions.
const (
	extensionEnd           = 0
	extensionBackingFormat = 0xe2792aca
	extensionEncryption    = 0x0537be77
	extensionDataFile      = 0x44415441
)

// Info describes a usable image.
type Info struct {
	// Version is 2 or 3.
	Version uint32
	// VirtualSize is the disk's size in bytes, as the guest sees it.
	VirtualSize uint64
	// ClusterSize is in bytes.
	ClusterSize uint64
	// Snapshots counts the internal snapshots.
	Snapshots uint32
	// Dirty means that the image was not closed properly. Reference counts can be wrong, but the data is not.
	Dirty bool
	// Zstd means that compressed clusters use zstd instead of zlib.
	Zstd bool
	// ExtendedL2 means that clusters have subclusters.
	ExtendedL2 bool
}

// header is the header in the file (big endian), with the fields that version 3 adds.
type header struct {
	Magic                 [4]byte
	Version               uint32
	BackingFileOffset     uint64
	BackingFileSize       uint32
	ClusterBits           uint32
	Size                  uint64
	CryptMethod           uint32
	L1Size                uint32
	L1TableOffset         uint64
	RefcountTableOffset   uint64
	RefcountTableClusters uint32
	NbSnapshots           uint32
	SnapshotsOffset       uint64

	IncompatibleFeatures uint64
	CompatibleFeatures   uint64
	AutoclearFeatures    uint64
	RefcountOrder        uint32
	HeaderLength         uint32

	CompressionType uint8
	Padding         [7]byte
}

// Is reports whether head begins with qcow2's magic number. Do not use it for a disk that a guest can write to, because
// the guest can write the magic number.
func Is(head []byte) bool { return strings.HasPrefix(string(head), Magic) }

// Inspect checks the header of an image of size bytes. It returns errdefs.ErrInvalidArgument, with the name of the
// field, for an image that is not qcow2 or is truncated, has a table over its limit or outside the file, names a
// backing file or an external data file (fault I5), is encrypted or marked as corrupt, or has unknown features. It
// returns errors from r unchanged.
func Inspect(r io.ReaderAt, size int64) (*Info, error) {
	_, info, err := inspect(r, size)
	return info, err
}

func inspect(r io.ReaderAt, size int64) (*header, *Info, error) {
	h, err := readHeader(r, size)
	if err != nil {
		return nil, nil, err
	}
	for _, check := range []func() error{
		h.checkFeatures, h.checkReferences, func() error { return h.checkTables(size) }, func() error { return h.checkExtensions(r, size) },
	} {
		if err := check(); err != nil {
			return nil, nil, err
		}
	}
	return h, &Info{
		Version: h.Version, VirtualSize: h.Size, ClusterSize: h.clusterSize(), Snapshots: h.NbSnapshots,
		Dirty: h.IncompatibleFeatures&featureDirty != 0, Zstd: h.CompressionType == 1,
		ExtendedL2: h.IncompatibleFeatures&featureExtendedL2 != 0,
	}, nil
}

func invalidf(format string, args ...any) error {
	return fmt.Errorf("qcow2: "+format+": %w", append(args, errdefs.ErrInvalidArgument)...)
}

// readHeader reads the header. In a version 2 header, it sets the fields of version 3 to their defaults.
func readHeader(r io.ReaderAt, size int64) (*header, error) {
	var buf [headerCompression]byte
	n := min(size, headerCompression)
	if n >= int64(len(Magic)) {
		if _, err := r.ReadAt(buf[:n], 0); err != nil && err != io.EOF {
			return nil, err
		}
	}
	if !Is(buf[:max(n, 0)]) {
		return nil, invalidf("the image does not begin with the magic number QFI\\xfb but with %q", buf[:min(max(n, 0), 8)])
	}
	h := &header{}
	if _, err := binary.Decode(buf[:], binary.BigEndian, h); err != nil {
		return nil, err
	}
	need := int64(headerV3)
	if h.Version == 2 {
		need = headerV2
	}
	switch {
	case h.Version != 2 && h.Version != 3:
		return nil, invalidf("version %d is neither 2 nor 3", h.Version)
	case size < need:
		return nil, invalidf("the image ends within its header, after %d bytes", size)
	case h.ClusterBits < minClusterBits || h.ClusterBits > maxClusterBits:
		return nil, invalidf("cluster_bits is %d, not %d to %d", h.ClusterBits, minClusterBits, maxClusterBits)
	}
	if h.Version == 2 {
		h.IncompatibleFeatures, h.CompatibleFeatures, h.AutoclearFeatures = 0, 0, 0
		h.RefcountOrder, h.HeaderLength, h.CompressionType = 4, headerV2, 0
		return h, nil
	}
	if h.HeaderLength < headerV3 || uint64(h.HeaderLength) > h.clusterSize() || h.HeaderLength%8 != 0 || int64(h.HeaderLength) > size {
		return nil, invalidf("header_length is %d, in an image of %d bytes with clusters of %d", h.HeaderLength, size, h.clusterSize())
	}
	if h.HeaderLength == headerV3 {
		h.CompressionType = 0
	}
	return h, nil
}

func (h *header) clusterSize() uint64 { return 1 << h.ClusterBits }

// checkFeatures rejects an image that has unknown features, is encrypted, or is marked as corrupt.
func (h *header) checkFeatures() error {
	if unknown := h.IncompatibleFeatures &^ featuresKnown; unknown != 0 {
		return invalidf("incompatible_features has the unknown bit %d (%#x in all)", bits.TrailingZeros64(unknown), h.IncompatibleFeatures)
	}
	switch {
	case h.IncompatibleFeatures&featureCorrupt != 0:
		return invalidf("the image is marked as corrupt; `qemu-img check -r all` may repair it")
	case h.CryptMethod == 1:
		return invalidf("crypt_method is 1 (AES): an encrypted image cannot be used")
	case h.CryptMethod == 2:
		return invalidf("crypt_method is 2 (LUKS): an encrypted image cannot be used")
	case h.CryptMethod != 0:
		return invalidf("crypt_method is %d, which is unknown", h.CryptMethod)
	case h.RefcountOrder > 6:
		return invalidf("refcount_order is %d, not 0 to 6", h.RefcountOrder)
	case h.CompressionType > 1:
		return invalidf("compression_type is %d, which is neither zlib nor zstd", h.CompressionType)
	case (h.CompressionType != 0) != (h.IncompatibleFeatures&featureCompression != 0):
		return invalidf("compression_type is %d, which contradicts incompatible_features %#x", h.CompressionType, h.IncompatibleFeatures)
	}
	return nil
}

// checkReferences rejects an image that would make QEMU open another file.
func (h *header) checkReferences() error {
	switch {
	case h.BackingFileOffset != 0 || h.BackingFileSize != 0:
		return invalidf("the image names a backing file (backing_file_offset %d, backing_file_size %d): flatten it with `qemu-img convert`",
			h.BackingFileOffset, h.BackingFileSize)
	case h.IncompatibleFeatures&featureDataFile != 0:
		return invalidf("the image keeps its data in another file (external data file): flatten it with `qemu-img convert`")
	}
	return nil
}

// checkTables checks the tables against the format's limits and the file's size.
func (h *header) checkTables(size int64) error {
	if h.Size == 0 || h.Size > maxSize {
		return invalidf("size is %d, not 1 to %d bytes", h.Size, uint64(maxSize))
	}
	if uint64(h.L1Size)*8 > maxL1Bytes {
		return invalidf("l1_size is %d entries, more than the limit of %d", h.L1Size, maxL1Bytes/8)
	}
	if need := l1Entries(h.Size, h.ClusterBits, h.IncompatibleFeatures&featureExtendedL2 != 0); uint64(h.L1Size) < need {
		return invalidf("l1_size is %d entries, too few for a disk of %d bytes, which needs %d", h.L1Size, h.Size, need)
	}
	if uint64(h.RefcountTableClusters)<<h.ClusterBits > maxRefcount {
		return invalidf("refcount_table_clusters is %d, more than the limit of %d", h.RefcountTableClusters, maxRefcount>>h.ClusterBits)
	}
	if h.RefcountTableClusters == 0 {
		return invalidf("refcount_table_clusters is 0")
	}
	if h.NbSnapshots > maxSnapshots {
		return invalidf("nb_snapshots is %d, more than the limit of %d", h.NbSnapshots, maxSnapshots)
	}
	// Each entry of the snapshot table takes at least 40 bytes.
	for _, table := range []struct {
		field         string
		offset, bytes uint64
	}{
		{"l1_table_offset", h.L1TableOffset, uint64(h.L1Size) * 8},
		{"refcount_table_offset", h.RefcountTableOffset, uint64(h.RefcountTableClusters) << h.ClusterBits},
		{"snapshots_offset", h.SnapshotsOffset, uint64(h.NbSnapshots) * 40},
	} {
		if table.field == "snapshots_offset" && h.NbSnapshots == 0 {
			continue
		}
		if table.offset == 0 || table.offset%h.clusterSize() != 0 {
			return invalidf("%s is %#x, which is not a multiple of the cluster size", table.field, table.offset)
		}
		if table.offset > uint64(size) || table.bytes > uint64(size)-table.offset {
			return invalidf("%s is %#x, but %d bytes at that offset exceed the image of %d bytes: it is cut off", table.field, table.offset,
				table.bytes, size)
		}
	}
	return nil
}

// l1Entries returns the number of entries that an L1 table needs for a disk of size bytes.
func l1Entries(size uint64, clusterBits uint32, extended bool) uint64 {
	entryBits := uint32(3)
	if extended {
		entryBits = 4
	}
	shift := clusterBits + clusterBits - entryBits
	return (size-1)>>shift + 1
}

// checkExtensions walks the header's extensions, all of which are within the first cluster.
func (h *header) checkExtensions(r io.ReaderAt, size int64) error {
	end := min(h.clusterSize(), uint64(size))
	for at := uint64(h.HeaderLength); at+8 <= end; {
		var head [8]byte
		if _, err := r.ReadAt(head[:], int64(at)); err != nil {
			return err
		}
		kind, length := binary.BigEndian.Uint32(head[:4]), uint64(binary.BigEndian.Uint32(head[4:]))
		at += 8
		switch {
		case kind == extensionEnd:
			return nil
		case length > end-at:
			return invalidf("the header extension %#x has %d bytes, more than the first cluster has room for", kind, length)
		case kind == extensionDataFile:
			return invalidf("a header extension names an external data file: flatten the image with `qemu-img convert`")
		case kind == extensionBackingFormat:
			return invalidf("a header extension names the format of a backing file: flatten the image with `qemu-img convert`")
		case kind == extensionEncryption:
			return invalidf("a header extension points to a LUKS header: an encrypted image cannot be used")
		}
		at += (length + 7) &^ 7
	}
	return nil
}
