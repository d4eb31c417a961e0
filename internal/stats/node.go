package stats

import "golang.org/x/sys/unix"

// NodeMemory returns the size of the node's memory in bytes, or 0 if the kernel does not tell it (sysinfo(2)).
func NodeMemory() uint64 {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return 0
	}
	return uint64(info.Totalram) * uint64(info.Unit)
}
