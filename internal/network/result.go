package network

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/containerd/errdefs"
	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
)

// Result describes a pod's network.
type Result struct {
	// Netns is the path of the network namespace.
	Netns string
	// IPs are the addresses of the pod's default interface, eth0, the primary address first. IPs is empty if the chain
	// assigns no address.
	IPs []netip.Addr
	// Interfaces are the interfaces that the chain made or used, in the pod and on the host.
	Interfaces []Interface
	Routes     []Route
	DNS        DNS
	// Raw is the chain's result, converted to the latest CNI version.
	Raw json.RawMessage
}

// Interface is a network interface in a Result.
type Interface struct {
	Name string
	MAC  string
	// InPod is set if the interface is in the pod's namespace and not on the host.
	InPod bool
	Addrs []netip.Prefix
	// MTU is in bytes; 0 means unknown, which is usual for interfaces on the host.
	MTU int
}

// Route is a route inside the pod. GW is the zero Addr if the route has no gateway.
type Route struct {
	Dst netip.Prefix
	GW  netip.Addr
}

// result converts an ADD result of any CNI version.
func (m *Manager) result(key string, added types.Result) (*Result, error) {
	cni, err := types100.NewResultFromResult(added)
	if err != nil {
		return nil, badResult("%v", err)
	}
	raw, err := json.Marshal(cni)
	if err != nil {
		return nil, err
	}
	r := &Result{
		Netns: m.netnsPath(key), Raw: raw,
		DNS: DNS{Servers: cni.DNS.Nameservers, Searches: cni.DNS.Search, Options: cni.DNS.Options},
	}
	if err := errors.Join(r.addInterfaces(cni), r.addRoutes(cni)); err != nil {
		return nil, err
	}
	m.fillFromKernel(r)
	return r, nil
}

// addInterfaces adds the interfaces and their addresses. An address without an interface belongs to the default
// interface. Results before CNI 0.3.0 name no interfaces at all.
func (r *Result) addInterfaces(cni *types100.Result) error {
	for _, i := range cni.Interfaces {
		r.Interfaces = append(r.Interfaces, Interface{Name: i.Name, MAC: i.Mac, InPod: i.Sandbox != "", MTU: i.Mtu})
	}
	if len(r.Interfaces) == 0 && len(cni.IPs) > 0 {
		r.Interfaces = []Interface{{Name: interfaceName, InPod: true}}
	}
	primary := r.defaultInterface()
	for _, ip := range cni.IPs {
		addr, ok := prefixOf(ip.Address)
		if !ok {
			return badResult("%s is not an address", ip.Address.String())
		}
		index := primary
		if ip.Interface != nil {
			index = *ip.Interface
		}
		if index >= len(r.Interfaces) {
			return badResult("address %s refers to interface %d, but there are only %d", addr, index, len(r.Interfaces))
		}
		if index < 0 { // none of the interfaces is the default one
			continue
		}
		r.Interfaces[index].Addrs = append(r.Interfaces[index].Addrs, addr)
		if index == primary {
			r.IPs = append(r.IPs, addr.Addr())
		}
	}
	return nil
}

func (r *Result) addRoutes(cni *types100.Result) error {
	for _, route := range cni.Routes {
		dst, ok := prefixOf(route.Dst)
		if !ok {
			return badResult("%s is not the destination of a route", route.Dst.String())
		}
		gw, _ := netip.AddrFromSlice(route.GW)
		r.Routes = append(r.Routes, Route{Dst: dst, GW: gw.Unmap()})
	}
	return nil
}

// defaultInterface returns the index of eth0, or of the only interface inside the pod, or -1.
func (r *Result) defaultInterface() int {
	only, inPod := -1, 0
	for i, iface := range r.Interfaces {
		if !iface.InPod {
			continue
		}
		if iface.Name == interfaceName {
			return i
		}
		only, inPod = i, inPod+1
	}
	if inPod == 1 {
		return only
	}
	return -1
}

// fillFromKernel sets the MTUs of the pod's interfaces, because results before CNI 1.1.0 lack them, and fills in
// missing MAC addresses. It leaves other interfaces unchanged, because such an interface may be gone, or may be a
// device that the chain prepared for a machine.
func (m *Manager) fillFromKernel(r *Result) {
	links, err := m.links(r.Netns)
	if err != nil {
		m.cfg.Logger.Warn("interfaces of a new network namespace cannot be listed", "netns", r.Netns, "err", err)
		return
	}
	for i := range r.Interfaces {
		iface := &r.Interfaces[i]
		for _, link := range links {
			if attrs := link.Attrs(); iface.InPod && attrs.Name == iface.Name {
				iface.MTU = attrs.MTU
				iface.MAC = cmp.Or(iface.MAC, attrs.HardwareAddr.String())
			}
		}
	}
}

// prefixOf converts an address with its mask. IPv4-mapped IPv6 addresses become IPv4.
func prefixOf(n net.IPNet) (netip.Prefix, bool) {
	addr, ok := netip.AddrFromSlice(n.IP)
	if !ok {
		return netip.Prefix{}, false
	}
	addr = addr.Unmap()
	ones, bits := n.Mask.Size()
	if bits == 128 && addr.Is4() {
		ones -= 96
	}
	prefix := netip.PrefixFrom(addr, ones)
	return prefix, prefix.IsValid()
}

// badResult returns an error for a bad result of the chain. The class is ErrUnavailable, because a retry may succeed.
func badResult(format string, args ...any) error {
	return fmt.Errorf("result of the CNI chain: "+format+": %w", append(args, errdefs.ErrUnavailable)...)
}
