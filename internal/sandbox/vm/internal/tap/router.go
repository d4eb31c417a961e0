package tap

import (
	"encoding/binary"
	"net"
	"net/netip"
	"sync/atomic"

	"github.com/insomniacslk/dhcp/rfc1035label"
)

// server6 configures a guest's IPv6. It sends the router advertisements, and it is the DHCPv6 server (dhcp6.go).
//
// A router advertisement comes from a link-local address, but a CNI chain's gateway usually has another kind of
// address. So server6 advertises virtualRouter, a link-local address that nobody uses. It turns the guest's neighbour
// solicitations for virtualRouter into solicitations for the gateway, and the gateway's answers into answers from
// virtualRouter. A link-local gateway is advertised as it is.
//
//	guest ── NS for virtualRouter ──▶ Responder ── NS for the gateway ──▶ gateway
//	guest ◀── NA of virtualRouter ─── Responder ◀── NA of the gateway ─── gateway
type server6 struct {
	mac     [6]byte
	addrs   []netip.Prefix
	gateway netip.Addr // invalid without a default route
	router  netip.Addr // the advertised address
	mtu     int
	dns     []net.IP
	search  []string
	// requester is the source address of the guest's last solicitation for virtualRouter. It is nil once that
	// solicitation has been answered.
	requester atomic.Pointer[netip.Addr]
}

func newServer6(i Interface, mac net.HardwareAddr, cfg Config) *server6 {
	s := &server6{
		mac: [6]byte(mac), addrs: i.addrs6(), gateway: i.gateway(netip.Addr.Is6), router: virtualRouter, mtu: i.MTU,
		dns: addrsOf(cfg.Servers, netip.Addr.Is6), search: cfg.Searches,
	}
	if s.gateway.IsLinkLocalUnicast() {
		s.router = s.gateway
	}
	return s
}

// proxiesGateway reports whether the advertised router represents a gateway with another address.
func (s *server6) proxiesGateway() bool { return s.gateway.IsValid() && s.gateway != s.router }

// Fields of a router advertisement (RFC 4861, section 4.2).
const (
	hopLimit = 64
	// managed and otherConfig refer the guest to DHCPv6 for addresses and other settings.
	managed, otherConfig = 0x80, 0x40
	// routerLifetime is the longest lifetime that the RFC allows, in seconds.
	routerLifetime = 9000
	// onLink marks a prefix whose addresses are neighbours. The autonomous flag is not set, so the guest derives no
	// address from the prefix.
	onLink = 0x80
	// forever is the infinite lifetime.
	forever = 0xffffffff
	// minMTU6 is the minimum MTU of IPv6.
	minMTU6 = 1280
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

// option returns a neighbour discovery option, padded to a multiple of 8 bytes.
func option(kind uint8, body []byte) []byte {
	size := (2 + len(body) + 7) / 8
	o := make([]byte, size*8)
	o[0], o[1] = kind, uint8(size)
	copy(o[2:], body)
	return o
}

// answerSolicit answers a router solicitation.
func (s *server6) answerSolicit(f frame) []byte {
	if f.from.IsLinkLocalUnicast() {
		return s.advertisement(f.from, s.mac)
	}
	return s.advertisement(allNodes, groupMAC(allNodes))
}

// advertisement returns a router advertisement.
func (s *server6) advertisement(to netip.Addr, dst [6]byte) []byte {
	m := make([]byte, 16)
	m[0], m[4], m[5] = routerAdvert, hopLimit, managed|otherConfig
	if s.gateway.IsValid() {
		binary.BigEndian.PutUint16(m[6:], routerLifetime)
	}
	if s.mtu >= minMTU6 {
		m = append(m, option(optMTU, binary.BigEndian.AppendUint32([]byte{0, 0}, uint32(s.mtu)))...)
	}
	seen := map[netip.Prefix]bool{}
	for _, a := range s.addrs {
		if p := a.Masked(); !p.IsSingleIP() && !seen[p] {
			seen[p] = true
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

// solicitGateway turns the guest's solicitation for the router into one for the gateway, or returns nil if the target
// is not the router. The new solicitation comes from the guest's global address, because the gateway can reply to that
// address.
func (s *server6) solicitGateway(f frame) []byte {
	if len(f.payload) < 24 || netip.AddrFrom16([16]byte(f.payload[8:24])) != s.router {
		return nil
	}
	from := f.from
	s.requester.Store(&from)
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
	// advertLen is the size of a neighbour advertisement without options.
	advertLen = 24
)

// gatewayAdvert turns the gateway's advertisement of itself into one from the router. It returns nil if the target is
// not the gateway.
func (s *server6) gatewayAdvert(f frame) []byte {
	if len(f.payload) < advertLen || netip.AddrFrom16([16]byte(f.payload[8:24])) != s.gateway {
		return nil
	}
	mac, ok := targetAddress(f.payload[advertLen:])
	if !ok {
		mac = f.src
	}
	flags, to, dst := byte(ndRouter|f.payload[4]&ndOverride), allNodes, groupMAC(allNodes)
	if requester := s.requester.Swap(nil); requester != nil && !requester.IsUnspecified() {
		flags, to, dst = ndRouter|ndSolicited|ndOverride, *requester, s.mac
	}
	r := s.router.As16()
	m := append([]byte{ndAdvert, 0, 0, 0, flags, 0, 0, 0}, r[:]...)
	m = append(m, option(optTargetAddress, mac[:])...)
	return icmp6Frame(dst, serverMAC, s.router, to, m)
}

// targetAddress returns the target's Ethernet address from the options.
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
