package stats

import (
	"bytes"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/cgroup"
)

// maxScan limits how many descriptors of a cgroup's processes are examined, because each takes a call to the kernel. If
// there are more, the number of sockets is not known.
const maxScan = 1 << 14

// processes lists the processes in a cgroup and its children.
func (r Root) processes(name string) []int {
	if r.V2 {
		return cgroup.Procs(r.Mount + name)
	}
	return cgroup.Procs(r.Mount + "/memory" + name)
}

// processSamples adds what /proc knows about processes. Processes that end in the meantime count as having no
// descriptors.
func processSamples(pids []int, first int, s *Samples) {
	s.count(Processes, uint64(len(pids)))
	files, sockets, known := uint64(0), uint64(0), true
	for _, pid := range pids {
		names := descriptors(pid)
		files += uint64(len(names))
		if known = known && files <= maxScan; known {
			sockets += countSockets(pid, names)
		}
	}
	s.count(FileDescriptors, files)
	if known {
		s.count(Sockets, sockets)
	}
	if first == 0 && len(pids) > 0 {
		first = pids[0]
	}
	if limit, ok := openFilesLimit(first); ok {
		s.count(Ulimits, limit, "max_open_files")
	}
}

// openFilesLimit returns a process's soft limit on open files. It reads the file because prlimit(2) may not look at the
// processes of other users.
func openFilesLimit(pid int) (uint64, bool) {
	content, _ := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/limits")
	_, rest, _ := bytes.Cut(content, []byte("\nMax open files"))
	soft, _, _ := bytes.Cut(bytes.TrimSpace(rest), []byte(" "))
	return parseUint(soft)
}

func fdDir(pid int) string { return "/proc/" + strconv.Itoa(pid) + "/fd" }

// descriptors lists the names of a process's open descriptors.
func descriptors(pid int) []string {
	d, err := os.Open(fdDir(pid))
	if err != nil {
		return nil
	}
	defer d.Close()
	names, _ := d.Readdirnames(-1)
	return names
}

func countSockets(pid int, names []string) (n uint64) {
	const socket = "socket:"
	dir, err := openat(unix.AT_FDCWD, fdDir(pid), unix.O_PATH|unix.O_DIRECTORY)
	if err != nil {
		return 0
	}
	defer unix.Close(dir)
	var target [len(socket)]byte
	for _, name := range names {
		if m, err := unix.Readlinkat(dir, name, target[:]); err == nil && string(target[:m]) == socket {
			n++
		}
	}
	return n
}
