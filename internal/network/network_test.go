package network

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/network/netthread"
)

// TestAddressOfAnother checks that a reused address leads to the new pod immediately, even for a peer that has just
// connected to the previous pod.
func TestAddressOfAnother(t *testing.T) {
	n := newNode(t, func(c *Config) { c.Default.SubnetV4, c.Default.SubnetV6 = "10.87.0.0/29", "fd87::/125" })
	answers := func(ip netip.Addr) error {
		conn, err := net.DialTimeout("tcp", net.JoinHostPort(ip.String(), "9"), time.Second)
		if err == nil {
			conn.Close()
		} else if errors.Is(err, unix.ECONNREFUSED) {
			return nil
		}
		return fmt.Errorf("dial %s: %v, want a refused connection", ip, err)
	}
	// The neighbour keeps the bridge up: when it is down, it forgets its neighbours' addresses. The bridge's own IPv6
	// address takes a moment to settle.
	neighbour := Attachment{ID: "neighbour"}
	for _, ip := range n.setup(neighbour).IPs {
		for began := time.Now(); answers(ip) != nil && time.Since(began) < 10*time.Second; {
			time.Sleep(20 * time.Millisecond) // pacing: between two attempts
		}
	}
	for range 8 { // more often than there are addresses left, which is 4 or 5
		pod := Attachment{ID: "pod"}
		for _, ip := range n.setup(pod).IPs {
			if err := answers(ip); err != nil {
				t.Error(err)
			}
		}
		n.teardown(pod)
	}
	n.teardown(neighbour)
	n.assertClean()
}

