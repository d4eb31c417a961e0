package builtin

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"slices"
	"time"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/network/netthread"
)

const (
	// nameAttempts limits the attempts to find a free random name for the host's end. Names have 32 random bits.
	nameAttempts = 10
	// portPatience limits the wait for the host's end to become operational after both ends were set up. The kernel
	// updates the state in the background.
	portPatience = 2500 * time.Millisecond
	// settlePatience limits the wait until no IPv6 address is tentative.
	settlePatience = 5 * time.Second
	// firstPause is the first pause between two checks of a link or address. Each pause is twice as long as the one
	// before, up to lastPause.
	firstPause, lastPause = 200 * time.Microsecond, 50 * time.Millisecond
)

// addPair makes a veth pair with one end in the pod. It makes the host's end a port of the bridge, sets it up, and returns
// its name.
func (c *Call) addPair(ctx context.Context, host *netlink.Handle, bridge netlink.Link, conf *bridgeConfig) (string, error) {
	name, err := c.makePair(host, conf.MTU)
	if err != nil {
		return "", err
	}
	port, err := host.LinkByName(name)
	if err == nil {
		err = host.LinkSetMaster(port, bridge)
	}
	if err == nil && conf.HairpinMode {
		err = host.LinkSetHairpin(port, true)
	}
	if err == nil {
		err = host.LinkSetUp(port)
	}
	if err != nil {
		return "", fmt.Errorf("connect %s to bridge %s: %w", name, conf.Bridge, err)
	}
	if ctx.Err() != nil {
		return "", context.Cause(ctx)
	}
	return name, nil
}

// makePair makes the veth pair and returns the random name of the host's end. If that name is taken, makePair tries
// another one. If the name in the pod is taken, it returns an error.
func (c *Call) makePair(host *netlink.Handle, mtu int) (name string, err error) {
	netns, err := netthread.Open(c.netns)
	if err != nil {
		return "", err
	}
	defer unix.Close(netns)
	for range nameAttempts {
		var suffix [4]byte
		_, _ = rand.Read(suffix[:]) // never fails
		name = fmt.Sprintf("veth%x", suffix)
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.MTU = name, mtu
		err = host.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: c.ifName, PeerNamespace: netlink.NsFd(netns)})
		if !errors.Is(err, unix.EEXIST) {
			break
		}
		if _, err := host.LinkByName(name); err != nil { // the host name is free, so the name in the pod is taken
			break
		}
	}
	if err != nil {
		return "", fmt.Errorf("make veth pair %s (host) and %s (pod): %w", name, c.ifName, err)
	}
	// A port of a bridge needs no addresses, and would announce its groups to all other ports. This fails if the host has no IPv6.
	_ = sysctl("1", "ipv6/conf", name, "disable_ipv6")
	return name, nil
}

// configurePod gives the pod's end its addresses and routes, sets it up, and returns the hardware address of that end.
func (c *Call) configurePod(ctx context.Context, result *types100.Result) (mac string, err error) {
	err = inPod(c.netns, func(pod *netlink.Handle) error {
		link, err := pod.LinkByName(c.ifName)
		if err != nil {
			return err
		}
		mac = link.Attrs().HardwareAddr.String()
		if err := c.podSysctls(link, result); err != nil {
			return err
		}
		for _, address := range result.IPs {
			if err := pod.AddrAdd(link, &netlink.Addr{IPNet: &address.Address}); err != nil {
				return fmt.Errorf("add address %s: %w", &address.Address, err)
			}
		}
		if err := pod.LinkSetUp(link); err != nil {
			return fmt.Errorf("set link up: %w", err)
		}
		if gatewayOf(result, false) != nil {
			if err := awaitAddresses(ctx, pod, link); err != nil {
				return err
			}
		}
		return addRoutes(pod, link, result)
	})
	if err != nil {
		return "", fmt.Errorf("configure %s in %s: %w", c.ifName, c.netns, err)
	}
	return mac, nil
}

// podSysctls sets the sysctls that must be set before the addresses are added. It disables duplicate address detection,
// because each address is leased only to this pod. It also enables announcements to neighbours.
//
// What a pod sends to groups goes to all ports of the bridge, so of 1000 pods a million times: solicitations of routers, which it
// does not need because its routes are those of the result, and what comes with a link-local address, which it does not need
// without other IPv6 addresses.
func (c *Call) podSysctls(link netlink.Link, result *types100.Result) error {
	if err := configureLink(link, !hasV6(result)); err != nil {
		return err
	}
	if !hasV6(result) {
		return nil
	}
	for _, link := range []string{"lo", c.ifName} {
		if err := ensureSysctl("0", "ipv6/conf", link, "disable_ipv6"); err != nil {
			return fmt.Errorf("enable IPv6 for %s: %w", link, err)
		}
	}
	// The kernel keeps the IPv6 addresses when the interface is set down. By default, it removes them.
	for name, value := range map[string]string{"accept_dad": "0", "router_solicitations": "0", "keep_addr_on_down": "1"} {
		if err := sysctl(value, "ipv6/conf", c.ifName, name); err != nil {
			return err
		}
	}
	return nil
}

