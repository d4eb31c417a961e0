package launch

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// MemoryFile creates a file in memory (memfd_create(2)).
func MemoryFile(name string) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("memfd: %w", err)
	}
	return os.NewFile(uintptr(fd), name), nil
}

// Seal makes the content of a memory file immutable, even for a child that has kept a file descriptor, and rewinds the
// file.
func Seal(f *os.File) error {
	const all = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_WRITE | unix.F_SEAL_SEAL
	if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, all); err != nil {
		return fmt.Errorf("seal the code: %w", err)
	}
	_, err := f.Seek(0, io.SeekStart)
	return err
}

// Tail is a writer that keeps only the last bytes written, up to its limit.
type Tail struct {
	// Limit is in bytes.
	Limit int

	mu  sync.Mutex
	buf bytes.Buffer
}

// Write implements io.Writer.
func (t *Tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.buf.Write(p)
	if over := t.buf.Len() - t.Limit; over > 0 {
		t.buf.Next(over)
	}
	return len(p), nil
}

// Bytes returns a copy of the bytes that are kept.
func (t *Tail) Bytes() []byte {
	t.mu.Lock()
	defer t.mu.Unlock()
	return bytes.Clone(t.buf.Bytes())
}
