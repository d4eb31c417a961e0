package network

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
)

// addGateway adds the gateway address of a new IPv4 subnet to the bridge of the embedded default, as its first address.
// The old gateways stay, so that running pods remain reachable: the bridge plugin only removes addresses listed before
// its own. If the bridge is missing, the first pod makes it. IPv6 subnets do not conflict.
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
	// The kernel lists addresses in the order of their addition, so adding the old ones again puts the gateway first.
	for _, old := range have {
		if old.IPNet.String() == gateway.String() {
			continue
		}
		addr := &netlink.Addr{IPNet: old.IPNet, Label: old.Label}
		if err := errors.Join(netlink.AddrDel(link, &old), netlink.AddrAdd(link, addr)); err != nil {
			return fmt.Errorf("add %s to bridge %s again: %w", old.IPNet, bridge, err)
		}
	}
	return nil
}
