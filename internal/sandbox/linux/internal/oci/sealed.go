package oci

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/sandbox/linux/internal/mnt"
)

// sealed is an OCI runtime's program behind a read-only mount.
//
// Before they create a container, crun and runc mount their own program read-only, unmount it and execute themselves
// again from there, so that no container can overwrite the program (CVE-2019-5736). They skip all this if the program
// is on a read-only mount already. This mount is detached: only the descriptor refers to it, and it ends with our
// process.
type sealed struct {
	source string

	mu   sync.Mutex
	file *os.File
}

// seal mounts the program of a runtime with the given first line of --version. It returns nil if the program must be
// executed by its own path, as a script or a program that depends on its name, or if the kernel cannot make the mount
// (before Linux 5.12). The runtime then does it.
func seal(program, version string) *sealed {
	name, _, ok := parseVersion(version)
	if !ok || filepath.Base(program) != name || !isELF(program) {
		return nil
	}
	file, err := mnt.CloneReadOnly(program, nil)
	if err != nil {
		return nil
	}
	return &sealed{source: program, file: file}
}

func isELF(program string) bool {
	f, err := os.Open(program)
	if err != nil {
		return false
	}
	defer f.Close()
	magic := make([]byte, 4)
	_, err = io.ReadFull(f, magic)
	return err == nil && bytes.Equal(magic, []byte("\x7fELF"))
}

// Path returns a path of the program on the mount, for processes that we start. It is the same as long as the daemon
// lives. If the program was replaced, as by an upgrade, the path leads to the new one; if that is not possible, to the
// old one.
func (s *sealed) path() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	_ = s.refresh()
	return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), s.file.Fd())
}

func (s *sealed) refresh() error {
	now, err := os.Stat(s.source)
	if err != nil {
		return err
	}
	mounted, err := s.file.Stat()
	if err != nil || os.SameFile(now, mounted) {
		return err
	}
	fresh, err := mnt.CloneReadOnly(s.source, nil)
	if err != nil {
		return err
	}
	defer fresh.Close()
	return unix.Dup3(int(fresh.Fd()), int(s.file.Fd()), unix.O_CLOEXEC)
}

func (s *sealed) close() {
	if s != nil {
		_ = s.file.Close()
	}
}
