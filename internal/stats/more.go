package stats

import (
	"bytes"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"
)

// userHZ is the number of ticks per second in cpuacct.stat, which is the same on every architecture that Go supports.
const userHZ = 100

// ReadAll is like Read. It also returns the samples of all families that the kernel counts. The first process of the
// cgroup has the given PID; 0 means that the PID is unknown.
func ReadAll(name string, pid int) (Figures, Samples, error) {
	root, err := host()
	if err != nil {
		return Figures{}, nil, err
	}
	return root.ReadAll(name, pid)
}

// ReadAll is like the function ReadAll, for a cgroup in this root.
func (r Root) ReadAll(name string, pid int) (Figures, Samples, error) {
	f, more, err := r.read(name, true)
	if err != nil {
		return f, nil, err
	}
	s := append(f.Samples(), more...)
	processSamples(r.processes(name), pid, &s)
	return f, s, nil
}

// statFamily says which family a key of memory.stat belongs to. If the kernel does not have the key, the value is 0.
type statFamily struct {
	key    string
	family *Family
}

var (
	memoryStatV1 = []statFamily{
		{"total_cache", MemoryCache}, {"total_mapped_file", MemoryMappedFile}, {"total_active_file", MemoryActiveFile},
		{"total_inactive_file", MemoryInactiveFile}, {"total_active_anon", MemoryActiveAnon}, {"total_inactive_anon", MemoryInactiveAnon},
		{"total_rss_huge", MemoryAnonTHP}, {"", MemoryShmemTHP}, {"", MemoryFileTHP}, {"total_dirty", MemoryDirty},
		{"total_writeback", MemoryWriteback}, {"total_workingset_refault_anon", MemoryRefaultAnon},
		{"total_workingset_refault_file", MemoryRefaultFile}, {"", MemoryScanned}, {"", MemoryReclaimed},
	}
	memoryStatV2 = []statFamily{
		{"file", MemoryCache}, {"file_mapped", MemoryMappedFile}, {"active_file", MemoryActiveFile},
		{"inactive_file", MemoryInactiveFile}, {"active_anon", MemoryActiveAnon}, {"inactive_anon", MemoryInactiveAnon},
		{"anon_thp", MemoryAnonTHP}, {"shmem_thp", MemoryShmemTHP}, {"file_thp", MemoryFileTHP}, {"file_dirty", MemoryDirty},
		{"file_writeback", MemoryWriteback}, {"workingset_refault_anon", MemoryRefaultAnon},
		{"workingset_refault_file", MemoryRefaultFile}, {"pgscan", MemoryScanned}, {"pgsteal", MemoryReclaimed},
	}
)

// memoryStat adds the samples from memory.stat and returns all its pairs.
func memoryStat(d *dir, families []statFamily, s *Samples) map[string]uint64 {
	pairs := d.all("memory.stat")
	for _, f := range families {
		s.count(f.family, pairs[f.key])
	}
	return pairs
}

// all returns the "key number" lines of a file.
func (d *dir) all(name string) map[string]uint64 {
	pairs := map[string]uint64{}
	d.pairs(name, func(key string, v uint64) { pairs[strings.Clone(key)] = v })
	return pairs
}

func cpuTimesV1(_ Root, d *dir, _ *Figures, s *Samples) {
	times := d.all("cpuacct.stat")
	s.Add(CPUUser, float64(times["user"])/userHZ)
	s.Add(CPUSystem, float64(times["system"])/userHZ)
}

func throttlingV1(_ Root, d *dir, _ *Figures, s *Samples) {
	cpu := d.all("cpu.stat")
	throttling(cpu, cpu["throttled_time"], cpu["burst_time"], s)
}

func throttling(cpu map[string]uint64, throttled, burst uint64, s *Samples) {
	s.count(CFSPeriods, cpu["nr_periods"])
	s.count(CFSThrottledPeriods, cpu["nr_throttled"])
	s.nanos(CFSThrottledTime, throttled)
	s.count(CFSBursts, cpu["nr_bursts"])
	s.nanos(CFSBurstTime, burst)
}

func memoryMoreV1(_ Root, d *dir, f *Figures, s *Samples) {
	stat := memoryStat(d, memoryStatV1, s)
	faults(stat["pgfault"], stat["pgmajfault"], f.Memory, s)
	s.count(MemoryMaxUsage, d.number("memory.max_usage_in_bytes"))
	s.count(MemoryKernel, d.number("memory.kmem.usage_in_bytes"))
	hits := d.number("memory.failcnt")
	s.count(MemoryFailures, hits)
	s.count(MemoryMaxEvents, hits)
	s.count(MemoryHighEvents, 0) // there is no memory.high
	s.count(OOMEvents, d.all("memory.oom_control")["oom_kill"])
}

// faults adds the page faults of the cgroup itself and of the whole hierarchy.
func faults(own, ownMajor uint64, m Memory, s *Samples) {
	s.count(MemoryFaults, own, "pgfault", "container")
	s.count(MemoryFaults, ownMajor, "pgmajfault", "container")
	s.count(MemoryFaults, m.PageFaults, "pgfault", "hierarchy")
	s.count(MemoryFaults, m.MajorPageFaults, "pgmajfault", "hierarchy")
}

