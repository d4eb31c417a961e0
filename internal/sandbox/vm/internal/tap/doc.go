// Package tap gives a pod's network to a virtual machine: each interface that the CNI chain made is joined to a
// persistent tap, and the interface's addresses move into the guest.
//
//	bridge ── veth ══ eth0 ──ingress: u32, mirred──▶ tap0 ══ QEMU ── guest: MAC, MTU, addresses, routes of eth0
//	                  eth0 ◀──ingress: u32, mirred── tap0
//	                                                  └─ AF_PACKET ── Responder: DHCPv4, router advertisements, DHCPv6
//	└────── node ───┘ └──────── pod's namespace ────────┘
//
//	Wire    write record ─► make taps ─► remove addresses ─► add filters ─► announce     a second call completes a partial Wire
//	Unwire  remove taps and filters ─► restore addresses ─► remove record
//
// The guest has the same MAC as the pod's interface. Nothing changes for the neighbours, and bridge tables, ARP caches
// and anti-spoofing filters stay valid. There is no learning bridge between interface and tap, because a reflecting
// port (CNI's hairpinMode) would mislead the bridge.
//
// The filters use only u32 with mirred, because some kernels lack matchall, flower and gact. A frame that must not be
// forwarded matches a filter without an action. The frame then reaches the namespace's own IP stack, which drops it for
// lack of an address. These frames are not forwarded:
//
//	from the guest   requests to DHCP servers, router solicitations, solicitations of our router   the Responder answers them
//	from the wire    answers from DHCP servers, router advertisements                              if the guest has addresses of the family
//	                 the guest's own broadcasts, reflected                                         always
//
// An address family without an address on the interface is not filtered, so the guest can use a DHCP server on its
// network.
//
// Wire handles only Ethernet interfaces that are up and not part of another interface, and moves only the routes of the
// main table. The Responder can announce no IPv6 route except the default route. Callers that write the guest's network
// configuration can include the other routes.
//
// The package knows nothing about pods, machines or CNI. It changes nothing outside the namespace and the record.
package tap
