package tap_test

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv6"
	"github.com/insomniacslk/dhcp/iana"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/tap"
)

// udhcpc runs busybox's DHCP client until it has an address, configures it, and returns the client's environment.
func (g *guest) udhcpc(args ...string) map[string]string {
	g.n.t.Helper()
	dir := g.n.t.TempDir()
	script, result := filepath.Join(dir, "script"), filepath.Join(dir, "env")
	text := fmt.Sprintf("#!/bin/sh\n[ $1 = bound ] || exit 0\nenv >%s\nip addr add $ip/$mask dev $interface\nip route add default via $router\n", result)
	if err := os.WriteFile(script, []byte(text), 0o755); err != nil {
		g.n.t.Fatal(err)
	}
	g.n.must(g.netns, append([]string{"busybox", "udhcpc", "-i", "eth0", "-f", "-q", "-n", "-t", "20", "-T", "1", "-s", script, "-O", "search",
		"-O", "mtu", "-O", "staticroutes"}, args...)...)
	data, err := os.ReadFile(result)
	if err != nil {
		g.n.t.Fatal(err)
	}
	env := map[string]string{}
	for line := range strings.Lines(string(data)) {
		if key, value, ok := strings.Cut(strings.TrimSpace(line), "="); ok {
			env[key] = value
		}
	}
	return env
}

// TestDHCP: a DHCP client gets the guest's whole network, also after a daemon restart, and no neighbour receives DHCP.
func TestDHCP(t *testing.T) {
	n := newNode(t, "")
	r := n.pod("pod")
	neighbour := n.pod("neighbour")
	receivedPorts := n.capturePorts(neighbour.Netns, "eth0")
	interfaces := n.wire("pod")
	g := n.guest("pod", interfaces)
	first := n.serve("pod", interfaces)
	env := g.udhcpc()
	want := map[string]string{
		"ip": r.IPs[0].String(), "mask": "24", "router": interfaces[0].Routes[0].GW.String(), "dns": "10.96.0.10", "hostname": "guest",
		"domain": "ns.svc.cluster.local", "search": "ns.svc.cluster.local svc.cluster.local", "mtu": "1500",
		"staticroutes": "0.0.0.0/0 " + interfaces[0].Routes[0].GW.String(), "lease": "31536000", "serverid": interfaces[0].Routes[0].GW.String(),
	}
	for key, value := range want {
		if env[key] != value {
			t.Errorf("DHCP gave %s = %q, want %q", key, env[key], value)
		}
	}
	n.ping("", r.IPs[0].String())
	n.ping(g.netns, neighbour.IPs[0].String())

	if err := first.Close(); err != nil { // the next daemon serves the guest
		t.Fatal(err)
	}
	again, err := tap.Read(n.record("pod"))
	if err != nil {
		t.Fatal(err)
	}
	n.serve("pod", again)
	n.must(g.netns, "ip", "addr", "flush", "dev", "eth0")
	// The client asks for an address that it had elsewhere.
	if env := g.udhcpc("-r", "10.1.2.3"); env["ip"] != r.IPs[0].String() {
		t.Errorf("the second Responder gave %v, want address %s", env, r.IPs[0])
	}
	for _, port := range receivedPorts() {
		if port == 67 || port == 68 {
			t.Errorf("the neighbour received a DHCP frame to port %d", port)
		}
	}
}

// packetSocket opens a socket for all frames on an interface.
func (n *node) packetSocket(netns, name string) (file *os.File, index int) {
	n.t.Helper()
	n.inside(netns, func() error {
		link, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		index = link.Attrs().Index
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			return err
		}
		file = os.NewFile(uintptr(fd), "packets")
		return unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: 0x0300, Ifindex: index}) // ETH_P_ALL in network order
	})
	n.t.Cleanup(func() { file.Close() })
	return file, index
}

// capturePorts captures UDP over IPv4 on an interface. The returned function returns the destination ports so far.
func (n *node) capturePorts(netns, name string) func() []uint16 {
	n.t.Helper()
	file, _ := n.packetSocket(netns, name)
	return func() []uint16 {
		var ports []uint16
		_ = file.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
		buf := make([]byte, 70000)
		for {
			count, err := file.Read(buf)
			if err != nil {
				return ports
			}
			if count > 38 && buf[12] == 8 && buf[13] == 0 && buf[23] == unix.IPPROTO_UDP {
				ports = append(ports, uint16(buf[36])<<8|uint16(buf[37]))
			}
		}
	}
}

