package network

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// restartWith restarts the node with Config.Executables set to executables.
func (n *node) restartWith(executables bool) {
	n.t.Helper()
	n.cfg.Executables = executables
	n.restart()
}

// countInProcess makes the node count the plugins that it runs in process.
func (n *node) countInProcess() *atomic.Int64 {
	var ran atomic.Int64
	n.wrapCalls(func(call inProcessCall, _ []string) inProcessCall { ran.Add(1); return call })
	return &ran
}

// wrapCalls makes change replace each call that the node runs in process.
func (n *node) wrapCalls(change func(call inProcessCall, environ []string) inProcessCall) {
	n.t.Helper()
	_ = n.Status(n.t.Context()) // after the first status, the watch goroutine runs no more plugins
	plan := n.exec.plan
	n.exec.plan = func(path string, stdin []byte, environ []string) (inProcessCall, error) {
		call, why := plan(path, stdin, environ)
		if why == nil {
			call = change(call, environ)
		}
		return call, why
	}
}

// interchangeable lists chains for which in-process plugins and executables must make the same network.
var interchangeable = map[string]struct {
	change func(*Config)
	conf   string // "" means the embedded default
	pod    Attachment
	calls  int64 // calls that one ADD runs in process
}{
	"default": {calls: 1},
	"options": {calls: 1, change: func(c *Config) { c.Default.MTU, c.Default.SubnetV4 = 1400, "10.92.0.0/24" }},
	"dual":    {calls: 1, change: func(c *Config) { c.Default.SubnetV4, c.Default.SubnetV6 = "10.93.0.0/24", "fd00:93::/64" }},
	"v6":      {calls: 1, change: func(c *Config) { c.Default.SubnetV6, c.Default.SubnetV4 = "fd00:94::/64", "" }},
	"ports":   {calls: 1, pod: Attachment{PortMappings: []PortMapping{{HostPort: 18090, ContainerPort: 80}}}},
	"owner's": {calls: 3, conf: `{"cniVersion":"0.4.0","name":"owner","plugins":[
		{"type":"bridge","bridge":"BRIDGE","isDefaultGateway":true,"promiscMode":true,"dns":{"nameservers":["192.0.2.53"]},
		 "ipam":{"type":"host-local","dataDir":"LEASES","subnet":"10.95.0.0/24","rangeStart":"10.95.0.10","rangeEnd":"10.95.0.20","gateway":"10.95.0.5",
		         "routes":[{"dst":"192.0.2.0/24","gw":"10.95.0.7"}]}},
		{"type":"loopback"},
		{"type":"portmap","snat":true,"capabilities":{"portMappings":true}}]}`},
	"ipMasq": {calls: 2, conf: `{"cniVersion":"1.0.0","name":"masq","plugins":[
		{"type":"bridge","bridge":"BRIDGE","isGateway":true,"ipMasq":true,"hairpinMode":true,
		 "ipam":{"type":"host-local","dataDir":"LEASES","ranges":[[{"subnet":"10.98.0.0/24"}],[{"subnet":"fd00:98::/64"}]],
		         "routes":[{"dst":"0.0.0.0/0"},{"dst":"::/0"}]}},
		{"type":"portmap","capabilities":{"portMappings":true}}]}`},
	"no gateway": {calls: 1, conf: `{"cniVersion":"0.3.1","name":"plain","plugins":[
		{"type":"bridge","bridge":"BRIDGE","ipam":{"type":"host-local","dataDir":"LEASES","ranges":[[{"subnet":"10.96.0.0/24"}],[{"subnet":"fd00:96::/64"}]]}}]}`},
}

// TestInProcessIsTheSameNetwork checks that in-process plugins and executables make the same network, down to the
// sysctls, and that each removes the other's without a trace.
func TestInProcessIsTheSameNetwork(t *testing.T) {
	for name, c := range interchangeable {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, c.change)
			if c.conf != "" {
				conf := strings.NewReplacer("BRIDGE", n.cfg.Default.Bridge, "LEASES", n.leasesDir()).Replace(c.conf)
				n.configure("10.conflist", conf)
			}
			pod := c.pod
			pod.ID, pod.Name, pod.Namespace = "pod", "web", "prod"
			snapshots := map[bool]string{}
			for _, executables := range []bool{true, false} {
				n.restartWith(executables)
				n.forget()
				if !executables {
					ran := n.countInProcess()
					defer func() {
						if ran.Load() != c.calls {
							t.Errorf("ADD ran %d calls in process, want %d", ran.Load(), c.calls)
						}
					}()
				}
				r := n.setup(pod)
				snapshots[executables] = n.snapshot(r)
				n.restartWith(true)                                                                              // CHECK always runs executables
				if err := n.Check(t.Context(), pod); err != nil && !strings.Contains(err.Error(), "ipv6 dnat") { // portmap 1.1 wants both families
					t.Errorf("CHECK of the executables refuses the network made with executables=%t: %v", executables, err)
				}
				n.restartWith(!executables)
				n.teardown(pod)
				n.assertNoLeases()
				n.assertClean()
			}
			for _, line := range difference(snapshots[true], snapshots[false]) {
				t.Errorf("only the executables make: %s", line)
			}
			for _, line := range difference(snapshots[false], snapshots[true]) {
				t.Errorf("only the in-process plugins make: %s", line)
			}
		})
	}
}

