package tap

import (
	"bytes"
	"encoding/binary"
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/dhcpv6"
	"github.com/insomniacslk/dhcp/iana"
	"golang.org/x/sys/unix"
)

var testMAC = net.HardwareAddr{0x02, 1, 2, 3, 4, 5}

func testInterface() Interface {
	prefix, addr := netip.MustParsePrefix, netip.MustParseAddr
	return Interface{
		Link: "eth0", Tap: "tap0", MAC: testMAC.String(), MTU: 1450,
		Addrs: []netip.Prefix{prefix("10.1.1.2/32"), prefix("fd01::2/64")},
		Routes: []Route{
			{Dst: prefix("10.2.0.0/16")}, {Dst: prefix("0.0.0.0/0"), GW: addr("10.1.1.1")}, {Dst: prefix("10.3.0.0/16"), GW: addr("10.2.0.1")},
			{Dst: prefix("::/0"), GW: addr("fd01::1")},
		},
	}
}

var testConfig = Config{Servers: []string{"10.0.0.53", "fd00::53"}, Searches: []string{"a.example", "b.example"}, Hostname: "guest"}

// ask4 sends a message to a server4 and returns the parsed answer, or nil.
func ask4(t *testing.T, kind dhcpv4.MessageType, with ...dhcpv4.Modifier) (*dhcpv4.DHCPv4, frame) {
	t.Helper()
	i := testInterface()
	m, err := dhcpv4.New(append([]dhcpv4.Modifier{dhcpv4.WithHwAddr(testMAC), dhcpv4.WithMessageType(kind)}, with...)...)
	if err != nil {
		t.Fatal(err)
	}
	reply, _ := newServer4(i, testMAC, testConfig).answer(m.ToBytes())
	if reply == nil {
		return nil, frame{}
	}
	f, ok := parseFrame(reply)
	if !ok || !f.isUDP(dhcp4Client) || checksum(reply[etherLen:etherLen+ip4Len]) != 0 || udpChecksum(f, reply) != 0 {
		t.Fatalf("the answer is not a valid frame: %x", reply)
	}
	answer, err := dhcpv4.FromBytes(f.payload)
	if err != nil || answer.TransactionID != m.TransactionID {
		t.Fatalf("parsed answer = %v (error %v), want transaction %v", answer, err, m.TransactionID)
	}
	return answer, f
}

// udpChecksum returns 0 if the frame, whose IP header has no options, has a correct UDP checksum.
func udpChecksum(f frame, raw []byte) uint16 {
	segment := raw[len(raw)-len(f.payload)-udpLen:]
	return checksum(pseudoHeader(f.from, f.to, unix.IPPROTO_UDP, len(segment)), segment)
}

