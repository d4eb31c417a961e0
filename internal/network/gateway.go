package network

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
)

// addGateway gives the embedded default's bridge the gateway address of a new IPv4 subnet, ahead of those that it has:
// pods that run keep theirs, and can be reached on. The bridge plugin takes away an address that it meets before its
// own; once its own is the first, it leaves the others. A bridge that is not there yet is made with the first pod, and
// IPv6 subnets do not stand in each other's way.
func addGateway(bridge string, subnet netip.Prefix) error {
	if !subnet.IsValid() || !subnet.Addr().Is4() {
		return nil
	}
	link, err := netlink.LinkByName(bridge)
	if _, missing := errors.AsType[netlink.LinkNotFoundError](err); missing {
		return nil
	}
	if err != nil {
		return fmt.Errorf("find bridge %s: %w", bridge, err)
	}
	have, err := netlink.AddrList(link, netlink.FAMILY_V4)
	if err != nil {
		return fmt.Errorf("addresses of bridge %s: %w", bridge, err)
	}
	gateway := &net.IPNet{IP: subnet.Masked().Addr().Next().AsSlice(), Mask: net.CIDRMask(subnet.Bits(), 32)}
	if len(have) == 0 || have[0].IPNet.String() == gateway.String() {
		return nil
	}
	if err := netlink.AddrReplace(link, &netlink.Addr{IPNet: gateway}); err != nil {
		return fmt.Errorf("add %s to bridge %s: %w", gateway, bridge, err)
	}
	// The kernel lists addresses in the order in which they came.
	for _, old := range have {
		if old.IPNet.String() == gateway.String() {
			continue
		}
		again := &netlink.Addr{IPNet: old.IPNet, Label: old.Label}
		if err := errors.Join(netlink.AddrDel(link, &old), netlink.AddrAdd(link, again)); err != nil {
			return fmt.Errorf("keep %s on bridge %s: %w", old.IPNet, bridge, err)
		}
	}
	return nil
}
