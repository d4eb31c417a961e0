package builtin

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/failpoint"
)

var (
	addLeased   = failpoint.New("network.bridge.add.leased")
	addPaired   = failpoint.New("network.bridge.add.paired")
	addPodReady = failpoint.New("network.bridge.add.configured")
)

// addBridge connects the pod to the bridge:
//
//	address ─► bridge ─► veth pair ─┬─ host's end: up, a port of the bridge
//	                                └─ pod's end: sysctls, addresses, up, routes ─► gateway's address on the bridge
//
// The pod and the host know each other's hardware address from the beginning. Once the port forwards packets, addBridge announces
// the pod's addresses to the others, unless no pod has had them before.
//
// If addBridge fails, it frees the pod's addresses but leaves the interface to DEL, as the bridge plugin does.
func (c *Call) addBridge(ctx context.Context, conf *bridgeConfig) (output []byte, err error) {
	result, leases, err := c.allocate(ctx)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.free(context.WithoutCancel(ctx), hosts(podAddresses(result))))
		}
	}()
	if err := addLeased.Hit(ctx); err != nil {
		return nil, err
	}
	gateways := conf.setGateways(result)
	err = withHandle(func(host *netlink.Handle) error {
		bridge, err := ensureBridge(host, conf, leases.begin)
		if err != nil {
			return err
		}
		port, err := c.addPair(ctx, host, bridge, conf)
		if err != nil {
			return err
		}
		if err := addPaired.Hit(ctx); err != nil {
			return err
		}
		result.Interfaces = []*types100.Interface{{Name: conf.Bridge}, {Name: port}, {Name: c.ifName, Sandbox: c.netns}}
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
		end, err := awaitPort(ctx, host, port)
		if err != nil {
			return err
		}
		result.Interfaces[1].Mac = end.HardwareAddr.String()
		// Read the bridge's hardware address only now, because a first port or a new IP address can change the bridge's
		// hardware address.
		bridge, err = host.LinkByName(conf.Bridge)
		if err != nil {
			return fmt.Errorf("bridge %s: %w", conf.Bridge, err)
		}
		result.Interfaces[0].Mac = bridge.Attrs().HardwareAddr.String()
		if err := conf.introduce(host, bridge, end.Index, result); err != nil {
			return err
		}
		known := !conf.IsGateway || !leases.fresh(hosts(podAddresses(result)))
		return c.announce(result, known, gateways, bridge.Attrs().HardwareAddr)
	})
	if err != nil {
		return nil, err
	}
	if d := conf.DNS; d.Nameservers != nil || d.Search != nil || d.Options != nil || d.Domain != "" {
		result.DNS = d
	}
	return printResult(result, conf.CNIVersion)
}

func podAddresses(result *types100.Result) []net.IPNet {
	var all []net.IPNet
	for _, address := range result.IPs {
		all = append(all, address.Address)
	}
	return all
}

func hosts(networks []net.IPNet) []net.IP {
	ips := make([]net.IP, len(networks))
	for i, n := range networks {
		ips[i] = n.IP
	}
	return ips
}

// podInterface is the index of the pod's interface in Result.Interfaces.
const podInterface = 2

// setGateways sets the interface and the gateway of each address in the result. With isDefaultGateway, it also adds
// default routes. With isGateway, it returns the addresses that the bridge must have to be the gateway.
func (conf *bridgeConfig) setGateways(result *types100.Result) []net.IPNet {
	var gateways []net.IPNet
	routed := map[bool]bool{} // address families (true for IPv4) that have a default route
	for _, address := range result.IPs {
		address.Interface = types100.Int(podInterface)
		if address.Gateway == nil && conf.IsGateway {
			address.Gateway = firstHost(address.Address)
		}
		if v4 := isV4(address.Address.IP); conf.IsDefaultGateway && !routed[v4] {
			routed[v4] = true
			everywhere := defaultDestination(v4)
			isDefault := func(r *types.Route) bool { return r.GW != nil && r.Dst.String() == everywhere.String() }
			if !slices.ContainsFunc(result.Routes, isDefault) {
				result.Routes = append(result.Routes, &types.Route{Dst: everywhere, GW: address.Gateway})
			}
		}
		if conf.IsGateway {
			gateways = append(gateways, net.IPNet{IP: address.Gateway, Mask: address.Address.Mask})
		}
	}
	return gateways
}

