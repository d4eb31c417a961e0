package tap

import (
	"encoding/binary"
	"net/netip"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// UDP ports of DHCP and ICMPv6 types of neighbour discovery.
const (
	dhcp4Server, dhcp4Client = 67, 68
	dhcp6Server, dhcp6Client = 547, 546

	routerSolicit, routerAdvert = 133, 134
	ndSolicit, ndAdvert         = 135, 136
)

// Sizes of headers.
const (
	etherLen = 14
	ip4Len   = 20
	ip6Len   = 40
	udpLen   = 8
)

var (
	allNodes     = netip.MustParseAddr("ff02::1")
	broadcast4   = netip.AddrFrom4([4]byte{255, 255, 255, 255})
	broadcastMAC = [6]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
)

// frame is an Ethernet frame with UDP or ICMPv6. It has only the fields that the Responder uses.
type frame struct {
	src      [6]byte
	from, to netip.Addr
	protocol uint8
	port     uint16 // destination port of UDP
	payload  []byte // of UDP, or the whole ICMPv6 message
}

func (f frame) isUDP(port uint16) bool { return f.protocol == unix.IPPROTO_UDP && f.port == port }

// isICMP6 reports whether the frame is a neighbour discovery message of the given type. parseFrame has checked the hop
// limit, so no router has forwarded the frame.
func (f frame) isICMP6(kind uint8) bool {
	return f.protocol == unix.IPPROTO_ICMPV6 && len(f.payload) >= 8 && f.payload[0] == kind && f.payload[1] == 0
}

// parseFrame parses a frame. The second result is false if the frame is damaged or is neither UDP nor ICMPv6.
// parseFrame ignores checksums, because a guest may leave them to offloading.
func parseFrame(b []byte) (f frame, ok bool) {
	if len(b) < etherLen {
		return f, false
	}
	f.src = [6]byte(b[6:12])
	kind, b := binary.BigEndian.Uint16(b[12:14]), b[etherLen:]
	switch kind {
	case unix.ETH_P_IP:
		b, ok = f.parse4(b)
	case unix.ETH_P_IPV6:
		b, ok = f.parse6(b)
	}
	if !ok {
		return f, false
	}
	f.payload = b
	if f.protocol != unix.IPPROTO_UDP {
		return f, f.protocol == unix.IPPROTO_ICMPV6
	}
	if len(b) < udpLen {
		return f, false
	}
	f.port = binary.BigEndian.Uint16(b[2:4])
	size := int(binary.BigEndian.Uint16(b[4:6]))
	if size < udpLen || size > len(b) {
		return f, false
	}
	f.payload = b[udpLen:size]
	return f, true
}

func (f *frame) parse4(b []byte) (payload []byte, ok bool) {
	if len(b) < ip4Len || b[0]>>4 != 4 {
		return nil, false
	}
	header, total := int(b[0]&0xf)*4, int(binary.BigEndian.Uint16(b[2:4]))
	fragment := binary.BigEndian.Uint16(b[6:8]) & 0x3fff
	if header < ip4Len || total < header || total > len(b) || fragment != 0 || b[9] != unix.IPPROTO_UDP {
		return nil, false
	}
	f.protocol = b[9]
	f.from, f.to = netip.AddrFrom4([4]byte(b[12:16])), netip.AddrFrom4([4]byte(b[16:20]))
	return b[header:total], true
}

func (f *frame) parse6(b []byte) (payload []byte, ok bool) {
	if len(b) < ip6Len || b[0]>>4 != 6 {
		return nil, false
	}
	size := int(binary.BigEndian.Uint16(b[4:6]))
	if size > len(b)-ip6Len {
		return nil, false
	}
	f.protocol = b[6]
	f.from, f.to = netip.AddrFrom16([16]byte(b[8:24])), netip.AddrFrom16([16]byte(b[24:40]))
	if f.protocol == unix.IPPROTO_ICMPV6 && b[7] != 255 {
		return nil, false
	}
	return b[ip6Len : ip6Len+size], true
}

// ether returns an Ethernet header, in a slice with capacity for the given number of further bytes.
func ether(dst, src [6]byte, kind uint16, size int) []byte {
	b := make([]byte, 0, etherLen+size)
	b = append(append(b, dst[:]...), src[:]...)
	return binary.BigEndian.AppendUint16(b, kind)
}

// udp4Frame returns a frame with UDP over IPv4.
func udp4Frame(dst, src [6]byte, from, to netip.AddrPort, payload []byte) []byte {
	b := ether(dst, src, unix.ETH_P_IP, ip4Len+udpLen+len(payload))
	header := make([]byte, ip4Len)
	header[0] = 0x45
	binary.BigEndian.PutUint16(header[2:], uint16(ip4Len+udpLen+len(payload)))
	header[8], header[9] = 64, unix.IPPROTO_UDP
	copy(header[12:], from.Addr().AsSlice())
	copy(header[16:], to.Addr().AsSlice())
	binary.BigEndian.PutUint16(header[10:], checksum(header))
	b = append(b, header...)
	return appendUDP(b, from, to, payload)
}

// udp6Frame returns a frame with UDP over IPv6.
func udp6Frame(dst, src [6]byte, from, to netip.AddrPort, payload []byte) []byte {
	b := appendIP6(ether(dst, src, unix.ETH_P_IPV6, ip6Len+udpLen+len(payload)), from.Addr(), to.Addr(), unix.IPPROTO_UDP, 64,
		udpLen+len(payload))
	return appendUDP(b, from, to, payload)
}

// icmp6Frame returns a frame with an ICMPv6 message to neighbours (hop limit 255), and fills in the message's checksum.
func icmp6Frame(dst, src [6]byte, from, to netip.Addr, message []byte) []byte {
	binary.BigEndian.PutUint16(message[2:], 0)
	binary.BigEndian.PutUint16(message[2:], checksum(pseudoHeader(from, to, unix.IPPROTO_ICMPV6, len(message)), message))
	b := appendIP6(ether(dst, src, unix.ETH_P_IPV6, ip6Len+len(message)), from, to, unix.IPPROTO_ICMPV6, 255, len(message))
	return append(b, message...)
}

func appendIP6(b []byte, from, to netip.Addr, protocol, hops uint8, size int) []byte {
	b = append(b, 0x60, 0, 0, 0)
	b = binary.BigEndian.AppendUint16(b, uint16(size))
	b = append(b, protocol, hops)
	return append(append(b, from.AsSlice()...), to.AsSlice()...)
}

func appendUDP(b []byte, from, to netip.AddrPort, payload []byte) []byte {
	header := make([]byte, udpLen)
	binary.BigEndian.PutUint16(header, from.Port())
	binary.BigEndian.PutUint16(header[2:], to.Port())
	binary.BigEndian.PutUint16(header[4:], uint16(udpLen+len(payload)))
	sum := checksum(pseudoHeader(from.Addr(), to.Addr(), unix.IPPROTO_UDP, udpLen+len(payload)), header, payload)
	if sum == 0 { // 0 means no checksum
		sum = 0xffff
	}
	binary.BigEndian.PutUint16(header[6:], sum)
	return append(append(b, header...), payload...)
}

// pseudoHeader returns the pseudo-header that the checksums of UDP and ICMPv6 include.
func pseudoHeader(from, to netip.Addr, protocol uint8, size int) []byte {
	b := append(from.AsSlice(), to.AsSlice()...)
	b = binary.BigEndian.AppendUint32(b, uint32(size))
	return binary.BigEndian.AppendUint32(b, uint32(protocol))
}

// checksum returns the checksum of RFC 1071. All parts except the last must have even length.
func checksum(parts ...[]byte) uint16 {
	var sum uint32
	for _, p := range parts {
		for ; len(p) >= 2; p = p[2:] {
			sum += uint32(binary.BigEndian.Uint16(p))
		}
		if len(p) == 1 {
			sum += uint32(p[0]) << 8
		}
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

// groupMAC returns the Ethernet address of an IPv6 multicast group (RFC 2464, section 7).
func groupMAC(group netip.Addr) [6]byte {
	a := group.As16()
	return [6]byte{0x33, 0x33, a[12], a[13], a[14], a[15]}
}

// guestFilter returns the BPF program of the packet socket on the tap. It accepts incoming requests to DHCP servers,
// router solicitations and neighbour solicitations.
func guestFilter() ([]unix.SockFilter, error) {
	const ip6, icmp, pass, drop = 9, 14, 18, 19 // instruction numbers
	jump := func(at int, value uint32, yes, no int) bpf.Instruction {
		return bpf.JumpIf{Cond: bpf.JumpEqual, Val: value, SkipTrue: uint8(yes - at - 1), SkipFalse: uint8(no - at - 1)}
	}
	return assemble([]bpf.Instruction{
		0:    bpf.LoadExtension{Num: bpf.ExtType},
		1:    jump(1, unix.PACKET_OUTGOING, drop, 2),
		2:    bpf.LoadAbsolute{Off: 12, Size: 2},
		3:    jump(3, unix.ETH_P_IP, 4, ip6),
		4:    bpf.LoadAbsolute{Off: etherLen + 9, Size: 1},
		5:    jump(5, unix.IPPROTO_UDP, 6, drop),
		6:    bpf.LoadMemShift{Off: etherLen},
		7:    bpf.LoadIndirect{Off: etherLen + 2, Size: 2},
		8:    jump(8, dhcp4Server, pass, drop),
		ip6:  jump(ip6, unix.ETH_P_IPV6, 10, drop),
		10:   bpf.LoadAbsolute{Off: etherLen + 6, Size: 1},
		11:   jump(11, unix.IPPROTO_UDP, 12, icmp),
		12:   bpf.LoadAbsolute{Off: etherLen + ip6Len + 2, Size: 2},
		13:   jump(13, dhcp6Server, pass, drop),
		icmp: jump(icmp, unix.IPPROTO_ICMPV6, 15, drop),
		15:   bpf.LoadAbsolute{Off: etherLen + ip6Len, Size: 1},
		16:   jump(16, routerSolicit, pass, 17),
		17:   jump(17, ndSolicit, pass, drop),
		pass: bpf.RetConstant{Val: maxFrame + 1},
		drop: bpf.RetConstant{Val: 0},
	})
}

// advertFilter returns the BPF program of the packet socket on the pod's interface. It accepts incoming neighbour
// advertisements.
func advertFilter() ([]unix.SockFilter, error) {
	return assemble([]bpf.Instruction{
		bpf.LoadExtension{Num: bpf.ExtType},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.PACKET_OUTGOING, SkipTrue: 7},
		bpf.LoadAbsolute{Off: 12, Size: 2},
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.ETH_P_IPV6, SkipTrue: 5},
		bpf.LoadAbsolute{Off: etherLen + 6, Size: 1},
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.IPPROTO_ICMPV6, SkipTrue: 3},
		bpf.LoadAbsolute{Off: etherLen + ip6Len, Size: 1},
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: ndAdvert, SkipTrue: 1},
		bpf.RetConstant{Val: maxFrame + 1},
		bpf.RetConstant{Val: 0},
	})
}

func assemble(program []bpf.Instruction) ([]unix.SockFilter, error) {
	raw, err := bpf.Assemble(program)
	if err != nil {
		return nil, err
	}
	filter := make([]unix.SockFilter, len(raw))
	for i, r := range raw {
		filter[i] = unix.SockFilter{Code: r.Op, Jt: r.Jt, Jf: r.Jf, K: r.K}
	}
	return filter, nil
}
