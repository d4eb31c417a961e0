package network

import (
	"context"
	"crypto/sha512"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/invoke"
	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/tripod-run/tripod/internal/network/iptables"
)

// portRules are the rules that plugin portmap has made for a pod.
type portRules struct {
	wanted map[iptables.Family][]wantedRule
	// next is when to restore the rules again, and pause the time until then, if they stay incomplete.
	next  time.Time
	pause time.Duration
}

// wantedRule is a rule that must be in a chain of table nat. Its parts are sequences of words, because the order of the
// matches depends on the version.
type wantedRule struct {
	chain string
	parts []string
}

// portmapConf has the fields of the plugin's configuration that decide which rules it makes.
type portmapConf struct {
	Backend              string  `json:"backend"`
	SNAT                 *bool   `json:"snat"`
	ExternalSetMarkChain *string `json:"externalSetMarkChain"`
}

// portmapOf returns the plugin of the recorded chain that maps the pod's host ports, or nil.
func portmapOf(rec *record) *libcni.PluginConfig {
	i := slices.IndexFunc(rec.list.Plugins, func(p *libcni.PluginConfig) bool {
		return p.Network.Type == "portmap" && p.Network.Capabilities[capPortMappings]
	})
	if i < 0 || rec.Capabilities[capPortMappings] == nil {
		return nil
	}
	return rec.list.Plugins[i]
}

// portRules returns the rules for the host ports of a pod that is set up, or nil if it has none that iptables shows.
func (m *Manager) portRules(rec *record) *portRules {
	plugin := portmapOf(rec)
	if plugin == nil {
		return nil
	}
	var conf portmapConf
	var ports []portMapEntry
	added, err := m.cachedResult(rec)
	if err != nil || added == nil ||
		json.Unmarshal(plugin.Bytes, &conf) != nil || conf.Backend == "nftables" ||
		json.Unmarshal(rec.Capabilities[capPortMappings], &ports) != nil {
		return nil
	}
	var r Result
	if r.addInterfaces(added) != nil {
		return nil
	}
	rules := &portRules{wanted: map[iptables.Family][]wantedRule{}}
	for _, ip := range r.IPs {
		family := familyOf(ip)
		if rules.wanted[family] == nil {
			rules.wanted[family] = conf.rules(portmapChain(rec), portsOf(ports, family))
		}
	}
	return rules
}

// cachedResult returns the result of the pod's ADD, or nil.
func (m *Manager) cachedResult(rec *record) (*types100.Result, error) {
	added, err := m.cni.GetNetworkListCachedResult(rec.list, rec.runtimeConf(m.netnsPath(rec.key)))
	if err != nil || added == nil {
		return nil, err
	}
	return types100.NewResultFromResult(added)
}

// portmapChain returns the name of the chain with the pod's rules, as the plugin chooses it.
func portmapChain(rec *record) string {
	sum := sha512.Sum512([]byte(rec.list.Name + rec.key))
	return fmt.Sprintf("CNI-DN-%x", sum)[:28]
}

// portsOf returns the mappings that apply to a family: an address of the other one excludes it.
func portsOf(ports []portMapEntry, family iptables.Family) []portMapEntry {
	return slices.DeleteFunc(slices.Clone(ports), func(p portMapEntry) bool {
		return p.HostIP != "" && strings.Contains(p.HostIP, ":") != bool(family)
	})
}

// rules returns the rules for a pod whose own chain has this name.
func (c portmapConf) rules(own string, ports []portMapEntry) []wantedRule {
	if len(ports) == 0 {
		return nil
	}
	const dnat, mark, masq = "CNI-HOSTPORT-DNAT", "CNI-HOSTPORT-SETMARK", "CNI-HOSTPORT-MASQ"
	rules := []wantedRule{{"PREROUTING", []string{"-j " + dnat}}, {"OUTPUT", []string{"-j " + dnat}}}
	if (c.SNAT == nil || *c.SNAT) && c.ExternalSetMarkChain == nil {
		rules = append(rules, wantedRule{mark, []string{"-j MARK"}}, wantedRule{masq, []string{"-j MASQUERADE"}},
			wantedRule{"POSTROUTING", []string{"-j " + masq}}, wantedRule{own, []string{"-j " + mark}})
	}
	for _, p := range ports {
		protocol := "-p " + p.Protocol
		rules = append(rules, wantedRule{dnat, []string{protocol, "-j " + own}},
			wantedRule{own, []string{protocol, "--dport " + strconv.Itoa(int(p.HostPort)), "-j DNAT"}})
	}
	return rules
}

