package network

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/internal/guard"
	"github.com/tripod-run/tripod/internal/network/iptables"
)

// firewall keeps the pods' rules in the node's firewall, which other software flushes when it reloads:
//
//	first pod of a subnet ─► chains of the subnet ─┐
//	Setup with host ports ─► the plugin's rules  ──┴─► watch: read all rules, restore what is missing
//
// The embedded default has chains for each subnet, which are made before the first pod's ADD. One masquerades, so that
// the pods reach other networks under the node's address. One accepts what the pods send and receive, because Docker,
// ufw and others drop what is forwarded by default. The bridge plugin's ipMasq would make a chain per pod. That takes
// half of the plugin's time for ADD and most of its time for DEL, and the chain stays behind if the pod's namespace is
// gone before DEL. The chains belong to the bridge, not to a pod. Like the bridge, they are never removed.
type firewall struct {
	// subnets says of each subnet (netip.Prefix) that has pods whether its chains existed at the last check.
	subnets sync.Map
	// ports holds the *portRules of each pod with host ports, by key.
	ports sync.Map
	// newChain says that the chain of plugins has changed since the rules were read.
	newChain atomic.Bool
	// changing serialises checks of the rules and changes to them.
	changing sync.Mutex
	// refreshing serialises refreshes.
	refreshing sync.Mutex
	// failure says why pods cannot be masqueraded; blocked says why they are not forwarded. The watch sets both.
	failure, blocked atomic.Pointer[verdict]
	restored         atomic.Pointer[func(what string)]
}

// tables holds the rules of the node by family.
type tables map[iptables.Family]map[string]iptables.Table

// adminChain is for the administrator's own rules, which come before those that accept. Tripod only makes it.
const adminChain = "TRIPOD-ADMIN"

// ownChain is a chain of rules for a subnet and the jump that leads to it.
type ownChain struct {
	purpose, table, name string
	rules                []string // as iptables-save prints them
	from, jump           string
	// first means that the jump comes before the rules of others, except kube-proxy's, which refuse what goes to a Service
	// without endpoints.
	first bool
}

// chainsFor returns the chains for a subnet.
func chainsFor(subnet netip.Prefix) []ownChain {
	multicast := "224.0.0.0/4"
	if subnet.Addr().Is6() {
		multicast = "ff00::/8"
	}
	sum := sha256.Sum256([]byte(subnet.String()))
	id := hex.EncodeToString(sum[:6])
	masq, forward := "TRIPOD-MASQ-"+id, "TRIPOD-FORWARD-"+id
	return []ownChain{{
		purpose: "masquerading", table: iptables.NAT, name: masq,
		rules: []string{"-d " + subnet.String() + " -j RETURN", "-d " + multicast + " -j RETURN", "-j MASQUERADE"},
		from:  "POSTROUTING", jump: fmt.Sprintf("-A POSTROUTING -s %s -m comment --comment tripod-pods -j %s", subnet, masq),
	}, {
		purpose: "forwarding", table: iptables.Filter, name: forward,
		rules: []string{"-j " + adminChain, "-s " + subnet.String() + " -j ACCEPT", "-d " + subnet.String() + " -j ACCEPT"},
		from:  "FORWARD", jump: "-m comment --comment tripod-pods -j " + forward, first: true,
	}}
}

// missing returns the lines for iptables-restore that complete the chain in its table.
func (c ownChain) missing(now iptables.Table) (lines []string) {
	if !slices.Equal(now.Rules[c.name], c.rules) {
		lines = append(lines, ":"+c.name+" - [0:0]") // creates or empties the chain
		if _, ok := now.Rules[adminChain]; !ok && c.table == iptables.Filter {
			lines = append(lines, ":"+adminChain+" - [0:0]")
		}
		for _, rule := range c.rules {
			lines = append(lines, "-A "+c.name+" "+rule)
		}
	}
	if now.Has(c.from, "-j "+c.name) {
		return lines
	}
	if !c.first {
		return append(lines, c.jump)
	}
	position := 1
	for i, rule := range now.Rules[c.from] {
		if strings.Contains(rule, "-j KUBE-") {
			position = i + 2
		}
	}
	return append(lines, fmt.Sprintf("-I %s %d %s", c.from, position, c.jump))
}

// restore makes the chain unless it is complete. It reports whether it changed anything.
func (c ownChain) restore(ctx context.Context, family iptables.Family, now iptables.Table) (changed bool, err error) {
	if now.Unreadable {
		return false, fmt.Errorf("%s: table %s of iptables has rules that only nft can show (move them to another table)", c.purpose, c.table)
	}
	lines := c.missing(now)
	if lines == nil {
		return false, nil
	}
	if err := iptables.Restore(ctx, family, c.table, lines...); err != nil {
		return false, fmt.Errorf("%s: %w", c.purpose, err)
	}
	return true, nil
}

