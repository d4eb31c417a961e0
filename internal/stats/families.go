package stats

import runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

// Family is a metric of containers and pods. The names, types and labels are those of cAdvisor, so that dashboards and
// alerts for Kubernetes work unchanged.
type Family struct {
	Name, Help string
	Type       runtimeapi.MetricType
	// Labels are the names of the labels after those in BaseLabels.
	Labels []string
}

// Families lists all families.
var Families []*Family

func counter(name, help string, labels ...string) *Family {
	return register(&Family{Name: name, Help: help, Type: runtimeapi.MetricType_COUNTER, Labels: labels})
}

func gauge(name, help string, labels ...string) *Family {
	return register(&Family{Name: name, Help: help, Type: runtimeapi.MetricType_GAUGE, Labels: labels})
}

func register(f *Family) *Family {
	Families = append(Families, f)
	return f
}

var (
	LastSeen  = gauge("container_last_seen", "Time at which the container was last measured, in seconds since 1970.")
	StartTime = gauge("container_start_time_seconds", "Start time of the container, in seconds since 1970.")

	CPUUsage            = counter("container_cpu_usage_seconds_total", "CPU time used by the container, in seconds.", "cpu")
	CPUUser             = counter("container_cpu_user_seconds_total", "CPU time used in user mode, in seconds.")
	CPUSystem           = counter("container_cpu_system_seconds_total", "CPU time used in the kernel, in seconds.")
	CFSPeriods          = counter("container_cpu_cfs_periods_total", "Periods of the CPU quota that have elapsed.")
	CFSThrottledPeriods = counter("container_cpu_cfs_throttled_periods_total", "Periods in which the container had used up its CPU quota.")
	CFSThrottledTime    = counter("container_cpu_cfs_throttled_seconds_total", "Time that the container has waited for CPU quota, in seconds.")
	CFSBursts           = counter("container_cpu_cfs_burst_periods_total",
		"Periods in which the container used more than its CPU quota, in a burst.")
	CFSBurstTime = counter("container_cpu_cfs_burst_seconds_total", "CPU time used beyond the quota, in bursts, in seconds.")

	MemoryUsage      = gauge("container_memory_usage_bytes", "Memory in use, including all page cache.")
	MemoryWorkingSet = gauge("container_memory_working_set_bytes",
		"Memory in use without the inactive page cache; evictions are decided by it.")
	MemoryMaxUsage     = gauge("container_memory_max_usage_bytes", "Highest memory usage so far.")
	MemoryRSS          = gauge("container_memory_rss", "Anonymous memory in use, in bytes.")
	MemoryCache        = gauge("container_memory_cache", "Page cache, in bytes.")
	MemoryMappedFile   = gauge("container_memory_mapped_file", "Memory-mapped files, in bytes.")
	MemoryActiveFile   = gauge("container_memory_total_active_file_bytes", "Page cache on the active list.")
	MemoryInactiveFile = gauge("container_memory_total_inactive_file_bytes", "Page cache on the inactive list.")
	MemoryActiveAnon   = gauge("container_memory_active_anon_bytes", "Anonymous memory on the active list.")
	MemoryInactiveAnon = gauge("container_memory_inactive_anon_bytes", "Anonymous memory on the inactive list.")
	MemoryAnonTHP      = gauge("container_memory_anon_thp_bytes", "Anonymous memory in transparent huge pages.")
	MemoryShmemTHP     = gauge("container_memory_shmem_thp_bytes", "Shared memory in transparent huge pages; 0 on cgroup v1.")
	MemoryFileTHP      = gauge("container_memory_file_thp_bytes", "Page cache in transparent huge pages; 0 on cgroup v1.")
	MemoryDirty        = gauge("container_memory_file_dirty_bytes", "Page cache that is not yet written to disk.")
	MemoryWriteback    = gauge("container_memory_file_writeback_bytes", "Page cache that is being written to disk.")
	MemoryKernel       = gauge("container_memory_kernel_usage", "Memory that the kernel uses for the container, in bytes.")
	MemorySwap         = gauge("container_memory_swap", "Swap in use, in bytes.")
	MemoryFailures     = counter("container_memory_failcnt", "Times that the memory usage hit the limit.")
	MemoryFaults       = counter("container_memory_failures_total", "Page faults, all (pgfault) and those that needed I/O (pgmajfault).",
		"failure_type", "scope")
	MemoryRefaultAnon = counter("container_memory_workingset_refault_anon_total", "Anonymous pages that were swapped out and needed again.")
	MemoryRefaultFile = counter("container_memory_workingset_refault_file_total", "Pages of files that were evicted and needed again.")
	MemoryScanned     = counter("container_memory_pgscan_total", "Pages scanned for reclaim; 0 on cgroup v1.")
	MemoryReclaimed   = counter("container_memory_pgsteal_total", "Pages reclaimed; 0 on cgroup v1.")
	MemoryHighEvents  = counter("container_memory_events_high_total",
		"Times that the container was throttled at memory.high; 0 on cgroup v1.")
	MemoryMaxEvents = counter("container_memory_events_max_total", "Times that the memory usage hit the limit.")
	OOMEvents       = counter("container_oom_events_total", "Processes killed for lack of memory.")

	HugePages    = gauge("container_hugetlb_usage_bytes", "Huge pages in use.", "pagesize")
	HugePagesMax = gauge("container_hugetlb_max_usage_bytes",
		"Highest usage of huge pages; on cgroup v2, which records none, the current usage.", "pagesize")

	FSUsage      = gauge("container_fs_usage_bytes", "Disk space that the container uses.", "device")
	FSLimit      = gauge("container_fs_limit_bytes", "Size of the file system that the container writes to.", "device")
	FSInodes     = gauge("container_fs_inodes_total", "Inodes of that file system.", "device")
	FSInodesFree = gauge("container_fs_inodes_free", "Free inodes of that file system.", "device")

	FSReads      = counter("container_fs_reads_total", "Reads from a disk.", "device")
	FSReadBytes  = counter("container_fs_reads_bytes_total", "Bytes read from a disk.", "device")
	FSWrites     = counter("container_fs_writes_total", "Writes to a disk.", "device")
	FSWriteBytes = counter("container_fs_writes_bytes_total", "Bytes written to a disk.", "device")
	BlockIO      = counter("container_blkio_device_usage_total", "Bytes transferred to and from a block device, by operation.", "device",
		"major", "minor", "operation")

	NetworkRxBytes   = counter("container_network_receive_bytes_total", "Bytes received.", "interface")
	NetworkRxPackets = counter("container_network_receive_packets_total", "Packets received.", "interface")
	NetworkRxDropped = counter("container_network_receive_packets_dropped_total", "Received packets that were dropped.", "interface")
	NetworkRxErrors  = counter("container_network_receive_errors_total", "Errors while receiving.", "interface")
	NetworkTxBytes   = counter("container_network_transmit_bytes_total", "Bytes sent.", "interface")
	NetworkTxPackets = counter("container_network_transmit_packets_total", "Packets sent.", "interface")
	NetworkTxDropped = counter("container_network_transmit_packets_dropped_total", "Packets that were dropped instead of sent.", "interface")
	NetworkTxErrors  = counter("container_network_transmit_errors_total", "Errors while sending.", "interface")

	Processes       = gauge("container_processes", "Processes in the container.")
	Threads         = gauge("container_threads", "Threads in the container.")
	ThreadsMax      = gauge("container_threads_max", "Limit on processes and threads; 0 means no limit.")
	FileDescriptors = gauge("container_file_descriptors", "Open file descriptors of the container's processes.")
	Sockets         = gauge("container_sockets", "Open sockets of the container's processes.")
	Ulimits         = gauge("container_ulimits_soft", "Soft limits of the container's first process.", "ulimit")

	SpecCPUPeriod         = gauge("container_spec_cpu_period", "Period of the CPU quota, in microseconds.")
	SpecCPUQuota          = gauge("container_spec_cpu_quota", "CPU quota per period, in microseconds; missing without a quota.")
	SpecCPUShares         = gauge("container_spec_cpu_shares", "Share of the CPU, relative to other containers.")
	SpecMemoryLimit       = gauge("container_spec_memory_limit_bytes", "Memory limit; 0 means no limit.")
	SpecMemoryReservation = gauge("container_spec_memory_reservation_limit_bytes", "Memory that is protected from reclaim; 0 means none.")
	SpecSwapLimit         = gauge("container_spec_memory_swap_limit_bytes", "Limit on memory and swap together; 0 means no limit.")

	// Requests is the only family that is ours.
	Requests = counter("container_requests_total",
		"Requests that the node itself has served for the container: those to WebAssembly components, otherwise 0.")

	PressureCPUWaiting = counter("container_pressure_cpu_waiting_seconds_total",
		"Time in which at least one task waited for the CPU, in seconds.")
	PressureCPUStalled    = counter("container_pressure_cpu_stalled_seconds_total", "Time in which all tasks waited for the CPU, in seconds.")
	PressureMemoryWaiting = counter("container_pressure_memory_waiting_seconds_total",
		"Time in which at least one task waited for memory, in seconds.")
	PressureMemoryStalled = counter("container_pressure_memory_stalled_seconds_total",
		"Time in which all tasks waited for memory, in seconds.")
	PressureIOWaiting = counter("container_pressure_io_waiting_seconds_total",
		"Time in which at least one task waited for I/O, in seconds.")
	PressureIOStalled = counter("container_pressure_io_stalled_seconds_total", "Time in which all tasks waited for I/O, in seconds.")
)
