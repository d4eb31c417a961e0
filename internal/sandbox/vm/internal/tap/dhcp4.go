package tap

import (
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/iana"
	"github.com/insomniacslk/dhcp/rfc1035label"
)

// leaseTime is how long the guest may keep its address: as good as for ever, in a number that no client overflows on. The
// address is the guest's for as long as the pod is.
const leaseTime = 365 * 24 * time.Hour

// minMessage4 is the size of an IP packet that each DHCP client takes (RFC 2131, section 2), leastMTU4 the least MTU that
// can be told (RFC 2132, section 5.1).
const minMessage4, leastMTU4 = 576, 68

// serverMAC is the Ethernet address that answers come from; nothing is sent to it.
var serverMAC = [6]byte{0x02, 0x00, 0x54, 0x52, 0x50, 0x44}

// nobody4 identifies the server where there is no gateway whose address would do. Renewals to it are lost, and broadcast
// in the end.
var nobody4 = netip.MustParseAddr("169.254.1.1")

// server4 answers a guest's DHCPv4 messages (RFC 2131, section 4.3) with its only address. It has no state: an address is
// leased by being the pod's.
type server4 struct {
	mac net.HardwareAddr
	// address is the guest's, server what identifies us: the gateway, which a client that renews can reach, if only to
	// be answered by us.
	address netip.Prefix
	server  netip.Addr
	// offer are the options for whoever accepts the address; search is the one that may be left out for its size.
	offer  []dhcpv4.Option
	search *dhcpv4.Option
}

func newServer4(i Interface, mac net.HardwareAddr, cfg Config) *server4 {
	s := &server4{mac: mac, address: i.addrs4()[0], server: i.gateway(netip.Addr.Is4)}
	add := func(o dhcpv4.Option) { s.offer = append(s.offer, o) }
	add(dhcpv4.OptSubnetMask(net.CIDRMask(s.address.Bits(), 32)))
	if s.server.IsValid() {
		add(dhcpv4.OptRouter(s.server.AsSlice()))
	} else {
		s.server = nobody4
	}
	if routes := classless(i); len(routes) > 0 {
		add(dhcpv4.OptClasslessStaticRoute(routes...))
	}
	if dns := addrsOf(cfg.Servers, netip.Addr.Is4); len(dns) > 0 {
		add(dhcpv4.OptDNS(dns...))
	}
	if cfg.Hostname != "" {
		add(dhcpv4.OptHostName(cfg.Hostname))
	}
	if i.MTU >= leastMTU4 {
		add(dhcpv4.OptGeneric(dhcpv4.OptionInterfaceMTU, []byte{byte(i.MTU >> 8), byte(i.MTU)}))
	}
	if len(cfg.Searches) > 0 {
		add(dhcpv4.OptDomainName(cfg.Searches[0]))
		search := dhcpv4.OptDomainSearch(&rfc1035label.Labels{Labels: cfg.Searches})
		s.search = &search
	}
	return s
}

// classless are all routes of IPv4 (RFC 3442): a client that knows them does not look at the router option. Gateways that
// are no neighbours by the address's subnet are made so by a route before.
func classless(i Interface) []*dhcpv4.Route {
	var all []*dhcpv4.Route
	near := []netip.Prefix{i.addrs4()[0].Masked()}
	add := func(dst netip.Prefix, gw net.IP) {
		all = append(all, &dhcpv4.Route{Dest: netOf(dst), Router: gw})
	}
	for _, r := range i.Routes {
		if !r.Dst.Addr().Is4() {
			continue
		}
		if !r.GW.IsValid() {
			near = append(near, r.Dst)
			add(r.Dst, net.IPv4zero.To4())
			continue
		}
		if !r.GW.Is4() {
			continue
		}
		if !within(near, r.GW) {
			host := netip.PrefixFrom(r.GW, 32)
			near = append(near, host)
			add(host, net.IPv4zero.To4())
		}
		add(r.Dst, r.GW.AsSlice())
	}
	return all
}

func within(some []netip.Prefix, addr netip.Addr) bool {
	for _, p := range some {
		if p.Contains(addr) {
			return true
		}
	}
	return false
}

