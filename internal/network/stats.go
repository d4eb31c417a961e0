package network

import "net"

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