func hasV6(result *types100.Result) bool {
	return slices.ContainsFunc(result.IPs, func(c *types100.IPConfig) bool { return !isV4(c.Address.IP) })
}

// announce adds the pod's entries for its gateways on the bridge, whose hardware address is given. If others may know the pod's
// addresses with another hardware address, it makes the kernel announce them. The announcement at link-up was lost,
// because the bridge port was not forwarding yet. Without a second announcement, neighbours would send packets for a
// reused address to the previous pod until the neighbours' caches expire, some tens of seconds later. Setting the
// hardware address, even to its present value, triggers the announcement (arp_notify, ndisc_notify).
func (c *Call) announce(result *types100.Result, known bool, gateways []net.IPNet, bridge net.HardwareAddr) error {
	err := inPod(c.netns, func(pod *netlink.Handle) error {
		link, err := pod.LinkByName(c.ifName)
		if err != nil {
			return err
		}
		if known && hasV6(result) {
			_ = sysctl("1", "ipv6/conf", c.ifName, "ndisc_notify")
			defer func() { _ = sysctl("0", "ipv6/conf", c.ifName, "ndisc_notify") }()
		}
		if known {
			if err := pod.LinkSetHardwareAddr(link, link.Attrs().HardwareAddr); err != nil {
				return err
			}
		}
		for _, gateway := range gateways {
			if err := setNeighbour(pod, link, gateway.IP, bridge); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("announce the addresses of %s in %s: %w", c.ifName, c.netns, err)
	}
	return nil
}

// gatewayOf returns the first gateway of an address family, or nil.
func gatewayOf(result *types100.Result, v4 bool) net.IP {
	for _, address := range result.IPs {
		if address.Gateway != nil && isV4(address.Gateway) == v4 {
			return address.Gateway
		}
	}
	return nil
}

// addRoutes adds the routes of the result. A route without a gateway uses the first gateway of its address family.
func addRoutes(pod *netlink.Handle, link netlink.Link, result *types100.Result) error {
	for _, r := range result.Routes {
		gateway := r.GW
		if gateway == nil {
			gateway = gatewayOf(result, isV4(r.Dst.IP))
		}
		dst := r.Dst
		err := pod.RouteAddEcmp(&netlink.Route{Dst: &dst, LinkIndex: link.Attrs().Index, Gw: gateway})
		if err != nil {
			return fmt.Errorf("add route to %s via %s: %w", &dst, gateway, err)
		}
	}
	return nil
}

// awaitAddresses waits until no IPv6 address of the link is tentative, because sockets cannot bind to a tentative
// address.
func awaitAddresses(ctx context.Context, pod *netlink.Handle, link netlink.Link) error {
	return await(ctx, settlePatience, func() (bool, error) {
		have, err := addresses(pod, link, unix.AF_INET6)
		if err != nil {
			return false, err
		}
		settled := true
		for _, a := range have {
			if a.Flags&unix.IFA_F_DADFAILED != 0 {
				return false, fmt.Errorf("address %s is a duplicate on the link", a.IP)
			}
			settled = settled && a.Flags&unix.IFA_F_TENTATIVE == 0
		}
		return settled, nil
	})
}

// awaitPort waits until the host's end is operational, and returns its attributes.
func awaitPort(ctx context.Context, host *netlink.Handle, name string) (port *netlink.LinkAttrs, err error) {
	port = &netlink.LinkAttrs{}
	err = await(ctx, portPatience, func() (bool, error) {
		link, err := host.LinkByName(name)
		if err != nil {
			return false, err
		}
		port = link.Attrs()
		return port.OperState == netlink.OperUp, nil
	})
	if err != nil {
		return nil, fmt.Errorf("bridge port %s (state %s): %w", name, port.OperState, err)
	}
	return port, nil
}

var errNotInTime = errors.New("not ready in time")

// await polls a condition until it holds or the given time has passed.
func await(ctx context.Context, patience time.Duration, holds func() (bool, error)) error {
	ctx, cancel := context.WithTimeoutCause(ctx, patience, errNotInTime)
	defer cancel()
	for wait := firstPause; ; wait = min(2*wait, lastPause) {
		if ok, err := holds(); ok || err != nil {
			return err
		}
		if err := guard.Sleep(ctx, wait); err != nil {
			return err
		}
	}
}
