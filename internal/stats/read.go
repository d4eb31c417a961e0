package stats

import (
	"errors"
	"fmt"
	"path"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/cgroup"
)

// Root is the location of the cgroup hierarchies. Tests use directories of plain files.
type Root struct {
	// Mount is the mount point of the v2 hierarchy. On v1, it is the directory that contains the hierarchies: a
	// directory named after each controller, and "unified" for an additional v2 hierarchy.
	Mount string
	V2    bool
	// HugePages are the sizes of the host's huge pages, as in the names of the hugetlb controller's files: 2MB, 1GB.
	HugePages []string
}

// Read reads the figures of a cgroup of this host, such as /kubepods/pod1/abc. It returns errdefs.ErrNotFound if the
// cgroup does not exist, and ErrInvalidArgument if the name is not an absolute, clean path.
func Read(name string) (Figures, error) {
	root, err := host()
	if err != nil {
		return Figures{}, err
	}
	return root.Read(name)
}

// OOMKills returns how many processes of a cgroup the OOM killer has killed. On v2, the number includes child cgroups;
// on v1, it does not. It returns the same errors as Read.
func OOMKills(name string) (uint64, error) {
	root, err := host()
	if err != nil {
		return 0, err
	}
	return root.OOMKills(name)
}

func host() (Root, error) {
	v2, err := cgroup.IsV2()
	return Root{Mount: cgroup.Mount, V2: v2, HugePages: hugePages()}, err
}

// part describes how to read the figures that are in one hierarchy.
type part struct {
	// controller is the name of the v1 hierarchy; empty on v2.
	controller string
	// optional means that it is not an error if the cgroup does not exist in the hierarchy; the figures then stay zero.
	optional bool
	read     func(*dir, *Figures)
	// more reads what only ReadAll returns; nil if there is no more. It is called after read.
	more func(Root, *dir, *Figures, *Samples)
}

var (
	partsV1 = []part{
		{"cpuacct", false, cpuV1, cpuTimesV1}, {"memory", false, memoryV1, memoryMoreV1}, {"pids", true, processes, threads},
		{"unified", true, pressure, nil}, {"cpu", true, nil, throttlingV1}, {"blkio", true, nil, blockIOV1}, {"hugetlb", true, nil, hugePagesV1},
	}
	partsV2 = []part{{"", false, allV2, moreV2}}
)

// Read is like the function Read, for a cgroup in this root.
func (r Root) Read(name string) (Figures, error) {
	f, _, err := r.read(name, false)
	return f, err
}

// read reads the figures of a cgroup, and also the samples that only ReadAll returns, if all is true.
func (r Root) read(name string, all bool) (f Figures, more Samples, err error) {
	if err := checkName(name); err != nil {
		return f, nil, err
	}
	buf := buffers.Get().(*buffer)
	defer buffers.Put(buf)
	f = Figures{Time: time.Now(), Memory: Memory{Limit: Unlimited}}
	parts := partsV1
	if r.V2 {
		parts = partsV2
	}
	for _, p := range parts {
		if p.read == nil && !all {
			continue
		}
		d, err := r.open(p.controller, name, buf)
		switch {
		case err == nil:
			if all {
				d.memo = map[string][]byte{}
			}
			if p.read != nil {
				p.read(d, &f)
			}
			if p.more != nil && all {
				p.more(r, d, &f, &more)
			}
			err = d.err
			d.close()
		case p.optional || errors.Is(err, errNotMounted):
			err = nil
		}
		if err != nil {
			return Figures{}, nil, err
		}
	}
	return f, more, nil
}

// OOMKills is like the function OOMKills, for a cgroup in this root.
func (r Root) OOMKills(name string) (uint64, error) {
	if err := checkName(name); err != nil {
		return 0, err
	}
	buf := buffers.Get().(*buffer)
	defer buffers.Put(buf)
	controller, file := "memory", "memory.oom_control"
	if r.V2 {
		controller, file = "", "memory.events"
	}
	d, err := r.open(controller, name, buf)
	if err != nil {
		return 0, err
	}
	defer d.close()
	var kills uint64
	d.pairs(file, func(key string, v uint64) {
		if key == "oom_kill" {
			kills = v
		}
	})
	return kills, d.err
}

func checkName(name string) error {
	if path.IsAbs(name) && path.Clean(name) == name {
		return nil
	}
	return fmt.Errorf("cgroup path %q is not absolute and clean (begin at the hierarchy's root, e.g. /kubepods/pod1): %w",
		name, errdefs.ErrInvalidArgument)
}

func allV2(d *dir, f *Figures) {
	cpuV2(d, f)
	memoryV2(d, f)
	processes(d, f)
	pressure(d, f)
}

func cpuV1(d *dir, f *Figures) { f.CPU = d.number("cpuacct.usage") }

func cpuV2(d *dir, f *Figures) {
	d.pairs("cpu.stat", func(key string, v uint64) {
		if key == "usage_usec" {
			f.CPU = v * uint64(time.Microsecond)
		}
	})
}

func memoryV1(d *dir, f *Figures) {
	m := &f.Memory
	m.Usage = d.number("memory.usage_in_bytes")
	m.Limit = d.limit("memory.limit_in_bytes")
	var inactiveFile, swap uint64
	d.pairs("memory.stat", func(key string, v uint64) {
		switch key {
		case "total_rss":
			m.RSS = v
		case "total_pgfault":
			m.PageFaults = v
		case "total_pgmajfault":
			m.MajorPageFaults = v
		case "total_inactive_file":
			inactiveFile = v
		case "total_swap":
			swap = v
		}
	})
	m.WorkingSet = m.Usage - min(inactiveFile, m.Usage)
	// This limit is for memory and swap together. The file exists only if the kernel accounts swap.
	if both, ok := d.lookup("memory.memsw.limit_in_bytes"); ok {
		m.Swap = &Swap{Usage: swap, Limit: Unlimited}
		if both != Unlimited && m.Limit != Unlimited {
			m.Swap.Limit = both - min(m.Limit, both)
		}
	}
}

func memoryV2(d *dir, f *Figures) {
	m := &f.Memory
	m.Usage = d.number("memory.current")
	m.Limit = d.limit("memory.max")
	var inactiveFile uint64
	d.pairs("memory.stat", func(key string, v uint64) {
		switch key {
		case "anon":
			m.RSS = v
		case "pgfault":
			m.PageFaults = v
		case "pgmajfault":
			m.MajorPageFaults = v
		case "inactive_file":
			inactiveFile = v
		}
	})
	m.WorkingSet = m.Usage - min(inactiveFile, m.Usage)
	if usage, ok := d.lookup("memory.swap.current"); ok {
		m.Swap = &Swap{Usage: usage, Limit: d.limit("memory.swap.max")}
	}
}

func processes(d *dir, f *Figures) { f.Processes = d.number("pids.current") }

func pressure(d *dir, f *Figures) {
	f.PSI = PSI{
		CPU:    parsePressure(d.file("cpu.pressure")),
		Memory: parsePressure(d.file("memory.pressure")),
		IO:     parsePressure(d.file("io.pressure")),
	}
}