// restoreSubnet makes the chains of a subnet unless they are complete. It returns what it has made, and separately why
// the pods are not masqueraded, and why what they send and receive is not accepted.
func restoreSubnet(ctx context.Context, subnet netip.Prefix, now map[string]iptables.Table) (made []string, failure, blocked error) {
	for _, c := range chainsFor(subnet) {
		changed, err := c.restore(ctx, familyOf(subnet.Addr()), now[c.table])
		if err != nil {
			err = fmt.Errorf("firewall rules for the pods of %s: %w", subnet, err)
		}
		if changed {
			made = append(made, c.purpose+" of "+subnet.String())
		}
		if c.table == iptables.NAT {
			failure = err
		} else {
			blocked = err
		}
	}
	return made, failure, blocked
}

func familyOf(a netip.Addr) iptables.Family { return iptables.Family(a.Is6()) }

// ensure makes the chains of the subnets, unless they existed at the last check.
func (f *firewall) ensure(ctx context.Context, subnets []netip.Prefix) error {
	for _, subnet := range subnets {
		if err := f.ensureSubnet(ctx, subnet); err != nil {
			return err
		}
	}
	return nil
}

func (f *firewall) exists(subnet netip.Prefix) bool {
	there, _ := f.subnets.Load(subnet)
	return there == true
}

func (f *firewall) ensureSubnet(ctx context.Context, subnet netip.Prefix) error {
	if f.exists(subnet) {
		return nil
	}
	f.changing.Lock()
	defer f.changing.Unlock()
	if f.exists(subnet) { // made while we waited for the lock
		return nil
	}
	now, err := iptables.Save(ctx, familyOf(subnet.Addr()))
	if err != nil {
		return err
	}
	if _, err, _ = restoreSubnet(ctx, subnet, now); err != nil { // the watch reports what blocks the pods
		return err
	}
	f.subnets.Store(subnet, true)
	return nil
}

const (
	// firewallInterval is the time between checks of whether the kernel's rules have changed, and firewallSlowly that
	// between reads of rules whose changes the kernel does not count, or which take long to read.
	firewallInterval, firewallSlowly = time.Second, 3 * time.Second
	// firewallUnused is the time between reads of uncounted rules while no pod has rules.
	firewallUnused = time.Minute
	// firewallShare is how much longer than a refresh the pause after it is, up to firewallSlowly, because others may
	// change the rules all the time.
	firewallShare = 20
)

// watchFirewall restores the pods' rules until Close, within a second if the rules are those of nftables, which count
// their changes.
func (m *Manager) watchFirewall() {
	m.loadFirewall()
	var last time.Time
	var seen uint32
	pause := firewallInterval
	for ; ; _ = guard.Sleep(m.life, pause) {
		if m.life.Err() != nil {
			return
		}
		start := time.Now()
		now := rulesetGeneration()
		newChain := m.firewall.newChain.Swap(false) // before the rules are read
		if now == seen && !newChain && start.Sub(last) < m.firewall.uncountedInterval(iptables.HasLegacy) {
			continue
		}
		seen, last = now, start
		if !m.refreshFirewall() {
			last = time.Time{}
		}
		pause = min(max(firewallInterval, firewallShare*time.Since(start)), firewallSlowly)
	}
}

// uncountedInterval returns the time between reads of the rules if nftables counts no change: tables of iptables-legacy have
// no count. As long as no pod has had rules and nothing is wrong, only the verdict on other programs' rules can become old.
func (f *firewall) uncountedInterval(hasLegacy func(iptables.Family) bool) time.Duration {
	switch {
	case !f.used() && f.failure.Load().error() == nil && f.blocked.Load().error() == nil:
		return firewallUnused
	case hasLegacy(iptables.V4) || hasLegacy(iptables.V6):
		return firewallSlowly
	}
	return refreshInterval
}

// used reports whether pods have rules, or have had rules in one of the subnets since the start.
func (f *firewall) used() bool {
	for _, pods := range []*sync.Map{&f.subnets, &f.ports} {
		for range pods.Range {
			return true
		}
	}
	return false
}

