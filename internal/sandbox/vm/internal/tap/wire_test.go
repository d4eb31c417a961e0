package tap_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/network"
	"github.com/tripod-run/tripod/internal/sandbox/vm/internal/tap"
)

// hairpin is a chain with a bridge whose ports reflect frames.
const hairpin = `{"cniVersion":"1.0.0","name":"hairpin%d","plugins":[{"type":"bridge","bridge":"hairpin%d","isGateway":true,
 "hairpinMode":true,"ipam":{"type":"host-local","dataDir":"/run/hairpin%d","ranges":[[{"subnet":"10.98.%d.0/24"}],[{"subnet":"fd98:%d::/64"}]],
 "routes":[{"dst":"0.0.0.0/0"},{"dst":"::/0"}]}}]}`

// TestGuestTakesThePodsPlace: the guest has the pod's addresses for neighbours on the bridge, for the node and for
// other guests, in both families and directions, with little and much data.
func TestGuestTakesThePodsPlace(t *testing.T) {
	for name, configuration := range map[string]string{"default": "", "hairpin": hairpin} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, configuration)
			neighbour, a, b := n.pod("neighbour"), n.pod("a"), n.pod("b")
			interfaces, others := n.wire("a"), n.wire("b")
			if got := addrs(interfaces[0]); !reflect.DeepEqual(got, a.IPs) {
				t.Fatalf("addresses of the guest = %v, want the pod's %v", got, a.IPs)
			}
			n.serve("a", interfaces)
			n.serve("b", others)
			g, other := n.guest("a", interfaces), n.guest("b", others)
			g.static(interfaces)
			other.static(others)
			for _, ip := range a.IPs {
				n.ping("", ip.String())
				n.ping(neighbour.Netns, ip.String())
				n.ping(other.netns, ip.String())
			}
			for _, r := range []*network.Result{neighbour, b} {
				for _, ip := range r.IPs {
					n.ping(g.netns, ip.String())
				}
			}
			const size = 50 << 20
			n.listener(g.netns, "[::]:80", body(size))
			for from, netns := range map[string]string{"node": "", "pod": neighbour.Netns, "guest": other.netns} {
				for _, ip := range a.IPs {
					began := time.Now()
					if got := n.fetch(netns, netip.AddrPortFrom(ip, 80).String()); got != size {
						t.Errorf("%s got %d bytes from %s, want %d", from, got, ip, size)
					}
					t.Logf("%s: 50 MiB from %s in %s", from, ip, time.Since(began))
				}
			}
			n.listener(neighbour.Netns, "[::]:80", body(size))
			if got := n.fetch(g.netns, netip.AddrPortFrom(neighbour.IPs[0], 80).String()); got != size {
				t.Errorf("the guest got %d bytes, want %d", got, size)
			}
		})
	}
}

func addrs(i tap.Interface) []netip.Addr {
	var all []netip.Addr
	for _, a := range i.Addrs {
		all = append(all, a.Addr())
	}
	return all
}