func TestDHCPv4Messages(t *testing.T) {
	requested := func(ip string) dhcpv4.Modifier {
		return dhcpv4.WithOption(dhcpv4.OptRequestedIPAddress(net.ParseIP(ip)))
	}
	server := func(ip string) dhcpv4.Modifier {
		return dhcpv4.WithOption(dhcpv4.OptServerIdentifier(net.ParseIP(ip)))
	}
	has := func(ip string) dhcpv4.Modifier { return dhcpv4.WithClientIP(net.ParseIP(ip)) }
	const none = dhcpv4.MessageTypeNone
	for name, c := range map[string]struct {
		kind dhcpv4.MessageType
		with []dhcpv4.Modifier
		want dhcpv4.MessageType
		to   string
	}{
		"discover": {dhcpv4.MessageTypeDiscover, nil, dhcpv4.MessageTypeOffer, "10.1.1.2"},
		"discover, broadcast": {dhcpv4.MessageTypeDiscover, []dhcpv4.Modifier{dhcpv4.WithBroadcast(true)}, dhcpv4.MessageTypeOffer,
			"255.255.255.255"},
		"relayed discover": {dhcpv4.MessageTypeDiscover, []dhcpv4.Modifier{dhcpv4.WithGatewayIP(net.IP{10, 9, 9, 9})}, none, ""},
		"discover of another client": {dhcpv4.MessageTypeDiscover, []dhcpv4.Modifier{dhcpv4.WithHwAddr(net.HardwareAddr{2, 9, 9, 9, 9, 9})}, none,
			""},
		"select": {dhcpv4.MessageTypeRequest, []dhcpv4.Modifier{requested("10.1.1.2"), server("10.1.1.1")},
			dhcpv4.MessageTypeAck, "10.1.1.2"},
		"select another's offer": {dhcpv4.MessageTypeRequest, []dhcpv4.Modifier{requested("10.1.1.2"), server("10.1.1.9")}, none, ""},
		"reboot":                 {dhcpv4.MessageTypeRequest, []dhcpv4.Modifier{requested("10.1.1.2")}, dhcpv4.MessageTypeAck, "10.1.1.2"},
		"reboot, stale address": {dhcpv4.MessageTypeRequest, []dhcpv4.Modifier{requested("192.168.0.7")}, dhcpv4.MessageTypeNak,
			"255.255.255.255"},
		"renew":                   {dhcpv4.MessageTypeRequest, []dhcpv4.Modifier{has("10.1.1.2")}, dhcpv4.MessageTypeAck, "10.1.1.2"},
		"renew, stale address":    {dhcpv4.MessageTypeRequest, []dhcpv4.Modifier{has("10.1.1.77")}, dhcpv4.MessageTypeNak, "255.255.255.255"},
		"request nothing":         {dhcpv4.MessageTypeRequest, nil, dhcpv4.MessageTypeNak, "255.255.255.255"},
		"inform":                  {dhcpv4.MessageTypeInform, []dhcpv4.Modifier{has("10.1.1.2")}, dhcpv4.MessageTypeAck, "10.1.1.2"},
		"decline":                 {dhcpv4.MessageTypeDecline, []dhcpv4.Modifier{requested("10.1.1.2"), server("10.1.1.1")}, none, ""},
		"release":                 {dhcpv4.MessageTypeRelease, []dhcpv4.Modifier{has("10.1.1.2"), server("10.1.1.1")}, none, ""},
		"an offer, by the guest":  {dhcpv4.MessageTypeOffer, nil, none, ""},
		"no message type (BOOTP)": {none, []dhcpv4.Modifier{dhcpv4.WithoutOption(dhcpv4.OptionDHCPMessageType)}, none, ""},
		"a reply of another server": {dhcpv4.MessageTypeAck, []dhcpv4.Modifier{func(d *dhcpv4.DHCPv4) { d.OpCode = dhcpv4.OpcodeBootReply }},
			none, ""},
	} {
		t.Run(name, func(t *testing.T) {
			answer, f := ask4(t, c.kind, c.with...)
			if answer == nil {
				if c.want != none {
					t.Fatalf("got no answer, want %s", c.want)
				}
				return
			}
			if answer.MessageType() != c.want || f.to.String() != c.to {
				t.Fatalf("got an answer to %s, want %s to %s: %s", f.to, c.want, c.to, answer.Summary())
			}
			leased := c.want != dhcpv4.MessageTypeNak && c.kind != dhcpv4.MessageTypeInform
			if got := answer.YourIPAddr.Equal(net.IP{10, 1, 1, 2}); got != leased {
				t.Errorf("yiaddr = %s, want the address: %t", answer.YourIPAddr, leased)
			}
			if got := answer.Options.Has(dhcpv4.OptionIPAddressLeaseTime); got != leased {
				t.Errorf("answer has a lease time: %t, want %t", got, leased)
			}
			if c.want == dhcpv4.MessageTypeNak {
				if answer.Options.Has(dhcpv4.OptionRouter) || answer.Message() == "" || !answer.IsBroadcast() {
					t.Errorf("a NAK needs a message and broadcast, and no router: %s", answer.Summary())
				}
				return
			}
			const routes = "route to 10.2.0.0/16 via 0.0.0.0; route to 10.1.1.1/32 via 0.0.0.0; route to 0.0.0.0/0 via 10.1.1.1; route to 10.3.0.0/16 via 10.2.0.1"
			if got := dhcpv4.Routes(answer.ClasslessStaticRoute()).String(); got != routes {
				t.Errorf("routes = %s, want %s", got, routes)
			}
			mtu, err := dhcpv4.GetUint16(dhcpv4.OptionInterfaceMTU, answer.Options)
			if err != nil || mtu != 1450 || answer.HostName() != "guest" || answer.DNS()[0].String() != "10.0.0.53" || len(answer.DNS()) != 1 {
				t.Errorf("wrong MTU, hostname or DNS servers: %s", answer.Summary())
			}
			if search := answer.DomainSearch(); search == nil || strings.Join(search.Labels, " ") != "a.example b.example" {
				t.Errorf("search = %v, want a.example b.example", search)
			}
		})
	}
}

