package network

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
)

// podCIDRs is the content of the file that stores the pod CIDR. The file is needed because the kubelet does not send
// the pod CIDR again when the daemon restarts.
type podCIDRs struct {
	SubnetV4 string `json:"subnetV4,omitempty"`
	SubnetV6 string `json:"subnetV6,omitempty"`
}

func (m *Manager) podCIDRFile() string { return filepath.Join(m.cfg.CacheDir, "pod-cidr.json") }

// UpdatePodCIDR sets the node's pod CIDR for the embedded default chain: one CIDR, or an IPv4 CIDR and an IPv6 CIDR,
// separated by a comma (CRI UpdateRuntimeConfig). Running pods keep their addresses and gateway. A configuration in
// ConfDir is not affected. An empty string means that the CIDR is not known yet; in that case, nothing changes.
func (m *Manager) UpdatePodCIDR(cidr string) error {
	if cidr == "" {
		return nil
	}
	wanted, err := parsePodCIDR(cidr)
	if err != nil {
		return err
	}
	data, err := json.Marshal(wanted)
	if err != nil {
		return err
	}
	m.mu.Lock()
	known := podCIDRs{m.defaults.SubnetV4, m.defaults.SubnetV6}
	m.mu.Unlock()
	if known == wanted {
		return nil
	}
	if v4, err := parseSubnet(wanted.SubnetV4); err != nil {
		return err
	} else if err := addGateway(m.cfg.Default.Bridge, v4); err != nil {
		return fmt.Errorf("pod CIDR %s: %w", cidr, err)
	}
	if err := writeDurably(m.podCIDRFile(), data); err != nil {
		return fmt.Errorf("save pod CIDR %s: %w", cidr, err)
	}
	m.setPodCIDR(wanted)
	m.reload()
	return nil
}

func parsePodCIDR(cidr string) (podCIDRs, error) {
	var wanted podCIDRs
	for part := range strings.SplitSeq(cidr, ",") {
		prefix, err := parseSubnet(strings.TrimSpace(part))
		if err != nil {
			return wanted, err
		}
		if prefix == (netip.Prefix{}) {
			return wanted, invalidf("pod CIDR %q: an entry is empty", cidr)
		}
		field := &wanted.SubnetV6
		if prefix.Addr().Is4() {
			field = &wanted.SubnetV4
		}
		if *field != "" {
			return wanted, invalidf("pod CIDR %q: more than one subnet of an address family", cidr)
		}
		*field = prefix.String()
	}
	return wanted, nil
}

func (m *Manager) setPodCIDR(wanted podCIDRs) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.defaults.SubnetV4, m.defaults.SubnetV6 = wanted.SubnetV4, wanted.SubnetV6
}

// loadPodCIDR restores the pod CIDR after a restart. A file that cannot be parsed counts as missing: the configured
// subnets then apply until the kubelet sends the pod CIDR again.
func (m *Manager) loadPodCIDR() error {
	data, err := os.ReadFile(m.podCIDRFile())
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read pod CIDR: %w", err)
	}
	var wanted podCIDRs
	err = json.Unmarshal(data, &wanted)
	if err == nil {
		err = DefaultNetwork{SubnetV4: wanted.SubnetV4, SubnetV6: wanted.SubnetV6}.validateSubnets()
	}
	if err != nil || wanted == (podCIDRs{}) {
		m.cfg.Logger.Warn("pod CIDR is not readable, using the configured subnets", "file", m.podCIDRFile(), "err", err)
		return nil
	}
	m.setPodCIDR(wanted)
	return nil
}
