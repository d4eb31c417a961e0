package wire

import "math"

// Info is the result of OpInfo.
type Info struct {
	// Program is the version of the guest's program, Kernel the kernel's release, Machine the architecture.
	Program, Kernel, Machine string
	Hostname                 string
	// BootID changes with each boot of the guest.
	BootID string
	// Uptime is in milliseconds.
	Uptime     uint64
	Interfaces []Interface
}

// Interface is a network interface in the guest.
type Interface struct {
	Name      string
	Addresses []string // with their prefix lengths
}

func (m Info) Append(b []byte) []byte {
	e := encoder(b)
	for _, s := range []string{m.Program, m.Kernel, m.Machine, m.Hostname, m.BootID} {
		e.string(s)
	}
	e.uint(m.Uptime)
	e.uint(uint64(len(m.Interfaces)))
	for _, i := range m.Interfaces {
		e.string(i.Name)
		e.strings(i.Addresses)
	}
	return e
}

func (m *Info) Parse(b []byte) error {
	d := decoder{b: b}
	for _, s := range []*string{&m.Program, &m.Kernel, &m.Machine, &m.Hostname, &m.BootID} {
		*s = d.string()
	}
	m.Uptime = d.uint()
	m.Interfaces = nil
	d.list(func() { m.Interfaces = append(m.Interfaces, Interface{Name: d.string(), Addresses: d.strings()}) })
	return d.err
}

// Stats is the result of OpStats. Memory is in bytes.
type Stats struct {
	MemoryTotal, MemoryAvailable uint64
	// Load is the load average over 1, 5 and 15 minutes, in hundredths.
	Load        [3]uint64
	Filesystems []Filesystem
}

// Filesystem is a mounted file system in the guest.
type Filesystem struct {
	Path, Source, Type string
	// Total and Free are in bytes. Available is the part of Free that unprivileged users can use.
	Total, Free, Available uint64
	Inodes, InodesFree     uint64
}

func (m Stats) Append(b []byte) []byte {
	e := encoder(b)
	for _, v := range []uint64{m.MemoryTotal, m.MemoryAvailable, m.Load[0], m.Load[1], m.Load[2], uint64(len(m.Filesystems))} {
		e.uint(v)
	}
	for _, f := range m.Filesystems {
		e.string(f.Path)
		e.string(f.Source)
		e.string(f.Type)
		for _, v := range []uint64{f.Total, f.Free, f.Available, f.Inodes, f.InodesFree} {
			e.uint(v)
		}
	}
	return e
}

func (m *Stats) Parse(b []byte) error {
	d := decoder{b: b}
	for _, v := range []*uint64{&m.MemoryTotal, &m.MemoryAvailable, &m.Load[0], &m.Load[1], &m.Load[2]} {
		*v = d.small(math.MaxInt64)
	}
	m.Filesystems = nil
	d.list(func() {
		f := Filesystem{Path: d.string(), Source: d.string(), Type: d.string()}
		for _, v := range []*uint64{&f.Total, &f.Free, &f.Available, &f.Inodes, &f.InodesFree} {
			*v = d.small(math.MaxInt64)
		}
		m.Filesystems = append(m.Filesystems, f)
	})
	return d.err
}
