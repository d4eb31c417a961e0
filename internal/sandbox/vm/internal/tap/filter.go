package tap

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/containerd/errdefs"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/network/netthread"
)

// match selects frames that are not forwarded. They have the given protocol and match all keys. Offsets start at the
// network header.
type match struct {
	protocol uint16
	keys     []netlink.TcU32Key
}

// virtualRouter is the router address that the Responder advertises if the gateway's address is not link-local.
var virtualRouter = netip.MustParseAddr("fe80::7472:6970:6f64:1")

// filters returns the frames that are not forwarded between the pod's interface and the guest; see the package comment.
func filters(i Interface) (fromWire, fromGuest []match) {
	if mac, err := net.ParseMAC(i.MAC); err == nil && len(mac) == 6 {
		fromWire = append(fromWire, match{unix.ETH_P_ALL, []netlink.TcU32Key{
			{Off: -16, Mask: 0x100, Val: 0x100}, // group bit of the destination
			{Off: -8, Mask: 0xffffffff, Val: binary.BigEndian.Uint32(mac)},
			{Off: -4, Mask: 0xffff0000, Val: uint32(binary.BigEndian.Uint16(mac[4:])) << 16},
		}})
	}
	if len(i.addrs4()) > 0 {
		fromWire = append(fromWire, udp4(dhcp4Server, dhcp4Client))
		fromGuest = append(fromGuest, udp4(dhcp4Client, dhcp4Server))
	}
	if len(i.addrs6()) > 0 {
		target := virtualRouter.As16()
		routerNS := icmp6(ndSolicit)
		for at := 0; at < len(target); at += 4 {
			routerNS.keys = append(routerNS.keys, netlink.TcU32Key{
				Off: int32(48 + at), Mask: 0xffffffff, Val: binary.BigEndian.Uint32(target[at:]),
			})
		}
		fromWire = append(fromWire, udp6(dhcp6Server, dhcp6Client), icmp6(routerAdvert))
		fromGuest = append(fromGuest, udp6(dhcp6Client, dhcp6Server), icmp6(routerSolicit), routerNS)
	}
	return fromWire, fromGuest
}

// udp4 matches unfragmented UDP over IPv4 without IP options.
func udp4(src, dst uint16) match {
	return match{unix.ETH_P_IP, []netlink.TcU32Key{
		{Off: 0, Mask: 0x0f000000, Val: 0x05000000},
		{Off: 4, Mask: 0x00003fff, Val: 0},
		{Off: 8, Mask: 0x00ff0000, Val: unix.IPPROTO_UDP << 16},
		{Off: 20, Mask: 0xffffffff, Val: uint32(src)<<16 | uint32(dst)},
	}}
}

func udp6(src, dst uint16) match {
	return match{unix.ETH_P_IPV6, []netlink.TcU32Key{
		{Off: 4, Mask: 0x0000ff00, Val: unix.IPPROTO_UDP << 8},
		{Off: 40, Mask: 0xffffffff, Val: uint32(src)<<16 | uint32(dst)},
	}}
}

func icmp6(kind uint8) match {
	return match{unix.ETH_P_IPV6, []netlink.TcU32Key{
		{Off: 4, Mask: 0x0000ff00, Val: unix.IPPROTO_ICMPV6 << 8},
		{Off: 40, Mask: 0xff000000, Val: uint32(kind) << 24},
	}}
}

// ingressQdisc returns the queueing discipline for filters on frames that the link receives.
func ingressQdisc(link netlink.Link) netlink.Qdisc {
	return &netlink.Ingress{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: link.Attrs().Index, Parent: netlink.HANDLE_INGRESS, Handle: netlink.MakeHandle(0xffff, 0),
	}}
}

// ensureFilters adds filters that forward every frame from the first link to the second, except frames that match one
// of the exceptions. It adds the forwarding filter last, so if that filter exists, the others exist too.
func ensureFilters(h *netlink.Handle, in, out netlink.Link, exceptions []match) error {
	qdisc := ingressQdisc(in)
	parent := qdisc.Attrs().Handle
	err := h.QdiscAdd(qdisc)
	if errors.Is(err, unix.EEXIST) {
		if joined, err := isForwarding(h, in, out, parent); joined || err != nil {
			return err
		}
		if err := h.QdiscDel(qdisc); err != nil {
			return fmt.Errorf("remove incomplete filters of %s (does another program use a clsact qdisc on it?): %w: %w", in.Attrs().Name, err,
				errdefs.ErrFailedPrecondition)
		}
		err = h.QdiscAdd(qdisc)
	}
	if err != nil {
		return fmt.Errorf("add an ingress qdisc to %s (the kernel needs NET_SCH_INGRESS): %w: %w", in.Attrs().Name, err,
			errdefs.ErrFailedPrecondition)
	}
	add := func(priority int, m match, actions ...netlink.Action) error {
		filter := &netlink.U32{
			FilterAttrs: netlink.FilterAttrs{LinkIndex: in.Attrs().Index, Parent: parent, Priority: uint16(priority), Protocol: m.protocol},
			Actions:     actions,
		}
		if len(m.keys) > 0 {
			filter.Sel = &netlink.TcU32Sel{Flags: netlink.TC_U32_TERMINAL, Keys: m.keys}
			filter.ClassId = netlink.MakeHandle(0xffff, 1)
		}
		if err := h.FilterAdd(filter); err != nil {
			return fmt.Errorf("add a filter to %s (the kernel needs NET_CLS_U32 and NET_ACT_MIRRED): %w: %w", in.Attrs().Name, err,
				errdefs.ErrFailedPrecondition)
		}
		return nil
	}
	for i, m := range exceptions {
		if err := add(i+1, m); err != nil { // filters with the same priority must have the same protocol
			return err
		}
	}
	return add(len(exceptions)+1, match{protocol: unix.ETH_P_ALL}, netlink.NewMirredAction(out.Attrs().Index))
}

// isForwarding reports whether the filter that forwards frames from the first link to the second exists.
func isForwarding(h *netlink.Handle, in, out netlink.Link, parent uint32) (bool, error) {
	have, err := netthread.Dump(func() ([]netlink.Filter, error) { return h.FilterList(in, parent) })
	if err != nil {
		return false, fmt.Errorf("list filters of %s: %w", in.Attrs().Name, err)
	}
	for _, f := range have {
		u32, ok := f.(*netlink.U32)
		if !ok {
			continue
		}
		for _, action := range u32.Actions {
			if mirred, ok := action.(*netlink.MirredAction); ok && mirred.Ifindex == out.Attrs().Index {
				return true, nil
			}
		}
	}
	return false, nil
}
