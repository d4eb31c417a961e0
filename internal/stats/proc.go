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
		open, found := descriptors(pid, maxScan-min(files, maxScan))
		files += open
		if known = known && files <= maxScan; known {
			sockets += found
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

// descriptors counts a process's open descriptors and, if there are no more than the given number, the sockets among them.
func descriptors(pid int, most uint64) (open, sockets uint64) {
	const socket = "socket:"
	d, err := os.Open("/proc/" + strconv.Itoa(pid) + "/fd")
	if err != nil {
		return 0, 0
	}
	defer d.Close()
	names, _ := d.Readdirnames(-1)
	if open = uint64(len(names)); open > most {
		return open, 0
	}
	var target [len(socket)]byte
	for _, name := range names {
		if n, err := unix.Readlinkat(int(d.Fd()), name, target[:]); err == nil && string(target[:n]) == socket {
			sockets++
		}
	}
	return open, sockets
}
