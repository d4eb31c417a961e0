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

// podCIDRs is the file with the pod CIDR from UpdatePodCIDR: the kubelet does not repeat it when we restart.
type podCIDRs struct {
	SubnetV4 string `json:"subnetV4,omitempty"`
	SubnetV6 string `json:"subnetV6,omitempty"`
}

func (m *Manager) podCIDRFile() string { return filepath.Join(m.cfg.CacheDir, "pod-cidr.json") }

// UpdatePodCIDR gives the embedded default chain the node's pod CIDR: one or, separated by a comma, one of each
// family (CRI UpdateRuntimeConfig). Pods that run keep their addresses and their gateway; a configuration in ConfDir is
// not touched.
// An empty CIDR means that none is known yet, and changes nothing.
func (m *Manager) UpdatePodCIDR(cidr string) error {
	if cidr == "" {
		return nil
	}
	told, err := parsePodCIDR(cidr)
	if err != nil {
		return err
	}
	data, err := json.Marshal(told)
	if err != nil {
		return err
	}
	m.mu.Lock()
	known := podCIDRs{m.podCIDR.SubnetV4, m.podCIDR.SubnetV6}
	m.mu.Unlock()
	if known == told {
		return nil
	}
	if v4, err := parseSubnet(told.SubnetV4); err != nil {
		return err
	} else if err := addGateway(m.cfg.Default.Bridge, v4); err != nil {
		return fmt.Errorf("pod CIDR %s: %w", cidr, err)
	}
	if err := writeDurably(m.podCIDRFile(), data); err != nil {
		return fmt.Errorf("keep pod CIDR %s: %w", cidr, err)
	}
	m.setPodCIDR(told)
	m.reload()
	return nil
}

func parsePodCIDR(cidr string) (podCIDRs, error) {
	var told podCIDRs
	for part := range strings.SplitSeq(cidr, ",") {
		prefix, err := parseSubnet(strings.TrimSpace(part))
		if err != nil {
			return told, err
		}
		if prefix == (netip.Prefix{}) {
			return told, invalidf("pod CIDR %q: an entry is empty", cidr)
		}
		field := &told.SubnetV6
		if prefix.Addr().Is4() {
			field = &told.SubnetV4
		}
		if *field != "" {
			return told, invalidf("pod CIDR %q: more than one subnet of a family", cidr)
		}
		*field = prefix.String()
	}
	return told, nil
}

func (m *Manager) setPodCIDR(told podCIDRs) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.podCIDR.SubnetV4, m.podCIDR.SubnetV6 = told.SubnetV4, told.SubnetV6
}

// loadPodCIDR restores the pod CIDR after a restart. A file that cannot be parsed counts as missing: the configuration's subnets
// apply until the kubelet sends its own again.
func (m *Manager) loadPodCIDR() error {
	data, err := os.ReadFile(m.podCIDRFile())
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read pod CIDR: %w", err)
	}
	var told podCIDRs
	err = json.Unmarshal(data, &told)
	if err == nil {
		err = DefaultNetwork(DefaultNetwork{SubnetV4: told.SubnetV4, SubnetV6: told.SubnetV6}).validateSubnets()
	}
	if err != nil || told == (podCIDRs{}) {
		m.cfg.Logger.Warn("pod CIDR is not readable, using the configured subnets", "file", m.podCIDRFile(), "err", err)
		return nil
	}
	m.setPodCIDR(told)
	return nil
}
