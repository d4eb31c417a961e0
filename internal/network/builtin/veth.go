package builtin

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"time"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/network/netthread"
)

const (
	// nameAttempts is how many random names are tried for the host's end: 32 bits seldom meet.
	nameAttempts = 10
	// portPatience is how long the host's end may take to be up, after both are set up: the kernel's link watch runs
	// in the background.
	portPatience = 2500 * time.Millisecond
	// settlePatience is how long IPv6 addresses may be tentative.
	settlePatience = 5 * time.Second
	// firstPause and lastPause pace looking at the state of links and addresses: doubled from one to the other.
	firstPause, lastPause = 200 * time.Microsecond, 50 * time.Millisecond
)

// vethPair are the names of the two ends.
type vethPair struct{ host, pod string }

// addPair makes a veth pair, one end in the pod, the other, up, a port of the bridge.
func (c *Call) addPair(ctx context.Context, host *netlink.Handle, bridge netlink.Link, conf *bridgeConfig) (vethPair, error) {
	pair, err := c.makePair(host, conf.MTU)
	if err != nil {
		return pair, err
	}
	port, err := host.LinkByName(pair.host)
	if err == nil {
		err = host.LinkSetMaster(port, bridge)
	}
	if err == nil && conf.HairpinMode {
		err = host.LinkSetHairpin(port, true)
	}
	if err != nil {
		return pair, fmt.Errorf("connect %s to bridge %s: %w", pair.host, conf.Bridge, err)
	}
	if ctx.Err() != nil {
		return pair, context.Cause(ctx)
	}
	return pair, nil
}

// makePair makes the veth pair, the host's end up. A name that is taken on the host is another's and tried no more;
// one that is taken in the pod is an error.
func (c *Call) makePair(host *netlink.Handle, mtu int) (pair vethPair, err error) {
	netns, err := netthread.Open(c.netns)
	if err != nil {
		return pair, err
	}
	defer unix.Close(netns)
	pair.pod = c.ifName
	for range nameAttempts {
		var suffix [4]byte
		_, _ = rand.Read(suffix[:]) // never fails
		pair.host = fmt.Sprintf("veth%x", suffix)
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.MTU, attrs.Flags = pair.host, mtu, net.FlagUp
		err = host.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: pair.pod, PeerNamespace: netlink.NsFd(netns)})
		if !errors.Is(err, unix.EEXIST) {
			break
		}
		if _, taken := host.LinkByName(pair.host); taken != nil { // then it was the other name
			break
		}
	}
	if err != nil {
		return pair, fmt.Errorf("make veth pair %s (host) and %s (pod): %w", pair.host, pair.pod, err)
	}
	_ = sysctl("0", "ipv6/conf", pair.host, "accept_ra") // its routes are ours; there may be no IPv6
	return pair, nil
}

