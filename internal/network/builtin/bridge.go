package builtin

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"

	"github.com/containerd/errdefs"
	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/vishvananda/netlink"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/failpoint"
)

// Between what would be separate executions and requests to the kernel.
var (
	addLeased   = failpoint.New("network.bridge.add.leased")
	addPaired   = failpoint.New("network.bridge.add.paired")
	addPodReady = failpoint.New("network.bridge.add.configured")
	delUnlinked = failpoint.New("network.bridge.del.unlinked")
)

// addBridge connects the pod to the bridge:
//
//	address ─► bridge ─► veth pair ─┬─ host's end: up, a port of the bridge
//	                                └─ pod's end: sysctls, addresses, up, routes ─► gateway's address on the bridge
//
// Once the port forwards, the pod's addresses are announced to its neighbours.
//
// When it fails the address is given back; the interface is left to DEL, as the plugin does.
func (c *Call) addBridge(ctx context.Context, conf *bridgeConfig) (output []byte, err error) {
	result, err := c.allocate(ctx)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.free(context.WithoutCancel(ctx)))
		}
	}()
	if err := addLeased.Hit(ctx); err != nil {
		return nil, err
	}
	gateways := conf.gateways(result)
	err = withHandle(func(host *netlink.Handle) error {
		bridge, err := ensureBridge(host, conf)
		if err != nil {
			return err
		}
		pair, err := c.addPair(ctx, host, bridge, conf)
		if err != nil {
			return err
		}
		if err := addPaired.Hit(ctx); err != nil {
			return err
		}
		result.Interfaces = []*types100.Interface{{Name: conf.Bridge}, {Name: pair.host}, {Name: c.ifName, Sandbox: c.netns}}
		if result.Interfaces[2].Mac, err = c.configurePod(ctx, result); err != nil {
			return err
		}
		if err := addPodReady.Hit(ctx); err != nil {
			return err
		}
		if conf.IPMasq {
			if err := newMasquerade(conf.Name, c.container).add(ctx, podAddresses(result)); err != nil {
				return err
			}
		}
		for _, gateway := range gateways {
			if err := conf.serveAsGateway(host, bridge, gateway); err != nil {
				return err
			}
		}
		if result.Interfaces[1].Mac, err = awaitPort(ctx, host, pair.host); err != nil {
			return err
		}
		if err := c.announce(); err != nil {
			return err
		}
		// The first port and a new address change it.
		bridge, err = host.LinkByName(conf.Bridge)
		if err != nil {
			return fmt.Errorf("bridge %s: %w", conf.Bridge, err)
		}
		result.Interfaces[0].Mac = bridge.Attrs().HardwareAddr.String()
		return nil
	})
	if err != nil {
		return nil, err
	}
	if d := conf.DNS; d.Nameservers != nil || d.Search != nil || d.Options != nil || d.Domain != "" {
		result.DNS = d
	}
	return printResult(result, conf.CNIVersion)
}

// podAddresses are the addresses of the result.
func podAddresses(result *types100.Result) []net.IPNet {
	var all []net.IPNet
	for _, address := range result.IPs {
		all = append(all, address.Address)
	}
	return all
}

// podInterface is the index of the pod's interface in the result.
const podInterface = 2

// gateways completes the addresses of the result, and adds the default routes where they are wanted. It returns what
// the bridge's own addresses must be.
func (conf *bridgeConfig) gateways(result *types100.Result) []net.IPNet {
	var gateways []net.IPNet
	routed := map[bool]bool{} // families that have a default route, by isV4
	for _, address := range result.IPs {
		address.Interface = types100.Int(podInterface)
		if address.Gateway == nil && conf.IsGateway {
			address.Gateway = firstHost(address.Address)
		}
		if v4 := isV4(address.Address.IP); conf.IsDefaultGateway && !routed[v4] {
			routed[v4] = true
			everywhere := defaultDestination(v4)
			given := func(r *types.Route) bool { return r.GW != nil && r.Dst.String() == everywhere.String() }
			if !slices.ContainsFunc(result.Routes, given) {
				result.Routes = append(result.Routes, &types.Route{Dst: everywhere, GW: address.Gateway})
			}
		}
		if conf.IsGateway {
			gateways = append(gateways, net.IPNet{IP: address.Gateway, Mask: address.Address.Mask})
		}
	}
	return gateways
}

// everything is the destination of a default route.
func defaultDestination(v4 bool) net.IPNet {
	if v4 {
		return net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}
	}
	return net.IPNet{IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)}
}

// firstHost is the address after the network's own.
func firstHost(network net.IPNet) net.IP {
	ip := network.IP.Mask(network.Mask)
	for i := len(ip) - 1; i >= 0; i-- {
		if ip[i]++; ip[i] != 0 {
			break
		}
	}
	return ip
}

