package builtin

import (
	"errors"
	"fmt"
	"net"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// All network namespaces of a machine share one table of neighbours for each address family, with 1024 entries by default
// (net.ipv4.neigh.default.gc_thresh3). A pod needs two: the host in the pod, and the pod on the bridge. With more than 500 pods,
// new entries failed, and so did connections to pods that run. Entries that were learned elsewhere (NTF_EXT_LEARNED) do not
// count, and the kernel does not discard them. In everything else they are as others: they are verified, and announcements
// change them.

// introduce says to the bridge which port leads to the pod, and adds the host's entries for the pod's addresses, if the host is the
// pod's gateway.
func (conf *bridgeConfig) introduce(host *netlink.Handle, bridge netlink.Link, port int, result *types100.Result) error {
	mac, err := net.ParseMAC(result.Interfaces[podInterface].Mac)
	if err != nil || !conf.IsGateway {
		return err
	}
	// Otherwise, the packets to a pod that has sent none yet, or none for five minutes, go to all ports.
	err = host.NeighSet(&netlink.Neigh{
		LinkIndex: port, Family: unix.AF_BRIDGE, HardwareAddr: mac, State: netlink.NUD_REACHABLE,
		Flags: netlink.NTF_MASTER | netlink.NTF_EXT_LEARNED,
	})
	if err != nil {
		return fmt.Errorf("add %s to bridge %s: %w", mac, conf.Bridge, err)
	}
	for _, ip := range hosts(podAddresses(result)) {
		if err := setNeighbour(host, bridge, ip, mac); err != nil {
			return err
		}
	}
	return nil
}

// forget removes the host's entries for addresses. A missing bridge or entry is not an error.
func (conf *bridgeConfig) forget(addresses []net.IP) error {
	if !conf.IsGateway {
		return nil
	}
	return withHandle(func(host *netlink.Handle) error {
		bridge, err := host.LinkByName(conf.Bridge)
		if notFound(err) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("bridge %s: %w", conf.Bridge, err)
		}
		for _, ip := range addresses {
			err := host.NeighDel(&netlink.Neigh{LinkIndex: bridge.Attrs().Index, IP: ip})
			if err != nil && !errors.Is(err, unix.ENOENT) {
				return fmt.Errorf("remove neighbour %s of bridge %s: %w", ip, conf.Bridge, err)
			}
		}
		return nil
	})
}

// setNeighbour adds an entry, which may then be in use, or replaces it.
func setNeighbour(h *netlink.Handle, link netlink.Link, ip net.IP, mac net.HardwareAddr) error {
	err := h.NeighSet(&netlink.Neigh{
		LinkIndex: link.Attrs().Index, IP: ip, HardwareAddr: mac, State: netlink.NUD_REACHABLE, Flags: netlink.NTF_EXT_LEARNED,
	})
	if err != nil {
		return fmt.Errorf("add neighbour %s of %s: %w", ip, link.Attrs().Name, err)
	}
	return nil
}
