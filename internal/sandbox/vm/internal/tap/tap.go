package tap

import (
	"net/netip"
	"strings"

	"github.com/vishvananda/netlink"
)

// Interface is a network interface of the guest, and where in the pod's namespace it ends.
type Interface struct {
	// Link is the pod's interface, Tap the device of the hypervisor.
	Link string `json:"link"`
	Tap  string `json:"tap"`
	// MAC is the address of the guest's interface.
	MAC string `json:"mac"`
	MTU int    `json:"mtu"`
	// Addrs are the guest's addresses, IPv4 first, in the order in which the link got them, without link-local ones. An address
	// without a route to its subnet has the prefix length of a single address.
	Addrs []netip.Prefix `json:"addrs"`
	// Routes are those of the main table that do not follow from Addrs, in an order in which they can be added.
	Routes []Route `json:"routes"`
}

// Route is a route of the guest by an Interface.
type Route struct {
	Dst netip.Prefix `json:"dst"`
	// GW is not valid for a route to neighbours.
	GW netip.Addr `json:"gw"`
	// Metric is the kernel's priority where it is not the family's default.
	Metric int `json:"metric,omitempty"`
}

// isDefault reports whether the route is the one to everywhere, by a gateway.
func (r Route) isDefault() bool { return r.Dst.Bits() == 0 && r.GW.IsValid() }

// addrs4 and addrs6 are the addresses of one family.
func (i Interface) addrs4() []netip.Prefix { return i.family(netip.Addr.Is4) }
func (i Interface) addrs6() []netip.Prefix { return i.family(netip.Addr.Is6) }

func (i Interface) family(is func(netip.Addr) bool) []netip.Prefix {
	var some []netip.Prefix
	for _, a := range i.Addrs {
		if is(a.Addr()) {
			some = append(some, a)
		}
	}
	return some
}

// gateway is the first default gateway of a family; not valid when there is none.
func (i Interface) gateway(is func(netip.Addr) bool) netip.Addr {
	for _, r := range i.Routes {
		if r.isDefault() && is(r.GW) {
			return r.GW
		}
	}
	return netip.Addr{}
}

// alias begins the kernel's alias (IFLA_IFALIAS) of a tap that Wire made; the name of the pod's interface follows.
const alias = "tripod guest of "

// IsTap reports whether the link, seen in a pod's namespace, is a tap that Wire made: its counters are those of a pod's
// interface once more, the other way round.
func IsTap(link netlink.Link) bool { return strings.HasPrefix(link.Attrs().Alias, alias) }
