package builtin

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/network/netthread"
)

// inPod runs fn inside the network namespace at path, with a netlink handle of that namespace.
func inPod(path string, fn func(*netlink.Handle) error) error {
	netns, err := netthread.Open(path)
	if err != nil {
		return err
	}
	defer unix.Close(netns)
	return inNetns(netns, fn)
}

func inNetns(netns int, fn func(*netlink.Handle) error) error {
	return netthread.In(netns, func() error { return withHandle(fn) })
}

// withHandle runs fn with a new netlink handle. Handles are not shared, because a handle serialises its requests.
func withHandle(fn func(*netlink.Handle) error) error {
	handle, err := netthread.Handle()
	if err != nil {
		return err
	}
	defer handle.Close()
	return fn(handle)
}

func addresses(h *netlink.Handle, link netlink.Link, family int) ([]netlink.Addr, error) {
	return netthread.Dump(func() ([]netlink.Addr, error) { return h.AddrList(link, family) })
}

func notFound(err error) bool {
	_, missing := errors.AsType[netlink.LinkNotFoundError](err)
	return missing
}

// sysctl writes a file under /proc/sys/net of the thread's network namespace. Unlike sysctl names, the path elements
// can contain dots, as interface names do.
func sysctl(value string, name ...string) error {
	return os.WriteFile("/proc/sys/net/"+strings.Join(name, "/"), []byte(value), 0)
}

// ensureSysctl sets a sysctl unless it already has the wanted value.
func ensureSysctl(value string, name ...string) error {
	have, err := os.ReadFile("/proc/sys/net/" + strings.Join(name, "/"))
	if err == nil && strings.TrimSpace(string(have)) == value {
		return nil
	}
	return sysctl(value, name...)
}

// Below /proc/sys/net, each lookup of a name compares it with those of all network namespaces. What each pod needs goes by
// netlink instead.

// The attributes that package unix does not have (linux/if_link.h, ip.h, netconf.h).
const (
	iflaInetConf       = 1
	devconfARPNotify   = 22
	netconfIfindex     = 1
	netconfForwarding  = 2
	netconfIfindexAll  = ^uint32(0)
	netconfMessageSize = 4 // with padding
)

// configureLink enables the announcement of the addresses of a link in the thread's network namespace (arp_notify). With
// noLinkLocal, the link gets no IPv6 address by itself (addr_gen_mode).
func configureLink(link netlink.Link, noLinkLocal bool) error {
	set := func(noLinkLocal bool) error {
		message := nl.NewIfInfomsg(unix.AF_UNSPEC)
		message.Index = int32(link.Attrs().Index)
		families := nl.NewRtAttr(unix.IFLA_AF_SPEC, nil)
		families.AddRtAttr(unix.AF_INET, nil).AddRtAttr(iflaInetConf, nil).AddRtAttr(devconfARPNotify, nl.Uint32Attr(1))
		if noLinkLocal {
			families.AddRtAttr(unix.AF_INET6, nil).AddRtAttr(unix.IFLA_INET6_ADDR_GEN_MODE, []byte{nl.IN6_ADDR_GEN_MODE_NONE})
		}
		request := nl.NewNetlinkRequest(unix.RTM_SETLINK, unix.NLM_F_ACK)
		request.AddData(message)
		request.AddData(families)
		_, err := request.Execute(unix.NETLINK_ROUTE, 0)
		return err
	}
	err := set(noLinkLocal)
	if errors.Is(err, unix.EAFNOSUPPORT) { // the host has no IPv6
		err = set(false)
	}
	if err != nil {
		return fmt.Errorf("configure announcements and IPv6: %w", err)
	}
	return nil
}

// forwarding reports whether the thread's network namespace forwards packets of an address family.
func forwarding(family int) (bool, error) {
	request := nl.NewNetlinkRequest(unix.RTM_GETNETCONF, 0)
	request.AddData(&nl.RtGenMsg{RtGenmsg: unix.RtGenmsg{Family: uint8(family)}}) // as netconfmsg
	request.AddData(nl.NewRtAttr(netconfIfindex, nl.Uint32Attr(netconfIfindexAll)))
	messages, err := request.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWNETCONF)
	if err != nil {
		return false, err
	}
	for _, m := range messages {
		attributes, err := nl.ParseRouteAttr(m[min(netconfMessageSize, len(m)):])
		if err != nil {
			return false, err
		}
		for _, a := range attributes {
			if a.Attr.Type == netconfForwarding && len(a.Value) == 4 {
				return binary.NativeEndian.Uint32(a.Value) != 0, nil
			}
		}
	}
	return false, errors.New("the kernel does not say whether it forwards")
}