// rulesetGeneration returns the number of the ruleset of nftables, which every change increments, or 0 if the kernel has
// none.
func rulesetGeneration() uint32 {
	request := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_GETGEN, 0)
	request.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_UNSPEC})
	messages, err := request.Execute(unix.NETLINK_NETFILTER, 0)
	if err != nil || len(messages) == 0 || len(messages[0]) < nl.SizeofNfgenmsg {
		return 0
	}
	attributes, err := nl.ParseRouteAttr(messages[0][nl.SizeofNfgenmsg:])
	if err != nil {
		return 0
	}
	for _, a := range attributes {
		if a.Attr.Type == unix.NFTA_GEN_ID && len(a.Value) == 4 {
			return uint32(a.Value[0])<<24 | uint32(a.Value[1])<<16 | uint32(a.Value[2])<<8 | uint32(a.Value[3])
		}
	}
	return 0
}

// loadFirewall finds the subnets and the host ports of pods that earlier processes have set up.
func (m *Manager) loadFirewall() {
	keys, err := m.records.keys()
	if err != nil {
		m.cfg.Logger.Warn("rules of running pods are not watched", "err", err)
		return
	}
	for _, key := range keys {
		rec, err := m.records.get(key)
		if err != nil || rec == nil || !isNetns(m.netnsPath(key)) {
			continue // never set up, or being released; others report err
		}
		if rec.Source == defaultSource {
			for _, subnet := range subnetsIn(rec.Conf) {
				m.firewall.subnets.LoadOrStore(subnet, false)
			}
		}
		if rules := m.portRules(rec); rules != nil {
			m.firewall.ports.LoadOrStore(key, rules)
		}
	}
}

// refreshFirewall restores rules that were removed, for example by a firewall that reloads. It returns false if rules are
// still missing that it will restore later.
func (m *Manager) refreshFirewall() (complete bool) {
	f := &m.firewall
	f.refreshing.Lock()
	defer f.refreshing.Unlock()
	ctx, cancel := context.WithTimeout(m.life, probeTimeout)
	defer cancel()
	ports := f.watchedPorts() // before reading the rules, so that the rules of these pods are complete
	f.changing.Lock()
	now, err := m.readRules(ctx)
	made, failure, blocked := f.restoreSubnets(ctx, now)
	f.changing.Unlock()
	blocked = errors.Join(blocked, m.forwarding(ctx, now))
	restored, complete := m.restorePorts(m.life, now, ports)
	if m.life.Err() != nil {
		return true
	}
	made = append(made, restored...)
	f.failure.Store(&verdict{errors.Join(err, failure)})
	f.blocked.Store(&verdict{blocked})
	if len(made) == 0 {
		return complete
	}
	what := strings.Join(made, ", ")
	m.cfg.Logger.Warn("restored firewall rules of pods that something else had removed", "rules", what)
	if tell := f.restored.Load(); tell != nil {
		(*tell)(what)
	}
	return complete
}

// restoreSubnets restores the chains of all subnets that have pods, and returns the same as restoreSubnet.
func (f *firewall) restoreSubnets(ctx context.Context, now tables) (restored []string, failure, blocked error) {
	for key, there := range f.subnets.Range {
		subnet := key.(netip.Prefix)
		saved, read := now[familyOf(subnet.Addr())]
		if !read {
			continue
		}
		made, err, block := restoreSubnet(ctx, subnet, saved)
		f.subnets.Store(subnet, err == nil) // if not, the next pod retries and reports the error
		failure, blocked = errors.Join(failure, err), errors.Join(blocked, block)
		if there == true { // otherwise they are made for the first time
			restored = append(restored, made...)
		}
	}
	return restored, failure, blocked
}

// readRules reads the rules of the families that pods use. If it cannot read those of one family, it returns the others.
func (m *Manager) readRules(ctx context.Context) (now tables, err error) {
	families := map[iptables.Family]bool{}
	for subnet := range m.firewall.subnets.Range {
		families[familyOf(subnet.(netip.Prefix).Addr())] = true
	}
	for _, rules := range m.firewall.ports.Range {
		for family := range rules.(*portRules).wanted {
			families[family] = true
		}
	}
	if c, err := m.currentChain(); err == nil {
		for _, subnet := range m.podSubnets(c) {
			families[familyOf(subnet.Addr())] = true
		}
	}
	if len(families) == 0 { // the subnet is not known
		families[iptables.V4] = true
	}
	now = tables{}
	for family := range families {
		saved, failed := iptables.Save(ctx, family)
		if failed == nil {
			now[family] = saved
		}
		err = errors.Join(err, failed)
	}
	return now, err
}

// OnRestored sets the function that gets what was restored, each time that rules were missing.
func (m *Manager) OnRestored(tell func(what string)) { m.firewall.restored.Store(&tell) }

// Blocked returns why the node's firewall does not forward what pods send and receive, and what to do, or nil.
func (m *Manager) Blocked() error { return m.firewall.blocked.Load().error() }

func (v *verdict) error() error {
	if v == nil {
		return nil
	}
	return v.err
}