// difference returns the lines of a that are missing from b.
func difference(a, b string) []string {
	var only []string
	for line := range strings.Lines(a) {
		if !strings.Contains("\n"+b, "\n"+line) {
			only = append(only, line)
		}
	}
	return only
}

// TestInProcessBesideExecutables checks that no address is assigned twice if in-process plugins and executables set up
// pods of one network in parallel.
func TestInProcessBesideExecutables(t *testing.T) {
	n := newNode(t, nil)
	other := n.cfg
	other.Executables, other.NetnsDir = true, filepath.Join(filepath.Dir(n.cfg.NetnsDir), "other")
	executables, err := New(other)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Unmount(other.NetnsDir, unix.MNT_DETACH)
	defer executables.Close()
	const pods = 12
	results := make(chan string, 2*pods)
	for i := range 2 * pods {
		go func() {
			m := []*Manager{n.Manager, executables}[i%2]
			r, err := m.Setup(t.Context(), Attachment{ID: fmt.Sprintf("pod-%d", i)})
			if err != nil {
				results <- err.Error()
				return
			}
			results <- r.IPs[0].String()
		}()
	}
	seen := map[string]bool{}
	for range 2 * pods {
		ip := <-results
		if net.ParseIP(ip) == nil || seen[ip] {
			t.Errorf("Setup returned %s: an error, or an address of another pod", ip)
		}
		seen[ip] = true
	}
	for i := range 2 * pods {
		m := []*Manager{n.Manager, executables}[i%2]
		if err := m.Teardown(t.Context(), Attachment{ID: fmt.Sprintf("pod-%d", i)}); err != nil {
			t.Error(err)
		}
	}
	n.assertClean() // waits for the releases
	n.assertNoLeases()
}

// forget removes everything that outlives pods, so that the next snapshot shows only what was made for the next pod.
func (n *node) forget() {
	n.t.Helper()
	if link, err := netlink.LinkByName(n.cfg.Default.Bridge); err == nil {
		if err := netlink.LinkDel(link); err != nil {
			n.t.Fatal(err)
		}
	}
	if err := os.RemoveAll(n.leasesDir()); err != nil {
		n.t.Fatal(err)
	}
	for _, forwarding := range []string{"ipv4/ip_forward", "ipv6/conf/all/forwarding"} {
		if err := os.WriteFile("/proc/sys/net/"+forwarding, []byte("0"), 0); err != nil {
			n.t.Fatal(err)
		}
	}
}

func (n *node) assertNoLeases() {
	n.t.Helper()
	if left := n.leaseFiles(); strings.Contains(left, "eth0") {
		n.t.Errorf("leases left:\n%s", left)
	}
}

// leaseFiles returns the names and contents of all files in host-local's directories.
func (n *node) leaseFiles() string {
	var all strings.Builder
	files, _ := filepath.Glob(filepath.Join(n.leasesDir(), "*", "*"))
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			n.t.Fatal(err)
		}
		fmt.Fprintf(&all, "%s: %q\n", strings.TrimPrefix(file, n.leasesDir()), data)
	}
	return all.String()
}

// snapshot describes a pod's network, in the pod and on the host. It replaces random names and addresses by fixed ones.
func (n *node) snapshot(r *Result) string {
	n.t.Helper()
	var b strings.Builder
	var random []string // pairs of a random string and its replacement
	for _, i := range r.Interfaces {
		random = append(random, i.MAC, "MAC")
		if !i.InPod && i.Name != n.cfg.Default.Bridge {
			random = append(random, i.Name, "VETH")
		}
	}
	var raw any
	if err := json.Unmarshal(r.Raw, &raw); err != nil {
		n.t.Fatal(err)
	}
	fmt.Fprintf(&b, "result %v\nleases %s", raw, n.leaseFiles())
	n.describe(&b, "", n.cfg.Default.Bridge)
	for _, port := range n.bridgePorts() {
		n.describe(&b, "", port, "accept_ra") // in-process, ports have no IPv6
	}
	for _, forwarding := range []string{"ipv4/ip_forward", "ipv6/conf/all/forwarding"} {
		value, _ := os.ReadFile("/proc/sys/net/" + forwarding)
		fmt.Fprintf(&b, "%s %s", forwarding, value)
	}
	for _, iptables := range []string{"iptables", "ip6tables"} {
		rules, err := exec.Command(iptables, "--wait", "-t", "nat", "-S").CombinedOutput()
		if err != nil {
			n.t.Fatal(err)
		}
		fmt.Fprintf(&b, "%s rules:\n%s", iptables, rules)
	}
	n.describe(&b, r.Netns, "lo")
	var skip []string
	if !slices.ContainsFunc(r.IPs, func(ip netip.Addr) bool { return ip.Is6() }) {
		skip = append(skip, "accept_dad") // in-process, pods without IPv6 addresses have no link-local one either
	}
	n.describe(&b, r.Netns, "eth0", skip...)
	return strings.NewReplacer(random...).Replace(b.String())
}

