package network

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"

	"github.com/tripod-run/tripod/internal/network/netthread"
)

// addGateway adds the gateway of a new IPv4 subnet to the embedded default's bridge, as the bridge's first address. The
// old gateways stay, so that running pods remain reachable. The bridge plugin leaves the old gateways alone, because it
// removes only addresses that are listed before the new gateway. If the bridge does not exist, addGateway does
// nothing, because the first pod's ADD creates the bridge with the new gateway. IPv6 subnets are ignored, because the
// bridge plugin accepts a bridge that has IPv6 addresses in other subnets.
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
	have, err := netthread.Dump(func() ([]netlink.Addr, error) { return netlink.AddrList(link, netlink.FAMILY_V4) })
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
	// The kernel lists the oldest address first, so removing the old addresses and adding them again puts the gateway
	// first.
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
