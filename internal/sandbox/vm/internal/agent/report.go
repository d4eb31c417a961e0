package agent

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent/wire"
)

// Info is a guest's description of itself. All texts are printable and of limited length, but the guest may lie.
type Info struct {
	// Program is the version of tripod-agent, Kernel the kernel's release, Machine the architecture.
	Program    string        `json:"program"`
	Kernel     string        `json:"kernel"`
	Machine    string        `json:"machine"`
	Hostname   string        `json:"hostname"`
	BootID     string        `json:"bootID"`
	Uptime     time.Duration `json:"uptime"`
	Interfaces []Interface   `json:"interfaces,omitempty"`
}

// Interface is a network interface in the guest.
type Interface struct {
	Name      string         `json:"name"`
	Addresses []netip.Prefix `json:"addresses,omitempty"`
}

// Stats are statistics that only the guest knows. Memory is in bytes. The guest may lie.
type Stats struct {
	MemoryTotal, MemoryAvailable uint64
	// Load is the load average over 1, 5 and 15 minutes.
	Load        [3]float64
	Filesystems []Filesystem
}

// Filesystem is the guest's root file system, or a mounted file system on a block device.
type Filesystem struct {
	Path, Source, Type string
	// Total and Free are in bytes. Available is the part of Free that unprivileged users can use.
	Total, Free, Available uint64
	Inodes, InodesFree     uint64
}

// Info requests the guest's description of itself.
func (a *Agent) Info(ctx context.Context) (Info, error) {
	var m wire.Info
	if err := a.ask(ctx, wire.OpInfo, m.Parse); err != nil {
		return Info{}, fmt.Errorf("get the guest's information: %w", err)
	}
	info := Info{
		Program: printable(m.Program), Kernel: printable(m.Kernel), Machine: printable(m.Machine), Hostname: printable(m.Hostname),
		BootID: printable(m.BootID), Uptime: time.Duration(m.Uptime) * time.Millisecond,
	}
	for _, i := range m.Interfaces {
		parsed := Interface{Name: printable(i.Name)}
		for _, text := range i.Addresses {
			if p, err := netip.ParsePrefix(text); err == nil {
				parsed.Addresses = append(parsed.Addresses, p)
			}
		}
		info.Interfaces = append(info.Interfaces, parsed)
	}
	return info, nil
}

// Stats requests the guest's statistics.
func (a *Agent) Stats(ctx context.Context) (Stats, error) {
	var m wire.Stats
	if err := a.ask(ctx, wire.OpStats, m.Parse); err != nil {
		return Stats{}, fmt.Errorf("get the guest's statistics: %w", err)
	}
	stats := Stats{MemoryTotal: m.MemoryTotal, MemoryAvailable: m.MemoryAvailable}
	for i, v := range m.Load {
		stats.Load[i] = float64(v) / 100
	}
	for _, f := range m.Filesystems {
		f.Path, f.Source, f.Type = printable(f.Path), printable(f.Source), printable(f.Type)
		stats.Filesystems = append(stats.Filesystems, Filesystem(f))
	}
	return stats, nil
}

// ask runs an operation that transfers nothing but a result, and parses the result.
func (a *Agent) ask(ctx context.Context, op wire.Op, parse func([]byte) error) error {
	c, err := a.open(ctx, op, nil)
	if err != nil {
		return err
	}
	defer c.stop()
	if err := c.wait(ctx); err != nil {
		return err
	}
	return parse([]byte(c.result.Body))
}
