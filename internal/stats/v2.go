package stats

import "time"

// readV2 reads the files of the one v2 directory (kernel: Documentation/admin-guide/cgroup-v2.rst).
func (c Cgroup) readV2() (Figures, error) {
	buf := borrow()
	defer buf.giveBack()
	f := Figures{Time: time.Now()}
	d, err := c.dir("", buf)
	if err != nil {
		return Figures{}, err
	}
	defer d.close()
	v2CPU(d, &f)
	v2Memory(d, &f)
	readPids(d, &f)
	f.IO = parseIOStat(d.file("io.stat"))
	readPSI(d, &f)
	if err := d.failure(); err != nil {
		return Figures{}, err
	}
	return f, nil
}

func v2CPU(d *dir, f *Figures) {
	const perMicrosecond = 1000
	d.pairs("cpu.stat", func(key string, v uint64) {
		switch key {
		case "usage_usec":
			f.CPU.Usage = v * perMicrosecond
		case "user_usec":
			f.CPU.User = v * perMicrosecond
		case "system_usec":
			f.CPU.System = v * perMicrosecond
		case "nr_periods":
			f.CPU.Periods = v
		case "nr_throttled":
			f.CPU.ThrottledPeriods = v
		case "throttled_usec":
			f.CPU.Throttled = v * perMicrosecond
		}
	})
}

func v2Memory(d *dir, f *Figures) {
	m := &f.Memory
	m.Usage = d.number("memory.current")
	m.MaxUsage = d.number("memory.peak") // since Linux 5.19
	m.Limit = d.limit("memory.max")
	var inactiveFile, kernelParts uint64
	d.pairs("memory.stat", func(key string, v uint64) {
		switch key {
		case "anon":
			m.RSS = v
		case "file":
			m.Cache = v
		case "file_mapped":
			m.MappedFile = v
		case "kernel": // since Linux 5.18; it includes the parts below
			m.Kernel = v
		case "kernel_stack", "pagetables", "percpu", "slab":
			kernelParts += v
		case "pgfault":
			m.PageFaults = v
		case "pgmajfault":
			m.MajorPageFaults = v
		case "inactive_file":
			inactiveFile = v
		}
	})
	m.WorkingSet = m.Usage - min(inactiveFile, m.Usage)
	if m.Kernel == 0 {
		m.Kernel = kernelParts
	}
	if usage, ok := d.lookup("memory.swap.current"); ok {
		m.Swap = &Swap{Usage: usage, Limit: d.limit("memory.swap.max")}
	}
	d.pairs("memory.events", func(key string, v uint64) {
		switch key {
		case "max":
			m.Failcnt = v
		case "oom_kill":
			m.OOMKills = v
		}
	})
}

// readPids and readPSI read files that have one name and form on v1 and v2.
func readPids(d *dir, f *Figures) {
	f.Pids = Pids{Current: d.number("pids.current"), Limit: d.limit("pids.max")}
}

func readPSI(d *dir, f *Figures) {
	f.PSI = PSI{
		CPU:    parsePressure(d.file("cpu.pressure")),
		Memory: parsePressure(d.file("memory.pressure")),
		IO:     parsePressure(d.file("io.pressure")),
	}
}
