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

// interfaces lists the guest's network interfaces with their addresses, by rtnetlink.
func interfaces() ([]wire.Interface, error) {
	links, err := dump(syscall.RTM_GETLINK)
	if err != nil {
		return nil, err
	}
	addresses, err := dump(syscall.RTM_GETADDR)
	if err != nil {
		return nil, err
	}
	return join(links, addresses), nil
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

// join reads the messages of both dumps.
func join(links, addresses []syscall.NetlinkMessage) (all []wire.Interface) {
	place := map[uint32]int{}
	for _, m := range links {
		attributes, err := syscall.ParseNetlinkRouteAttr(&m)
		if err != nil || m.Header.Type != syscall.RTM_NEWLINK || len(m.Data) < int(unsafe.Sizeof(syscall.IfInfomsg{})) {
			continue
		}
		for _, a := range attributes {
			if a.Attr.Type == syscall.IFLA_IFNAME {
				place[binary.NativeEndian.Uint32(m.Data[4:])] = len(all)
				all = append(all, wire.Interface{Name: strings.TrimRight(string(a.Value), "\x00")})
			}
		}
	}
	for _, m := range addresses {
		attributes, err := syscall.ParseNetlinkRouteAttr(&m)
		if err != nil || m.Header.Type != syscall.RTM_NEWADDR || len(m.Data) < int(unsafe.Sizeof(syscall.IfAddrmsg{})) {
			continue
		}
		i, known := place[binary.NativeEndian.Uint32(m.Data[4:])]
		prefix := prefixOf(attributes, int(m.Data[1]))
		if known && prefix.IsValid() {
			all[i].Addresses = append(all[i].Addresses, prefix.String())
		}
	}
	return all
}

// prefixOf finds an address's own end among its attributes: of a point-to-point link, IFA_ADDRESS is the other one.
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