func moreV2(r Root, d *dir, f *Figures, s *Samples) {
	const micro = uint64(time.Microsecond)
	cpu := d.all("cpu.stat")
	s.nanos(CPUUser, cpu["user_usec"]*micro)
	s.nanos(CPUSystem, cpu["system_usec"]*micro)
	throttling(cpu, cpu["throttled_usec"]*micro, cpu["burst_usec"]*micro, s)
	memoryMoreV2(d, f, s)
	threads(r, d, f, s)
	blockIOV2(d, s)
	for _, size := range r.HugePages {
		if used, ok := d.lookup("hugetlb." + size + ".current"); ok {
			s.count(HugePages, used, size)
			s.count(HugePagesMax, used, size)
		}
	}
}

func memoryMoreV2(d *dir, f *Figures, s *Samples) {
	stat := memoryStat(d, memoryStatV2, s)
	faults(f.Memory.PageFaults, f.Memory.MajorPageFaults, f.Memory, s) // the kernel counts those of the hierarchy only
	peak, ok := d.lookup("memory.peak")
	if !ok { // before Linux 5.19
		peak = f.Memory.Usage
	}
	s.count(MemoryMaxUsage, peak)
	kernel, ok := stat["kernel"]
	if !ok { // before Linux 5.18
		kernel = stat["kernel_stack"] + stat["pagetables"] + stat["percpu"] + stat["slab"]
	}
	s.count(MemoryKernel, kernel)
	events := d.all("memory.events")
	s.count(MemoryFailures, events["max"])
	s.count(MemoryMaxEvents, events["max"])
	s.count(MemoryHighEvents, events["high"])
	s.count(OOMEvents, events["oom_kill"])
}

func threads(_ Root, d *dir, f *Figures, s *Samples) {
	s.count(Threads, f.Processes)
	s.limit(ThreadsMax, d.number("pids.max"))
}

func hugePagesV1(r Root, d *dir, _ *Figures, s *Samples) {
	for _, size := range r.HugePages {
		prefix := "hugetlb." + size
		if used, ok := d.lookup(prefix + ".usage_in_bytes"); ok {
			s.count(HugePages, used, size)
			s.count(HugePagesMax, d.number(prefix+".max_usage_in_bytes"), size)
		}
	}
}

// hugePages returns the sizes of huge pages that the host's kernel offers.
var hugePages = sync.OnceValue(func() (sizes []string) {
	entries, _ := os.ReadDir("/sys/kernel/mm/hugepages")
	for _, e := range entries {
		number, _ := strings.CutPrefix(e.Name(), "hugepages-")
		if kb, ok := parseUint([]byte(strings.TrimSuffix(number, "kB"))); ok {
			sizes = append(sizes, pageSize(kb))
		}
	}
	return sizes
})

// pageSize formats a number of KiB as the hugetlb controller does.
func pageSize(kb uint64) string {
	switch {
	case kb >= 1<<20:
		return strconv.FormatUint(kb>>20, 10) + "GB"
	case kb >= 1<<10:
		return strconv.FormatUint(kb>>10, 10) + "MB"
	}
	return strconv.FormatUint(kb, 10) + "KB"
}

// Operations of a block device, as cAdvisor writes them.
const (
	opRead    = "Read"
	opWrite   = "Write"
	opDiscard = "Discard"
)

func blockIOV1(_ Root, d *dir, _ *Figures, s *Samples) {
	deviceCounters(d.file("blkio.throttle.io_service_bytes_recursive"), func(device blockDevice, op string, v uint64) {
		s.count(BlockIO, v, device.name, device.major, device.minor, op)
		s.io(FSReadBytes, FSWriteBytes, device, op, v)
	})
	deviceCounters(d.file("blkio.throttle.io_serviced_recursive"), func(device blockDevice, op string, v uint64) {
		s.io(FSReads, FSWrites, device, op, v)
	})
}

// io adds a count of reads or writes. It ignores other operations.
func (s *Samples) io(read, write *Family, device blockDevice, op string, v uint64) {
	switch op {
	case opRead:
		s.count(read, v, device.name)
	case opWrite:
		s.count(write, v, device.name)
	}
}

func blockIOV2(d *dir, s *Samples) {
	ops := map[string]struct {
		op          string
		read, write *Family
		bytes       bool
	}{
		"rbytes": {opRead, FSReadBytes, FSWriteBytes, true}, "wbytes": {opWrite, FSReadBytes, FSWriteBytes, true},
		"dbytes": {op: opDiscard, bytes: true},
		"rios":   {opRead, FSReads, FSWrites, false}, "wios": {opWrite, FSReads, FSWrites, false},
	}
	for line := range bytes.Lines(d.file("io.stat")) {
		number, fields, _ := bytes.Cut(bytes.TrimSpace(line), []byte(" "))
		device, ok := findDevice(string(number))
		if !ok {
			continue
		}
		for field := range bytes.FieldsSeq(fields) {
			key, number, _ := bytes.Cut(field, []byte("="))
			v, numeric := parseUint(number)
			c, known := ops[string(key)]
			if !numeric || !known {
				continue
			}
			if c.bytes {
				s.count(BlockIO, v, device.name, device.major, device.minor, c.op)
			}
			s.io(c.read, c.write, device, c.op, v)
		}
	}
}

// deviceCounters calls f for each line of the form "MAJOR:MINOR OPERATION NUMBER".
func deviceCounters(content []byte, f func(device blockDevice, op string, v uint64)) {
	for line := range bytes.Lines(content) {
		fields := bytes.Fields(line)
		if len(fields) != 3 {
			continue
		}
		v, numeric := parseUint(fields[2])
		if device, ok := findDevice(string(fields[0])); ok && numeric {
			f(device, string(fields[1]), v)
		}
	}
}