// TestLongSearch: a search list that does not fit is omitted, not truncated.
func TestLongSearch(t *testing.T) {
	cfg := testConfig
	cfg.Searches = nil
	for range 9 {
		cfg.Searches = append(cfg.Searches, strings.Repeat("very-long-label.", 3)+"example")
	}
	for range 40 {
		cfg.Searches = append(cfg.Searches, strings.Repeat("x", len(cfg.Searches))+".example")
	}
	s := newServer4(testInterface(), testMAC, cfg)
	for size, want := range map[uint16]bool{0: false, 1500: false, 4000: true} {
		m, err := dhcpv4.NewDiscovery(testMAC)
		if err != nil {
			t.Fatal(err)
		}
		if size > 0 {
			m.UpdateOption(dhcpv4.OptMaxMessageSize(size))
		}
		reply, _ := s.answer(m.ToBytes())
		f, ok := parseFrame(reply)
		if !ok {
			t.Fatalf("the answer is not a valid frame: %x", reply)
		}
		answer, err := dhcpv4.FromBytes(f.payload)
		if err != nil {
			t.Fatal(err)
		}
		if got := answer.DomainSearch() != nil; got != want {
			t.Errorf("answer of %[2]d bytes to a client that accepts %[1]d has a search list: %[3]t, want %[4]t", size, len(reply)-etherLen, got,
				want)
		}
	}
}

func TestDomains(t *testing.T) {
	got := domains([]string{"cluster.local.", ".", "", "a..b", strings.Repeat("x", 64) + ".example", strings.Repeat("abc.", 64) + "d", "b"})
	if strings.Join(got, " ") != "cluster.local b" {
		t.Errorf("domains = %q, want cluster.local and b", got)
	}
}

// ask6 sends a DHCPv6 message to a server6 and returns the parsed answer, or nil.
func ask6(t *testing.T, m *dhcpv6.Message) *dhcpv6.Message {
	t.Helper()
	s := newServer6(testInterface(), testMAC, testConfig)
	request := udp6Frame(groupMAC(allNodes), [6]byte(testMAC), netip.MustParseAddrPort("[fe80::5]:546"),
		netip.MustParseAddrPort("[ff02::1:2]:547"), m.ToBytes())
	f, ok := parseFrame(request)
	if !ok || !f.isUDP(dhcp6Server) || udpChecksum(f, request) != 0 {
		t.Fatal("the request is not a valid frame")
	}
	reply, _ := s.answer(f)
	if reply == nil {
		return nil
	}
	if f, ok = parseFrame(reply); !ok || !f.isUDP(dhcp6Client) || f.to.String() != "fe80::5" || udpChecksum(f, reply) != 0 {
		t.Fatalf("the answer is not a valid frame: %x", reply)
	}
	answer, err := dhcpv6.MessageFromBytes(f.payload)
	if err != nil || answer.TransactionID != m.TransactionID || answer.Options.ServerID() == nil {
		t.Fatalf("parsed answer = %v (error %v), want transaction %v and a server ID", answer, err, m.TransactionID)
	}
	return answer
}