// describe writes one interface: its attributes, addresses, routes and sysctls, but not those to skip.
func (n *node) describe(b *strings.Builder, netns, name string, skip ...string) {
	n.t.Helper()
	err := inNetns(netns, func() error {
		h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		defer h.Close()
		link, err := h.LinkByName(name)
		if err != nil {
			return err
		}
		a := link.Attrs()
		fmt.Fprintf(b, "%s: %s mtu %d flags %s promisc %d allmulti %d state %s alias %q\n", name, link.Type(), a.MTU, a.Flags, a.Promisc,
			a.Allmulti, a.OperState, a.Alias)
		if a.MasterIndex != 0 {
			port, err := h.LinkGetProtinfo(link)
			if err != nil {
				return err
			}
			fmt.Fprintf(b, "%s: port %+v\n", name, port)
		}
		return writeAddresses(b, h, link)
	})
	if err == nil {
		err = inNetns(netns, func() error { return writeSysctls(b, name, skip) })
	}
	if err != nil {
		n.t.Fatal(err)
	}
}

func writeAddresses(b *strings.Builder, h *netlink.Handle, link netlink.Link) error {
	addrs, err := h.AddrList(link, unix.AF_UNSPEC)
	if err != nil {
		return err
	}
	for _, a := range addrs {
		if !a.IP.IsLinkLocalUnicast() { // link-local addresses depend on the hardware address
			fmt.Fprintf(b, "%s: address %s scope %d flags %x broadcast %s\n", link.Attrs().Name, a.IPNet, a.Scope, a.Flags, a.Broadcast)
		}
	}
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		routes, err := h.RouteListFiltered(family, &netlink.Route{LinkIndex: link.Attrs().Index}, netlink.RT_FILTER_OIF|netlink.RT_FILTER_TABLE)
		if err != nil {
			return err
		}
		var lines []string
		for _, r := range routes {
			if r.Dst.IP.IsLinkLocalUnicast() || r.Dst.IP.IsMulticast() { // these routes come and go with the carrier
				continue
			}
			lines = append(lines,
				fmt.Sprintf("%s: route %s by %s from %s scope %d protocol %d priority %d table %d\n", link.Attrs().Name, r.Dst, r.Gw, r.Src, r.Scope,
					r.Protocol, r.Priority, r.Table))
		}
		slices.Sort(lines)
		b.WriteString(strings.Join(lines, ""))
	}
	return nil
}

func writeSysctls(b *strings.Builder, name string, skip []string) error {
	// We set the first like newer releases of the plugins. With the others, there are fewer packets to all ports of the bridge.
	skip = append(skip, "keep_addr_on_down", "router_solicitations", "disable_ipv6", "addr_gen_mode")
	for _, family := range []string{"ipv4", "ipv6"} {
		dir := filepath.Join("/proc/sys/net", family, "conf", name)
		files, err := os.ReadDir(dir)
		if err != nil {
			return err
		}
		for _, file := range files {
			if slices.Contains(skip, file.Name()) {
				continue
			}
			value, err := os.ReadFile(filepath.Join(dir, file.Name())) // stable_secret cannot be read before it is set
			fmt.Fprintf(b, "%s: %s %s %s %t\n", name, family, file.Name(), strings.TrimSpace(string(value)), err == nil)
		}
	}
	return nil
}

// hang is a call that hangs until resume is closed and then does its work, even if the context has ended.
type hang struct {
	inProcessCall
	resume chan struct{}
}

func (h hang) Run(ctx context.Context) ([]byte, error) {
	<-h.resume
	return h.inProcessCall.Run(context.WithoutCancel(ctx))
}

