package unitpods

import (
	"encoding/binary"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// positionsDir is the directory of the position files. It is outside the modules' log directories, because each change
// in those wakes a follower.
const positionsDir = "positions"

// position is the end of the lines that the manager has taken from a log: the file's inode, and the offset in the file.
type position struct {
	inode  uint64
	offset int64
}

// positionFile stores a position in 16 bytes. Like the log, it is written without a sync, so a power failure can lose
// recent data in both files.
type positionFile struct{ file *os.File }

func openPositionFile(logDir, name string) (*positionFile, error) {
	dir := filepath.Join(logDir, positionsDir)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	file, err := os.OpenFile(filepath.Join(dir, name), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	return &positionFile{file}, nil
}

// read returns the position, which is zero if there is none.
func (m *positionFile) read() position {
	var raw [16]byte
	if n, _ := m.file.ReadAt(raw[:], 0); n < len(raw) {
		return position{}
	}
	return position{inode: binary.LittleEndian.Uint64(raw[:]), offset: int64(binary.LittleEndian.Uint64(raw[8:]))}
}

func (m *positionFile) write(p position) {
	var raw [16]byte
	binary.LittleEndian.PutUint64(raw[:], p.inode)
	binary.LittleEndian.PutUint64(raw[8:], uint64(p.offset))
	_, _ = m.file.WriteAt(raw[:], 0) // if the disk is full, lines may be reported twice
}

func (m *positionFile) close() { _ = m.file.Close() }

func inodeOf(path string) (uint64, bool) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return 0, false
	}
	return st.Ino, true
}

func inodeOfFile(f *os.File) uint64 {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return 0
	}
	return st.Ino
}