// complete reports whether no rule is missing.
func (r *portRules) complete(now tables) bool {
	for family, wanted := range r.wanted {
		saved, read := now[family]
		table := saved[iptables.NAT]
		if read && !table.Unreadable && slices.ContainsFunc(wanted, func(w wantedRule) bool { return !table.Has(w.chain, w.parts...) }) {
			return false
		}
	}
	return true
}

func (f *firewall) watchedPorts() map[string]*portRules {
	watched := map[string]*portRules{}
	for key, rules := range f.ports.Range {
		watched[key.(string)] = rules.(*portRules)
	}
	return watched
}

// restorePorts restores the host ports of pods whose rules are incomplete. It returns what it has restored, and whether
// it need not look again soon.
func (m *Manager) restorePorts(ctx context.Context, now tables, watched map[string]*portRules) (made []string, complete bool) {
	ids := sync.Map{} // the IDs (string) of pods whose plugin has run, by key
	complete = true
	started := false
	var all sync.WaitGroup
	executables := make(chan struct{}, gcParallel)
	for key, rules := range watched {
		if rules.complete(now) {
			continue
		}
		complete = complete && rules.pause > refreshInterval
		if time.Now().Before(rules.next) {
			continue
		}
		started = true
		all.Go(func() {
			executables <- struct{}{}
			defer func() { <-executables }()
			id, err := m.restorePod(key)
			if err != nil {
				m.cfg.Logger.Warn("host ports cannot be restored, will retry", "pod", id, "err", err)
			}
			if id != "" {
				ids.Store(key, id)
			}
		})
	}
	all.Wait()
	if !started {
		return nil, complete
	}
	after, err := m.readRules(ctx)
	for key, id := range ids.Range {
		rules := watched[key.(string)]
		if err == nil && rules.complete(after) {
			rules.pause, rules.next = 0, time.Time{}
			made = append(made, "host ports of pod "+id.(string))
			continue
		}
		// A plugin whose rules something else removes at once must not run all the time.
		rules.pause = min(max(2*rules.pause, firewallInterval), time.Minute)
		rules.next = time.Now().Add(rules.pause)
	}
	slices.Sort(made)
	return made, complete
}

// restorePod runs ADD of the plugin portmap again, which adds only the rules that are missing. It returns the pod's ID,
// or "" if the pod is gone or in the hands of another operation, such as Teardown; then the next check looks again.
func (m *Manager) restorePod(key string) (id string, err error) {
	unlock := m.locks.try(key)
	if unlock == nil {
		return "", nil
	}
	defer unlock()
	if _, watched := m.firewall.ports.Load(key); !watched {
		return "", nil
	}
	rec, err := m.records.get(key)
	if err != nil {
		return "", err
	}
	if rec == nil || !isNetns(m.netnsPath(key)) {
		m.firewall.ports.Delete(key)
		return "", nil
	}
	plugin := portmapOf(rec)
	added, err := m.cachedResult(rec)
	if err != nil || added == nil || plugin == nil {
		return rec.ID, err
	}
	previous, err := added.GetAsVersion(rec.list.CNIVersion)
	if err != nil {
		return rec.ID, err
	}
	conf, err := libcni.InjectConf(plugin, map[string]any{
		"name": rec.list.Name, "cniVersion": rec.list.CNIVersion, "prevResult": previous,
		"runtimeConfig": map[string]any{capPortMappings: rec.Capabilities[capPortMappings]},
	})
	if err != nil {
		return rec.ID, err
	}
	path, err := m.exec.FindInPath(plugin.Network.Type, m.cfg.BinDirs)
	if err != nil {
		return rec.ID, err
	}
	defer m.excludeGC()()
	_, err = invoke.ExecPluginWithResult(m.life, path, conf.Bytes, &invoke.Args{
		Command: "ADD", ContainerID: key, NetNS: m.netnsPath(key), PluginArgs: rec.Args, IfName: rec.Interface,
		Path: strings.Join(m.cfg.BinDirs, ":"),
	}, m.exec)
	return rec.ID, err
}
