package tap

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/iana"
	"github.com/insomniacslk/dhcp/rfc1035label"
)

// leaseTime is practically infinite, because the address belongs to the pod, but short enough not to overflow in any
// client.
const leaseTime = 365 * 24 * time.Hour

// minMessage4 is the size of an IP packet that every DHCP client accepts (RFC 2131, section 2). minMTU4 is the lowest
// value of the MTU option (RFC 2132, section 5.1).
const minMessage4, minMTU4 = 576, 68

// serverMAC is the source MAC address of answers. Nothing is sent to it.
var serverMAC = [6]byte{0x02, 0x00, 0x54, 0x52, 0x50, 0x44}

// fallbackServer4 identifies the server if the guest has no gateway. A client cannot renew its lease at this address,
// so it finally broadcasts the request.
var fallbackServer4 = netip.MustParseAddr("169.254.1.1")

// server4 answers a guest's DHCPv4 messages (RFC 2131, section 4.3) with the guest's first address. It keeps no lease
// state, because the address belongs to the pod.
type server4 struct {
	mac     net.HardwareAddr
	address netip.Prefix // of the guest
	// server is the server identifier, usually the gateway's address. Clients send renewals to this address, and
	// server4 answers them.
	server netip.Addr
	// offer holds the options of an offer or acknowledgement. The option in the field search is added only if it fits.
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
		s.server = fallbackServer4
	}
	if routes := classlessRoutes(i); len(routes) > 0 {
		add(dhcpv4.OptClasslessStaticRoute(routes...))
	}
	if dns := addrsOf(cfg.Servers, netip.Addr.Is4); len(dns) > 0 {
		add(dhcpv4.OptDNS(dns...))
	}
	if cfg.Hostname != "" {
		add(dhcpv4.OptHostName(cfg.Hostname))
	}
	if i.MTU >= minMTU4 {
		add(dhcpv4.OptGeneric(dhcpv4.OptionInterfaceMTU, []byte{byte(i.MTU >> 8), byte(i.MTU)}))
	}
	if len(cfg.Searches) > 0 {
		add(dhcpv4.OptDomainName(cfg.Searches[0]))
		search := dhcpv4.OptDomainSearch(&rfc1035label.Labels{Labels: cfg.Searches})
		s.search = &search
	}
	return s
}

// classlessRoutes returns all IPv4 routes, for the classless static route option (RFC 3442). A client that supports
// this option ignores the router option. If a gateway is outside the guest's subnet, an on-link route to the gateway
// comes before the routes through it.
func classlessRoutes(i Interface) []*dhcpv4.Route {
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
		if !slices.ContainsFunc(near, func(p netip.Prefix) bool { return p.Contains(r.GW) }) {
			host := netip.PrefixFrom(r.GW, 32)
			near = append(near, host)
			add(host, net.IPv4zero.To4())
		}
		add(r.Dst, r.GW.AsSlice())
	}
	return all
}

// answer returns the frame that answers the message, or nil if there is no answer. The second result describes the
// exchange for the log; it is "" if there is nothing to log.
func (s *server4) answer(message []byte) (reply []byte, what string) {
	request, err := dhcpv4.FromBytes(message)
	if err != nil || request.OpCode != dhcpv4.OpcodeBootRequest || request.HWType != iana.HWTypeEthernet ||
		request.ClientHWAddr.String() != s.mac.String() || !request.GatewayIPAddr.IsUnspecified() {
		return nil, "" // ignore a message that is damaged, from another client, or relayed by the guest for another host
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

// decide returns the type of the answer. MessageTypeNone means no answer. If the request is refused or not answered,
// the second result is the reason.
func (s *server4) decide(request *dhcpv4.DHCPv4) (kind dhcpv4.MessageType, why string) {
	mine := func(ip net.IP) bool { return ip.Equal(s.address.Addr().AsSlice()) }
	switch kind := request.MessageType(); kind {
	case dhcpv4.MessageTypeDiscover:
		return dhcpv4.MessageTypeOffer, ""
	case dhcpv4.MessageTypeInform:
		return dhcpv4.MessageTypeAck, ""
	case dhcpv4.MessageTypeRequest:
		if server := request.ServerIdentifier(); server != nil && !server.Equal(s.server.AsSlice()) {
			return dhcpv4.MessageTypeNone, fmt.Sprintf("%s selects the offer of another server, %s", kind, server)
		}
		wanted := request.RequestedIPAddress() // set in SELECTING and INIT-REBOOT, not in RENEWING and REBINDING
		if wanted == nil {
			wanted = request.ClientIPAddr
		}
		if !mine(wanted) {
			return dhcpv4.MessageTypeNak, fmt.Sprintf("%s is not this pod's address", wanted)
		}
		return dhcpv4.MessageTypeAck, ""
	case dhcpv4.MessageTypeDecline:
		return dhcpv4.MessageTypeNone, fmt.Sprintf("the guest declines %s: another host on its network uses it", request.RequestedIPAddress())
	case dhcpv4.MessageTypeRelease:
		return dhcpv4.MessageTypeNone, "" // the address still belongs to the pod
	default:
		return dhcpv4.MessageTypeNone, fmt.Sprintf("%s is not a client's message", kind)
	}
}

// frame returns the frame that carries the reply. Its destination follows RFC 2131, section 4.1: the guest's current
// address if it has one, otherwise the offered address, or the broadcast address if the client asks for a broadcast. A
// refusal is always broadcast.
func (s *server4) frame(request, r *dhcpv4.DHCPv4, kind dhcpv4.MessageType) []byte {
	payload := r.ToBytes()
	if s.search != nil && kind != dhcpv4.MessageTypeNak {
		most := minMessage4
		if size, err := request.MaxMessageSize(); err == nil {
			most = max(most, int(size))
		}
		r.UpdateOption(*s.search)
		if full := r.ToBytes(); ip4Len+udpLen+len(full) <= most {
			payload = full
		}
	}
	to, dst := broadcast4, broadcastMAC
	if client, ok := netip.AddrFromSlice(request.ClientIPAddr.To4()); kind != dhcpv4.MessageTypeNak && ok && !client.IsUnspecified() {
		to, dst = client, [6]byte(s.mac)
	} else if kind != dhcpv4.MessageTypeNak && !request.IsBroadcast() {
		to, dst = s.address.Addr(), [6]byte(s.mac)
	}
	return udp4Frame(dst, serverMAC, netip.AddrPortFrom(s.server, dhcp4Server), netip.AddrPortFrom(to, dhcp4Client), payload)
}