// defaultDestination returns the destination of a default route.
func defaultDestination(v4 bool) net.IPNet {
	if v4 {
		return net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}
	}
	return net.IPNet{IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)}
}

// firstHost returns the address after the network address.
func firstHost(network net.IPNet) net.IP {
	ip, _ := netip.AddrFromSlice(network.IP.Mask(network.Mask))
	return ip.Next().AsSlice()
}

// ensureBridge makes the bridge if it is missing, and then calls made. It configures the bridge, and sets the link up.
func ensureBridge(host *netlink.Handle, conf *bridgeConfig, made func()) (netlink.Link, error) {
	link, err := host.LinkByName(conf.Bridge)
	if notFound(err) {
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.MTU = conf.Bridge, conf.MTU
		if err = host.LinkAdd(&netlink.Bridge{LinkAttrs: attrs}); err == nil {
			made()
		}
		if err == nil || errors.Is(err, unix.EEXIST) { // EEXIST: another process made it first
			link, err = host.LinkByName(conf.Bridge)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("make bridge %s: %w", conf.Bridge, err)
	}
	if _, ok := link.(*netlink.Bridge); !ok {
		return nil, fmt.Errorf("%s already exists and is not a bridge, but of type %s", conf.Bridge, link.Type())
	}
	if conf.PromiscMode && link.Attrs().Promisc == 0 {
		if err := host.SetPromiscOn(link); err != nil {
			return nil, fmt.Errorf("set bridge %s to promiscuous mode: %w", conf.Bridge, err)
		}
	}
	_ = sysctl("0", "ipv6/conf", conf.Bridge, "accept_ra") // take no routes from routers; fails if the host has no IPv6
	if link.Attrs().Flags&net.FlagUp == 0 {
		if err := host.LinkSetUp(link); err != nil {
			return nil, fmt.Errorf("set bridge %s up: %w", conf.Bridge, err)
		}
	}
	return link, nil
}

// serveAsGateway adds the gateway's address to the bridge and enables forwarding on the host.
func (conf *bridgeConfig) serveAsGateway(host *netlink.Handle, bridge netlink.Link, gateway net.IPNet) error {
	family, name := unix.AF_INET6, "ipv6/conf/all/forwarding"
	if isV4(gateway.IP) {
		family, name = unix.AF_INET, "ipv4/ip_forward"
	}
	if err := conf.ensureAddress(host, bridge, family, gateway); err != nil {
		return fmt.Errorf("address %s of bridge %s: %w", &gateway, conf.Bridge, err)
	}
	on, err := forwarding(family)
	if err == nil && !on {
		err = sysctl("1", name)
	}
	if err != nil {
		return fmt.Errorf("enable forwarding on the host: %w", err)
	}
	return nil
}

// ensureAddress adds an address to the bridge. A bridge can have only one IPv4 address, and its IPv6 subnets must not
// overlap. Conflicting addresses are removed if forceAddress is set; otherwise they are an error.
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
			return fmt.Errorf("conflicts with its address %s (set forceAddress to replace that)", a.IPNet)
		}
		if err := host.AddrDel(bridge, &netlink.Addr{IPNet: a.IPNet}); err != nil {
			return fmt.Errorf("remove %s: %w", a.IPNet, err)
		}
	}
	if err := host.AddrAdd(bridge, &netlink.Addr{IPNet: &wanted}); err != nil && !errors.Is(err, unix.EEXIST) {
		return err
	}
	// Setting the hardware address, even to its present value, keeps the bridge from adopting the lowest hardware
	// address among its ports, which come and go. A bridge that has lost its last port has none.
	mac := bridge.Attrs().HardwareAddr
	if !slices.ContainsFunc(mac, func(b byte) bool { return b != 0 }) {
		mac = randomMAC()
	}
	return host.LinkSetHardwareAddr(bridge, mac)
}

// randomMAC returns a hardware address of the kind that its owner assigns (IEEE 802, locally administered, unicast).
func randomMAC() net.HardwareAddr {
	mac := make(net.HardwareAddr, 6)
	_, _ = rand.Read(mac) // never fails
	mac[0] = mac[0]&^1 | 2
	return mac
}