// TestNeighbours: the pod and the host know each other's hardware address from the beginning, by entries that do not count in
// the kernel's table for all pods, and the bridge knows the pod's port. The host's entries go with the pod.
func TestNeighbours(t *testing.T) {
	n := newNode(t, func(c *Config) { c.Default.SubnetV4, c.Default.SubnetV6 = "10.88.0.0/24", "fd88::/64" })
	pod := Attachment{ID: "pod"}
	r := n.setup(pod)
	bridge, inside := r.Interfaces[0], r.Interfaces[2]
	if got := neighbours(t, bridge.Name); len(got) != 2 || got[r.IPs[0].String()] != inside.MAC || got[r.IPs[1].String()] != inside.MAC {
		t.Errorf("the host's neighbours: got %v, want %s at %s", got, r.IPs, inside.MAC)
	}
	port, err := netlink.LinkByName(r.Interfaces[1].Name)
	if err != nil {
		t.Fatal(err)
	}
	ports, err := netthread.Dump(func() ([]netlink.Neigh, error) { return netlink.NeighList(port.Attrs().Index, unix.AF_BRIDGE) })
	if err != nil || !slices.ContainsFunc(ports, func(p netlink.Neigh) bool {
		return p.HardwareAddr.String() == inside.MAC && p.Flags&netlink.NTF_EXT_LEARNED != 0
	}) {
		t.Errorf("the bridge's entries for the port: got %v, error %v, want the pod's %s", ports, err, inside.MAC)
	}
	netns, err := netthread.Open(r.Netns)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(netns)
	err = netthread.In(netns, func() error {
		if got := neighbours(t, inside.Name); len(got) != 2 || got["10.88.0.1"] != bridge.MAC || got["fd88::1"] != bridge.MAC {
			t.Errorf("the pod's neighbours: got %v, want its gateways at %s", got, bridge.MAC)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	other := Attachment{ID: "other"} // keeps the bridge up: when it is down, it has no neighbours
	n.setup(other)
	n.teardown(pod)
	n.awaitReleased(keyOf(pod.ID))
	got := neighbours(t, bridge.Name)
	for _, ip := range r.IPs {
		if got[ip.String()] != "" {
			t.Errorf("the host still has a neighbour %s", ip)
		}
	}
	n.teardown(other)
	n.assertClean()
}

// neighbours returns the hardware addresses, by IP address, of neighbours that were learned elsewhere.
func neighbours(t *testing.T, link string) map[string]string {
	t.Helper()
	l, err := netlink.LinkByName(link)
	if err != nil {
		t.Fatal(err)
	}
	list, err := netthread.Dump(func() ([]netlink.Neigh, error) { return netlink.NeighList(l.Attrs().Index, netlink.FAMILY_ALL) })
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]string{}
	for _, neighbour := range list {
		if neighbour.Flags&netlink.NTF_EXT_LEARNED != 0 {
			all[neighbour.IP.String()] = neighbour.HardwareAddr.String()
		}
	}
	return all
}

func TestPodsReachEachOtherAndTheHost(t *testing.T) {
	n := newNode(t, nil)
	a, b := Attachment{ID: "pod-a"}, Attachment{ID: "example.com:foo.Bar@1.2.3#0", Name: "b", Namespace: "ns", UID: "u"}
	ra, rb := n.setup(a), n.setup(b)
	for _, r := range []*Result{ra, rb} {
		if len(r.IPs) != 1 || !netip.MustParsePrefix(DefaultSubnetV4).Contains(r.IPs[0]) {
			t.Fatalf("IPs = %v, want one in %s", r.IPs, DefaultSubnetV4)
		}
	}
	n.serve(ra.Netns, "0.0.0.0:80", "a")
	n.mustAsk(rb.Netns, ra.IPs[0].String()+":80", "a")
	n.mustAsk("", ra.IPs[0].String()+":80", "a")
	n.mustAsk(ra.Netns, "localhost:80", "a") // lo is up
	err := inNetns(ra.Netns, func() error {
		got, err := netlink.AddrList(nil, unix.AF_INET6)
		if slices.ContainsFunc(got, func(a netlink.Addr) bool { return !a.IP.IsLoopback() }) {
			t.Errorf("IPv6 addresses of a pod to which none is assigned: got %v", got)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
	if _, err := n.ask(rb.Netns, "localhost:80"); !errdefs.IsUnavailable(err) {
		t.Errorf("connecting to localhost in pod b = %v, want unavailable, because only pod a listens", err)
	}
	for _, pod := range []Attachment{a, b} {
		if err := n.Check(t.Context(), pod); err != nil {
			t.Errorf("Check(%s): %v", pod.ID, err)
		}
		if !n.Present(pod.ID) {
			t.Errorf("Present(%s) = false after Setup", pod.ID)
		}
		n.teardown(pod)
		n.teardown(pod)
		if n.Present(pod.ID) {
			t.Errorf("Present(%s) = true after Teardown", pod.ID)
		}
	}
	n.assertClean()
	if err := n.Check(t.Context(), a); !errdefs.IsNotFound(err) {
		t.Errorf("Check after Teardown = %v, want not found", err)
	}
}

func TestResultTellsInterfaces(t *testing.T) {
	n := newNode(t, func(c *Config) { c.Default.MTU = 1400 })
	r := n.setup(Attachment{ID: "pod"})
	defer n.teardown(Attachment{ID: "pod"})
	var pod *Interface
	for i := range r.Interfaces {
		if r.Interfaces[i].InPod {
			pod = &r.Interfaces[i]
		}
	}
	if pod == nil || pod.Name != "eth0" || pod.MAC == "" || pod.MTU != 1400 || len(pod.Addrs) != 1 || pod.Addrs[0].Addr() != r.IPs[0] {
		t.Errorf("the pod's interface is %+v, want eth0 with MTU 1400, a MAC and the address %v", pod, r.IPs)
	}
	if len(r.Routes) != 1 || r.Routes[0].Dst != netip.MustParsePrefix("0.0.0.0/0") {
		t.Errorf("Routes = %+v, want the default route", r.Routes)
	}
	if len(r.Interfaces) != 3 || len(r.Raw) == 0 {
		t.Errorf("result has interfaces %+v and raw result %q, want 3 interfaces and a raw result", r.Interfaces, r.Raw)
	}
}

func TestHostPort(t *testing.T) {
	n := newNode(t, nil)
	web := Attachment{ID: "web", PortMappings: []PortMapping{{HostPort: 18080, ContainerPort: 80}, {ContainerPort: 81, Protocol: "UDP"}}}
	r, client := n.setup(web), n.setup(Attachment{ID: "client"})
	n.serve(r.Netns, "0.0.0.0:80", "web")
	n.mustAsk("", "127.0.0.1:18080", "web")
	gateway := r.IPs[0].As4()
	gateway[3] = 1 // the host's address on the bridge
	host := netip.AddrFrom4(gateway).String() + ":18080"
	n.mustAsk(client.Netns, host, "web")
	n.mustAsk(r.Netns, host, "web") // hairpin
	n.teardown(web)
	n.teardown(Attachment{ID: "client"})
	n.assertClean()
	if _, err := n.ask("", "127.0.0.1:18080"); err == nil {
		t.Error("the host port answers after Teardown")
	}
}

func TestDualStackAndSingleV6(t *testing.T) {
	for name, c := range map[string]struct {
		v4, v6   string
		families []bool // for each address in order, whether it is IPv4
	}{
		"dual": {"10.90.0.0/24", "fd00:90::/64", []bool{true, false}},
		"v6":   {"", "fd00:91::/64", []bool{false}},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, func(cfg *Config) { cfg.Default.SubnetV4, cfg.Default.SubnetV6 = c.v4, c.v6 })
			a := Attachment{ID: "a", PortMappings: []PortMapping{{HostPort: 18081, ContainerPort: 80}}}
			ra, rb := n.setup(a), n.setup(Attachment{ID: "b"})
			if len(ra.IPs) != len(c.families) {
				t.Fatalf("IPs = %v, want %d addresses", ra.IPs, len(c.families))
			}
			n.serve(ra.Netns, "[::]:80", "a")
			for i, v4 := range c.families {
				if ra.IPs[i].Is4() != v4 {
					t.Errorf("address %d is %s, want one with IPv4 = %t", i, ra.IPs[i], v4)
				}
				n.mustAsk(rb.Netns, netip.AddrPortFrom(ra.IPs[i], 80).String(), "a")
			}
			n.teardown(a)
			n.teardown(Attachment{ID: "b"})
			n.assertClean()
		})
	}
}

func TestSetupTwiceIsOneNetwork(t *testing.T) {
	n := newNode(t, nil)
	first := n.setup(Attachment{ID: "pod"})
	again := n.setup(Attachment{ID: "pod"})
	if first.IPs[0] != again.IPs[0] || len(n.leases()) != 1 {
		t.Errorf("repeated Setup returned %v, want %v; leases %v", again.IPs, first.IPs, n.leases())
	}
	n.restart()
	if again = n.setup(Attachment{ID: "pod"}); first.IPs[0] != again.IPs[0] {
		t.Errorf("repeated Setup after a restart returned %v, want %v", again.IPs, first.IPs)
	}
	n.setup(Attachment{ID: "pod", Name: "other"}) // a different request replaces the network
	if len(n.leases()) != 1 || len(n.bridgePorts()) != 1 {
		t.Errorf("after a different request, leases are %v and bridge ports %v, want one of each", n.leases(), n.bridgePorts())
	}
	n.teardown(Attachment{ID: "pod"})
	n.assertClean()
}

func TestParallelSetups(t *testing.T) {
	n := newNode(t, nil)
	const pods = 20
	var wg sync.WaitGroup
	results := make([]*Result, pods)
	for i := range pods {
		wg.Go(func() {
			var err error
			if results[i], err = n.Setup(t.Context(), Attachment{ID: fmt.Sprintf("pod-%d", i)}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	seen := map[netip.Addr]bool{}
	for _, r := range results {
		if r == nil || seen[r.IPs[0]] {
			t.Fatalf("result %+v is nil, or its address belongs to two pods", r)
		}
		seen[r.IPs[0]] = true
	}
	for i := range pods {
		wg.Go(func() {
			if err := n.Teardown(t.Context(), Attachment{ID: fmt.Sprintf("pod-%d", i)}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	n.assertClean()
}

func TestTeardownAfterRestartWithOtherConfiguration(t *testing.T) {
	n := newNode(t, nil)
	n.setup(Attachment{ID: "pod", PortMappings: []PortMapping{{HostPort: 18082, ContainerPort: 80}}})
	n.plugin("other", "exit 1")
	n.configure("10-other.conflist", `{"cniVersion":"1.0.0","name":"other","plugins":[{"type":"other"}]}`)
	n.restart()
	n.teardown(Attachment{ID: "pod"})
	n.assertClean()
}

func TestTeardownWithoutNetnsFreesLease(t *testing.T) {
	n := newNode(t, nil)
	r := n.setup(Attachment{ID: "pod"})
	if err := unix.Unmount(r.Netns, unix.MNT_DETACH); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(r.Netns); err != nil { // as after a reboot: /run is empty
		t.Fatal(err)
	}
	if n.Present("pod") {
		t.Error("Present = true without a namespace")
	}
	if err := n.Check(t.Context(), Attachment{ID: "pod"}); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("Check without a namespace = %v, want a failed precondition", err)
	}
	n.restart()
	n.teardown(Attachment{ID: "pod"})
	eventually(t, 5*time.Second, "the removal of the namespace by the kernel", func() bool { return len(n.bridgePorts()) == 0 })
	n.assertClean()
}

func TestGC(t *testing.T) {
	n := newNode(t, nil)
	n.setup(Attachment{ID: "kept"})
	n.setup(Attachment{ID: "gone"})
	n.setup(Attachment{ID: "rebooted#1"})
	if _, err := n.NewNetns(t.Context(), "bare"); err != nil {
		t.Fatal(err)
	}
	if err := removeNetns(n.Netns("rebooted#1")); err != nil {
		t.Fatal(err)
	}
	foreign := n.cfg.NetnsDir + "/foreign"
	if err := os.WriteFile(foreign, []byte("not ours"), 0o600); err != nil {
		t.Fatal(err)
	}
	halfMade := n.cfg.NetnsDir + "/half-made"
	if err := os.WriteFile(halfMade, nil, 0o444); err != nil {
		t.Fatal(err)
	}
	n.restart()
	n.setup(Attachment{ID: "new"})
	if err := n.GC(t.Context(), []string{"kept"}); err != nil {
		t.Fatal(err)
	}
	for id, want := range map[string]bool{"kept": true, "new": true, "gone": false, "bare": false} {
		if n.Present(id) != want {
			t.Errorf("Present(%s) = %t after GC, want %t", id, !want, want)
		}
	}
	if len(n.leases()) != 2 {
		t.Errorf("leases are %v, want those of two pods", n.leases())
	}
	if _, err := os.Stat(halfMade); err == nil {
		t.Error("GC left the file of a half-made namespace")
	}
	if data, _ := os.ReadFile(foreign); string(data) != "not ours" {
		t.Error("GC changed a foreign file")
	}
	_ = os.Remove(foreign)
	n.teardown(Attachment{ID: "kept"})
	n.teardown(Attachment{ID: "new"})
	n.assertClean()
}

func TestUpdatePodCIDR(t *testing.T) {
	n := newNode(t, nil)
	old := n.setup(Attachment{ID: "old"})
	n.serve(old.Netns, "0.0.0.0:80", "old")
	if err := n.UpdatePodCIDR("10.91.7.0/24, fd00:92::/64"); err != nil {
		t.Fatal(err)
	}
	n.restart() // the kubelet does not send the pod CIDR again
	r := n.setup(Attachment{ID: "pod"})
	for from, netns := range map[string]string{"the node": "", "a new pod": r.Netns} {
		if got, err := n.ask(netns, netip.AddrPortFrom(old.IPs[0], 80).String()); err != nil || got != "old" {
			t.Errorf("%s gets %q, %v from the old pod, want \"old\"", from, got, err)
		}
	}
	if len(r.IPs) != 2 || !netip.MustParsePrefix("10.91.7.0/24").Contains(r.IPs[0]) ||
		!netip.MustParsePrefix("fd00:92::/64").Contains(r.IPs[1]) {
		t.Errorf("IPs = %v, want one of each subnet of the new pod CIDR; the old pod has %v", r.IPs, old.IPs)
	}
	for _, bad := range []string{"10.0.0.0", "10.0.0.0/31", "10.0.0.0/8,10.1.0.0/16", "10.0.0.0/8,"} {
		if err := n.UpdatePodCIDR(bad); !errdefs.IsInvalidArgument(err) {
			t.Errorf("UpdatePodCIDR(%q) = %v, want an invalid argument", bad, err)
		}
	}
	n.teardown(Attachment{ID: "old"})
	n.teardown(Attachment{ID: "pod"})
	n.assertClean()
}

func TestBadRequests(t *testing.T) {
	n := newNode(t, nil)
	for name, a := range map[string]Attachment{
		"no ID":          {},
		"dots":           {ID: ".."},
		"slash":          {ID: "../pod"},
		"argument":       {ID: "pod", Name: "x;K8S_POD_NAMESPACE=kube-system"},
		"host port":      {ID: "pod", PortMappings: []PortMapping{{HostPort: 70000, ContainerPort: 1}}},
		"container port": {ID: "pod", PortMappings: []PortMapping{{HostPort: 1}}},
		"protocol":       {ID: "pod", PortMappings: []PortMapping{{HostPort: 1, ContainerPort: 1, Protocol: "icmp"}}},
		"host IP":        {ID: "pod", PortMappings: []PortMapping{{HostPort: 1, ContainerPort: 1, HostIP: "everywhere"}}},
	} {
		if _, err := n.Setup(t.Context(), a); !errdefs.IsInvalidArgument(err) {
			t.Errorf("%s: Setup = %v, want an invalid argument", name, err)
		}
	}
	n.assertClean()
}
