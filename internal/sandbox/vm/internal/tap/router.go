package tap

import (
	"encoding/binary"
	"net"
	"net/netip"
	"sync/atomic"

	"github.com/insomniacslk/dhcp/rfc1035label"
)

// server6 tells a guest of its IPv6: as the router that advertises where to get addresses and whereto to send, and as the
// DHCPv6 server that gives them (file dhcp6.go).
//
// A default router is known to its neighbours by a link-local address, a CNI chain's gateway mostly by another one. So the
// guest gets the address router, which nobody has. Its neighbour solicitations for that address are sent on for the gateway,
// and the gateway's answer is returned as the router's. A link-local gateway is advertised itself.
//
//	guest ── NS for router ──▶ Responder ── NS for the gateway ──▶ gateway
//	guest ◀── NA of router ─── Responder ◀── NA of the gateway ─── gateway
type server6 struct {
	mac     [6]byte
	addrs   []netip.Prefix
	gateway netip.Addr // not valid: no default route
	router  netip.Addr
	mtu     int
	dns     []net.IP
	search  []string
	// seeker is who asked for the router last; nil once answered.
	seeker atomic.Pointer[netip.Addr]
}

func newServer6(i Interface, mac net.HardwareAddr, cfg Config) *server6 {
	s := &server6{
		mac: [6]byte(mac), addrs: i.addrs6(), gateway: i.gateway(netip.Addr.Is6), router: router, mtu: i.MTU,
		dns: addrsOf(cfg.Servers, netip.Addr.Is6), search: cfg.Searches,
	}
	if s.gateway.IsLinkLocalUnicast() {
		s.router = s.gateway
	}
	return s
}

// stands reports whether the router advertised stands for a gateway of another address.
func (s *server6) stands() bool { return s.gateway.IsValid() && s.gateway != s.router }

// Fields of a router advertisement (RFC 4861, section 4.2).
const (
	hopLimit = 64
	// managed and otherConfig: addresses and the rest are to be had by DHCPv6.
	managed, otherConfig = 0x80, 0x40
	// routerLifetime in seconds is the longest that the RFC allows.
	routerLifetime = 9000
	// onLink: the prefix's addresses are neighbours. The flag for making an address of it is not set.
	onLink = 0x80
	// forever is an infinite lifetime.
	forever = 0xffffffff
	// leastMTU6 is IPv6's own.
	leastMTU6 = 1280
)

// Types of neighbour discovery options (RFC 4861, section 4.6; RFC 8106).
const (
	optSourceAddress = 1
	optTargetAddress = 2
	optPrefix        = 3
	optMTU           = 5
	optDNS           = 25
	optSearch        = 31
)

// option pads the body to a whole option.
func option(kind uint8, body []byte) []byte {
	size := (2 + len(body) + 7) / 8
	o := make([]byte, size*8)
	o[0], o[1] = kind, uint8(size)
	copy(o[2:], body)
	return o
}

// solicited answers a router solicitation.
func (s *server6) solicited(f frame) []byte {
	if f.from.IsLinkLocalUnicast() {
		return s.advertisement(f.from, s.mac)
	}
	return s.advertisement(allNodes, groupMAC(allNodes))
}

// advertisement is the router advertisement.
func (s *server6) advertisement(to netip.Addr, dst [6]byte) []byte {
	m := make([]byte, 16)
	m[0], m[4], m[5] = routerAdvert, hopLimit, managed|otherConfig
	if s.gateway.IsValid() {
		binary.BigEndian.PutUint16(m[6:], routerLifetime)
	}
	if s.mtu >= leastMTU6 {
		m = append(m, option(optMTU, binary.BigEndian.AppendUint32([]byte{0, 0}, uint32(s.mtu)))...)
	}
	told := map[netip.Prefix]bool{}
	for _, a := range s.addrs {
		if p := a.Masked(); !p.IsSingleIP() && !told[p] {
			told[p] = true
			body := []byte{uint8(p.Bits()), onLink}
			body = binary.BigEndian.AppendUint32(body, forever)
			body = binary.BigEndian.AppendUint32(body, forever)
			m = append(m, option(optPrefix, append(append(body, 0, 0, 0, 0), p.Addr().AsSlice()...))...)
		}
	}
	lifetime := binary.BigEndian.AppendUint32([]byte{0, 0}, forever)
	if len(s.dns) > 0 {
		body := lifetime
		for _, server := range s.dns {
			body = append(body, server.To16()...)
		}
		m = append(m, option(optDNS, body)...)
	}
	if len(s.search) > 0 {
		m = append(m, option(optSearch, append(lifetime[:len(lifetime):len(lifetime)], (&rfc1035label.Labels{Labels: s.search}).ToBytes()...))...)
	}
	return icmp6Frame(dst, serverMAC, s.router, to, m)
}

// seek asks the gateway for its Ethernet address, if it is the router's that the guest asks for. The gateway answers to
// the guest's own address, which it can reach.
func (s *server6) seek(f frame) []byte {
	if len(f.payload) < 24 || netip.AddrFrom16([16]byte(f.payload[8:24])) != s.router {
		return nil
	}
	from := f.from
	s.seeker.Store(&from)
	gateway := s.gateway.As16()
	group := netip.MustParseAddr("ff02::1:ff00:0").As16()
	copy(group[13:], gateway[13:])
	to := netip.AddrFrom16(group)
	m := append([]byte{ndSolicit, 0, 0, 0, 0, 0, 0, 0}, gateway[:]...)
	m = append(m, option(optSourceAddress, s.mac[:])...)
	return icmp6Frame(groupMAC(to), s.mac, s.addrs[0].Addr(), to, m)
}

// Flags of a neighbour advertisement.
const (
	ndRouter, ndSolicited, ndOverride = 0x80, 0x40, 0x20
	// advertLen is its size without options.
	advertLen = 24
)

// found passes the gateway's advertisement of itself on as the router's.
func (s *server6) found(f frame) []byte {
	if len(f.payload) < advertLen || netip.AddrFrom16([16]byte(f.payload[8:24])) != s.gateway {
		return nil
	}
	mac, ok := targetAddress(f.payload[advertLen:])
	if !ok {
		mac = f.src
	}
	flags, to, dst := byte(ndRouter|f.payload[4]&ndOverride), allNodes, groupMAC(allNodes)
	if seeker := s.seeker.Swap(nil); seeker != nil && !seeker.IsUnspecified() {
		flags, to, dst = ndRouter|ndSolicited|ndOverride, *seeker, s.mac
	}
	r := s.router.As16()
	m := append([]byte{ndAdvert, 0, 0, 0, flags, 0, 0, 0}, r[:]...)
	m = append(m, option(optTargetAddress, mac[:])...)
	return icmp6Frame(dst, serverMAC, s.router, to, m)
}

// targetAddress finds the option that tells the Ethernet address of a target.
func targetAddress(options []byte) (mac [6]byte, ok bool) {
	for len(options) >= 8 {
		size := int(options[1]) * 8
		if size == 0 || size > len(options) {
			break
		}
		if options[0] == optTargetAddress {
			return [6]byte(options[2:8]), true
		}
		options = options[size:]
	}
	return mac, false
}
