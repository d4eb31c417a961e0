package network

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/tripod-run/tripod/internal/network/iptables"
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
	n.refreshFirewall()
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

// sh runs a script on the test host.
func sh(t *testing.T, script string) {
	t.Helper()
	if out, err := exec.Command("sh", "-ec", script).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", script, err, out)
	}
}

// withPolicyDrop lets the test host drop what it forwards, as a host with Docker does.
func withPolicyDrop(t *testing.T) {
	sh(t, "iptables -P FORWARD DROP; ip6tables -P FORWARD DROP")
	t.Cleanup(func() { sh(t, "nft flush ruleset") })
}

func TestPodsAreForwardedInSpiteOfThePolicy(t *testing.T) {
	withPolicyDrop(t)
	n := newNode(t, func(c *Config) { c.Default.SubnetV4, c.Default.SubnetV6 = "10.93.1.0/24", "fd93:1::/64" })
	joinWorld(t, n)
	r := n.setup(Attachment{ID: "pod", PortMappings: []PortMapping{{HostPort: 18081, ContainerPort: 80}}})
	n.serve(r.Netns, "0.0.0.0:80", "web")
	n.mustAsk(r.Netns, worldAddr+":80", hostAddr)
	n.mustAsk(filepath.Join(n.cfg.NetnsDir, keyOf("world")), hostAddr+":18081", "web")

	rules, err := iptables.Save(t.Context(), iptables.V6)
	if filter := rules[iptables.Filter]; err != nil || len(filter.Rules["FORWARD"]) != 1 ||
		!filter.Has(chainsFor(netip.MustParsePrefix("fd93:1::/64"))[1].name, "-s fd93:1::/64", "-j ACCEPT") {
		t.Errorf("IPv6 rules = %v, %v, want one that accepts the pods", rules, err)
	}
	n.refreshFirewall()
	if err := n.Blocked(); err != nil {
		t.Errorf("Blocked = %v, want nil", err)
	}

	// The administrator has the first word, also after a refresh.
	sh(t, "iptables -A "+adminChain+" -d "+worldAddr+" -j REJECT --reject-with tcp-reset -p tcp; iptables -D FORWARD 1")
	n.refreshFirewall()
	if got, err := n.ask(r.Netns, worldAddr+":80"); err == nil {
		t.Errorf("the world answered %q, although %s rejects it", got, adminChain)
	}
	n.teardown(Attachment{ID: "pod"})
}

// TestRulesComeBack: whatever removes rules, the pods are reachable and reach the world again within seconds.
func TestRulesComeBack(t *testing.T) {
	const foreign = `{"cniVersion":"0.4.0","name":"foreign","plugins":[
		{"type":"bridge","bridge":"BRIDGE","isGateway":true,"ipMasq":false,
		 "ipam":{"type":"host-local","dataDir":"LEASES","ranges":[[{"subnet":"10.93.2.0/24"}]],"routes":[{"dst":"0.0.0.0/0"}]}},
		{"type":"portmap","capabilities":{"portMappings":true}},{"type":"tuning"}]}`
	for name, conf := range map[string]string{"embedded": "", "foreign": foreign, "legacy": ""} {
		t.Run(name, func(t *testing.T) {
			if name == "legacy" {
				useLegacy(t)
			}
			if conf == "" {
				withPolicyDrop(t)
			}
			var told atomic.Int64
			n := newNode(t, func(c *Config) { c.Default.SubnetV4 = "10.93.2.0/24" })
			if conf != "" {
				n.configure("10.conflist", strings.NewReplacer("BRIDGE", n.cfg.Default.Bridge, "LEASES", n.leasesDir()).Replace(conf))
			}
			joinWorld(t, n)
			web := Attachment{ID: "web", PortMappings: []PortMapping{
				{HostPort: 18082, ContainerPort: 80}, {HostPort: 18083, ContainerPort: 80, HostIP: hostAddr},
				{HostPort: 18084, ContainerPort: 84, Protocol: "udp"},
			}}
			r := n.setup(web)
			n.serve(r.Netns, "0.0.0.0:80", "web")
			n.restart() // the rules of an earlier daemon's pods count as well
			n.OnRestored(func(string) { told.Add(1) })
			world := filepath.Join(n.cfg.NetnsDir, keyOf("world"))
			works := func() bool {
				for _, address := range []string{hostAddr + ":18082", hostAddr + ":18083"} {
					if got, _ := n.askSoon(world, address); got != "web" {
						return false
					}
				}
				got, _ := n.askSoon(r.Netns, worldAddr+":80")
				return conf != "" || got == hostAddr
			}
			eventually(t, 5*time.Second, "the pod to be reachable", works)
			own := portmapChain(&record{key: keyOf("web"), list: mustChain(t, n).list})
			masq := chainsFor(netip.MustParsePrefix("10.93.2.0/24"))[0].name
			flushes := []string{
				"iptables -t nat -F", "nft flush ruleset; iptables -P FORWARD DROP", "iptables -t nat -F " + own, "iptables -t nat -F PREROUTING",
				"iptables -t nat -F CNI-HOSTPORT-DNAT; iptables -t nat -F CNI-HOSTPORT-SETMARK",
				"iptables -t nat -D " + own + " -p tcp -m tcp --dport 18082 -j DNAT --to-destination " + r.IPs[0].String() + ":80",
			}
			if name == "legacy" {
				flushes = flushes[:1]
			}
			if conf == "" {
				flushes = append(flushes, "iptables -F FORWARD", "iptables -F", "iptables -t nat -F "+masq, "iptables -t nat -I "+masq+" -s 192.0.2.77",
					"iptables -t nat -D "+masq+" 1; iptables -t nat -D "+masq+" 2")
			} else {
				flushes[1] = "nft flush ruleset"
			}
			for _, flush := range flushes {
				before := told.Load()
				sh(t, flush)
				eventually(t, 9*time.Second, "recovery from "+flush, func() bool { return told.Load() > before && works() })
				complete := func() bool {
					now, err := n.readRules(t.Context())
					return err == nil && n.firewall.watchedPorts()[keyOf("web")].complete(now)
				}
				eventually(t, 9*time.Second, "all rules after "+flush, complete)
			}
			n.teardown(web)
			if rules, err := iptables.Save(t.Context(), iptables.V4); err != nil ||
				len(rules[iptables.NAT].Rules[own])+len(rules[iptables.NAT].Rules["CNI-HOSTPORT-DNAT"]) > 0 {
				t.Errorf("rules left: %v, %v", rules, err)
			}
		})
	}
}

