package guestagent

import (
	"io"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent/wire"
)

const (
	// maxProc is the maximum number of bytes to read from a file in /proc.
	maxProc = 1 << 20
	// maxFilesystems is the maximum number of file systems in a report.
	maxFilesystems = 64
)

// readSome reads a file, but at most the given number of bytes.
func readSome(path string, limit int64) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, limit))
	return string(b), err
}

func readInfo(version string) (wire.Info, error) {
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return wire.Info{}, os.NewSyscallError("uname", err)
	}
	info := wire.Info{
		Program: version, Kernel: unix.ByteSliceToString(name.Release[:]), Machine: unix.ByteSliceToString(name.Machine[:]),
		Hostname: unix.ByteSliceToString(name.Nodename[:]),
	}
	if id, err := readSome("/proc/sys/kernel/random/boot_id", maxProc); err == nil {
		info.BootID = strings.TrimSpace(id)
	}
	var up unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &up); err == nil {
		info.Uptime = uint64(up.Nano()) / 1e6
	}
	var err error
	info.Interfaces, err = interfaces()
	return info, err
}

func readStats() (wire.Stats, error) {
	var stats wire.Stats
	memory, err := readSome("/proc/meminfo", maxProc)
	if err != nil {
		return stats, err
	}
	stats.MemoryTotal, stats.MemoryAvailable = memoryOf(memory)
	if load, err := readSome("/proc/loadavg", maxProc); err == nil {
		stats.Load = loadOf(load)
	}
	mounts, err := readSome("/proc/self/mounts", maxProc)
	if err != nil {
		return stats, err
	}
	for _, f := range filesystemsOf(mounts) {
		var st unix.Statfs_t
		if unix.Statfs(f.Path, &st) != nil {
			continue
		}
		size := uint64(st.Frsize)
		f.Total, f.Free, f.Available = st.Blocks*size, st.Bfree*size, st.Bavail*size
		f.Inodes, f.InodesFree = st.Files, st.Ffree
		stats.Filesystems = append(stats.Filesystems, f)
	}
	return stats, nil
}

// memoryOf parses /proc/meminfo. The results are in bytes.
func memoryOf(text string) (total, available uint64) {
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) < 2 {
			continue
		}
		n, _ := strconv.ParseUint(fields[1], 10, 53)
		switch fields[0] {
		case "MemTotal:":
			total = n << 10
		case "MemAvailable:":
			available = n << 10
		}
	}
	return total, available
}

// loadOf parses /proc/loadavg. The results are in hundredths.
func loadOf(text string) (load [3]uint64) {
	for i, field := range strings.Fields(text) {
		if i == len(load) {
			break
		}
		v, _ := strconv.ParseFloat(field, 64)
		load[i] = uint64(v*100 + 0.5)
	}
	return load
}

// filesystemsOf parses a mount table. It returns the root file system and the file systems on block devices, each of
// them once. It leaves out all others, because statfs may hang on them.
func filesystemsOf(mounts string) (all []wire.Filesystem) {
	seen := map[string]bool{}
	for line := range strings.Lines(mounts) {
		fields := strings.Fields(line)
		if len(fields) < 3 || len(all) == maxFilesystems {
			continue
		}
		f := wire.Filesystem{Source: unescape(fields[0]), Path: unescape(fields[1]), Type: fields[2]}
		key := f.Source
		if !strings.HasPrefix(f.Source, "/dev/") {
			if f.Path != "/" {
				continue
			}
			key = "/"
		}
		if !seen[key] {
			seen[key] = true
			all = append(all, f)
		}
	}
	return all
}

// unescape decodes the octal escapes in a mount table.
func unescape(s string) string {
	if !strings.Contains(s, `\`) {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if v, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(v))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}