// TestNodeSeesThePod: host ports, statistics, CHECK and DEL work for a pod whose addresses a guest has.
func TestNodeSeesThePod(t *testing.T) {
	n := newNode(t, "")
	pod := network.Attachment{ID: "pod"}
	r := n.pod(pod.ID, network.PortMapping{HostPort: 8099, ContainerPort: 80})
	other := n.pod("other")
	interfaces := n.wire(pod.ID)
	g := n.guest("pod", interfaces)
	g.static(interfaces)
	if err := n.Check(t.Context(), pod); err != nil {
		t.Error(err)
	}
	const size = 1 << 20
	n.listener(g.netns, "[::]:80", body(size))
	gateway := interfaces[0].Routes[0].GW
	if got := n.fetch(other.Netns, netip.AddrPortFrom(gateway, 8099).String()); got != size {
		t.Errorf("got %d bytes through the host port, want %d", got, size)
	}
	stats, err := n.Stats(r.Netns)
	if err != nil {
		t.Fatal(err)
	}
	if len(stats) != 1 || stats[0].Name != "eth0" || stats[0].TxBytes < size || stats[0].RxBytes == 0 || stats[0].RxBytes > size {
		t.Errorf("statistics after the guest sent %d bytes = %+v, want eth0 with these bytes", size, stats)
	}
	// DEL without Unwire, as when the daemon lost its record of the machine, still frees everything.
	if err := n.Teardown(t.Context(), pod); err != nil {
		t.Error(err)
	}
	if leases, err := filepath.Glob(filepath.Join(n.dir, "cni", "leases", "*", r.IPs[0].String())); err != nil || len(leases) > 0 {
		t.Errorf("leases after Teardown = %v (error %v), want none", leases, err)
	}
	rules := n.must("", "iptables", "-t", "nat", "-S")
	if strings.Contains(rules, r.IPs[0].String()) {
		t.Errorf("iptables rules of the pod remain after Teardown:\n%s", rules)
	}
	n.wire("other")
	n.unwire("other")
	if err := n.Check(t.Context(), network.Attachment{ID: "other"}); err != nil {
		t.Errorf("Check after Unwire: %v", err)
	}
}

// TestPluginsDelete: after Unwire, DEL of executable plugins finds the addresses and leaves no rule.
func TestPluginsDelete(t *testing.T) {
	n := newNode(t, strings.ReplaceAll(hairpin, `"hairpinMode":true`, `"ipMasq":true`), func(c *network.Config) { c.Executables = true })
	r := n.pod("pod")
	n.wire("pod")
	n.unwire("pod")
	if err := n.Check(t.Context(), network.Attachment{ID: "pod"}); err != nil {
		t.Error(err)
	}
	rules := func() string {
		return n.must("", "iptables", "-t", "nat", "-S") + n.must("", "ip6tables", "-t", "nat", "-S")
	}
	if !strings.Contains(rules(), r.IPs[0].String()) {
		t.Errorf("iptables has no rules for %s:\n%s", r.IPs[0], rules())
	}
	if err := n.Teardown(t.Context(), network.Attachment{ID: "pod"}); err != nil {
		t.Fatal(err)
	}
	for _, ip := range r.IPs {
		if strings.Contains(rules(), ip.String()) {
			t.Errorf("rules for %s remain after Teardown:\n%s", ip, rules())
		}
	}
}

// TestWireAgain: a second Wire and Read return the first result without stopping traffic; Unwire restores everything.
func TestWireAgain(t *testing.T) {
	n := newNode(t, "")
	r := n.pod("pod")
	look := func() string {
		return n.must(r.Netns, "ip", "addr") + n.must(r.Netns, "ip", "route") + n.must(r.Netns, "ip", "-6", "route")
	}
	before := look()
	first := n.wire("pod")
	g := n.guest("pod", first)
	g.static(first)
	if left := n.must(r.Netns, "ip", "-br", "addr", "show", "dev", "eth0"); len(strings.Fields(left)) != 2 {
		t.Errorf("eth0 still has addresses after Wire: %s", left)
	}
	again := n.wire("pod")
	read, err := tap.Read(n.record("pod"))
	if err != nil || !reflect.DeepEqual(first, again) || !reflect.DeepEqual(first, read) {
		t.Errorf("results differ or Read failed:\nfirst Wire %+v\nsecond Wire %+v\nRead %+v, %v", first, again, read, err)
	}
	n.ping("", r.IPs[0].String())

	if _, err := tap.Open(t.Context(), r.Netns, first[0].Tap); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("second Open of the tap: got error %v, want ErrFailedPrecondition", err)
	}
	if _, err := tap.Open(t.Context(), r.Netns, "tap7"); !errdefs.IsNotFound(err) {
		t.Errorf("Open of a missing tap: got error %v, want ErrNotFound", err)
	}
	links := n.must(r.Netns, "ip", "-d", "link")
	if !strings.Contains(links, "user 4242") || !strings.Contains(links, "group 4243") || !strings.Contains(links, "persist on") ||
		strings.Contains(links, "tap7") {
		t.Errorf("want a persistent tap of user 4242 and group 4243, and no tap7; got:\n%s", links)
	}
	n.unwire("pod")
	n.unwire("pod")
	if after := look(); normalize(after) != normalize(before) {
		t.Errorf("Unwire did not restore the network; before Wire:\n%s\nafter Unwire:\n%s", before, after)
	}
	if _, err := tap.Read(n.record("pod")); !errdefs.IsNotFound(err) {
		t.Errorf("Read after Unwire: got error %v, want ErrNotFound", err)
	}
}

