package unitpods

import (
	"encoding/binary"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// positionsDir is where, beside the modules' own log directories, their positions are: a watch of those must not see them.
const positionsDir = "positions"

// position is how much of a log has been taken by the manager: the file, by its inode, and the bytes of it.
type position struct {
	inode  uint64
	offset int64
}

// mark keeps a position in a file of 16 bytes. It is written without a sync: what it is of is in the page cache, too, and is
// of no use when that is gone.
type mark struct{ file *os.File }

func openMark(logDir, name string) (*mark, error) {
	dir := filepath.Join(logDir, positionsDir)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	file, err := os.OpenFile(filepath.Join(dir, name), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	return &mark{file}, nil
}

// read gives the position; the zero one is none.
func (m *mark) read() position {
	var raw [16]byte
	if n, _ := m.file.ReadAt(raw[:], 0); n < len(raw) {
		return position{}
	}
	return position{inode: binary.LittleEndian.Uint64(raw[:]), offset: int64(binary.LittleEndian.Uint64(raw[8:]))}
}

func (m *mark) write(p position) {
	var raw [16]byte
	binary.LittleEndian.PutUint64(raw[:], p.inode)
	binary.LittleEndian.PutUint64(raw[8:], uint64(p.offset))
	_, _ = m.file.WriteAt(raw[:], 0) // a disk that is full costs lines that are told twice
}

func (m *mark) close() { _ = m.file.Close() }

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