// TestInProcessHang checks that Setup returns in time although a call hangs, and that the roll-back waits for the call.
func TestInProcessHang(t *testing.T) {
	n := newNode(t, func(c *Config) { c.PluginTimeout = 300 * time.Millisecond })
	resume := make(chan struct{})
	n.wrapCalls(func(call inProcessCall, environ []string) inProcessCall {
		if cniVariable(environ, "CNI_COMMAND") == "ADD" && cniVariable(environ, "CNI_CONTAINERID") == "stuck" {
			return hang{call, resume}
		}
		return call
	})
	start := time.Now()
	_, err := n.Setup(t.Context(), Attachment{ID: "stuck"})
	if err == nil || !strings.Contains(err.Error(), "background") || time.Since(start) > 10*time.Second {
		t.Errorf("Setup returned %v after %s, want an error that mentions the background within 10 s", err, time.Since(start))
	}
	n.setup(Attachment{ID: "other"}) // does not wait
	n.teardown(Attachment{ID: "other"})
	close(resume)
	eventually(t, 10*time.Second, "the roll-back", func() bool {
		keys, err := n.records.keys()
		return err == nil && len(keys) == 0
	})
	n.assertClean()
	n.exec.containers.mu.Lock()
	defer n.exec.containers.mu.Unlock()
	if len(n.exec.containers.held) != 0 {
		t.Errorf("containers are still locked: %v", n.exec.containers.held)
	}
}

// TestInProcessLeasesLocked checks that the wait for a lock that another process holds ends with the plugin timeout.
func TestInProcessLeasesLocked(t *testing.T) {
	n := newNode(t, func(c *Config) { c.PluginTimeout = 300 * time.Millisecond })
	n.setup(Attachment{ID: "first"})
	lock, err := os.Open(filepath.Join(n.leasesDir(), defaultNetworkName, "lock"))
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	if _, err := n.Setup(t.Context(), Attachment{ID: "pod"}); err == nil || time.Since(start) > 10*time.Second {
		t.Errorf("Setup returned %v after %s, want an error within 10 s", err, time.Since(start))
	}
	if err := lock.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, 10*time.Second, "the roll-back", func() bool {
		keys, err := n.records.keys()
		return err == nil && len(keys) == 1
	})
	n.teardown(Attachment{ID: "first"})
	n.assertClean()
}

// TestInProcessSubnetExhausted checks that Setup in a full subnet returns a clear error and leaves nothing behind.
func TestInProcessSubnetExhausted(t *testing.T) {
	n := newNode(t, func(c *Config) { c.Default.SubnetV4, c.Default.SubnetV6 = "10.97.0.0/29", "fd00:97::/64" })
	var full error
	pods := 0
	for ; full == nil && pods < 10; pods++ {
		_, full = n.Setup(t.Context(), Attachment{ID: fmt.Sprintf("pod-%d", pods)})
	}
	if full == nil || !strings.Contains(full.Error(), "no IP addresses available") || pods != 6 { // 8 minus network, gateway and broadcast
		t.Errorf("Setup of pod %d = %v, want the subnet exhausted by pod 6", pods, full)
	}
	for i := range pods {
		n.teardown(Attachment{ID: fmt.Sprintf("pod-%d", i)})
	}
	n.assertNoLeases()
	n.assertClean()
}

// TestInProcessKeepsThreadsHome checks that calls leave no extra threads and no open descriptors.
func TestInProcessKeepsThreadsHome(t *testing.T) {
	n := newNode(t, nil)
	n.setup(Attachment{ID: "first"})
	before := openFiles(t)
	for i := range 30 {
		pod := Attachment{ID: fmt.Sprintf("pod-%d", i)}
		n.setup(pod)
		n.teardown(pod)
	}
	if after := openFiles(t); after > before+2 {
		t.Errorf("%d descriptors are open after 30 pods, want at most %d", after, before+2)
	}
	if threads, err := os.ReadDir("/proc/self/task"); err != nil || len(threads) > 60 {
		t.Errorf("%d threads after 30 pods, %v, want at most 60", len(threads), err)
	}
	n.teardown(Attachment{ID: "first"})
	n.assertClean()
}

func openFiles(t *testing.T) int {
	t.Helper()
	files, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(files)
}

// TestForeignPluginIsRun checks that an executable that replaces a reference plugin runs.
func TestForeignPluginIsRun(t *testing.T) {
	n := newNode(t, nil)
	ran := n.countInProcess()
	n.plugin("bridge", `echo '{"cniVersion":"1.0.0","ips":[{"address":"192.0.2.7/24"}]}'`)
	r := n.setup(Attachment{ID: "pod"})
	if len(r.IPs) != 1 || r.IPs[0].String() != "192.0.2.7" || ran.Load() != 0 {
		t.Errorf("IPs = %v with %d calls in process, want 192.0.2.7 and no calls", r.IPs, ran.Load())
	}
	n.teardown(Attachment{ID: "pod"})
	n.assertClean()
}
