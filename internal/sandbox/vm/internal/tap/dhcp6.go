package tap

import (
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv6"
	"github.com/insomniacslk/dhcp/iana"
)

// infinite is DHCPv6's time without end, 0xffffffff seconds.
const infinite = forever * time.Second

// serverID identifies us to DHCPv6 clients; it is the same for every pod, as each hears only one.
var serverID = &dhcpv6.DUIDLL{HWType: iana.HWTypeEthernet, LinkLayerAddr: serverMAC[:]}

// answer is the frame that answers a DHCPv6 message (RFC 8415, section 18.3), or none, and what was done, for the log;
// nothing was if that is empty.
func (s *server6) answer(f frame) (reply []byte, what string) {
	request, err := dhcpv6.MessageFromBytes(f.payload)
	if err != nil || request.GetOneOption(dhcpv6.OptionRelayMsg) != nil || !f.from.IsLinkLocalUnicast() {
		return nil, ""
	}
	if id := request.Options.ServerID(); id != nil && !id.Equal(serverID) {
		return nil, fmt.Sprintf("%s to another server", request.Type())
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

// reply makes the answer but for what all have in common; nil is none.
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
		s.give(request, r)
	case dhcpv6.MessageTypeRequest, dhcpv6.MessageTypeRenew, dhcpv6.MessageTypeRebind:
		r, err = dhcpv6.NewReplyFromMessage(request)
		s.give(request, r)
	case dhcpv6.MessageTypeConfirm:
		r, err = dhcpv6.NewReplyFromMessage(request)
		status(r, s.confirm(request))
	case dhcpv6.MessageTypeRelease: // they stay the pod's
		r, err = dhcpv6.NewReplyFromMessage(request)
		status(r, iana.StatusSuccess)
	case dhcpv6.MessageTypeInformationRequest:
		r = &dhcpv6.Message{MessageType: dhcpv6.MessageTypeReply, TransactionID: request.TransactionID}
		if id := request.GetOneOption(dhcpv6.OptionClientID); id != nil { // which it need not tell
			r.AddOption(id)
		}
	}
	if err != nil {
		return nil
	}
	return r
}

func status(r *dhcpv6.Message, code iana.StatusCode) {
	if r != nil {
		r.AddOption(&dhcpv6.OptStatusCode{StatusCode: code})
	}
}

// give answers each identity association: the first one that the client has gets all addresses, with them go others that
// it asks to keep, to be given up at once.
func (s *server6) give(request, r *dhcpv6.Message) {
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
				if !s.has(a.IPv6Addr) {
					answer.Options.Add(&dhcpv6.OptIAAddress{IPv6Addr: a.IPv6Addr})
				}
			}
		}
		r.AddOption(answer)
	}
}

func (s *server6) has(ip net.IP) bool {
	for _, a := range s.addrs {
		if ip.Equal(a.Addr().AsSlice()) {
			return true
		}
	}
	return false
}

// confirm tells whether the addresses that a client had are still right.
func (s *server6) confirm(request *dhcpv6.Message) iana.StatusCode {
	for _, ia := range request.Options.IANA() {
		for _, a := range ia.Options.Addresses() {
			if !s.has(a.IPv6Addr) {
				return iana.StatusNotOnLink
			}
		}
	}
	return iana.StatusSuccess
}