func TestDHCPv6Messages(t *testing.T) {
	solicit, err := dhcpv6.NewSolicit(testMAC)
	if err != nil {
		t.Fatal(err)
	}
	message := func(kind dhcpv6.MessageType, addrs ...string) *dhcpv6.Message {
		m, err := dhcpv6.NewSolicit(testMAC)
		if err != nil {
			t.Fatal(err)
		}
		m.MessageType = kind
		for _, a := range addrs {
			m.Options.OneIANA().Options.Add(&dhcpv6.OptIAAddress{IPv6Addr: net.ParseIP(a)})
		}
		return m
	}
	if a := ask6(t, solicit); a.Type() != dhcpv6.MessageTypeAdvertise ||
		a.Options.OneIANA().Options.OneAddress().IPv6Addr.String() != "fd01::2" {
		t.Errorf("answer to solicit = %v, want an advertise with fd01::2", a)
	}
	rapid := message(dhcpv6.MessageTypeSolicit)
	dhcpv6.WithRapidCommit(rapid)
	if a := ask6(t, rapid); a.Type() != dhcpv6.MessageTypeReply || a.GetOneOption(dhcpv6.OptionRapidCommit) == nil {
		t.Errorf("answer to solicit with rapid commit = %v, want a reply with rapid commit", a)
	}
	a := ask6(t, message(dhcpv6.MessageTypeRenew, "fd09::9", "fd01::2"))
	for _, addr := range a.Options.OneIANA().Options.Addresses() {
		if mine := addr.IPv6Addr.String() == "fd01::2"; mine != (addr.ValidLifetime == infinite) || !mine && addr.ValidLifetime != 0 {
			t.Errorf("renew: got lifetime of %v, want infinite for fd01::2 and 0 for others", addr)
		}
	}
	for addr, want := range map[string]iana.StatusCode{"fd01::2": iana.StatusSuccess, "fd09::9": iana.StatusNotOnLink} {
		if a := ask6(t, message(dhcpv6.MessageTypeConfirm, addr)); a.Options.Status().StatusCode != want {
			t.Errorf("answer to confirm of %s = %v, want status %s", addr, a, want)
		}
	}
	if a := ask6(t, message(dhcpv6.MessageTypeRelease, "fd01::2")); a.Options.Status().StatusCode != iana.StatusSuccess {
		t.Errorf("answer to release = %v, want success", a)
	}
	inform := &dhcpv6.Message{MessageType: dhcpv6.MessageTypeInformationRequest, TransactionID: solicit.TransactionID}
	if a := ask6(t, inform); a.Options.DNS()[0].String() != "fd00::53" || len(a.Options.DNS()) != 1 || len(a.Options.IANA()) != 0 {
		t.Errorf("answer to information request = %v, want one DNS server and no addresses", a)
	}
	foreign := message(dhcpv6.MessageTypeRequest)
	foreign.AddOption(dhcpv6.OptServerID(&dhcpv6.DUIDLL{HWType: iana.HWTypeEthernet, LinkLayerAddr: testMAC}))
	for name, m := range map[string]*dhcpv6.Message{
		"to another server": foreign, "decline": message(dhcpv6.MessageTypeDecline, "fd01::2"), "of a server": message(dhcpv6.MessageTypeReply),
		"without a client": {MessageType: dhcpv6.MessageTypeSolicit},
	} {
		if a := ask6(t, m); a != nil {
			t.Errorf("answer to message (%s) = %v, want none", name, a)
		}
	}
}