// TestFilters: others' DHCP and router messages and the guest's own broadcasts do not reach the guest; other frames do.
func TestFilters(t *testing.T) {
	n := newNode(t, "")
	n.pod("pod")
	neighbour := n.pod("neighbour")
	interfaces := n.wire("pod")
	g := n.guest("pod", interfaces)
	arrived, _ := n.packetSocket(g.netns, "eth0")
	wire, index := n.packetSocket(neighbour.Netns, "eth0")

	guest, err := net.ParseMAC(interfaces[0].MAC)
	if err != nil {
		t.Fatal(err)
	}
	other, all := [6]byte{2, 0, 0, 0, 0, 0x99}, [6]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
	at := netip.MustParseAddrPort
	const last = "the last one"
	refused := map[string][]byte{
		"DHCPv4": tap.UDP4Frame(all, other, at("10.0.0.9:67"), at("255.255.255.255:68"), []byte("DHCPv4")),
		"DHCPv6": tap.UDP6Frame([6]byte(guest), other, at("[fe80::9]:547"), at("[fe80::8]:546"), []byte("DHCPv6")),
		"advertisement": tap.ICMP6Frame(all, other, at("[fe80::9]:0").Addr(), at("[ff02::1]:0").Addr(),
			append([]byte{134, 0, 0, 0, 64, 0, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0}, "advertisement..."...)),
		"reflection": tap.UDP4Frame(all, [6]byte(guest), at("10.0.0.9:5"), at("255.255.255.255:5"), []byte("reflection")),
	}
	passed := map[string][]byte{
		"to a DHCP server": tap.UDP4Frame(all, other, at("0.0.0.0:68"), at("255.255.255.255:67"), []byte("to a DHCP server")),
		"neighbour, advert": tap.ICMP6Frame(all, other, at("[fe80::9]:0").Addr(), at("[ff02::1]:0").Addr(),
			append([]byte{136, 0, 0, 0}, "neighbour, advert"...)),
		last: tap.UDP4Frame(all, other, at("10.0.0.9:9"), at("255.255.255.255:9"), []byte(last)),
	}
	send := func(frame []byte) {
		t.Helper()
		raw, err := wire.SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		_ = raw.Control(func(fd uintptr) { err = unix.Sendto(int(fd), frame, 0, &unix.SockaddrLinklayer{Ifindex: index}) })
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, frame := range refused {
		send(frame)
	}
	for name, frame := range passed {
		if name != last {
			send(frame)
		}
	}
	send(passed[last])

	received := map[string]bool{}
	_ = arrived.SetReadDeadline(time.Now().Add(20 * time.Second))
	buf := make([]byte, 70000)
	for !received[last] {
		count, err := arrived.Read(buf)
		if err != nil {
			t.Fatalf("read on the guest's interface: %v; received so far: %v", err, received)
		}
		for _, frames := range []map[string][]byte{refused, passed} {
			for name := range frames {
				if strings.Contains(string(buf[:count]), name) {
					received[name] = true
				}
			}
		}
	}
	for name := range refused {
		if received[name] {
			t.Errorf("the guest received %s, want it filtered", name)
		}
	}
	for name := range passed {
		if !received[name] {
			t.Errorf("the guest did not receive %s", name)
		}
	}
}

// only6 is a chain with IPv6 only.
const only6 = `{"cniVersion":"1.0.0","name":"six%d","plugins":[{"type":"bridge","bridge":"six%d","isGateway":true,
 "ipam":{"type":"host-local","dataDir":"/run/six%d","ranges":[[{"subnet":"fd98:%d::/64"}]],"routes":[{"dst":"::/0"}]}}]}`

// TestIPv6: a guest learns its prefix and router from advertisements and its addresses by DHCPv6, and reaches a host
// beyond the router, whose gateway has another address.
func TestIPv6(t *testing.T) {
	for name, configuration := range map[string]string{"both families": "", "only IPv6": only6} {
		t.Run(name, func(t *testing.T) { testIPv6(t, configuration) })
	}
}

func testIPv6(t *testing.T, configuration string) {
	n := newNode(t, configuration)
	r := n.pod("pod")
	beyond := "fd77::77"
	n.must("", "ip", "-6", "addr", "add", beyond+"/128", "dev", "lo")
	t.Cleanup(func() { n.must("", "ip", "-6", "addr", "del", beyond+"/128", "dev", "lo") })
	interfaces := n.wire("pod")
	n.serve("pod", interfaces)
	g := n.guest("pod", interfaces)
	eventually(t, 30*time.Second, "a default route from an advertisement", func() bool {
		return strings.Contains(n.must(g.netns, "ip", "-6", "route"), "default via fe80::")
	})
	routes := n.must(g.netns, "ip", "-6", "route")
	mine := r.IPs[len(r.IPs)-1]
	prefix := netip.PrefixFrom(mine, 64).Masked().String()
	if !strings.Contains(routes, prefix+" dev eth0 proto kernel") {
		t.Errorf("no route to %s from the advertisement:\n%s", prefix, routes)
	}
	if addrs := n.must(g.netns, "ip", "-6", "addr", "show", "scope", "global"); addrs != "" {
		t.Errorf("the guest configured an address by itself:\n%s", addrs)
	}
	eventually(t, 10*time.Second, "link-local address of the guest is usable", func() bool {
		return !strings.Contains(n.must(g.netns, "ip", "-6", "addr", "show", "dev", "eth0"), "tentative")
	})
	got, dns := g.dhcp6(interfaces[0].MAC)
	if len(got) != 1 || got[0] != mine || len(dns) != 1 || dns[0].String() != "fd96::a" {
		t.Fatalf("DHCPv6: addresses %v, servers %v; want %s", got, dns, mine)
	}
	g.add(netip.PrefixFrom(got[0], 128), "eth0")
	n.ping(g.netns, beyond)
	n.ping("", got[0].String())
	neighbours := n.must(g.netns, "ip", "-6", "neigh")
	if !strings.Contains(neighbours, "router") {
		t.Errorf("the guest knows no router among its neighbours:\n%s", neighbours)
	}
}

// dhcp6 acts as a DHCPv6 client: it sends solicit and request, and returns the addresses and DNS servers.
func (g *guest) dhcp6(mac string) (addrs []netip.Addr, dns []net.IP) {
	t := g.n.t
	t.Helper()
	file, err := g.n.Listen(t.Context(), g.netns, "udp", "[::]:546")
	if err != nil {
		t.Fatal(err)
	}
	conn, err := net.FilePacketConn(file)
	_ = file.Close()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	var index int
	g.inside(func() error {
		link, err := netlink.LinkByName("eth0")
		if err == nil {
			index = link.Attrs().Index
		}
		return err
	})
	server := &net.UDPAddr{IP: net.ParseIP("ff02::1:2"), Port: 547, Zone: fmt.Sprint(index)}
	ask := func(m *dhcpv6.Message, want dhcpv6.MessageType) *dhcpv6.Message {
		t.Helper()
		for range 10 {
			if _, err := conn.WriteTo(m.ToBytes(), server); err != nil {
				t.Fatal(err)
			}
			_ = conn.SetReadDeadline(time.Now().Add(2 * time.Second))
			buf := make([]byte, 4096)
			count, _, err := conn.ReadFrom(buf)
			if err != nil {
				continue
			}
			answer, err := dhcpv6.MessageFromBytes(buf[:count])
			if err != nil || answer.Type() != want || answer.TransactionID != m.TransactionID {
				t.Fatalf("answer to %s = %v (error %v), want %s", m.Type(), answer, err, want)
			}
			return answer
		}
		t.Fatalf("no answer to %s", m.Type())
		return nil
	}
	hw, err := net.ParseMAC(mac)
	if err != nil {
		t.Fatal(err)
	}
	solicit, err := dhcpv6.NewSolicit(hw)
	if err != nil {
		t.Fatal(err)
	}
	request, err := dhcpv6.NewRequestFromAdvertise(ask(solicit, dhcpv6.MessageTypeAdvertise))
	if err != nil {
		t.Fatal(err)
	}
	reply := ask(request, dhcpv6.MessageTypeReply)
	if s := reply.Options.Status(); s != nil && s.StatusCode != iana.StatusSuccess {
		t.Errorf("status of the reply = %v, want success", s)
	}
	for _, a := range reply.Options.OneIANA().Options.Addresses() {
		addr, _ := netip.AddrFromSlice(a.IPv6Addr)
		addrs = append(addrs, addr)
	}
	return addrs, reply.Options.DNS()
}

// TestResponderEnds: Close releases all descriptors and goroutines, even if the tap is removed first.
func TestResponderEnds(t *testing.T) {
	n := newNode(t, "")
	n.pod("pod")
	interfaces := n.wire("pod")
	descriptors := func() int {
		entries, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(entries)
	}
	serve := func() *tap.Responder {
		r, err := tap.Serve(t.Context(), n.Netns("pod"), interfaces, tap.Config{})
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	if err := serve().Close(); err != nil { // create what the process creates only once
		t.Fatal(err)
	}
	files, routines := descriptors(), runtime.NumGoroutine()
	var all []*tap.Responder
	for range 20 {
		all = append(all, serve())
	}
	n.unwire("pod")
	for _, r := range all {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
		if err := r.Close(); err != nil {
			t.Errorf("second Close: %v", err)
		}
	}
	if now := descriptors(); now > files {
		t.Errorf("%d descriptors after Close, want at most %d", now, files)
	}
	eventually(t, 5*time.Second, "goroutines have ended", func() bool { return runtime.NumGoroutine() <= routines })
}
