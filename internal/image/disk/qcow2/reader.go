package qcow2

import (
	"bytes"
	"compress/flate"
	"encoding/binary"
	"errors"
	"io"

	"github.com/klauspost/compress/zstd"
)

// Bits of the entries in L1 and L2 tables.
const (
	entryCompressed = 1 << 62
	entryZero       = 1 << 0
	offsetMask      = 0x00fffffffffffe00
	subclusters     = 32
)

// Reader reads an image's disk as a guest would. It opens no files. It is not safe for concurrent use.
type Reader struct {
	r    io.ReaderAt
	size int64
	h    *header
	info *Info

	// l2 caches the L2 table that was used last; l2At is that table's offset.
	l2   []byte
	l2At uint64
	zstd *zstd.Decoder
}

// NewReader returns a Reader for an image of size bytes, or the same errors as Inspect. The caller must close the
// Reader.
func NewReader(r io.ReaderAt, size int64) (*Reader, error) {
	h, info, err := inspect(r, size)
	if err != nil {
		return nil, err
	}
	q := &Reader{r: r, size: size, h: h, info: info}
	if info.Zstd {
		limit := uint64(max(info.ClusterSize, zstd.MinWindowSize))
		if q.zstd, err = zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(limit)); err != nil {
			return nil, err
		}
	}
	return q, nil
}

// Close frees the Reader's memory. The image stays open.
func (q *Reader) Close() {
	if q.zstd != nil {
		q.zstd.Close()
	}
}

// Info returns Inspect's description of the image.
func (q *Reader) Info() Info { return *q.info }

// ReadCluster reads cluster n of the disk into buf, which must have Info.ClusterSize bytes. The first result is true if
// the tables mark the whole cluster as zeros. The bytes beyond the end of the disk are undefined. The error is
// errdefs.ErrInvalidArgument if a table or the cluster is not within the image.
func (q *Reader) ReadCluster(n uint64, buf []byte) (zero bool, err error) {
	if uint64(len(buf)) != q.info.ClusterSize || n > (q.h.Size-1)/q.info.ClusterSize {
		return false, invalidf("cluster %d into %d bytes, of a disk of %d", n, len(buf), q.h.Size)
	}
	entry, bitmap, err := q.entry(n)
	switch {
	case err != nil:
		return false, err
	case entry&entryCompressed != 0:
		return false, q.decompress(n, entry, buf)
	case q.info.ExtendedL2:
		return q.readParts(n, entry&offsetMask, bitmap, buf)
	case entry&entryZero != 0 && q.h.Version > 2, entry&offsetMask == 0:
		clear(buf)
		return true, nil
	}
	return false, q.read(n, entry&offsetMask, buf)
}

// ReadAt implements io.ReaderAt for the disk. Its errors are those of ReadCluster.
func (q *Reader) ReadAt(p []byte, off int64) (n int, err error) {
	if off < 0 {
		return 0, invalidf("offset %d is negative", off)
	}
	buf := make([]byte, q.info.ClusterSize)
	for n < len(p) && uint64(off) < q.h.Size {
		cluster, within := uint64(off)/q.info.ClusterSize, uint64(off)%q.info.ClusterSize
		if _, err := q.ReadCluster(cluster, buf); err != nil {
			return n, err
		}
		end := min(q.info.ClusterSize, q.h.Size-cluster*q.info.ClusterSize)
		copied := copy(p[n:], buf[within:end])
		n, off = n+copied, off+int64(copied)
	}
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

// entry returns the L2 entry of cluster n and, with ExtendedL2, the bitmap of its subclusters.
func (q *Reader) entry(n uint64) (entry, bitmap uint64, err error) {
	cluster, width := q.info.ClusterSize, uint64(8)
	if q.info.ExtendedL2 {
		width = 16
	}
	perTable := cluster / width
	var raw [8]byte
	if err := q.at(raw[:], q.h.L1TableOffset+n/perTable*8, "the L1 table"); err != nil {
		return 0, 0, err
	}
	table := binary.BigEndian.Uint64(raw[:]) & offsetMask
	if table == 0 {
		return 0, 0, nil
	}
	if q.l2 == nil || q.l2At != table {
		if q.l2 == nil {
			q.l2 = make([]byte, cluster)
		}
		q.l2At = 0
		if err := q.at(q.l2, table, "an L2 table"); err != nil {
			return 0, 0, err
		}
		q.l2At = table
	}
	at := n % perTable * width
	entry = binary.BigEndian.Uint64(q.l2[at:])
	if q.info.ExtendedL2 {
		bitmap = binary.BigEndian.Uint64(q.l2[at+8:])
	}
	return entry, bitmap, nil
}

// read reads an uncompressed cluster. If the file ends within the cluster, the rest of the cluster reads as zero.
func (q *Reader) read(n, offset uint64, buf []byte) error {
	if offset >= uint64(q.size) {
		return invalidf("cluster %d is at %#x, beyond the end of the image of %d bytes: it is cut off", n, offset, q.size)
	}
	got, err := q.r.ReadAt(buf[:min(uint64(len(buf)), uint64(q.size)-offset)], int64(offset))
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	clear(buf[got:])
	return nil
}

// readParts reads a cluster with subclusters. Unallocated subclusters read as zero.
func (q *Reader) readParts(n, offset, bitmap uint64, buf []byte) (zero bool, err error) {
	allocated := uint32(bitmap)
	if allocated == 0 {
		clear(buf)
		return true, nil
	}
	if err := q.read(n, offset, buf); err != nil {
		return false, err
	}
	part := len(buf) / subclusters
	for i := range subclusters {
		if allocated&(1<<i) == 0 {
			clear(buf[i*part : (i+1)*part])
		}
	}
	return false, nil
}

// decompress reads a compressed cluster. The cluster's L2 entry contains the offset of the compressed data and the
// number of sectors that this data touches.
func (q *Reader) decompress(n, entry uint64, buf []byte) error {
	shift := 62 - (q.h.ClusterBits - 8)
	offset := entry & compressedMask(q.h.ClusterBits)
	sectors := entry&(entryCompressed-1)>>shift + 1
	length := sectors*512 - offset%512
	if offset >= uint64(q.size) {
		return invalidf("compressed cluster %d is at %#x, beyond the end of the image of %d bytes: it is cut off", n, offset, q.size)
	}
	packed := make([]byte, min(length, uint64(q.size)-offset))
	if err := q.at(packed, offset, "a compressed cluster"); err != nil {
		return err
	}
	var from io.Reader
	if q.info.Zstd {
		if err := q.zstd.Reset(bytes.NewReader(packed)); err != nil {
			return err
		}
		from = q.zstd
	} else {
		from = flate.NewReader(bytes.NewReader(packed))
	}
	if _, err := io.ReadFull(from, buf); err != nil {
		return invalidf("compressed cluster %d at %#x cannot be unpacked: %v", n, offset, err)
	}
	return nil
}

// at fills buf from the image. The last parameter is the data's name for errors.
func (q *Reader) at(buf []byte, offset uint64, what string) error {
	if offset > uint64(q.size) || uint64(len(buf)) > uint64(q.size)-offset {
		return invalidf("%s is at %#x, but %d bytes at that offset exceed the image of %d bytes: it is cut off", what, offset, len(buf), q.size)
	}
	return readFull(q.r, buf, offset, what)
}
