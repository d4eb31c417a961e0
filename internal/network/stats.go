package network

import (
	"errors"
	"fmt"
	"net"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// InterfaceStats holds the counters of a network interface, as seen inside its namespace.
type InterfaceStats struct {
	Name                                    string
	RxBytes, RxPackets, RxErrors, RxDropped uint64
	TxBytes, TxPackets, TxErrors, TxDropped uint64
}

// Stats returns the counters of all interfaces except lo, the default interface first. The counters are those of the
// namespace at netnsPath; "" means the host's namespace. Stats omits a backend's links, because the pod's interfaces
// count the same traffic. If the namespace does not exist, Stats returns ErrNotFound.
func (m *Manager) Stats(netnsPath string) ([]InterfaceStats, error) {
	links, err := m.links(netnsPath)
	if err != nil {
		return nil, err
	}
	var all []InterfaceStats
	for _, link := range links {
		attrs := link.Attrs()
		if attrs.Statistics == nil || attrs.Flags&net.FlagLoopback != 0 || m.cfg.IsBackendLink(link) {
			continue
		}
		s := attrs.Statistics
		stats := InterfaceStats{
			Name:    attrs.Name,
			RxBytes: s.RxBytes, RxPackets: s.RxPackets, RxErrors: s.RxErrors, RxDropped: s.RxDropped,
			TxBytes: s.TxBytes, TxPackets: s.TxPackets, TxErrors: s.TxErrors, TxDropped: s.TxDropped,
		}
		all = append(all, stats)
		if attrs.Name == interfaceName {
			last := len(all) - 1
			all[0], all[last] = all[last], all[0]
		}
	}
	return all, nil
}

// links lists the interfaces of a namespace. Only opening the netlink socket needs a thread inside the namespace.
func (m *Manager) links(netnsPath string) ([]netlink.Link, error) {
	var handle *netlink.Handle
	err := inNetns(netnsPath, func() (err error) {
		handle, err = netlink.NewHandle(unix.NETLINK_ROUTE)
		return err
	})
	if err != nil {
		return nil, err
	}
	defer handle.Close()
	links, err := handle.LinkList()
	if errors.Is(err, netlink.ErrDumpInterrupted) { // an interface was added or removed during the dump
		links, err = handle.LinkList()
	}
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
		return nil, fmt.Errorf("list interfaces of %s: %w", netnsPath, err)
	}
	return links, nil
}