// normalize removes link-local addresses, lifetimes, equivalent flags and spaces, which differ without meaning.
func normalize(s string) string {
	var lines []string
	for line := range strings.Lines(s) {
		if !strings.Contains(line, "fe80::") && !strings.Contains(line, "valid_lft") {
			line = strings.NewReplacer(" onlink", "", " linkdown", "", " nodad", "", " qlen 1000", "").Replace(line)
			lines = append(lines, strings.Join(strings.Fields(line), " "))
		}
	}
	return strings.Join(lines, "\n")
}

// few is a chain with so few addresses that it reuses them immediately, and with plugins that announce too late.
const few = `{"cniVersion":"1.0.0","name":"few%d","plugins":[{"type":"bridge","bridge":"few%d","isGateway":true,
 "ipam":{"type":"host-local","dataDir":"/run/few%d","ranges":[[{"subnet":"10.98.%d.0/30"}],[{"subnet":"fd98:%d::/126"}]],
 "routes":[{"dst":"0.0.0.0/0"},{"dst":"::/0"}]}}]}`

// TestAddressOfAnother: a guest is reachable immediately at an address that another pod has just released, before the
// neighbours' caches expire.
func TestAddressOfAnother(t *testing.T) {
	n := newNode(t, few, func(c *network.Config) { c.Executables = true })
	for lap := range 3 {
		func() {
			n := &node{Manager: n.Manager, t: t, dir: n.dir}
			r := n.pod("pod")
			if lap == 0 { // a bridge without ports would be down and lose its neighbour cache
				bridge := fmt.Sprintf("few%d", nodes.Load())
				n.must("", "ip", "link", "add", "port", "up", "master", bridge, "type", "veth", "peer", "name", "plug")
				n.must("", "ip", "link", "set", "plug", "up")
				t.Cleanup(func() { n.must("", "ip", "link", "del", "port") })
			}
			interfaces := n.wire("pod")
			g := n.guest("pod", interfaces)
			g.static(interfaces)
			n.listener(g.netns, "[::]:80", body(1))
			for _, ip := range r.IPs {
				began := time.Now()
				if got := n.fetch("", netip.AddrPortFrom(ip, 80).String()); got != 1 || time.Since(began) > 5*time.Second {
					t.Errorf("got %d bytes from %s after %s, want 1 within 5 s", got, ip, time.Since(began))
				}
			}
			n.unwire("pod")
			if err := n.Teardown(t.Context(), network.Attachment{ID: "pod"}); err != nil {
				t.Fatal(err)
			}
			if err := n.RemoveNetns(t.Context(), "guest-pod"); err != nil {
				t.Fatal(err)
			}
		}()
	}
}

