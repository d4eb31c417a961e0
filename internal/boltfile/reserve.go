package boltfile

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"os"

	"golang.org/x/sys/unix"
)

// reserved is the free space that Reserve ensures after the used pages, in bytes. That is enough, because a removal
// changes only a few pages, and the next removal reuses the pages that the previous removal has freed.
const reserved = 512 << 10

// Reserve allocates disk space for later changes to the bbolt file at path. bbolt writes changed pages to free space,
// not over the old pages, so even a removal needs space, and would fail on a full disk. Call Reserve before adding a
// record; if it fails, do not add the record. Existing records can then always be removed.
//
// Reserve may run while others write to the file. On a full disk it returns ENOSPC. On a file system without
// fallocate(2), or with copy on write, it has no effect.
func Reserve(path string) error {
	file, err := os.OpenFile(path, os.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer file.Close()
	used, err := usedBytes(file)
	if err != nil {
		return err
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(file.Fd()), &st); err != nil {
		return err
	}
	if st.Size >= used+reserved && st.Blocks*512 >= used+reserved {
		return nil
	}
	err = unix.Fallocate(int(file.Fd()), 0, 0, used+2*reserved)
	if err != nil && !errors.Is(err, unix.EOPNOTSUPP) {
		return fmt.Errorf("reserve disk space for changes to %s: %w", path, err)
	}
	return nil
}

// Byte offsets in the meta pages, which are the first two pages of a file (bbolt's type Meta).
const (
	metaAt    = 16 // after the page header
	magicAt   = metaAt
	pageSize  = metaAt + 8
	highWater = metaAt + 40
	sumAt     = metaAt + 56
	metaEnd   = sumAt + 8

	magic = 0xED0CDAED
)

// usedBytes returns the offset of the end of the file's used pages. bbolt writes the two meta pages in turn, so one of
// them is always valid.
func usedBytes(file *os.File) (int64, error) {
	size := os.Getpagesize()
	var used int64
	for page := range 2 {
		raw := make([]byte, metaEnd)
		if _, err := file.ReadAt(raw, int64(page*size)); err != nil {
			return 0, fmt.Errorf("%s: %w", file.Name(), err)
		}
		sum := fnv.New64a()
		_, _ = sum.Write(raw[metaAt:sumAt])
		if binary.NativeEndian.Uint32(raw[magicAt:]) != magic || binary.NativeEndian.Uint64(raw[sumAt:]) != sum.Sum64() {
			continue
		}
		size = int(binary.NativeEndian.Uint32(raw[pageSize:]))
		used = max(used, int64(binary.NativeEndian.Uint64(raw[highWater:]))*int64(size))
	}
	if used == 0 {
		return 0, fmt.Errorf("%s is not a bbolt file", file.Name())
	}
	return used, nil
}
