package tap

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv6"
	"github.com/insomniacslk/dhcp/iana"
)

// infinite is the infinite lifetime of DHCPv6, 0xffffffff seconds.
const infinite = forever * time.Second

// serverID is the DHCPv6 server identifier. Every pod gets the same one, because each guest sees only one server.
var serverID = &dhcpv6.DUIDLL{HWType: iana.HWTypeEthernet, LinkLayerAddr: serverMAC[:]}

// answer returns the frame that answers a DHCPv6 message (RFC 8415, section 18.3), or nil if there is no answer. The
// second result describes the exchange for the log; it is "" if there is nothing to log.
func (s *server6) answer(f frame) (reply []byte, what string) {
	request, err := dhcpv6.MessageFromBytes(f.payload)
	if err != nil || request.GetOneOption(dhcpv6.OptionRelayMsg) != nil || !f.from.IsLinkLocalUnicast() {
		return nil, ""
	}
	if id := request.Options.ServerID(); id != nil && !id.Equal(serverID) {
		return nil, fmt.Sprintf("%s is for another server", request.Type())
	}
	r := s.reply(request)
	if r == nil {
		return nil, fmt.Sprintf("%s is not answered", request.Type())
	}
	r.AddOption(dhcpv6.OptServerID(serverID))
	if len(s.dns) > 0 {
		dhcpv6.WithDNS(s.dns...)(r)
	}
	if len(s.search) > 0 {
		dhcpv6.WithDomainSearchList(s.search...)(r)
	}
	frame := udp6Frame(s.mac, serverMAC, netip.AddrPortFrom(s.router, dhcp6Server), netip.AddrPortFrom(f.from, dhcp6Client), r.ToBytes())
	return frame, fmt.Sprintf("%s: %s", request.Type(), r.Type())
}

// reply returns the answer, or nil if there is none. It leaves out the options that all answers have.
func (s *server6) reply(request *dhcpv6.Message) *dhcpv6.Message {
	var r *dhcpv6.Message
	var err error
	switch request.Type() {
	case dhcpv6.MessageTypeSolicit:
		if request.GetOneOption(dhcpv6.OptionRapidCommit) != nil {
			r, err = dhcpv6.NewReplyFromMessage(request)
		} else {
			r, err = dhcpv6.NewAdvertiseFromSolicit(request)
		}
		s.assignAddrs(request, r)
	case dhcpv6.MessageTypeRequest, dhcpv6.MessageTypeRenew, dhcpv6.MessageTypeRebind:
		r, err = dhcpv6.NewReplyFromMessage(request)
		s.assignAddrs(request, r)
	case dhcpv6.MessageTypeConfirm:
		r, err = dhcpv6.NewReplyFromMessage(request)
		setStatus(r, s.confirm(request))
	case dhcpv6.MessageTypeRelease: // the addresses still belong to the pod
		r, err = dhcpv6.NewReplyFromMessage(request)
		setStatus(r, iana.StatusSuccess)
	case dhcpv6.MessageTypeInformationRequest:
		r = &dhcpv6.Message{MessageType: dhcpv6.MessageTypeReply, TransactionID: request.TransactionID}
		if id := request.GetOneOption(dhcpv6.OptionClientID); id != nil { // optional in this message
			r.AddOption(id)
		}
	}
	if err != nil {
		return nil
	}
	return r
}

func setStatus(r *dhcpv6.Message, code iana.StatusCode) {
	if r != nil {
		r.AddOption(&dhcpv6.OptStatusCode{StatusCode: code})
	}
}

// assignAddrs answers each identity association. The first association gets all of the guest's addresses. Other
// addresses that the client asks to keep get lifetime 0, so that the client drops them immediately. Further
// associations get no addresses.
func (s *server6) assignAddrs(request, r *dhcpv6.Message) {
	if r == nil {
		return
	}
	for n, ia := range request.Options.IANA() {
		answer := &dhcpv6.OptIANA{IaId: ia.IaId, T1: infinite, T2: infinite}
		if n > 0 {
			answer.Options.Add(&dhcpv6.OptStatusCode{StatusCode: iana.StatusNoAddrsAvail})
			r.AddOption(answer)
			continue
		}
		for _, a := range s.addrs {
			answer.Options.Add(&dhcpv6.OptIAAddress{IPv6Addr: a.Addr().AsSlice(), PreferredLifetime: infinite, ValidLifetime: infinite})
		}
		if request.Type() == dhcpv6.MessageTypeRenew || request.Type() == dhcpv6.MessageTypeRebind {
			for _, a := range ia.Options.Addresses() {
				if !s.hasAddr(a.IPv6Addr) {
					answer.Options.Add(&dhcpv6.OptIAAddress{IPv6Addr: a.IPv6Addr})
				}
			}
		}
		r.AddOption(answer)
	}
}

func (s *server6) hasAddr(ip net.IP) bool {
	return slices.ContainsFunc(s.addrs, func(a netip.Prefix) bool { return ip.Equal(a.Addr().AsSlice()) })
}

// confirm checks whether the client's addresses are still valid.
func (s *server6) confirm(request *dhcpv6.Message) iana.StatusCode {
	for _, ia := range request.Options.IANA() {
		for _, a := range ia.Options.Addresses() {
			if !s.hasAddr(a.IPv6Addr) {
				return iana.StatusNotOnLink
			}
		}
	}
	return iana.StatusSuccess
}
