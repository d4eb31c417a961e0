package network

import (
	"net"
	"testing"

	"github.com/vishvananda/netlink"
)

// uplink makes an interface with a default route that ends with the test.
func uplink(t *testing.T, name string, mtu, priority int, everything, gateway, address string) netlink.Link {
	t.Helper()
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU, attrs.Flags = name, mtu, net.FlagUp
	link := &netlink.Veth{LinkAttrs: attrs, PeerName: name + "p"}
	if err := netlink.LinkAdd(link); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = netlink.LinkDel(link) })
	addr, err := netlink.ParseAddr(address)
	if err == nil {
		err = netlink.AddrAdd(link, addr)
	}
	_, dst, _ := net.ParseCIDR(everything)
	if err == nil {
		err = netlink.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Dst: dst, Gw: net.ParseIP(gateway), Priority: priority})
	}
	if err != nil {
		t.Fatal(err)
	}
	return link
}

func mtuOf(t *testing.T, name string) int {
	t.Helper()
	link, err := netlink.LinkByName(name)
	if err != nil {
		t.Fatal(err)
	}
	return link.Attrs().MTU
}

// TestMTUOfTheUplink: the pods' interfaces and the bridge have the uplink's MTU, and follow its changes.
func TestMTUOfTheUplink(t *testing.T) {
	link := uplink(t, "uplink0", 1400, 1, "0.0.0.0/0", "192.0.2.1", "192.0.2.2/24")
	n := newNode(t, nil)
	podMTU := func(id string) int {
		for _, i := range n.setup(Attachment{ID: id}).Interfaces {
			if i.InPod {
				return i.MTU
			}
		}
		return 0
	}
	if pod, bridge := podMTU("pod"), mtuOf(t, n.cfg.Default.Bridge); pod != 1400 || bridge != 1400 {
		t.Errorf("MTU of the pod is %d and of the bridge %d, want the uplink's 1400", pod, bridge)
	}
	defer n.teardown(Attachment{ID: "pod"})
	if err := netlink.LinkSetMTU(link, 1380); err != nil {
		t.Fatal(err)
	}
	n.reload() // as every 10 s
	if pod, bridge := podMTU("later"), mtuOf(t, n.cfg.Default.Bridge); pod != 1380 || bridge != 1380 {
		t.Errorf("MTU of a later pod is %d and of the bridge %d, want the uplink's new 1380", pod, bridge)
	}
	defer n.teardown(Attachment{ID: "later"})

	set := newNode(t, func(c *Config) { c.Default.MTU, c.Default.SubnetV4 = 1450, "10.93.0.0/24" })
	set.setup(Attachment{ID: "pod"})
	defer set.teardown(Attachment{ID: "pod"})
	if bridge := mtuOf(t, set.cfg.Default.Bridge); bridge != 1450 {
		t.Errorf("MTU of the bridge is %d, want the configured 1450", bridge)
	}
}

// TestUplinkMTU: the smallest MTU of the default routes counts, loopback's never, and IPv6 only without IPv4.
func TestUplinkMTU(t *testing.T) {
	want := func(mtu int) {
		t.Helper()
		if got, err := UplinkMTU(); got != mtu || err != nil {
			t.Errorf("UplinkMTU = %d, %v, want %d", got, err, mtu)
		}
	}
	_, everything, _ := net.ParseCIDR("0.0.0.0/0")
	loopback := &netlink.Route{LinkIndex: loopbackIndex, Dst: everything, Scope: netlink.SCOPE_LINK}
	if err := netlink.RouteAdd(loopback); err != nil {
		t.Fatal(err)
	}
	want(0)
	if err := netlink.RouteDel(loopback); err != nil {
		t.Fatal(err)
	}
	uplink(t, "uplink6", 1300, 1, "::/0", "fd01::1", "fd01::2/64")
	want(1300)
	uplink(t, "uplink1", 1500, 1, "0.0.0.0/0", "192.0.2.1", "192.0.2.2/24")
	want(1500)
	uplink(t, "uplink2", 1420, 2, "0.0.0.0/0", "198.51.100.1", "198.51.100.2/24")
	want(1420)
}
