package network

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"

	"github.com/tripod-run/tripod/internal/lazyregexp"
	"github.com/tripod-run/tripod/internal/network/iptables"
)

// CheckForwarding returns why the firewall of this node does not forward what pods send and receive, and what to do, or
// nil. The daemon's own rules need not be there yet.
func CheckForwarding(ctx context.Context, cfg Config) error {
	m := &Manager{cfg: cfg.withDefaults()}
	m.defaults = m.cfg.Default
	if err := m.loadPodCIDR(); err != nil {
		return err
	}
	m.reload()
	now, err := m.readRules(ctx)
	if errdefs.IsFailedPrecondition(err) {
		err = nil // another network may do without iptables
	}
	return errors.Join(err, m.forwarding(ctx, now))
}

// forwarding returns what drops the packets of the current chain's pods. The accept rules of the embedded default
// overrule what else iptables has, but not the chains of other programs in nftables. Other chains must bring rules of
// their own.
func (m *Manager) forwarding(ctx context.Context, now tables) error {
	c, err := m.currentChain()
	if err != nil {
		return nil // Status reports it
	}
	subnets := m.podSubnets(c)
	var problems []error
	for family, saved := range now {
		legacy, err := iptables.SaveLegacy(ctx, family)
		if err != nil {
			problems = append(problems, err)
		}
		if filter := legacy[iptables.Filter]; dropsForwarded(filter) && !reflect.DeepEqual(filter, saved[iptables.Filter]) &&
			!c.accepted(filter, subnets) {
			problems = append(problems,
				fmt.Errorf("chain FORWARD of %[1]s-legacy drops what it does not know, and rules of %[1]s cannot overrule it: "+
					"%[1]s-legacy -I FORWARD -s SUBNET -j ACCEPT, and the same with -d, for the pods of %[2]s", family, c.source))
		}
		if filter := saved[iptables.Filter]; !c.embedded() && dropsForwarded(filter) && !c.accepted(filter, subnets) {
			problems = append(problems, fmt.Errorf("chain FORWARD of %s drops what it does not know, and no rule accepts the pods of %s: "+
				"add the plugin firewall to that configuration, or insert rules with -s SUBNET -j ACCEPT and -d SUBNET -j ACCEPT", family, c.source))
		}
	}
	for _, chain := range forwardChains(ctx) {
		for _, subnet := range subnets {
			if chain.family == "inet" || chain.family == "ip" && subnet.Addr().Is4() || chain.family == "ip6" && subnet.Addr().Is6() {
				problems = append(problems, chain.blocks(ctx, subnet, m.cfg.Default.Bridge))
			}
		}
	}
	return errors.Join(problems...)
}

// podSubnets returns the subnets of the chain's pods, as far as its configuration or the kubelet says.
func (m *Manager) podSubnets(c *chain) []netip.Prefix {
	if c.embedded() {
		return c.masqueraded
	}
	subnets := subnetsIn(c.list.Bytes)
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.defaults != m.cfg.Default { // the kubelet has sent the pod CIDR
		for _, text := range []string{m.defaults.SubnetV4, m.defaults.SubnetV6} {
			if subnet, err := parseSubnet(text); err == nil && subnet.IsValid() {
				subnets = append(subnets, subnet)
			}
		}
	}
	return subnets
}

var subnetFields = lazyregexp.New(`"subnet"\s*:\s*"([^"]*)"`)

// subnetsIn returns the subnets that a CNI configuration names.
func subnetsIn(conf []byte) (subnets []netip.Prefix) {
	for _, match := range subnetFields().FindAllSubmatch(conf, -1) {
		if subnet, err := parseSubnet(string(match[1])); err == nil && subnet.IsValid() {
			subnets = append(subnets, subnet)
		}
	}
	return subnets
}

// dropsForwarded reports whether chain FORWARD drops what none of its rules knows.
func dropsForwarded(filter iptables.Table) bool {
	rules := filter.Rules["FORWARD"]
	return filter.Policies["FORWARD"] == "DROP" ||
		len(rules) > 0 && slices.Contains([]string{"-j DROP", "-j REJECT"}, strings.Join(strings.Fields(rules[len(rules)-1] + " .")[:2], " "))
}

