package guestagent

import (
	"encoding/binary"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"unsafe"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/agent/wire"
)

// interfaces lists the guest's network interfaces and their addresses, from rtnetlink.
func interfaces() ([]wire.Interface, error) {
	links, err := dump(syscall.RTM_GETLINK)
	if err != nil {
		return nil, err
	}
	addresses, err := dump(syscall.RTM_GETADDR)
	if err != nil {
		return nil, err
	}
	return parseInterfaces(links, addresses), nil
}

func dump(what int) ([]syscall.NetlinkMessage, error) {
	rib, err := syscall.NetlinkRIB(what, syscall.AF_UNSPEC)
	if err != nil {
		return nil, os.NewSyscallError("netlink", err)
	}
	messages, err := syscall.ParseNetlinkMessage(rib)
	if err != nil {
		return nil, os.NewSyscallError("netlink", err)
	}
	return messages, nil
}

// parseInterfaces parses the messages in the dumps of links and of addresses.
func parseInterfaces(links, addresses []syscall.NetlinkMessage) (all []wire.Interface) {
	position := map[uint32]int{} // position in the result, by the kernel's interface index
	for _, m := range links {
		attributes, err := syscall.ParseNetlinkRouteAttr(&m)
		if err != nil || m.Header.Type != syscall.RTM_NEWLINK || len(m.Data) < int(unsafe.Sizeof(syscall.IfInfomsg{})) {
			continue
		}
		for _, a := range attributes {
			if a.Attr.Type == syscall.IFLA_IFNAME {
				position[binary.NativeEndian.Uint32(m.Data[4:])] = len(all)
				all = append(all, wire.Interface{Name: strings.TrimRight(string(a.Value), "\x00")})
			}
		}
	}
	for _, m := range addresses {
		attributes, err := syscall.ParseNetlinkRouteAttr(&m)
		if err != nil || m.Header.Type != syscall.RTM_NEWADDR || len(m.Data) < int(unsafe.Sizeof(syscall.IfAddrmsg{})) {
			continue
		}
		i, known := position[binary.NativeEndian.Uint32(m.Data[4:])]
		prefix := prefixOf(attributes, int(m.Data[1]))
		if known && prefix.IsValid() {
			all[i].Addresses = append(all[i].Addresses, prefix.String())
		}
	}
	return all
}

// prefixOf returns the interface's own address from the attributes. On a point-to-point link, the interface's own
// address is IFA_LOCAL, because IFA_ADDRESS is the peer's address.
func prefixOf(attributes []syscall.NetlinkRouteAttr, bits int) (p netip.Prefix) {
	for _, a := range attributes {
		if a.Attr.Type != syscall.IFA_LOCAL && (a.Attr.Type != syscall.IFA_ADDRESS || p.IsValid()) {
			continue
		}
		if address, ok := netip.AddrFromSlice(a.Value); ok {
			p = netip.PrefixFrom(address, bits)
		}
	}
	return p
}
