package unitpods

import (
	"encoding/binary"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// positionsDir holds the positions. It is outside of the modules' log directories, which are watched.
const positionsDir = "positions"

// position is how far the manager has taken a log: the file, by its inode, and the offset in it.
type position struct {
	inode  uint64
	offset int64
}

// mark keeps a position in a file of 16 bytes. It is written without a sync, as the log is: both are lost with the page cache.
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

// read returns the position; zero if there is none.
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
	_, _ = m.file.WriteAt(raw[:], 0) // on a full disk lines are reported twice
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
