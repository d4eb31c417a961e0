package console

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// recordSize is less than a page, so the kernel writes a record completely even if the process is killed.
const recordSize = 64

var recordMagic = [8]byte{'T', 'P', 'C', 'O', 'N', 'S', '0', '1'}

// fileID identifies a file while it exists, regardless of its path.
type fileID struct{ dev, ino uint64 }

func identify(f *os.File) (id fileID, size int64, err error) {
	var st unix.Stat_t
	if err := withFD(f, func(fd int) error { return unix.Fstat(fd, &st) }); err != nil {
		return id, 0, os.NewSyscallError("fstat", err)
	}
	return fileID{uint64(st.Dev), st.Ino}, st.Size, nil
}

// withFD calls the given function with the file's descriptor.
func withFD(f *os.File, call func(fd int) error) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var callErr error
	if err := raw.Control(func(fd uintptr) { callErr = call(int(fd)) }); err != nil {
		return err
	}
	return callErr
}

// record is the committed state: the first logSize bytes of the container's log, with its rotated files, contain
// exactly the entries for the first offset bytes of the serial log.
type record struct {
	serial  fileID
	offset  int64
	log     fileID // zero if the container has no log
	logSize int64
}

func (r record) encode() []byte {
	b := make([]byte, 0, recordSize)
	b = append(b, recordMagic[:]...)
	for _, v := range []uint64{r.serial.dev, r.serial.ino, uint64(r.offset), r.log.dev, r.log.ino, uint64(r.logSize)} {
		b = binary.BigEndian.AppendUint64(b, v)
	}
	b = binary.BigEndian.AppendUint32(b, crc32.ChecksumIEEE(b))
	return append(b, make([]byte, recordSize-len(b))...)
}

// decodeRecord decodes a record. It returns false if b is not a complete and valid record.
func decodeRecord(b []byte) (r record, ok bool) {
	if len(b) != recordSize || [8]byte(b) != recordMagic || crc32.ChecksumIEEE(b[:56]) != binary.BigEndian.Uint32(b[56:]) {
		return record{}, false
	}
	field := func(i int) uint64 { return binary.BigEndian.Uint64(b[8+8*i:]) }
	r = record{
		serial: fileID{field(0), field(1)}, offset: int64(field(2)),
		log: fileID{field(3), field(4)}, logSize: int64(field(5)),
	}
	return r, r.offset >= 0 && r.logSize >= 0
}

// readRecord reads the state file. It returns false if the file has no valid record.
func readRecord(f *os.File) (record, bool, error) {
	b := make([]byte, recordSize)
	n, err := f.ReadAt(b, 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return record{}, false, err
	}
	r, ok := decodeRecord(b[:n])
	return r, ok, nil
}

// writeRecord writes the state file in place, which needs no additional disk space.
func writeRecord(f *os.File, r record) error {
	_, err := f.WriteAt(r.encode(), 0)
	return err
}