func flushLegacy(t *testing.T) {
	sh(t, "for i in iptables-legacy ip6tables-legacy; do $i -P FORWARD ACCEPT; $i -F; $i -X; $i -t nat -F; $i -t nat -X; done")
}

// useLegacy lets this process and its plugins run the legacy variant of iptables.
func useLegacy(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"iptables", "ip6tables"} {
		for _, suffix := range []string{"", "-save", "-restore"} {
			if err := os.Symlink("/usr/sbin/"+name+"-legacy"+suffix, filepath.Join(dir, name+suffix)); err != nil {
				t.Fatal(err)
			}
		}
	}
	sh(t, "nft flush ruleset")
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	t.Cleanup(func() {
		flushLegacy(t)
	})
}

func mustChain(t *testing.T, n *node) *chain {
	t.Helper()
	c, err := n.currentChain()
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// askSoon is ask for an answer that comes at once or not at all.
func (n *node) askSoon(netns, addr string) (string, error) {
	ctx, cancel := context.WithTimeout(n.t.Context(), 300*time.Millisecond)
	defer cancel()
	conn, err := n.Dial(ctx, netns, "tcp", addr)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	_ = conn.SetReadDeadline(time.Now().Add(time.Second))
	greeting, err := io.ReadAll(conn)
	return string(greeting), err
}

// TestRulesOfPodsThatGo: while rules are flushed and restored all the time, no pod leaves a rule behind.
func TestRulesOfPodsThatGo(t *testing.T) {
	sh(t, "nft flush ruleset")
	n := newNode(t, nil)
	var all sync.WaitGroup
	for i := range 4 {
		all.Go(func() {
			for range 3 {
				a := Attachment{ID: fmt.Sprintf("pod%d", i), PortMappings: []PortMapping{{HostPort: int32(18090 + i), ContainerPort: 80}}}
				if _, err := n.Setup(t.Context(), a); err != nil {
					t.Error(err)
				}
				if err := n.Teardown(t.Context(), a); err != nil {
					t.Error(err)
				}
			}
		})
	}
	done := make(chan struct{})
	go func() { all.Wait(); close(done) }()
	for running := true; running; {
		select {
		case <-done:
			running = false
		default:
			sh(t, "iptables -t nat -F OUTPUT")
			n.refreshFirewall()
		}
	}
	n.assertClean()
	if left := n.firewall.watchedPorts(); len(left) > 0 {
		t.Errorf("still watched: %v", left)
	}
}

// TestRulesOfPodsThatCannotGo: while DEL fails, the pod's host ports are not restored.
func TestRulesOfPodsThatCannotGo(t *testing.T) {
	sh(t, "nft flush ruleset")
	n := newNode(t, nil)
	gate := filepath.Join(t.TempDir(), "gate")
	n.plugin("fault", "stdin=$(cat)\n[ $CNI_COMMAND = DEL ] && [ ! -e "+gate+" ] && exit 1\n[ $CNI_COMMAND = ADD ] || exit 0"+passOn)
	n.configure("10.conflist",
		`{"cniVersion":"1.0.0","name":"n","plugins":[{"type":"bridge","bridge":"`+n.cfg.Default.Bridge+`","isGateway":true,
		"ipam":{"type":"host-local","dataDir":"`+n.leasesDir()+`","ranges":[[{"subnet":"10.93.4.0/24"}]]}},
		{"type":"fault"},{"type":"portmap","capabilities":{"portMappings":true}}]}`)
	web := Attachment{ID: "web", PortMappings: []PortMapping{{HostPort: 18099, ContainerPort: 80}}}
	n.setup(web)
	own := portmapChain(&record{key: keyOf("web"), list: mustChain(t, n).list})
	rules := func() int {
		saved, err := iptables.Save(t.Context(), iptables.V4)
		if err != nil {
			t.Fatal(err)
		}
		return len(saved[iptables.NAT].Rules[own])
	}
	sh(t, "iptables -t nat -F "+own)
	n.refreshFirewall()
	if rules() == 0 {
		t.Error("the rules were not restored")
	}
	if err := n.Teardown(t.Context(), web); err == nil {
		t.Fatal("Teardown succeeded, want the plugin's error")
	}
	n.refreshFirewall()
	if left := rules(); left > 0 {
		t.Errorf("%d rules after portmap's DEL, want none", left)
	}
	sh(t, "touch "+gate)
	n.teardown(web)
}

// TestForwardingBlocked: what accept rules of iptables cannot overrule is reported with what to do, while it lasts.
func TestForwardingBlocked(t *testing.T) {
	const firewalld = "nft -f - <<END\ntable inet firewalld {\n chain filter_FORWARD {\n  type filter hook forward priority 10; policy accept;\n" +
		"  ct state established,related accept\n  RULE\n  reject with icmpx type admin-prohibited\n }\n}\nEND"
	const plugin = `{"cniVersion":"1.0.0","name":"n","plugins":[{"type":"bridge","bridge":"foreign0","ipam":{"type":"host-local","subnet":"10.93.3.0/24"}}]}`
	for name, c := range map[string]struct{ conf, host, want string }{
		"nothing":                    {},
		"firewalld":                  {host: firewalld, want: "firewall-cmd --permanent --zone=trusted --add-source=10.93.3.0/24"},
		"firewalld with the subnet":  {host: strings.ReplaceAll(firewalld, "RULE", "ip saddr 10.93.3.0/24 accept")},
		"firewalld with more":        {host: strings.ReplaceAll(firewalld, "RULE", "ip saddr { 10.93.0.0/16, 192.0.2.7 } accept")},
		"policy of nftables":         {host: "nft add table inet filter; nft add chain inet filter forward '{ type filter hook forward priority 0; policy drop; }'", want: "nft insert rule inet filter forward ip saddr 10.93.3.0/24 accept"},
		"policy of the other family": {host: "nft add table ip6 own; nft add chain ip6 own forward '{ type filter hook forward priority 0; policy drop; }'"},
		"rules that only nft shows":  {host: "nft add table ip filter; nft add chain ip filter FORWARD '{ type filter hook forward priority 0; }'; nft add rule ip filter FORWARD ct state vmap '{ established : accept, invalid : drop }'", want: "only nft can show"},
		"Docker, other CNI": {conf: plugin,
			host: "iptables -P FORWARD DROP; iptables -N DOCKER; iptables -A FORWARD -j DOCKER; iptables -A DOCKER -i docker0 -j ACCEPT; iptables -A FORWARD -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT", want: "add the plugin firewall"},
		"Docker with iptables-legacy": {host: "iptables-legacy -P FORWARD DROP", want: "iptables-legacy -I FORWARD -s SUBNET -j ACCEPT"},
		"final reject, other CNI":     {conf: plugin, host: "iptables -A FORWARD -j REJECT", want: "add the plugin firewall"},
		"Docker, CNI that accepts": {conf: plugin,
			host: "iptables -P FORWARD DROP; iptables -N F; iptables -A FORWARD -j F; iptables -A F -s 10.93.0.0/16 -j ACCEPT"},
		"Docker, bridge that accepts": {conf: plugin, host: "iptables -P FORWARD DROP; iptables -A FORWARD -i foreign0 -j ACCEPT"},
	} {
		t.Run(name, func(t *testing.T) {
			sh(t, "nft flush ruleset")
			t.Cleanup(func() { sh(t, "nft flush ruleset"); flushLegacy(t) })
			n := newNode(t, func(c *Config) { c.Default.SubnetV4 = "10.93.3.0/24" })
			if c.conf != "" {
				n.configure("10.conflist", c.conf)
			}
			if c.host != "" {
				sh(t, strings.ReplaceAll(c.host, "  RULE\n", ""))
			}
			if name == "rules that only nft shows" {
				n.firewall.subnets.Store(netip.MustParsePrefix("10.93.3.0/24"), true)
			}
			n.refreshFirewall()
			err := n.Blocked()
			if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
				t.Errorf("Blocked = %v, want %q", err, c.want)
			}
			if name != "rules that only nft shows" {
				if again := CheckForwarding(t.Context(), n.cfg); (again == nil) != (err == nil) {
					t.Errorf("CheckForwarding = %v, want %v", again, err)
				}
			}
			sh(t, "nft flush ruleset")
			flushLegacy(t)
			n.refreshFirewall()
			if err := n.Blocked(); err != nil {
				t.Errorf("Blocked on a host without a firewall = %v, want nil", err)
			}
		})
	}
}

