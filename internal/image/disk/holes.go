package disk

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// holeSize is the smallest run of zeros that becomes a hole, in bytes; holes are aligned to it.
const holeSize = 64 << 10

var zeros [holeSize]byte

// HoleFinder passes data on and records runs of zeros, which make up most of a raw disk.
type HoleFinder struct {
	w     io.Writer
	at    int64
	block []byte // the bytes of an incomplete block
	holes []hole
}

// hole is a range of a file in bytes.
type hole struct{ from, to int64 }

// NewHoleFinder returns a writer that writes to w.
func NewHoleFinder(w io.Writer) *HoleFinder { return &HoleFinder{w: w} }

func (h *HoleFinder) Write(p []byte) (int, error) {
	n, err := h.w.Write(p)
	for rest := p[:n]; len(rest) > 0; {
		take := min(len(rest), holeSize-len(h.block))
		h.block = append(h.block, rest[:take]...)
		rest = rest[take:]
		if len(h.block) == holeSize {
			h.addBlock(bytes.Equal(h.block, zeros[:]))
			h.block = h.block[:0]
		}
	}
	return n, err
}

// addBlock advances by one block. If the block is empty, that is, all zeros, it becomes part of a hole.
func (h *HoleFinder) addBlock(empty bool) {
	from := h.at
	h.at += holeSize
	if last := len(h.holes) - 1; empty && last >= 0 && h.holes[last].to == from {
		h.holes[last].to = h.at
	} else if empty {
		h.holes = append(h.holes, hole{from, h.at})
	}
}

// Punch frees the disk space that zeros occupy. It can be interrupted at any time, because it does not change the
// content.
func (h *HoleFinder) Punch(ctx context.Context, path string) error {
	if len(h.holes) == 0 {
		return nil
	}
	file, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer file.Close()
	for _, hole := range h.holes {
		if err := ctx.Err(); err != nil {
			return err
		}
		err := unix.Fallocate(int(file.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, hole.from, hole.to-hole.from)
		if errors.Is(err, unix.EOPNOTSUPP) {
			return nil // the file system does not support holes
		} else if err != nil {
			return fmt.Errorf("punch holes in %s: %w", path, err)
		}
	}
	return nil
}
