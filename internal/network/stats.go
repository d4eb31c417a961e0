package network

import (
	"errors"
	"fmt"
	"net"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// InterfaceStats are the counters of a network interface, as seen from inside its namespace.
type InterfaceStats struct {
	Name                                    string
	RxBytes, RxPackets, RxErrors, RxDropped uint64
	TxBytes, TxPackets, TxErrors, TxDropped uint64
}

// Stats reads the counters of all interfaces but lo of the namespace at netnsPath ("" is the host's), the default
// interface first. A backend's links are left out: their traffic is counted at the pod's interfaces. ErrNotFound: there is
// no such namespace.
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

// links lists the interfaces of a namespace. The socket is opened inside it and asked from outside.
func (m *Manager) links(netnsPath string) ([]netlink.Link, error) {
	var handle *netlink.Handle
	err := m.inNetns(netnsPath, func() (err error) {
		handle, err = netlink.NewHandle(unix.NETLINK_ROUTE)
		return err
	})
	if err != nil {
		return nil, err
	}
	defer handle.Close()
	links, err := handle.LinkList()
	if errors.Is(err, netlink.ErrDumpInterrupted) { // an interface came or went meanwhile
		links, err = handle.LinkList()
	}
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
		return nil, fmt.Errorf("list interfaces of %s: %w", netnsPath, err)
	}
	return links, nil
}