// several makes a pod's namespace with several interfaces: one with IPv6 only, one without an address, one like the ptp
// plugin's, and others that a guest cannot take over.
func several(t *testing.T) (*node, string) {
	n := newNode(t, "")
	netns, err := n.NewNetns(t.Context(), "several")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = n.RemoveNetns(context.Background(), "several") })
	for _, command := range []string{
		"ip link add net2 type veth peer name peer2", "ip link add net1 type veth peer name peer1",
		"ip link add eth0 mtu 1400 type veth peer name peer0 mtu 1400",
		"ip link add down0 type veth peer name peer3", "ip tuntap add tap1 mode tap",
		"ip addr add 10.1.1.2/24 dev eth0", "ip addr add 10.1.7.2/32 dev eth0", "ip -6 addr add fd01::2/64 dev net1 nodad",
		"ip link set eth0 up", "ip link set net1 up", "ip link set net2 up", "ip link set peer0 address 02:00:00:00:00:99", "ip link set tap1 up",
		"ip route del 10.1.1.0/24 dev eth0", "ip route add 10.1.1.1/32 dev eth0 scope link", "ip route add 10.1.1.0/24 via 10.1.1.1 dev eth0",
		"ip route add default via 10.1.1.1 dev eth0 metric 50", "ip -6 route add default via fe80::1 dev net1",
	} {
		n.must(netns, strings.Fields(command)...)
	}
	return n, netns
}

func TestSeveralInterfaces(t *testing.T) {
	n, netns := several(t)
	got := n.wire("several")
	for i := range got {
		if got[i].MAC == "" {
			t.Errorf("%s has no MAC", got[i].Link)
		}
		got[i].MAC = ""
	}
	prefix := netip.MustParsePrefix
	gw := netip.MustParseAddr("10.1.1.1")
	// The peers of these interfaces are not up.
	want := []tap.Interface{
		{Link: "eth0", Tap: "tap0", MTU: 1400, Addrs: []netip.Prefix{prefix("10.1.1.2/32"), prefix("10.1.7.2/32")}, Routes: []tap.Route{
			{Dst: prefix("10.1.1.1/32")}, {Dst: prefix("0.0.0.0/0"), GW: gw, Metric: 50}, {Dst: prefix("10.1.1.0/24"), GW: gw},
		}},
		{Link: "net2", Tap: "tap2", MTU: 1500},
		{Link: "net1", Tap: "tap3", MTU: 1500, Addrs: []netip.Prefix{prefix("fd01::2/64")}, Routes: []tap.Route{
			{Dst: prefix("::/0"), GW: netip.MustParseAddr("fe80::1")},
		}},
	}
	if !sameJSON(got, want) {
		t.Errorf("Wire returned\n     %s\nwant %s", toJSON(got), toJSON(want))
	}
	listing := n.must(netns, "ip", "-br", "addr")
	for line := range strings.Lines(listing) {
		if fields := strings.Fields(line); fields[0] != "lo" && len(fields) > 2 {
			t.Errorf("an interface still has addresses after Wire: %s", line)
		}
	}
	n.serve("several", n.wire("several"))
	n.unwire("several")
	if out := n.must(netns, "ip", "route"); !strings.Contains(out, "default via 10.1.1.1") {
		t.Errorf("no IPv4 default route after Unwire:\n%s", out)
	}
	if out := n.must(netns, "ip", "-6", "route"); !strings.Contains(out, "default via fe80::1") {
		t.Errorf("no IPv6 default route after Unwire:\n%s", out)
	}
}

func toJSON(v any) string {
	data, _ := json.Marshal(v)
	return string(data)
}

func sameJSON(a, b any) bool {
	return strings.ReplaceAll(toJSON(a), "[]", "null") == strings.ReplaceAll(toJSON(b), "[]", "null")
}

// BenchmarkWire measures Wire and Unwire of a pod with the default chain, and reports the time of Wire separately.
func BenchmarkWire(b *testing.B) {
	n := newNode(b, "")
	n.pod("pod")
	var wired time.Duration
	for b.Loop() {
		began := time.Now()
		n.wire("pod")
		wired += time.Since(began)
		n.unwire("pod")
	}
	b.ReportMetric(float64(wired.Microseconds())/float64(b.N), "µs/wire")
}
