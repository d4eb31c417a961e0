// Package tap gives a pod's network to a virtual machine: each interface that the CNI chain made is joined to a
// persistent tap, and its addresses move into the guest.
//
//	bridge ── veth ══ eth0 ──ingress: u32, mirred──▶ tap0 ══ QEMU ── guest: MAC, MTU, addresses, routes of eth0
//	                  eth0 ◀──ingress: u32, mirred── tap0
//	                                                  └─ AF_PACKET ── Responder: DHCPv4, router advertisements, DHCPv6
//	└────── node ───┘ └──────── pod's namespace ────────┘
//
//	Wire    record ─► taps ─► addresses off the links ─► filters ─► announcement     a repeat finishes what was cut off
//	Unwire  taps and filters away ─► addresses on the links ─► record removed
//
// The guest takes the MAC of the pod's interface, which keeps it too: to its neighbours nothing changes, and what the
// network remembers of the pod (bridge tables, ARP, filters against spoofing) stays true. There is no learning bridge in
// between, which a reflecting port (CNI's hairpinMode) would mislead.
//
// The filters are u32 with mirred alone: kernels have these where they lack matchall, flower and gact. What is to go no
// further is classified without an action, which hands it to the namespace's own IP stack, and that has no address there:
//
//	from the guest   requests to DHCP servers, router solicitations, solicitations of our router   → the Responder's
//	from the wire    answers of other DHCP servers, router advertisements of others                 → of no family that we serve
//	                 the guest's own broadcasts, reflected                                          → always
//
// A family of which an interface has no address is left alone: such a guest may use a DHCP server of its network.
//
// Only the main routing table is moved, and interfaces that are up, Ethernet, and no part of another. IPv6 routes beside
// the default one cannot be told by the Responder; callers who write the guest's network configuration have them.
//
// The package must not know pods, machines or CNI; it changes nothing outside the namespace and the record.
package tap
