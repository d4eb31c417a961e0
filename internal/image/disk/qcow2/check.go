package qcow2

import (
	"encoding/binary"
	"fmt"
	"io"
)

// Check is like Inspect, and also walks the tables: each L2 table, refcount block and cluster of the disk must begin
// within the image. It returns errdefs.ErrInvalidArgument for a truncated image, unless the cut is within its last
// cluster. Check reads only the tables. With clusters of 64 KiB they are at most 1/8000 of the disk, and never larger
// than the image.
func Check(r io.ReaderAt, size int64) (*Info, error) {
	h, info, err := inspect(r, size)
	if err != nil {
		return nil, err
	}
	w := walk{r: r, size: uint64(size), cluster: h.clusterSize(), extended: info.ExtendedL2, compressed: compressedMask(h.ClusterBits)}
	if err := w.refcounts(h); err != nil {
		return nil, err
	}
	if err := w.l1(h); err != nil {
		return nil, err
	}
	return info, nil
}

// compressedMask returns the mask of the offset in a compressed cluster's entry.
func compressedMask(clusterBits uint32) uint64 { return 1<<(62-(clusterBits-8)) - 1 }

// walk walks the tables of an image.
type walk struct {
	r             io.ReaderAt
	size, cluster uint64 // bytes
	extended      bool
	compressed    uint64 // see compressedMask
	tables        uint64 // L2 tables read so far
}

// each calls fn with each nonzero entry of a table of n entries. It reads one cluster of the table at a time.
func (w *walk) each(offset, n uint64, what string, fn func(i, entry uint64) error) error {
	buf := make([]byte, min(w.cluster, n*8))
	for i := uint64(0); i < n; {
		part := buf[:min(uint64(len(buf)), (n-i)*8)]
		if err := readFull(w.r, part, offset+i*8, what); err != nil {
			return err
		}
		for ; len(part) > 0; part, i = part[8:], i+1 {
			entry := binary.BigEndian.Uint64(part)
			if entry == 0 {
				continue
			}
			if err := fn(i, entry); err != nil {
				return err
			}
		}
	}
	return nil
}

func (w *walk) refcounts(h *header) error {
	n := uint64(h.RefcountTableClusters) * w.cluster / 8
	return w.each(h.RefcountTableOffset, n, "the refcount table", func(i, entry uint64) error {
		return w.begins(entry&^(minCluster-1), "refcount block %d", i)
	})
}

func (w *walk) l1(h *header) error {
	return w.each(h.L1TableOffset, uint64(h.L1Size), "the L1 table", func(i, entry uint64) error {
		table := entry & offsetMask
		if table == 0 {
			return nil
		}
		if err := w.begins(table, "the L2 table %d", i); err != nil {
			return err
		}
		if table > w.size-w.cluster {
			return invalidf("the L2 table %d is at %#x and extends beyond the image of %d bytes: it is cut off", i, table, w.size)
		}
		// L1 entries that share a table would make Check read that table again and again, so limit the number of reads.
		if w.tables++; w.tables > w.size/w.cluster {
			return invalidf("the L1 table names more L2 tables than the image has clusters")
		}
		return w.l2(table, i)
	})
}

// l2 walks the nth L2 table.
func (w *walk) l2(table, nth uint64) error {
	width := uint64(1)
	if w.extended {
		width = 2
	}
	perTable := w.cluster / 8 / width
	return w.each(table, perTable*width, "an L2 table", func(i, entry uint64) error {
		if i%width == 1 {
			return nil // a bitmap of subclusters
		}
		cluster := nth*perTable + i/width
		if entry&entryCompressed != 0 {
			if at := entry & w.compressed; at >= w.size {
				return invalidf("compressed cluster %d is at %#x, beyond the end of the image of %d bytes: it is cut off", cluster, at, w.size)
			}
			return nil
		}
		return w.begins(entry&offsetMask, "cluster %d", cluster)
	})
}

// begins checks that offset is a multiple of the cluster size and lies within the image. It accepts 0, which means
// unallocated.
func (w *walk) begins(offset uint64, what string, n uint64) error {
	if offset%w.cluster != 0 {
		return invalidf(what+" is at %#x, which is not a multiple of the cluster size", n, offset)
	}
	if offset >= w.size {
		return invalidf(what+" is at %#x, beyond the end of the image of %d bytes: it is cut off", n, offset, w.size)
	}
	return nil
}

// readFull fills buf from the image. The last parameter is the data's name for errors.
func readFull(r io.ReaderAt, buf []byte, offset uint64, what string) error {
	if _, err := r.ReadAt(buf, int64(offset)); err != nil {
		return fmt.Errorf("qcow2: read %s at %#x: %w", what, offset, err)
	}
	return nil
}
