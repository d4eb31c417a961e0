package network

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
)

// addGateway gives the bridge of the embedded default the gateway address of a new IPv4 subnet, ahead of its other addresses, so
// that running pods keep theirs and stay reachable. The bridge plugin removes any address that it finds before its own, and leaves
// the others once its own is first. A missing bridge is made with the first pod. IPv6 subnets do not conflict.
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
