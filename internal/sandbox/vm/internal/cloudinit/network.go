package cloudinit

import (
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/containerd/errdefs"
	"sigs.k8s.io/yaml"
)

// hardwareAddr returns the interface's MAC in lower case. It fails if the MAC or the name is invalid.
func (i Interface) hardwareAddr() (string, error) {
	mac, err := net.ParseMAC(i.MAC)
	if err != nil || len(mac) != 6 || !linkName().MatchString(i.Name) {
		return "", fmt.Errorf("interface %q, MAC %q: invalid name or MAC: %w", i.Name, i.MAC, errdefs.ErrInvalidArgument)
	}
	return mac.String(), nil
}

// families reports whether the interface has IPv4 addresses, and whether it has IPv6 addresses.
func (i Interface) families() (v4, v6 bool) {
	for _, a := range i.Addrs {
		v4, v6 = v4 || a.Addr().Is4(), v6 || a.Addr().Is6()
	}
	return v4, v6
}

// onLink reports whether a route through the given gateway needs the flag on-link. A route needs it if the gateway is
// outside the interface's networks. IPv6 link-local gateways never need the flag.
func (i Interface) onLink(via netip.Addr) bool {
	for _, a := range i.Addrs {
		if a.Masked().Contains(via) {
			return false
		}
	}
	return !via.Is6() || !via.IsLinkLocalUnicast()
}

// networkConfig returns the network configuration in version 2 of cloud-init's format.
func (b *builder) networkConfig() ([]byte, error) {
	ethernets := map[string]any{}
	resolver := b.in.DNS.v2()
	for _, i := range b.in.Interfaces {
		mac, err := i.hardwareAddr()
		if err != nil {
			return nil, err
		}
		e := map[string]any{"match": map[string]any{"macaddress": mac}, "set-name": i.Name}
		if i.MTU > 0 {
			e["mtu"] = i.MTU
		}
		v4, v6 := i.families()
		switch {
		case !v4 && !v6:
			e["optional"] = true
		case b.in.Options.ForceDHCP:
			if v4 {
				e["dhcp4"] = true
			}
			if v6 {
				e["dhcp6"] = true
			}
		default:
			b.static(i, e)
			if len(resolver) > 0 {
				e["nameservers"], resolver = resolver, nil
			}
		}
		ethernets[i.Name] = e
	}
	text, err := yaml.Marshal(map[string]any{"version": 2, "ethernets": ethernets})
	if err != nil {
		return nil, fmt.Errorf("network config: %v: %w", err, errdefs.ErrInvalidArgument)
	}
	return text, nil
}

// static puts an interface's addresses and routes into e, the interface's configuration. It also turns off router
// advertisements.
//
// cloud-init 22.4 has three bugs when it converts this format instead of passing it to netplan. It turns a route to
// ::/0 into a route to ::/64, so static uses gateway6 instead. It rejects the destination "default", so static writes
// the prefix. And it fails on a route without a gateway. CNI plugins add such routes to reach a gateway; static sets
// the flag on-link instead, which has the same effect.
func (b *builder) static(i Interface, e map[string]any) {
	var addrs, routes []any
	for _, a := range i.Addrs {
		addrs = append(addrs, a.String())
	}
	e["addresses"], e["dhcp4"], e["dhcp6"], e["accept-ra"] = addrs, false, false, false
	for _, r := range b.gatewayRoutes(i) {
		if r.Dst == netip.PrefixFrom(netip.IPv6Unspecified(), 0) && r.Metric == 0 && !i.onLink(r.Via) && e["gateway6"] == nil {
			e["gateway6"] = r.Via.String()
			continue
		}
		route := map[string]any{"to": r.Dst.String(), "via": r.Via.String()}
		if i.onLink(r.Via) {
			route["on-link"] = true
		}
		if r.Metric > 0 {
			route["metric"] = r.Metric
		}
		routes = append(routes, route)
	}
	if routes != nil {
		e["routes"] = routes
	}
}