// configurePod gives the pod's end its addresses and routes, sets it up, and returns its hardware address.
func (c *Call) configurePod(ctx context.Context, result *types100.Result) (mac string, err error) {
	err = inPod(c.netns, func(pod *netlink.Handle) error {
		link, err := pod.LinkByName(c.ifName)
		if err != nil {
			return err
		}
		mac = link.Attrs().HardwareAddr.String()
		if err := c.podSysctls(result); err != nil {
			return err
		}
		for _, address := range result.IPs {
			if err := pod.AddrAdd(link, &netlink.Addr{IPNet: &address.Address}); err != nil {
				return fmt.Errorf("add address %s: %w", &address.Address, err)
			}
		}
		if err := pod.LinkSetUp(link); err != nil {
			return fmt.Errorf("set it up: %w", err)
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

// podSysctls sets what must be set before the addresses: they are ours alone, so nobody needs to be asked for
// duplicates, and neighbours are to learn of them at once.
func (c *Call) podSysctls(result *types100.Result) error {
	_ = sysctl("0", "ipv6/conf", c.ifName, "accept_dad") // there may be no IPv6
	_ = sysctl("1", "ipv4/conf", c.ifName, "arp_notify")
	for _, address := range result.IPs {
		if isV4(address.Address.IP) {
			continue
		}
		for _, link := range []string{"lo", c.ifName} {
			if err := ensureSysctl("0", "ipv6/conf", link, "disable_ipv6"); err != nil {
				return fmt.Errorf("enable IPv6 for %s: %w", link, err)
			}
		}
		// The kernel takes IPv6 addresses away from interfaces that are set down.
		return sysctl("1", "ipv6/conf", c.ifName, "keep_addr_on_down")
	}
	return nil
}

// announce has the kernel tell the neighbours of the pod's addresses. What it told when the interface was set up did not
// pass the bridge, whose port did not forward yet; an address that was another pod's a moment ago would be sought there
// for as long as the neighbours remember it, some tens of seconds. A hardware address that is set is announced (arp_notify,
// ndisc_notify), be it the one that it was.
func (c *Call) announce() error {
	err := inPod(c.netns, func(pod *netlink.Handle) error {
		link, err := pod.LinkByName(c.ifName)
		if err != nil {
			return err
		}
		_ = sysctl("1", "ipv6/conf", c.ifName, "ndisc_notify") // there may be no IPv6
		defer func() { _ = sysctl("0", "ipv6/conf", c.ifName, "ndisc_notify") }()
		return pod.LinkSetHardwareAddr(link, link.Attrs().HardwareAddr)
	})
	if err != nil {
		return fmt.Errorf("announce the addresses of %s in %s: %w", c.ifName, c.netns, err)
	}
	return nil
}

// gatewayOf is the first gateway of a family.
func gatewayOf(result *types100.Result, v4 bool) net.IP {
	for _, address := range result.IPs {
		if address.Gateway != nil && isV4(address.Gateway) == v4 {
			return address.Gateway
		}
	}
	return nil
}

// addRoutes adds the routes of the result; those that name no gateway go by the one of their family.
func addRoutes(pod *netlink.Handle, link netlink.Link, result *types100.Result) error {
	for _, r := range result.Routes {
		gateway := r.GW
		if gateway == nil {
			gateway = gatewayOf(result, isV4(r.Dst.IP))
		}
		dst := r.Dst
		err := pod.RouteAddEcmp(&netlink.Route{Dst: &dst, LinkIndex: link.Attrs().Index, Gw: gateway})
		if err != nil {
			return fmt.Errorf("add route to %s by %s: %w", &dst, gateway, err)
		}
	}
	return nil
}

// awaitAddresses waits until no IPv6 address of the link is tentative: until then nothing can be bound to it.
func awaitAddresses(ctx context.Context, pod *netlink.Handle, link netlink.Link) error {
	return await(ctx, settlePatience, func() (bool, error) {
		have, err := addresses(pod, link, unix.AF_INET6)
		if err != nil {
			return false, err
		}
		settled := true
		for _, a := range have {
			if a.Flags&unix.IFA_F_DADFAILED != 0 {
				return false, fmt.Errorf("address %s is in use by another on the link", a.IP)
			}
			settled = settled && a.Flags&unix.IFA_F_TENTATIVE == 0
		}
		return settled, nil
	})
}

// awaitPort waits until the host's end is up in the eyes of the kernel, and returns its hardware address.
func awaitPort(ctx context.Context, host *netlink.Handle, name string) (mac string, err error) {
	var state netlink.LinkOperState
	err = await(ctx, portPatience, func() (bool, error) {
		link, err := host.LinkByName(name)
		if err != nil {
			return false, err
		}
		mac, state = link.Attrs().HardwareAddr.String(), link.Attrs().OperState
		return state == netlink.OperUp, nil
	})
	if err != nil {
		return "", fmt.Errorf("bridge port %s, which is %s: %w", name, state, err)
	}
	return mac, nil
}

// errNotInTime is for what the kernel was given time for.
var errNotInTime = errors.New("not ready in time")

// await looks at a condition until it holds.
func await(ctx context.Context, patience time.Duration, holds func() (bool, error)) error {
	ctx, cancel := context.WithTimeoutCause(ctx, patience, errNotInTime)
	defer cancel()
	for wait := firstPause; ; wait = min(2*wait, lastPause) {
		if ok, err := holds(); ok || err != nil {
			return err
		}
		if err := pause(ctx, wait); err != nil {
			return err
		}
	}
}
