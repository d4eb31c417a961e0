package tap

import (
	"cmp"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/network/netthread"
)

// primary is the name of the interface that Kubernetes regards as the pod's.
const primary = "eth0"

// defaultMetric6 is the kernel's default priority for IPv6 routes.
const defaultMetric6 = 1024

// readNetwork returns the interfaces of the calling thread's namespace that a guest can take over.
func readNetwork(h *netlink.Handle) ([]wiring, error) {
	links, err := netthread.Dump(h.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list interfaces: %w", err)
	}
	taken := map[string]bool{}
	for _, link := range links {
		taken[link.Attrs().Name] = true
	}
	links = slices.DeleteFunc(links, func(l netlink.Link) bool { return !isEligible(l) })
	slices.SortStableFunc(links, func(a, b netlink.Link) int {
		return cmp.Or(-compareBool(a.Attrs().Name == primary, b.Attrs().Name == primary), a.Attrs().Index-b.Attrs().Index)
	})
	routes, err := mainRoutes(h)
	if err != nil {
		return nil, err
	}
	var all []wiring
	number := 0
	for _, link := range links {
		w, err := readInterface(h, link, routes)
		if err != nil {
			return nil, err
		}
		for w.Tap == "" || taken[w.Tap] {
			w.Tap = fmt.Sprintf("tap%d", number)
			number++
		}
		all = append(all, w)
	}
	return all, nil
}

func compareBool(a, b bool) int {
	if a == b {
		return 0
	}
	if a {
		return 1
	}
	return -1
}

// isEligible reports whether a guest can take over the interface: it is up, Ethernet, and not part of another
// interface. This excludes lo and the devices that tunnel modules create in every namespace.
func isEligible(link netlink.Link) bool {
	a := link.Attrs()
	_, isTap := link.(*netlink.Tuntap)
	return a.EncapType == "ether" && len(a.HardwareAddr) == 6 && a.Flags&net.FlagUp != 0 && a.MasterIndex == 0 && !isTap
}

func readInterface(h *netlink.Handle, link netlink.Link, routes []netlink.Route) (wiring, error) {
	a := link.Attrs()
	w := wiring{Interface: Interface{Link: a.Name, MAC: a.HardwareAddr.String(), MTU: a.MTU}}
	connected := map[netip.Prefix]bool{}
	for _, r := range routes {
		dst := destination(r)
		if !dst.IsValid() || dst.Addr().IsLinkLocalUnicast() && r.Protocol == unix.RTPROT_KERNEL || dst.Addr().IsMulticast() {
			continue
		}
		for _, gw := range nextHops(r, a.Index) {
			if r.Protocol == unix.RTPROT_KERNEL && !gw.IsValid() {
				connected[dst] = true
			} else {
				w.Routes = append(w.Routes, Route{Dst: dst, GW: gw, Metric: metric(r, dst)})
			}
		}
	}
	slices.SortStableFunc(w.Routes, func(a, b Route) int { return compareBool(a.GW.IsValid(), b.GW.IsValid()) })
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		addrs, err := addresses(h, link, family)
		if err != nil {
			return w, err
		}
		for _, addr := range addrs {
			w.LinkAddrs = append(w.LinkAddrs, addr)
			if !connected[addr.Masked()] {
				addr = netip.PrefixFrom(addr.Addr(), addr.Addr().BitLen())
			}
			w.Addrs = append(w.Addrs, addr)
		}
	}
	var err error
	w.DisableIPv6, err = disableIPv6(a.Name)
	return w, err
}

// addresses returns the link's addresses of a family, oldest first, except IPv6 link-local ones.
func addresses(h *netlink.Handle, link netlink.Link, family int) ([]netip.Prefix, error) {
	have, err := netthread.Dump(func() ([]netlink.Addr, error) { return h.AddrList(link, family) })
	if err != nil {
		return nil, fmt.Errorf("list addresses of %s: %w", link.Attrs().Name, err)
	}
	var all []netip.Prefix
	for _, a := range have {
		addr := prefixOf(a.IPNet)
		if addr.IsValid() && (family == unix.AF_INET || !addr.Addr().IsLinkLocalUnicast()) {
			all = append(all, addr)
		}
	}
	if family == unix.AF_INET6 { // the kernel lists the newest first
		slices.Reverse(all)
	}
	return all, nil
}

// mainRoutes returns the unicast routes of the main table.
func mainRoutes(h *netlink.Handle) ([]netlink.Route, error) {
	var all []netlink.Route
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		filter := &netlink.Route{Table: unix.RT_TABLE_MAIN, Type: unix.RTN_UNICAST}
		some, err := netthread.Dump(func() ([]netlink.Route, error) {
			return h.RouteListFiltered(family, filter, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_TYPE)
		})
		if err != nil {
			return nil, fmt.Errorf("list routes: %w", err)
		}
		all = append(all, some...)
	}
	return all, nil
}

// destination returns the route's destination. For a default route without one, destination returns ::/0 or 0.0.0.0/0,
// depending on r.Family.
func destination(r netlink.Route) netip.Prefix {
	if r.Dst != nil {
		return prefixOf(r.Dst)
	}
	if r.Family == unix.AF_INET6 {
		return netip.PrefixFrom(netip.IPv6Unspecified(), 0)
	}
	return netip.PrefixFrom(netip.IPv4Unspecified(), 0)
}

// nextHops returns the gateways of the route on the link with the given index. An invalid gateway means an on-link
// route.
func nextHops(r netlink.Route, index int) []netip.Addr {
	gateway := func(ip net.IP) netip.Addr {
		gw, _ := netip.AddrFromSlice(ip)
		return gw.Unmap()
	}
	if len(r.MultiPath) == 0 {
		if r.LinkIndex != index {
			return nil
		}
		return []netip.Addr{gateway(r.Gw)}
	}
	var hops []netip.Addr
	for _, hop := range r.MultiPath {
		if hop.LinkIndex == index {
			hops = append(hops, gateway(hop.Gw))
		}
	}
	return hops
}

func metric(r netlink.Route, dst netip.Prefix) int {
	if dst.Addr().Is6() && r.Priority == defaultMetric6 {
		return 0
	}
	return r.Priority
}

func prefixOf(n *net.IPNet) netip.Prefix {
	if n == nil {
		return netip.Prefix{}
	}
	addr, _ := netip.AddrFromSlice(n.IP)
	ones, _ := n.Mask.Size()
	return netip.PrefixFrom(addr.Unmap(), ones)
}

func netOf(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
