package builtin

import (
	"context"
	"crypto/sha512"
	"errors"
	"fmt"
	"net"
	"strings"

	"github.com/tripod-run/tripod/internal/network/iptables"
)

// masquerade implements the bridge plugin's ipMasq: a chain of rules per pod, which replaces the pod's source addresses
// with the host's addresses. The rules are the same as the plugin's. The plugin makes them by ten executions of
// iptables, but here one execution of iptables-restore applies all of them.
type masquerade struct{ chain, comment string }

// newMasquerade chooses the chain's name and the rules' comment exactly as the plugins do (pkg/utils, FormatChainName
// and FormatComment).
func newMasquerade(network, container string) masquerade {
	sum := sha512.Sum512([]byte(network + container))
	return masquerade{
		chain: fmt.Sprintf("CNI-%x", sum)[:28],
		// iptables-restore interprets quotes, but neither the network's name nor the container ID contains quotes.
		comment: fmt.Sprintf(`-m comment --comment "name: \"%s\" id: \"%s\""`, network, container),
	}
}

// add adds the rules for a pod's addresses.
func (m masquerade) add(ctx context.Context, addresses []net.IPNet) error {
	families := map[iptables.Family][]net.IPNet{}
	for _, a := range addresses {
		family := iptables.Family(!isV4(a.IP))
		families[family] = append(families[family], a)
	}
	for family, own := range families {
		multicast := "224.0.0.0/4"
		if family == iptables.V6 {
			multicast = "ff00::/8"
		}
		rules := []string{":" + m.chain + " - [0:0]"} // creates or empties the chain
		for i, a := range own {
			rules = append(rules, fmt.Sprintf("-A %s -d %s -j ACCEPT %s", m.chain, &a, m.comment))
			if i == 0 {
				rules = append(rules, fmt.Sprintf("-A %s ! -d %s -j MASQUERADE %s", m.chain, multicast, m.comment))
			}
		}
		for _, a := range own {
			rules = append(rules, fmt.Sprintf("-A POSTROUTING -s %s -j %s %s", a.IP, m.chain, m.comment))
		}
		if err := iptables.Restore(ctx, family, iptables.NAT, rules...); err != nil {
			return fmt.Errorf("masquerade the pod: %w", err)
		}
	}
	return nil
}

// remove removes the rules for a pod's addresses. Missing rules are not an error.
func (m masquerade) remove(ctx context.Context, addresses []net.IP) error {
	jumps := map[iptables.Family][]string{}
	for _, ip := range addresses {
		family := iptables.Family(!isV4(ip))
		jumps[family] = append(jumps[family], fmt.Sprintf("-D POSTROUTING -s %s -j %s %s", ip, m.chain, m.comment))
	}
	var failures []error
	for family, jumps := range jumps {
		err := m.removeRules(ctx, family, jumps)
		if err != nil { // perhaps a jump is missing: remove only the jumps that exist
			err = m.removeLeftovers(ctx, family)
		}
		failures = append(failures, err)
	}
	return errors.Join(failures...)
}

func (m masquerade) removeRules(ctx context.Context, family iptables.Family, jumps []string) error {
	rules := append([]string{":" + m.chain + " - [0:0]"}, jumps...)
	return iptables.Restore(ctx, family, iptables.NAT, append(rules, "-X "+m.chain)...)
}

func (m masquerade) removeLeftovers(ctx context.Context, family iptables.Family) error {
	tables, err := iptables.Save(ctx, family)
	if err != nil {
		return err
	}
	var jumps []string
	for _, rule := range tables[iptables.NAT].Rules["POSTROUTING"] {
		if strings.HasSuffix(rule, " -j "+m.chain) {
			jumps = append(jumps, "-D POSTROUTING "+rule)
		}
	}
	if err := m.removeRules(ctx, family, jumps); err != nil {
		return fmt.Errorf("remove the pod's masquerading rules: %w", err)
	}
	return nil
}
