package network

import (
	"io"
	"net"
	"net/netip"
	"os/exec"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/tripod-run/tripod/test/accept"
)

// The world is a network that the test host is connected to. It has no route back to the pods.
const (
	worldLink = "world0"
	hostAddr  = "192.0.2.1"
	worldAddr = "192.0.2.2"
)

// joinWorld makes the world in its own namespace, with a server that sends each client the client's address.
func joinWorld(t *testing.T, n *node) {
	t.Helper()
	netns, err := n.NewNetns(t.Context(), "world")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = n.RemoveNetns(t.Context(), "world") })
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: worldLink}, PeerName: "world1"}))
	up := func(name, cidr string) {
		link, err := netlink.LinkByName(name)
		must(err)
		addr, err := netlink.ParseAddr(cidr)
		must(err)
		must(netlink.AddrAdd(link, addr))
		must(netlink.LinkSetUp(link))
	}
	up(worldLink, hostAddr+"/24")
	t.Cleanup(func() {
		if link, err := netlink.LinkByName(worldLink); err == nil {
			_ = netlink.LinkDel(link)
		}
	})
	must(exec.CommandContext(t.Context(), "ip", "link", "set", "world1", "netns", netns).Run())
	must(exec.CommandContext(t.Context(), "nsenter", "--net="+netns, "sh", "-ec",
		"ip addr add "+worldAddr+"/24 dev world1; ip link set world1 up").Run())

	file, err := n.Listen(t.Context(), netns, "tcp", worldAddr+":80")
	must(err)
	listener, err := net.FileListener(file)
	must(err)
	_ = file.Close()
	accept.Each(t, listener, func(conn net.Conn) {
		_, _ = io.WriteString(conn, netip.MustParseAddrPort(conn.RemoteAddr().String()).Addr().String())
	})
}

func TestPodsReachTheWorldWithTheNodesAddress(t *testing.T) {
	n := newNode(t, func(c *Config) { c.Default.SubnetV4 = "10.93.0.0/24" })
	joinWorld(t, n)
	r := n.setup(Attachment{ID: "pod"})
	n.mustAsk(r.Netns, worldAddr+":80", hostAddr)

	// A firewall reloads and flushes all NAT rules.
	if out, err := exec.Command("iptables", "--wait", "-t", "nat", "-F").CombinedOutput(); err != nil {
		t.Fatalf("flush the NAT rules: %v: %s", err, out)
	}
	n.refreshStatus()
	n.mustAsk(r.Netns, worldAddr+":80", hostAddr)

	// Between pods, addresses are not masked.
	other := n.setup(Attachment{ID: "other"})
	file, err := n.Listen(t.Context(), r.Netns, "udp", "0.0.0.0:53")
	if err != nil {
		t.Fatal(err)
	}
	packets, err := net.FilePacketConn(file)
	_ = file.Close()
	if err != nil {
		t.Fatal(err)
	}
	defer packets.Close()
	conn, err := n.Dial(t.Context(), other.Netns, "udp", r.IPs[0].String()+":53")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 16)
	count, from, err := packets.ReadFrom(buf)
	if err != nil || string(buf[:count]) != "hello" || netip.MustParseAddrPort(from.String()).Addr() != other.IPs[0] {
		t.Errorf("ReadFrom = %q from %v, %v, want \"hello\" from %s", buf[:count], from, err, other.IPs[0])
	}
	n.teardown(Attachment{ID: "pod"})
	n.teardown(Attachment{ID: "other"})
}