// accepted reports whether a rule that FORWARD leads to may accept new connections of the chain's pods.
func (c *chain) accepted(filter iptables.Table, subnets []netip.Prefix) bool {
	seen := map[string]bool{"KUBE-FORWARD": true} // kube-proxy's chain accepts only what it has marked
	var search func(name string) bool
	search = func(name string) bool {
		if seen[name] {
			return false
		}
		seen[name] = true
		return slices.ContainsFunc(filter.Rules[name], func(rule string) bool {
			_, target, _ := strings.Cut(" "+rule, " -j ")
			if _, goTo, ok := strings.Cut(" "+rule, " -g "); ok {
				target = goTo
			}
			target, _, _ = strings.Cut(target, " ")
			return target == "ACCEPT" && c.concerns(rule, subnets) || search(target)
		})
	}
	return search("FORWARD")
}

// concerns reports whether a rule that accepts may match a pod's first packet.
func (c *chain) concerns(rule string, subnets []netip.Prefix) bool {
	words := strings.Fields(rule)
	for i := range len(words) - 1 {
		value := words[i+1]
		switch words[i] {
		case "--ctstate", "--state":
			if !strings.Contains(value, "NEW") {
				return false
			}
		case "-p":
			if strings.Contains(value, "icmp") {
				return false
			}
		case "-i", "-o":
			if !strings.HasSuffix(value, "+") && !strings.Contains(string(c.list.Bytes), strconv.Quote(value)) {
				return false // of Docker, libvirt …
			}
		case "-s", "-d":
			prefix, err := netip.ParsePrefix(value)
			if err == nil && len(subnets) > 0 && !slices.ContainsFunc(subnets, prefix.Overlaps) {
				return false
			}
		}
	}
	return true
}

// forwardChain is a chain of nftables that sees the packets that the node forwards, and is not FORWARD of iptables.
type forwardChain struct{ family, table, name, policy string }

// forwardChains returns these chains, or none if the program nft is missing.
func forwardChains(ctx context.Context) (chains []forwardChain) {
	output, err := exec.CommandContext(ctx, "nft", "-j", "list", "chains").Output()
	if err != nil {
		return nil
	}
	var listed struct {
		Items []struct {
			Chain struct{ Family, Table, Name, Hook, Policy string }
		} `json:"nftables"`
	}
	if json.Unmarshal(output, &listed) != nil {
		return nil
	}
	for _, item := range listed.Items {
		c := item.Chain
		if c.Hook == "forward" && (c.Table != iptables.Filter || c.Name != "FORWARD") {
			chains = append(chains, forwardChain{c.Family, c.Table, c.Name, c.Policy})
		}
	}
	return chains
}

var finalRefusal = lazyregexp.New(`^(counter packets \d+ bytes \d+ )?(log .*)?(reject|drop)\b`)

var prefixes = lazyregexp.New(`[0-9a-f:.]+/[0-9]+`)

// blocks returns an error if the chain drops what it does not know, and its table does not name the subnet or the
// bridge of the pods.
func (f forwardChain) blocks(ctx context.Context, subnet netip.Prefix, bridge string) error {
	output, err := exec.CommandContext(ctx, "nft", "list", "table", f.family, f.table).Output()
	if err != nil {
		return nil // removed in the meantime
	}
	text := string(output)
	_, body, _ := strings.Cut(text, "\tchain "+f.name+" {\n")
	body, _, _ = strings.Cut(body, "\n\t}")
	last := strings.TrimSpace(body[strings.LastIndex(body, "\n")+1:])
	named := strings.Contains(text, strconv.Quote(bridge)) || slices.ContainsFunc(prefixes().FindAllString(text, -1), func(word string) bool {
		p, err := netip.ParsePrefix(word)
		return err == nil && p.Bits() > 0 && p.Bits() <= subnet.Bits() && p.Contains(subnet.Addr())
	})
	if named || f.policy != "drop" && !finalRefusal().MatchString(last) {
		return nil
	}
	remedy := fmt.Sprintf("nft insert rule %[1]s %[2]s %[3]s %[4]s saddr %[5]s accept, and the same with daddr",
		f.family, f.table, f.name, map[bool]string{false: "ip", true: "ip6"}[subnet.Addr().Is6()], subnet)
	if f.table == "firewalld" {
		remedy = fmt.Sprintf("firewall-cmd --permanent --zone=trusted --add-source=%s && firewall-cmd --reload", subnet)
	}
	return fmt.Errorf("chain %s of nftables' table %s %s drops what pods of %s send and receive, and rules of iptables cannot overrule it: %s",
		f.name, f.family, f.table, subnet, remedy)
}
