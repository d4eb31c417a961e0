package network

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
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

// by restarts the node as one that runs plugins in its process, or as executables.
func (n *node) by(executables bool) {
	n.t.Helper()
	n.cfg.Executables = executables
	n.restart()
}

// counted makes the node count what it runs in its process.
func (n *node) counted() *atomic.Int64 {
	var ran atomic.Int64
	n.planBy(func(call inProcessCall, _ []string) inProcessCall { ran.Add(1); return call })
	return &ran
}

// planBy lets change have a hand in what is run in process.
func (n *node) planBy(change func(call inProcessCall, environ []string) inProcessCall) {
	n.t.Helper()
	_ = n.Status(n.t.Context()) // the watch has asked the plugins for their versions, and runs none any more
	plan := n.exec.plan
	n.exec.plan = func(path string, stdin []byte, environ []string) (inProcessCall, error) {
		call, why := plan(path, stdin, environ)
		if why == nil {
			call = change(call, environ)
		}
		return call, why
	}
}

// chains that are the same network whoever makes it. "" is the embedded default.
var interchangeable = map[string]struct {
	change func(*Config)
	conf   string
	pod    Attachment
	calls  int64 // that are done in process by one ADD
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

// TestInProcessIsTheSameNetwork: what is made in process equals what the executables make, down to the sysctls, and
// each is taken away by the other without a trace.
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
				n.by(executables)
				n.forget()
				if !executables {
					ran := n.counted()
					defer func() {
						if ran.Load() != c.calls {
							t.Errorf("%d executions were done in process by ADD, want %d", ran.Load(), c.calls)
						}
					}()
				}
				r := n.setup(pod)
				snapshots[executables] = n.snapshot(r)
				n.by(true)                                                                                       // CHECK is the executables' in any case, and DEL the other side's
				if err := n.Check(t.Context(), pod); err != nil && !strings.Contains(err.Error(), "ipv6 dnat") { // portmap 1.1 wants both families
					t.Errorf("the executables find amiss what was made by executables=%t: %v", executables, err)
				}
				n.by(!executables)
				n.teardown(pod)
				n.assertNoLeases()
				n.assertClean()
			}
			for _, line := range difference(snapshots[true], snapshots[false]) {
				t.Errorf("made by executables only: %s", line)
			}
			for _, line := range difference(snapshots[false], snapshots[true]) {
				t.Errorf("made in process only: %s", line)
			}
		})
	}
}

// difference is the lines of a that are not in b.
func difference(a, b string) []string {
	var only []string
	for line := range strings.Lines(a) {
		if !strings.Contains("\n"+b, "\n"+line) {
			only = append(only, line)
		}
	}
	return only
}

// TestInProcessBesideExecutables: pods of one network that are made both ways at the same time share its addresses.
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
			t.Errorf("%s: no address, or one that was given twice", ip)
		}
		seen[ip] = true
	}
	for i := range 2 * pods {
		m := []*Manager{n.Manager, executables}[i%2]
		if err := m.Teardown(t.Context(), Attachment{ID: fmt.Sprintf("pod-%d", i)}); err != nil {
			t.Error(err)
		}
	}
	n.assertNoLeases()
	n.assertClean()
}

// forget undoes what outlives pods, so that a snapshot shows what was made for this one.
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

// leaseFiles is what host-local's directories hold.
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

// snapshot tells all of a pod's network, on both sides, but what chance decides.
func (n *node) snapshot(r *Result) string {
	n.t.Helper()
	var b strings.Builder
	var chance []string // and what it is called instead
	for _, i := range r.Interfaces {
		chance = append(chance, i.MAC, "MAC")
		if !i.InPod && i.Name != n.cfg.Default.Bridge {
			chance = append(chance, i.Name, "VETH")
		}
	}
	var raw any
	if err := json.Unmarshal(r.Raw, &raw); err != nil {
		n.t.Fatal(err)
	}
	fmt.Fprintf(&b, "result %v\nleases %s", raw, n.leaseFiles())
	n.describe(&b, "", n.cfg.Default.Bridge)
	for _, port := range n.bridgePorts() {
		n.describe(&b, "", port)
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
	n.describe(&b, r.Netns, "eth0")
	return strings.NewReplacer(chance...).Replace(b.String())
}

// describe writes one interface: its attributes, addresses, routes and sysctls.
func (n *node) describe(b *strings.Builder, netns, name string) {
	n.t.Helper()
	err := n.inNetns(netns, func() error {
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
		fmt.Fprintf(b, "%s: %s mtu %d flags %s promisc %d allmulti %d state %s alias %q\n", name, link.Type(), a.MTU, a.Flags, a.Promisc, a.Allmulti, a.OperState, a.Alias)
		if a.MasterIndex != 0 {
			port, err := h.LinkGetProtinfo(link)
			if err != nil {
				return err
			}
			fmt.Fprintf(b, "%s: port %+v\n", name, port)
		}
		return tellAddresses(b, h, link)
	})
	if err == nil {
		err = n.inNetns(netns, func() error { return tellSysctls(b, name) })
	}
	if err != nil {
		n.t.Fatal(err)
	}
}

func tellAddresses(b *strings.Builder, h *netlink.Handle, link netlink.Link) error {
	addrs, err := h.AddrList(link, unix.AF_UNSPEC)
	if err != nil {
		return err
	}
	for _, a := range addrs {
		if !a.IP.IsLinkLocalUnicast() { // which is made of the hardware address
			fmt.Fprintf(b, "%s: address %s scope %d flags %x broadcast %s\n", link.Attrs().Name, a.IPNet, a.Scope, a.Flags, a.Broadcast)
		}
	}
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		routes, err := h.RouteListFiltered(family, &netlink.Route{LinkIndex: link.Attrs().Index}, netlink.RT_FILTER_OIF|netlink.RT_FILTER_TABLE)
		if err != nil {
			return err
		}
		var told []string
		for _, r := range routes {
			if r.Dst.IP.IsLinkLocalUnicast() || r.Dst.IP.IsMulticast() { // which come and go with the carrier
				continue
			}
			told = append(told, fmt.Sprintf("%s: route %s by %s from %s scope %d protocol %d priority %d table %d\n", link.Attrs().Name, r.Dst, r.Gw, r.Src, r.Scope, r.Protocol, r.Priority, r.Table))
		}
		slices.Sort(told)
		b.WriteString(strings.Join(told, ""))
	}
	return nil
}