// ensureBridge finds the bridge, up, or makes it.
func ensureBridge(host *netlink.Handle, conf *bridgeConfig) (netlink.Link, error) {
	link, err := host.LinkByName(conf.Bridge)
	if notFound(err) {
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.MTU = conf.Bridge, conf.MTU
		err = host.LinkAdd(&netlink.Bridge{LinkAttrs: attrs})
		if err == nil || errors.Is(err, unix.EEXIST) { // made by another meanwhile
			link, err = host.LinkByName(conf.Bridge)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("make bridge %s: %w", conf.Bridge, err)
	}
	if _, ok := link.(*netlink.Bridge); !ok {
		return nil, fmt.Errorf("%s is there, but is no bridge but of type %s", conf.Bridge, link.Type())
	}
	if conf.PromiscMode && link.Attrs().Promisc == 0 {
		if err := host.SetPromiscOn(link); err != nil {
			return nil, fmt.Errorf("set bridge %s to promiscuous mode: %w", conf.Bridge, err)
		}
	}
	_ = sysctl("0", "ipv6/conf", conf.Bridge, "accept_ra") // its routes are ours; there may be no IPv6
	if link.Attrs().Flags&net.FlagUp == 0 {
		if err := host.LinkSetUp(link); err != nil {
			return nil, fmt.Errorf("set bridge %s up: %w", conf.Bridge, err)
		}
	}
	return link, nil
}

// serveAsGateway gives the bridge the gateway's address, and lets the host forward.
func (conf *bridgeConfig) serveAsGateway(host *netlink.Handle, bridge netlink.Link, gateway net.IPNet) error {
	family, forwarding := unix.AF_INET6, "ipv6/conf/all/forwarding"
	if isV4(gateway.IP) {
		family, forwarding = unix.AF_INET, "ipv4/ip_forward"
	}
	if err := conf.ensureAddress(host, bridge, family, gateway); err != nil {
		return fmt.Errorf("address %s of bridge %s: %w", &gateway, conf.Bridge, err)
	}
	if err := ensureSysctl("1", forwarding); err != nil {
		return fmt.Errorf("let the host forward: %w", err)
	}
	return nil
}

// ensureAddress adds the address. A bridge has one of IPv4, and those of IPv6 must not overlap: others are taken away
// if the configuration says so (forceAddress), else they are an error.
func (conf *bridgeConfig) ensureAddress(host *netlink.Handle, bridge netlink.Link, family int, wanted net.IPNet) error {
	have, err := addresses(host, bridge, family)
	if err != nil {
		return err
	}
	for _, a := range have {
		if a.IPNet.String() == wanted.String() {
			return nil
		}
		if family == unix.AF_INET6 && !a.Contains(wanted.IP) && !wanted.Contains(a.IP) {
			continue
		}
		if !conf.ForceAddress {
			return fmt.Errorf("it has another one, %s (set forceAddress to replace it)", a.IPNet)
		}
		if err := host.AddrDel(bridge, &netlink.Addr{IPNet: a.IPNet}); err != nil {
			return fmt.Errorf("take away %s: %w", a.IPNet, err)
		}
	}
	if err := host.AddrAdd(bridge, &netlink.Addr{IPNet: &wanted}); err != nil && !errors.Is(err, unix.EEXIST) {
		return err
	}
	// An address of its own keeps the bridge from taking over the lowest one of its ports, which come and go.
	return host.LinkSetHardwareAddr(bridge, bridge.Attrs().HardwareAddr)
}

// delBridge takes away the pod's interface, with it the host's end, and the rules for its addresses, then gives these
// back. Interface and rules go at the same time, as most of that is waiting for the kernel's grace periods.
func (c *Call) delBridge(ctx context.Context, conf *bridgeConfig) error {
	var both errgroup.Group
	both.Go(c.delPair)
	if conf.IPMasq {
		both.Go(func() (err error) {
			defer recoverTo(&err)
			return c.delMasquerade(ctx, conf)
		})
	}
	if err := both.Wait(); err != nil {
		return err
	}
	if err := delUnlinked.Hit(ctx); err != nil {
		return err
	}
	return c.free(ctx)
}

// delMasquerade takes away the rules. The addresses are known by their leases, so that no rule stays for the next pod
// that gets one when the namespace has gone before.
func (c *Call) delMasquerade(ctx context.Context, conf *bridgeConfig) error {
	held, err := c.leased(ctx)
	if err != nil {
		return err
	}
	return newMasquerade(conf.Name, c.container).remove(ctx, held)
}

// delPair takes away the pod's interface, if it and its namespace are there.
func (c *Call) delPair() error {
	if c.netns == "" {
		return nil
	}
	err := inPod(c.netns, func(h *netlink.Handle) error {
		link, err := h.LinkByName(c.ifName)
		if err == nil {
			err = h.LinkDel(link)
		}
		if err != nil && !notFound(err) {
			return fmt.Errorf("take away %s: %w", c.ifName, err)
		}
		return nil
	})
	if errdefs.IsNotFound(err) {
		return nil
	}
	return err
}
