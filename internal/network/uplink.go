package network

import (
	"fmt"
	"net"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/network/netthread"
)

// UplinkMTU returns the smallest MTU of the default routes' interfaces, for IPv4 or, if it has none, for IPv6. It returns
// 0 if there is no default route. Routes of policy routing are not looked at.
func UplinkMTU() (int, error) {
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		mtu, err := uplinkMTU(family)
		if err != nil {
			return 0, fmt.Errorf("MTU of the default route: %w", err)
		}
		if mtu > 0 {
			return mtu, nil
		}
	}
	return 0, nil
}

func uplinkMTU(family int) (smallest int, err error) {
	filter := &netlink.Route{Table: unix.RT_TABLE_MAIN, Type: unix.RTN_UNICAST} // no destination: default routes
	routes, err := netthread.Dump(func() ([]netlink.Route, error) {
		return netlink.RouteListFiltered(family, filter, netlink.RT_FILTER_DST|netlink.RT_FILTER_TABLE|netlink.RT_FILTER_TYPE)
	})
	if err != nil {
		return 0, err
	}
	consider := func(mtu int) {
		if mtu > 0 && (smallest == 0 || mtu < smallest) {
			smallest = mtu
		}
	}
	for _, r := range routes {
		consider(r.MTU)
		for _, hop := range append(r.MultiPath, &netlink.NexthopInfo{LinkIndex: r.LinkIndex}) {
			link, err := netlink.LinkByIndex(hop.LinkIndex) // fails for a route of several hops itself
			if err == nil && link.Attrs().Flags&net.FlagLoopback == 0 {
				consider(link.Attrs().MTU)
			}
		}
	}
	return smallest, nil
}
