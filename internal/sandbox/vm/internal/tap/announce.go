package tap

import (
	"encoding/binary"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"
)

// announce announces the guest's addresses to the neighbours. Otherwise neighbours would send to the pod that had the
// address before, until their caches expire after some tens of seconds. Not every CNI chain announces addresses, and
// the guest does so only after it has booted. An announcement can be lost; neighbours then learn the address later.
func announce(i Interface, index int) error {
	mac, err := net.ParseMAC(i.MAC)
	if err != nil {
		return err
	}
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	for _, a := range i.Addrs {
		frame := announcement([6]byte(mac), a.Addr())
		if err := unix.Sendto(fd, frame, 0, &unix.SockaddrLinklayer{Ifindex: index, Halen: 6}); err != nil {
			return err
		}
	}
	return nil
}

// announcement returns a gratuitous ARP request (RFC 5227, section 3) or an unsolicited neighbour advertisement (RFC
// 4861, section 7.2.6).
func announcement(mac [6]byte, addr netip.Addr) []byte {
	if addr.Is6() {
		a := addr.As16()
		m := append([]byte{ndAdvert, 0, 0, 0, ndOverride, 0, 0, 0}, a[:]...)
		return icmp6Frame(groupMAC(allNodes), mac, addr, allNodes, append(m, option(optTargetAddress, mac[:])...))
	}
	const request = 1
	a := addr.As4()
	b := ether(broadcastMAC, mac, unix.ETH_P_ARP, 28)
	b = binary.BigEndian.AppendUint16(b, unix.ARPHRD_ETHER)
	b = binary.BigEndian.AppendUint16(b, unix.ETH_P_IP)
	b = append(b, 6, 4, 0, request)
	b = append(append(b, mac[:]...), a[:]...)
	return append(append(b, make([]byte, 6)...), a[:]...)
}