// TestRouterAdvertisement compares an advertisement with the RFCs, byte by byte.
func TestRouterAdvertisement(t *testing.T) {
	i := testInterface()
	raw := newServer6(i, testMAC, testConfig).advertisement(allNodes, groupMAC(allNodes))
	f, ok := parseFrame(raw)
	if !ok || !f.isICMP6(routerAdvert) || checksum(pseudoHeader(f.from, f.to, unix.IPPROTO_ICMPV6, len(f.payload)), f.payload) != 0 ||
		f.from != virtualRouter {
		t.Fatalf("not a valid router advertisement of %s: %x", virtualRouter, raw)
	}
	const forever = "\xff\xff\xff\xff"
	want := "\x40\xc0\x23\x28\x00\x00\x00\x00\x00\x00\x00\x00" + // hops 64, M and O, 9000 s
		"\x05\x01\x00\x00\x00\x00\x05\xaa" + // MTU 1450
		"\x03\x04\x40\x80" + forever + forever + "\x00\x00\x00\x00" + "\xfd\x01" + strings.Repeat("\x00", 14) +
		"\x19\x03\x00\x00" + forever + "\xfd\x00" + strings.Repeat("\x00", 13) + "\x53" +
		"\x1f\x04\x00\x00" + forever + "\x01a\x07example\x00\x01b\x07example\x00" + "\x00\x00"
	if got := string(f.payload[4:]); got != want {
		t.Errorf("advertisement is\n     %x\nwant %x", got, want)
	}
	i.Routes = nil
	s := newServer6(i, testMAC, Config{})
	f, _ = parseFrame(s.advertisement(allNodes, groupMAC(allNodes)))
	if lifetime := binary.BigEndian.Uint16(f.payload[6:]); lifetime != 0 || s.proxiesGateway() {
		t.Errorf("router lifetime without a gateway = %d, want 0 and no proxied gateway", lifetime)
	}
	i.Routes = []Route{{Dst: netip.MustParsePrefix("::/0"), GW: netip.MustParseAddr("fe80::1")}}
	s = newServer6(i, testMAC, Config{})
	f, _ = parseFrame(s.advertisement(allNodes, groupMAC(allNodes)))
	if f.from.String() != "fe80::1" || s.proxiesGateway() {
		t.Errorf("a link-local gateway is advertised as %s, want fe80::1", f.from)
	}
}

// FuzzFrames: no frame, from the guest or the wire, causes a panic or an invalid answer.
func FuzzFrames(f *testing.F) {
	discover, err := dhcpv4.NewDiscovery(testMAC)
	if err != nil {
		f.Fatal(err)
	}
	solicit, err := dhcpv6.NewSolicit(testMAC)
	if err != nil {
		f.Fatal(err)
	}
	guest, all := netip.MustParseAddr("fe80::5"), groupMAC(allNodes)
	r := virtualRouter.As16()
	gateway := netip.MustParseAddr("fd01::1").As16()
	mac := [6]byte(testMAC)
	f.Add(udp4Frame(broadcastMAC, mac, netip.MustParseAddrPort("0.0.0.0:68"), netip.MustParseAddrPort("255.255.255.255:67"),
		discover.ToBytes()))
	f.Add(udp6Frame(all, mac, netip.AddrPortFrom(guest, 546), netip.AddrPortFrom(allNodes, 547), solicit.ToBytes()))
	f.Add(icmp6Frame(all, mac, guest, allNodes, []byte{routerSolicit, 0, 0, 0, 0, 0, 0, 0}))
	f.Add(icmp6Frame(all, mac, guest, allNodes, append([]byte{ndSolicit, 0, 0, 0, 0, 0, 0, 0}, r[:]...)))
	f.Add(icmp6Frame(all, mac, guest, allNodes,
		append(append([]byte{ndAdvert, 0, 0, 0, 0x60, 0, 0, 0}, gateway[:]...), option(optTargetAddress, mac[:])...)))
	f.Fuzz(func(t *testing.T, data []byte) {
		before := bytes.Clone(data)
		in, ok := parseFrame(data)
		if !ok {
			return
		}
		v4, v6 := newServer4(testInterface(), testMAC, testConfig), newServer6(testInterface(), testMAC, testConfig)
		answers := [][]byte{v6.answerSolicit(in), v6.solicitGateway(in), v6.gatewayAdvert(in)}
		reply, _ := v4.answer(in.payload)
		answers = append(answers, reply)
		reply, _ = v6.answer(in)
		for _, a := range append(answers, reply) {
			if _, ok := parseFrame(a); a != nil && !ok {
				t.Errorf("an answer is not a valid frame: %x", a)
			}
		}
		if !bytes.Equal(before, data) {
			t.Error("parsing or answering changed the frame")
		}
	})
}