func tellSysctls(b *strings.Builder, name string) error {
	for _, family := range []string{"ipv4", "ipv6"} {
		dir := filepath.Join("/proc/sys/net", family, "conf", name)
		files, err := os.ReadDir(dir)
		if err != nil {
			return err
		}
		for _, file := range files {
			if file.Name() == "keep_addr_on_down" { // newer releases of the plugins set it, and so do we
				continue
			}
			value, err := os.ReadFile(filepath.Join(dir, file.Name())) // stable_secret cannot be read before it is set
			fmt.Fprintf(b, "%s: %s %s %s %t\n", name, family, file.Name(), strings.TrimSpace(string(value)), err == nil)
		}
	}
	return nil
}

// hang is a call that the kernel keeps before it does its work, whatever the context says.
type hang struct {
	inProcessCall
	letGo chan struct{}
}

func (h hang) Run(ctx context.Context) ([]byte, error) {
	<-h.letGo
	return h.inProcessCall.Run(context.WithoutCancel(ctx))
}

// TestInProcessHang: who waits for a call that the kernel keeps is answered in time, and the roll-back comes after
// what the call still does.
func TestInProcessHang(t *testing.T) {
	n := newNode(t, func(c *Config) { c.PluginTimeout = 300 * time.Millisecond })
	letGo := make(chan struct{})
	n.planBy(func(call inProcessCall, environ []string) inProcessCall {
		if cniVariable(environ, "CNI_COMMAND") == "ADD" && cniVariable(environ, "CNI_CONTAINERID") == "stuck" {
			return hang{call, letGo}
		}
		return call
	})
	start := time.Now()
	_, err := n.Setup(t.Context(), Attachment{ID: "stuck"})
	if err == nil || !strings.Contains(err.Error(), "background") || time.Since(start) > 10*time.Second {
		t.Errorf("after %s: %v", time.Since(start), err)
	}
	n.setup(Attachment{ID: "other"}) // is not held up
	n.teardown(Attachment{ID: "other"})
	close(letGo)
	eventually(t, 10*time.Second, "the roll-back", func() bool {
		keys, err := n.records.keys()
		return err == nil && len(keys) == 0
	})
	n.assertClean()
	n.exec.containers.mu.Lock()
	defer n.exec.containers.mu.Unlock()
	if len(n.exec.containers.held) != 0 {
		t.Errorf("attachments are busy still: %v", n.exec.containers.held)
	}
}

// TestInProcessLeasesLocked: a lock that somebody else does not let go of is waited for within the plugin's time.
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
		t.Errorf("after %s: %v", time.Since(start), err)
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

// TestInProcessSubnetExhausted: no address is an error that says so, and leaves nothing.
func TestInProcessSubnetExhausted(t *testing.T) {
	n := newNode(t, func(c *Config) { c.Default.SubnetV4, c.Default.SubnetV6 = "10.97.0.0/29", "fd00:97::/64" })
	var full error
	pods := 0
	for ; full == nil && pods < 10; pods++ {
		_, full = n.Setup(t.Context(), Attachment{ID: fmt.Sprintf("pod-%d", pods)})
	}
	if full == nil || !strings.Contains(full.Error(), "no IP addresses available") || pods != 6 { // 8 less network, gateway, broadcast
		t.Errorf("pod %d: %v", pods, full)
	}
	for i := range pods {
		n.teardown(Attachment{ID: fmt.Sprintf("pod-%d", i)})
	}
	n.assertNoLeases()
	n.assertClean()
}

// TestInProcessKeepsThreadsHome: calls, failed ones too, leave no thread in a pod's namespace and no descriptor open.
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
		t.Errorf("%d descriptors are open after 30 pods, %d before", after, before)
	}
	if threads, err := os.ReadDir("/proc/self/task"); err != nil || len(threads) > 60 {
		t.Errorf("%d threads after 30 pods, %v", len(threads), err)
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

// TestForeignPluginIsRun: what stands in the place of a reference plugin is run, not what it is named after.
func TestForeignPluginIsRun(t *testing.T) {
	n := newNode(t, nil)
	ran := n.counted()
	n.plugin("bridge", `echo '{"cniVersion":"1.0.0","ips":[{"address":"192.0.2.7/24"}]}'`)
	r := n.setup(Attachment{ID: "pod"})
	if len(r.IPs) != 1 || r.IPs[0].String() != "192.0.2.7" || ran.Load() != 0 {
		t.Errorf("addresses %v, %d executions in process", r.IPs, ran.Load())
	}
	n.teardown(Attachment{ID: "pod"})
	n.assertClean()
}