// gatewayRoutes returns the routes that have a gateway. It warns about the other routes, except those that only lead to
// a gateway.
func (b *builder) gatewayRoutes(i Interface) (routes []Route) {
	for _, r := range i.Routes {
		if r.Via.IsValid() {
			routes = append(routes, r)
			continue
		}
		toGateway := slices.ContainsFunc(i.Routes, func(other Route) bool { return r.Dst.IsSingleIP() && r.Dst.Addr() == other.Via })
		if !toGateway {
			b.warn("interface %s: cloud-init cannot configure the route to %s on the link; guests that use DHCP get it", i.Name, r.Dst)
		}
	}
	return routes
}

func (d DNS) v2() map[string]any {
	m := map[string]any{}
	if len(d.Servers) > 0 {
		m["addresses"] = d.Servers
	}
	if len(d.Search) > 0 {
		m["search"] = d.Search
	}
	return m
}

// networkData returns the network configuration in OpenStack's format. The format has no fields for search domains and
// metrics, so networkData uses field names that cloud-init passes through (22.4: sources/helpers/openstack.py,
// convert_net_json).
func (b *builder) networkData() ([]byte, error) {
	links, networks, services := []any{}, []any{}, []any{}
	for _, i := range b.in.Interfaces {
		mac, err := i.hardwareAddr()
		if err != nil {
			return nil, err
		}
		link := map[string]any{"id": i.Name, "type": "phy", "ethernet_mac_address": mac}
		if i.MTU > 0 {
			link["mtu"] = i.MTU
		}
		links = append(links, link)
		v4, v6 := i.families()
		if b.in.Options.ForceDHCP {
			if v4 {
				networks = append(networks, map[string]any{"link": i.Name, "type": "ipv4_dhcp"})
			}
			if v6 {
				networks = append(networks, map[string]any{"link": i.Name, "type": "ipv6_dhcp"})
			}
		} else {
			networks = append(networks, b.openStackNetworks(i)...)
		}
	}
	for n, network := range networks {
		id := fmt.Sprintf("net-%d", n)
		network.(map[string]any)["id"], network.(map[string]any)["network_id"] = id, id
	}
	search := b.in.DNS.Search
	for _, s := range b.in.DNS.Servers {
		service := map[string]any{"type": "dns", "address": s}
		if len(search) > 0 {
			service["search"], search = search, nil
		}
		services = append(services, service)
	}
	if len(search) > 0 && len(networks) > 0 { // no DNS server's entry holds the search domains
		networks[0].(map[string]any)["dns_search"] = search
	}
	return encodeJSON(map[string]any{"links": links, "networks": networks, "services": services})
}

// openStackNetworks returns one network per address. The first network of each family has the family's routes.
func (b *builder) openStackNetworks(i Interface) (networks []any) {
	done, all := map[bool]bool{}, b.gatewayRoutes(i)
	for _, a := range i.Addrs {
		is4, kind := a.Addr().Is4(), "ipv6"
		if is4 {
			kind = "ipv4"
		}
		network := map[string]any{"link": i.Name, "type": kind, "ip_address": a.Addr().String(), "netmask": netmask(a)}
		var routes []any
		for _, r := range all {
			if r.Dst.Addr().Is4() == is4 && !done[is4] {
				route := map[string]any{"network": r.Dst.Addr().String(), "netmask": netmask(r.Dst), "gateway": r.Via.String()}
				if r.Metric > 0 {
					route["metric"] = r.Metric
				}
				if i.onLink(r.Via) {
					b.warn("interface %s: configdrive cannot configure the gateway %s of %s, which is outside the interface's networks; nocloud can, and guests that use DHCP get it", i.Name, r.Via, r.Dst)
				}
				routes = append(routes, route)
			}
		}
		if routes != nil {
			network["routes"] = routes
		}
		done[is4] = true
		networks = append(networks, network)
	}
	return networks
}

// netmask returns a prefix's mask in the form of an address.
func netmask(p netip.Prefix) string {
	return net.IP(net.CIDRMask(p.Bits(), p.Addr().BitLen())).String()
}
