package agent

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent/wire"
)

// Info is what a guest says of itself. Its texts are printable and of bounded length; they may be lies.
type Info struct {
	// Program is the version of tripod-agent, Kernel the kernel's release, Machine its architecture.
	Program    string        `json:"program"`
	Kernel     string        `json:"kernel"`
	Machine    string        `json:"machine"`
	Hostname   string        `json:"hostname"`
	BootID     string        `json:"bootID"`
	Uptime     time.Duration `json:"uptime"`
	Interfaces []Interface   `json:"interfaces,omitempty"`
}

// Interface is a network interface of the guest.
type Interface struct {
	Name      string         `json:"name"`
	Addresses []netip.Prefix `json:"addresses,omitempty"`
}

// Stats are figures that only the guest knows; memory and file systems in bytes. They may be lies.
type Stats struct {
	MemoryTotal, MemoryAvailable uint64
	// Load is the load average over 1, 5 and 15 minutes.
	Load        [3]float64
	Filesystems []Filesystem
}

// Filesystem is a mounted file system of the guest that lies on a block device, or its root.
type Filesystem struct {
	Path, Source, Type string
	// Total and Free are of all, Available of what users without privileges can have.
	Total, Free, Available uint64
	Inodes, InodesFree     uint64
}

// Info asks the guest who it is.
func (a *Agent) Info(ctx context.Context) (Info, error) {
	var m wire.Info
	if err := a.ask(ctx, wire.OpInfo, m.Parse); err != nil {
		return Info{}, fmt.Errorf("the guest's identity: %w", err)
	}
	info := Info{
		Program: printable(m.Program), Kernel: printable(m.Kernel), Machine: printable(m.Machine), Hostname: printable(m.Hostname),
		BootID: printable(m.BootID), Uptime: time.Duration(m.Uptime) * time.Millisecond,
	}
	for _, i := range m.Interfaces {
		known := Interface{Name: printable(i.Name)}
		for _, text := range i.Addresses {
			if p, err := netip.ParsePrefix(text); err == nil {
				known.Addresses = append(known.Addresses, p)
			}
		}
		info.Interfaces = append(info.Interfaces, known)
	}
	return info, nil
}

// Stats asks for the guest's figures.
func (a *Agent) Stats(ctx context.Context) (Stats, error) {
	var m wire.Stats
	if err := a.ask(ctx, wire.OpStats, m.Parse); err != nil {
		return Stats{}, fmt.Errorf("the guest's figures: %w", err)
	}
	stats := Stats{MemoryTotal: m.MemoryTotal, MemoryAvailable: m.MemoryAvailable}
	for i, v := range m.Load {
		stats.Load[i] = float64(v) / 100
	}
	for _, f := range m.Filesystems {
		stats.Filesystems = append(stats.Filesystems, Filesystem{
			Path: printable(f.Path), Source: printable(f.Source), Type: printable(f.Type),
			Total: f.Total, Free: f.Free, Available: f.Available, Inodes: f.Inodes, InodesFree: f.InodesFree,
		})
	}
	return stats, nil
}

// Shutdown has the guest turn itself off. It returns when that has begun; the guest may be gone before it has said so.
func (a *Agent) Shutdown(ctx context.Context) error {
	if err := a.ask(ctx, wire.OpShutdown, func([]byte) error { return nil }); err != nil {
		return fmt.Errorf("have the guest turn itself off: %w", err)
	}
	return nil
}

// ask is an operation without streams.
func (a *Agent) ask(ctx context.Context, op wire.Op, parse func([]byte) error) error {
	c, err := a.open(ctx, op, nil)
	if err != nil {
		return err
	}
	defer c.abandon()
	if err := c.wait(ctx); err != nil {
		return err
	}
	return parse([]byte(c.result.Body))
}