// TestForwardingComesAfterKubeProxy: kube-proxy refuses what goes to a Service without endpoints, in FORWARD. Accepting it before
// would send it out by the uplink, and clients would wait.
func TestForwardingComesAfterKubeProxy(t *testing.T) {
	forward := chainsFor(netip.MustParsePrefix("10.1.0.0/16"))[1]
	for want, rules := range map[string][]string{
		"-I FORWARD 1 ": {"-j DOCKER-USER", "-j DOCKER-FORWARD"},
		"-I FORWARD 3 ": {"-m conntrack --ctstate NEW -j KUBE-PROXY-FIREWALL", "-j KUBE-FORWARD", "-j DOCKER-USER"},
	} {
		lines := forward.missing(iptables.Table{Rules: map[string][]string{"FORWARD": rules}})
		if got := lines[len(lines)-1]; !strings.HasPrefix(got, want) || !strings.HasSuffix(got, "-j "+forward.name) {
			t.Errorf("beside %q: got %q, want %s…", rules, got, want)
		}
	}
}

// TestUncountedInterval checks how often rules are read whose changes nftables does not count.
func TestUncountedInterval(t *testing.T) {
	subnet := netip.MustParsePrefix("10.88.0.0/16")
	wrong := &verdict{err: errors.New("no rules")}
	for _, c := range []struct {
		name   string
		state  func(f *firewall)
		legacy []iptables.Family // the families with tables of iptables-legacy
		want   time.Duration
	}{
		{"no pod", func(*firewall) {}, nil, firewallUnused},
		{"no pod, legacy tables", func(*firewall) {}, []iptables.Family{iptables.V4}, firewallUnused},
		{"a pod", func(f *firewall) { f.subnets.Store(subnet, true) }, nil, refreshInterval},
		{"a pod whose chains are missing", func(f *firewall) { f.subnets.Store(subnet, false) }, nil, refreshInterval},
		{"a pod, legacy tables", func(f *firewall) { f.subnets.Store(subnet, true) }, []iptables.Family{iptables.V4}, firewallSlowly},
		{"a pod, legacy tables of IPv6", func(f *firewall) { f.subnets.Store(subnet, true) }, []iptables.Family{iptables.V6}, firewallSlowly},
		{"only host ports", func(f *firewall) { f.ports.Store("pod", &portRules{}) }, nil, refreshInterval},
		{"no host ports any more", func(f *firewall) { f.ports.Store("pod", &portRules{}); f.ports.Delete("pod") }, nil, firewallUnused},
		{"cannot masquerade", func(f *firewall) { f.failure.Store(wrong) }, nil, refreshInterval},
		{"does not forward", func(f *firewall) { f.blocked.Store(wrong) }, nil, refreshInterval},
		{"a verdict without an error", func(f *firewall) { f.failure.Store(&verdict{}); f.blocked.Store(&verdict{}) }, nil, firewallUnused},
	} {
		f := &firewall{}
		c.state(f)
		if got := f.uncountedInterval(func(family iptables.Family) bool { return slices.Contains(c.legacy, family) }); got != c.want {
			t.Errorf("%s: got %s, want %s", c.name, got, c.want)
		}
	}
}
