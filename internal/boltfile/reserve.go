package boltfile

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"os"

	"golang.org/x/sys/unix"
)

// Least is how much room in bytes there is after Keep for changes beyond what the file uses. A removal changes a few pages, and
// the next one uses the pages again that it has freed.
const Least = 512 << 10

// Keep makes sure that the file at path has Least bytes for changes, on the disk, and takes twice as much when it has not. It may
// be called while others write to the file. Errors: what the file system says, ENOSPC when it is full.
// On a file system that cannot keep room (fallocate(2), or copy on write) it has no effect.
func Keep(path string) error {
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
	if st.Size >= used+Least && st.Blocks*512 >= used+Least {
		return nil
	}
	err = unix.Fallocate(int(file.Fd()), 0, 0, used+2*Least)
	if err != nil && !errors.Is(err, unix.EOPNOTSUPP) {
		return fmt.Errorf("keep room for the changes of %s: %w", path, err)
	}
	return nil
}

// The part of a file's first two pages that says how much of it is used, see the type Meta of bbolt: offsets in bytes.
const (
	metaAt    = 16 // behind the header of a page
	magicAt   = metaAt
	pageSize  = metaAt + 8
	highWater = metaAt + 40
	sumAt     = metaAt + 56
	metaEnd   = sumAt + 8

	magic = 0xED0CDAED
)

// usedBytes is up to where the file's pages are in use. The two pages are written in turn, so that one of them is whole.
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
		return 0, fmt.Errorf("%s is no bbolt file", file.Name())
	}
	return used, nil
}
