package stats

import (
	"errors"
	"time"
)

// userTick is the unit of cpuacct.stat: USER_HZ is 100 on every architecture that Go runs on.
const userTick = 10 * uint64(time.Millisecond)

// readV1 reads the trees of the v1 controllers. Those that a container may not have joined, or the host not have
// mounted, leave their figures at zero; cpuacct and memory tell whether the cgroup is there.
func (c Cgroup) readV1() (Figures, error) {
	buf := borrow()
	defer buf.giveBack()
	f := Figures{Time: time.Now(), Memory: Memory{Limit: Unlimited}, Pids: Pids{Limit: Unlimited}}
	for _, part := range []struct {
		controller string
		required   bool
		read       func(*dir, *Figures)
	}{
		{"cpuacct", true, v1CPUAcct},
		{"memory", true, v1Memory},
		{"cpu", false, v1CPU},
		{"pids", false, readPids},
		{"blkio", false, v1Blkio},
		{"unified", false, readPSI},
	} {
		d, err := c.dir(part.controller, buf)
		switch {
		case err == nil:
			part.read(d, &f)
			err = d.failure()
			d.close()
		case !part.required || errors.Is(err, errNotMounted):
			err = nil
		}
		if err != nil {
			return Figures{}, err
		}
	}
	return f, nil
}

func v1CPUAcct(d *dir, f *Figures) {
	f.CPU.Usage = d.number("cpuacct.usage")
	d.pairs("cpuacct.stat", func(key string, v uint64) {
		switch key {
		case "user":
			f.CPU.User = v * userTick
		case "system":
			f.CPU.System = v * userTick
		}
	})
}

func v1CPU(d *dir, f *Figures) {
	d.pairs("cpu.stat", func(key string, v uint64) {
		switch key {
		case "nr_periods":
			f.CPU.Periods = v
		case "nr_throttled":
			f.CPU.ThrottledPeriods = v
		case "throttled_time":
			f.CPU.Throttled = v
		}
	})
}

func v1Memory(d *dir, f *Figures) {
	m := &f.Memory
	m.Usage = d.number("memory.usage_in_bytes")
	m.MaxUsage = d.number("memory.max_usage_in_bytes")
	m.Limit = d.limit("memory.limit_in_bytes")
	m.Failcnt = d.number("memory.failcnt")
	m.Kernel = d.number("memory.kmem.usage_in_bytes")
	var inactiveFile, swapUsage uint64
	d.pairs("memory.stat", func(key string, v uint64) {
		switch key {
		case "total_rss":
			m.RSS = v
		case "total_cache":
			m.Cache = v
		case "total_mapped_file":
			m.MappedFile = v
		case "total_pgfault":
			m.PageFaults = v
		case "total_pgmajfault":
			m.MajorPageFaults = v
		case "total_inactive_file":
			inactiveFile = v
		case "total_swap":
			swapUsage = v
		}
	})
	m.WorkingSet = m.Usage - min(inactiveFile, m.Usage)
	// The limit with swap is of memory and swap together, and the file is there only if swap is accounted.
	if both, ok := d.lookup("memory.memsw.limit_in_bytes"); ok {
		m.Swap = &Swap{Usage: swapUsage, Limit: Unlimited}
		if both != Unlimited && m.Limit != Unlimited {
			m.Swap.Limit = both - min(m.Limit, both)
		}
	}
	d.pairs("memory.oom_control", func(key string, v uint64) {
		if key == "oom_kill" {
			m.OOMKills = v
		}
	})
}

// v1Blkio reads the counters of the throttling layer, which sees every request whatever the I/O scheduler.
func v1Blkio(d *dir, f *Figures) {
	v1BlkioFile(d, "blkio.throttle.io_service_bytes", f, func(io *DeviceIO) (read, write *uint64) {
		return &io.ReadBytes, &io.WriteBytes
	})
	v1BlkioFile(d, "blkio.throttle.io_serviced", f, func(io *DeviceIO) (read, write *uint64) {
		return &io.Reads, &io.Writes
	})
}

func v1BlkioFile(d *dir, name string, f *Figures, of func(*DeviceIO) (read, write *uint64)) {
	content := d.file(name + "_recursive")
	if content == nil { // before Linux 4.16
		content = d.file(name)
	}
	parseBlkio(content, func(device DeviceIO, operation string, v uint64) {
		read, write := of(f.device(device))
		switch operation {
		case "Read":
			*read = v
		case "Write":
			*write = v
		}
	})
}

// device is the entry of a device, made if it is not there yet.
func (f *Figures) device(want DeviceIO) *DeviceIO {
	for i := range f.IO {
		if f.IO[i].Major == want.Major && f.IO[i].Minor == want.Minor {
			return &f.IO[i]
		}
	}
	f.IO = append(f.IO, want)
	return &f.IO[len(f.IO)-1]
}
