package tap

import (
	"net/netip"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
)

// Interface is a network interface of the guest and its counterparts in the pod's namespace.
type Interface struct {
	// Link is the pod's interface; Tap is the tap that the hypervisor opens.
	Link string `json:"link"`
	Tap  string `json:"tap"`
	// MAC is the address of both the guest's and the pod's interface.
	MAC string `json:"mac"`
	MTU int    `json:"mtu"`
	// Addrs are the guest's addresses, without link-local ones. IPv4 addresses come first; within each family, they are
	// in the order in which they were added to Link. An address without a route to its subnet gets the full prefix
	// length (/32, /128).
	Addrs []netip.Prefix `json:"addrs"`
	// Routes are the routes of the main table that do not follow from Addrs, in an order in which they can be added.
	Routes []Route `json:"routes"`
}

// Route is a route of the guest through an Interface.
type Route struct {
	Dst netip.Prefix `json:"dst"`
	// GW is the gateway. It is invalid for an on-link route.
	GW netip.Addr `json:"gw"`
	// Metric is the route's priority, or 0 for the family's default.
	Metric int `json:"metric,omitempty"`
}

// addrs4 and addrs6 return the addresses of one family.
func (i Interface) addrs4() []netip.Prefix { return i.family(netip.Addr.Is4) }
func (i Interface) addrs6() []netip.Prefix { return i.family(netip.Addr.Is6) }

func (i Interface) family(is func(netip.Addr) bool) []netip.Prefix {
	return slices.DeleteFunc(slices.Clone(i.Addrs), func(a netip.Prefix) bool { return !is(a.Addr()) })
}

// gateway returns the first default gateway of a family, or an invalid address if there is none.
func (i Interface) gateway(is func(netip.Addr) bool) netip.Addr {
	for _, r := range i.Routes {
		if r.Dst.Bits() == 0 && r.GW.IsValid() && is(r.GW) {
			return r.GW
		}
	}
	return netip.Addr{}
}

// aliasPrefix precedes the name of the pod's interface in the kernel alias (IFLA_IFALIAS) of a tap that Wire made.
const aliasPrefix = "tripod guest of "

// IsTap reports whether a link in a pod's namespace is a tap that Wire made. The tap's counters repeat those of the
// pod's interface, with receive and transmit swapped.
func IsTap(link netlink.Link) bool { return strings.HasPrefix(link.Attrs().Alias, aliasPrefix) }
