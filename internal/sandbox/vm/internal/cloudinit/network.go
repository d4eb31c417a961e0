package cloudinit

import (
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/containerd/errdefs"
	"sigs.k8s.io/yaml"
)

// hardwareAddr is the MAC of an interface in lower case.
func (i Interface) hardwareAddr() (string, error) {
	mac, err := net.ParseMAC(i.MAC)
	if err != nil || len(mac) != 6 || !linkName.MatchString(i.Name) {
		return "", fmt.Errorf("interface %q, MAC %q: not a name and a MAC: %w", i.Name, i.MAC, errdefs.ErrInvalidArgument)
	}
	return mac.String(), nil
}

// has tells which families the interface has addresses of.
func (i Interface) has() (v4, v6 bool) {
	for _, a := range i.Addrs {
		v4, v6 = v4 || a.Addr().Is4(), v6 || a.Addr().Is6()
	}
	return v4, v6
}

// onLink reports whether the gateway of a route is outside of the interface's networks, so that the guest must be told
// that it is on the link. A link-local one of IPv6 always is, and known to be.
func (i Interface) onLink(via netip.Addr) bool {
	for _, a := range i.Addrs {
		if a.Masked().Contains(via) {
			return false
		}
	}
	return !via.Is6() || !via.IsLinkLocalUnicast()
}

// networkConfig is the network in version 2 of cloud-init's form.
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
		v4, v6 := i.has()
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

// static puts addresses and routes into an interface's configuration. Router advertisements, ours
// or somebody else's on the same network, would give it further ones.
//
// Three things are as they are for cloud-init's sake, which hands this form to netplan as it is and turns it into others'
// by itself: 22.4 makes ::/64 of the route to ::/0, so that there is gateway6; it refuses "default" for both; and it fails
// altogether on a route without a gateway. The latter is implied by on-link where it leads to a gateway, as CNI's do.
func (b *builder) static(i Interface, e map[string]any) {
	var addrs, routes []any
	for _, a := range i.Addrs {
		addrs = append(addrs, a.String())
	}
	e["addresses"], e["dhcp4"], e["dhcp6"], e["accept-ra"] = addrs, false, false, false
	for _, r := range b.expressible(i) {
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

// expressible are the routes that have a gateway. Of the others, those that lead to no gateway are warned about.
func (b *builder) expressible(i Interface) (routes []Route) {
	for _, r := range i.Routes {
		if r.Via.IsValid() {
			routes = append(routes, r)
			continue
		}
		toGateway := slices.ContainsFunc(i.Routes, func(other Route) bool { return r.Dst.IsSingleIP() && r.Dst.Addr() == other.Via })
		if !toGateway {
			b.warn("interface %s: the route to %s over the link is not in the network configuration, which cannot express it; DHCP gives it to a guest that asks", i.Name, r.Dst)
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

// networkData is the network in OpenStack's form. That knows neither search domains nor metrics; they are under the names that
// cloud-init passes on from there (22.4: sources/helpers/openstack.py, convert_net_json).
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
		v4, v6 := i.has()
		if b.in.Options.ForceDHCP {
			if v4 {
				networks = append(networks, map[string]any{"link": i.Name, "type": "ipv4_dhcp"})
			}
			if v6 {
				networks = append(networks, map[string]any{"link": i.Name, "type": "ipv6_dhcp"})
			}
		} else {
			networks = append(networks, b.openStack(i)...)
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
	if len(search) > 0 && len(networks) > 0 { // no server to tell them with
		networks[0].(map[string]any)["dns_search"] = search
	}
	return encodeJSON(map[string]any{"links": links, "networks": networks, "services": services})
}

// openStack is a network per address. Routes are with the first one of their family.
func (b *builder) openStack(i Interface) (networks []any) {
	told, all := map[bool]bool{}, b.expressible(i)
	for _, a := range i.Addrs {
		is4, kind := a.Addr().Is4(), "ipv6"
		if is4 {
			kind = "ipv4"
		}
		network := map[string]any{"link": i.Name, "type": kind, "ip_address": a.Addr().String(), "netmask": netmask(a)}
		var routes []any
		for _, r := range all {
			if r.Dst.Addr().Is4() == is4 && !told[is4] {
				route := map[string]any{"network": r.Dst.Addr().String(), "netmask": netmask(r.Dst), "gateway": r.Via.String()}
				if r.Metric > 0 {
					route["metric"] = r.Metric
				}
				if i.onLink(r.Via) {
					b.warn("interface %s: the gateway %s of %s is in none of its networks, which the form configdrive cannot express; the form nocloud can, and DHCP gives it to a guest that asks", i.Name, r.Via, r.Dst)
				}
				routes = append(routes, route)
			}
		}
		if routes != nil {
			network["routes"] = routes
		}
		told[is4] = true
		networks = append(networks, network)
	}
	return networks
}

// netmask is the mask of a prefix as an address.
func netmask(p netip.Prefix) string {
	return net.IP(net.CIDRMask(p.Bits(), p.Addr().BitLen())).String()
}
