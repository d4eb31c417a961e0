package stats

import (
	"fmt"
	"strconv"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// What the kernel uses if nothing is configured.
const (
	defaultCPUPeriod = 100_000
	defaultCPUShares = 1024
)

// Spec adds what was configured for a container.
func (s *Samples) Spec(r *runtimeapi.LinuxContainerResources) {
	s.number(SpecCPUPeriod, orDefault(r.GetCpuPeriod(), defaultCPUPeriod))
	if quota := r.GetCpuQuota(); quota > 0 {
		s.number(SpecCPUQuota, quota)
	}
	s.number(SpecCPUShares, orDefault(r.GetCpuShares(), defaultCPUShares))
	s.number(SpecMemoryLimit, orDefault(r.GetMemoryLimitInBytes(), 0))
	reservation, _ := strconv.ParseInt(r.GetUnified()["memory.min"], 10, 64) // "max" and nothing become 0
	s.number(SpecMemoryReservation, orDefault(reservation, 0))
	s.number(SpecSwapLimit, orDefault(r.GetMemorySwapLimitInBytes(), 0))
}

func (s *Samples) number(f *Family, v int64) { s.Add(f, float64(v)) }

// orDefault returns v, or the default if v is 0 or, which means unlimited, negative.
func orDefault(v, unset int64) int64 {
	if v <= 0 {
		return unset
	}
	return v
}

// Filesystem adds the size of the file system at path and, if it is known, how much of that a container uses.
func (s *Samples) Filesystem(path string, used *runtimeapi.UInt64Value) {
	var fs unix.Statfs_t
	var st unix.Stat_t
	if unix.Statfs(path, &fs) != nil || unix.Stat(path, &st) != nil {
		return
	}
	device, _ := findDevice(fmt.Sprintf("%d:%d", unix.Major(st.Dev), unix.Minor(st.Dev)))
	if used != nil {
		s.count(FSUsage, used.GetValue(), device.name)
	}
	s.Disk(device.name, fs.Blocks*uint64(fs.Bsize), fs.Files, fs.Ffree)
}

// Disk adds the size in bytes and the inodes of the file system on a device.
func (s *Samples) Disk(device string, size, inodes, inodesFree uint64) {
	s.count(FSLimit, size, device)
	s.count(FSInodes, inodes, device)
	s.count(FSInodesFree, inodesFree, device)
}