// answer is the frame that answers the message, or none, and what was done, for the log; nothing was if that is empty.
func (s *server4) answer(message []byte) (reply []byte, what string) {
	request, err := dhcpv4.FromBytes(message)
	if err != nil || request.OpCode != dhcpv4.OpcodeBootRequest || request.HWType != iana.HWTypeEthernet ||
		request.ClientHWAddr.String() != s.mac.String() || !request.GatewayIPAddr.IsUnspecified() {
		return nil, "" // damaged, another's, or by a relay, which the guest may be for others
	}
	kind, why := s.decide(request)
	if kind == dhcpv4.MessageTypeNone {
		return nil, why
	}
	options := []dhcpv4.Modifier{dhcpv4.WithMessageType(kind), dhcpv4.WithOption(dhcpv4.OptServerIdentifier(s.server.AsSlice()))}
	if kind == dhcpv4.MessageTypeNak {
		options = append(options, dhcpv4.WithBroadcast(true), dhcpv4.WithOption(dhcpv4.OptMessage(why)))
	} else {
		for _, o := range s.offer {
			options = append(options, dhcpv4.WithOption(o))
		}
		if request.MessageType() != dhcpv4.MessageTypeInform {
			options = append(options, dhcpv4.WithYourIP(s.address.Addr().AsSlice()), dhcpv4.WithOption(dhcpv4.OptIPAddressLeaseTime(leaseTime)))
		}
	}
	r, err := dhcpv4.NewReplyFromRequest(request, options...)
	if err != nil {
		return nil, fmt.Sprintf("%s: %v", request.MessageType(), err)
	}
	if !request.ClientIPAddr.IsUnspecified() && kind == dhcpv4.MessageTypeAck {
		r.ClientIPAddr = request.ClientIPAddr
	}
	return s.frame(request, r, kind), fmt.Sprintf("%s: %s of %s", request.MessageType(), kind, s.address.Addr())
}

// decide tells how a message is answered, and in words why it is refused or passed over. MessageTypeNone is no answer.
func (s *server4) decide(request *dhcpv4.DHCPv4) (kind dhcpv4.MessageType, why string) {
	mine := func(ip net.IP) bool { return ip.Equal(s.address.Addr().AsSlice()) }
	switch kind := request.MessageType(); kind {
	case dhcpv4.MessageTypeDiscover:
		return dhcpv4.MessageTypeOffer, ""
	case dhcpv4.MessageTypeInform:
		return dhcpv4.MessageTypeAck, ""
	case dhcpv4.MessageTypeRequest:
		if server := request.ServerIdentifier(); server != nil && !server.Equal(s.server.AsSlice()) {
			return dhcpv4.MessageTypeNone, fmt.Sprintf("%s of another server's offer, %s", kind, server)
		}
		wanted := request.RequestedIPAddress() // SELECTING and INIT-REBOOT; else RENEWING and REBINDING
		if wanted == nil {
			wanted = request.ClientIPAddr
		}
		if !mine(wanted) {
			return dhcpv4.MessageTypeNak, fmt.Sprintf("%s is not this pod's address", wanted)
		}
		return dhcpv4.MessageTypeAck, ""
	case dhcpv4.MessageTypeDecline:
		return dhcpv4.MessageTypeNone, fmt.Sprintf("the guest declines %s: another on its network answers for it", request.RequestedIPAddress())
	case dhcpv4.MessageTypeRelease:
		return dhcpv4.MessageTypeNone, "" // it stays the pod's
	default:
		return dhcpv4.MessageTypeNone, fmt.Sprintf("%s is no client's", kind)
	}
}

// frame addresses the reply (RFC 2131, section 4.1): to the address that the guest has, else to the one that it gets,
// unless it cannot hear that yet and says so.
func (s *server4) frame(request, r *dhcpv4.DHCPv4, kind dhcpv4.MessageType) []byte {
	payload := r.ToBytes()
	if s.search != nil && kind != dhcpv4.MessageTypeNak {
		most := minMessage4
		if told, err := request.MaxMessageSize(); err == nil {
			most = max(most, int(told))
		}
		r.UpdateOption(*s.search)
		if full := r.ToBytes(); ip4Len+udpLen+len(full) <= most {
			payload = full
		}
	}
	to, dst := broadcast4, everyone
	if client, ok := netip.AddrFromSlice(request.ClientIPAddr.To4()); kind != dhcpv4.MessageTypeNak && ok && !client.IsUnspecified() {
		to, dst = client, [6]byte(s.mac)
	} else if kind != dhcpv4.MessageTypeNak && !request.IsBroadcast() {
		to, dst = s.address.Addr(), [6]byte(s.mac)
	}
	return udp4Frame(dst, serverMAC, netip.AddrPortFrom(s.server, dhcp4Server), netip.AddrPortFrom(to, dhcp4Client), payload)
}
