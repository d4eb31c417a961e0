package network

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"

	"github.com/containerd/errdefs"
	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/utils"
	"github.com/containernetworking/cni/pkg/version"
)

// chain is a parsed CNI network configuration list.
type chain struct {
	// source is the configuration file or "the embedded default", for logs and errors.
	source string
	list   *libcni.NetworkConfigList
	// optional maps plugins of the embedded default to the capabilities that they implement. A pod that does not use
	// the capability skips the plugin. Skipping a plugin saves one process for ADD and one for DEL. Skipping portmap
	// also saves the runs of iptables in its DEL.
	optional map[string]string
	// masqueraded holds the pod subnets whose addresses we masquerade. Only the embedded default has any.
	masqueraded []netip.Prefix
	// settings are those from which the embedded default was made.
	settings DefaultNetwork
}

// embedded reports whether c is the embedded default.
func (c *chain) embedded() bool { return len(c.masqueraded) > 0 }

// loaded is the outcome of loading a chain: either chain or err is set.
type loaded struct {
	chain *chain
	err   error
}

// confList is a configuration list with all its plugins inline. Records store this form. The other forms that libcni
// reads (plugins in a folder next to the list, single-plugin files) are converted to this form.
type confList struct {
	Name         string            `json:"name"`
	CNIVersion   string            `json:"cniVersion"`
	DisableCheck bool              `json:"disableCheck,omitempty"`
	DisableGC    bool              `json:"disableGC,omitempty"`
	Plugins      []json.RawMessage `json:"plugins"`
}

func (l confList) parse() (*libcni.NetworkConfigList, error) {
	data, err := json.Marshal(l)
	if err != nil {
		return nil, err
	}
	return libcni.NetworkConfFromBytes(data)
}

// findChain loads the configuration in dir whose file name sorts first. If there is none, it returns the embedded
// default, or an error if the default is off. An invalid file is an error, because skipping it would select a different
// network. last is the chain found before, or nil: the same embedded default is not made again.
func findChain(dir string, def DefaultNetwork, leases string, last *chain) (*chain, error) {
	files, err := libcni.ConfFiles(dir, []string{".conflist", ".conf", ".json"})
	if err != nil {
		return nil, fmt.Errorf("read CNI configuration directory: %w: %w", err, errdefs.ErrFailedPrecondition)
	}
	if len(files) == 0 && def.Off {
		return nil, fmt.Errorf("no CNI configuration in %s, and the embedded default is switched off (install a network plugin): %w",
			dir, errdefs.ErrFailedPrecondition)
	}
	if len(files) == 0 && last != nil && last.embedded() && last.settings == def {
		return last, nil
	}
	if len(files) == 0 {
		return defaultChain(def, leases)
	}
	slices.Sort(files)
	c, err := loadChain(files[0])
	if errors.Is(err, fs.ErrNotExist) { // removed after ConfFiles listed it
		return findChain(dir, def, leases, last)
	}
	if err != nil {
		return nil, fmt.Errorf("CNI configuration %s is invalid (correct it, or remove it to use the next file by name): %w: %w",
			files[0], err, errdefs.ErrFailedPrecondition)
	}
	return c, nil
}

func loadChain(file string) (*chain, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	list, err := parseConf(file, data)
	if err != nil {
		return nil, err
	}
	if err := utils.ValidateNetworkName(list.Name); err != nil {
		return nil, err
	}
	if newer, err := version.GreaterThan(list.CNIVersion, version.Current()); err != nil || newer {
		return nil, fmt.Errorf("cniVersion %q is not one of %v", list.CNIVersion, version.All.SupportedVersions())
	}
	return &chain{source: file, list: list}, nil
}

// parseConf parses a configuration list or a single plugin. The file contains a single plugin if it has no "plugins"
// key and its extension is not .conflist.
func parseConf(file string, data []byte) (*libcni.NetworkConfigList, error) {
	var head struct {
		Name       string           `json:"name"`
		CNIVersion string           `json:"cniVersion"`
		Plugins    *json.RawMessage `json:"plugins"`
	}
	if err := json.Unmarshal(data, &head); err != nil {
		return nil, fmt.Errorf("not JSON: %w", err)
	}
	norm := confList{Name: head.Name, CNIVersion: head.CNIVersion}
	if head.Plugins == nil && filepath.Ext(file) != ".conflist" {
		if _, err := libcni.NetworkPluginConfFromBytes(data); err != nil {
			return nil, err
		}
		norm.Plugins = []json.RawMessage{data}
	} else {
		list, err := libcni.NetworkConfFromFile(file)
		if err != nil {
			return nil, err
		}
		norm.CNIVersion, norm.DisableCheck, norm.DisableGC = list.CNIVersion, list.DisableCheck, list.DisableGC
		for _, plugin := range list.Plugins {
			norm.Plugins = append(norm.Plugins, plugin.Bytes)
		}
	}
	norm.CNIVersion = cmp.Or(norm.CNIVersion, "0.1.0") // plugins assume 0.1.0 if it is missing
	return norm.parse()
}

// The embedded default's name and CNI version. The version is the newest that Debian's plugins (1.1.1) support.
const (
	defaultSource      = "the embedded default"
	defaultNetworkName = "tripod"
	defaultCNIVersion  = "1.0.0"
)

// defaultChain makes the embedded default chain, with the given directory for host-local's leases.
func defaultChain(d DefaultNetwork, leases string) (*chain, error) {
	ipam := map[string]any{"type": "host-local", "dataDir": leases}
	var ranges [][]map[string]string // a pod gets one address from each range; the first address is its primary one
	var routes []map[string]string
	var masqueraded []netip.Prefix
	for _, family := range []struct{ subnet, everything string }{{d.SubnetV4, "0.0.0.0/0"}, {d.SubnetV6, "::/0"}} {
		subnet, err := parseSubnet(family.subnet)
		if err != nil {
			return nil, err
		}
		if subnet.IsValid() {
			ranges = append(ranges, []map[string]string{{"subnet": subnet.String()}})
			routes = append(routes, map[string]string{"dst": family.everything})
			masqueraded = append(masqueraded, subnet)
		}
	}
	ipam["ranges"], ipam["routes"] = ranges, routes

	bridge := map[string]any{
		"type":   "bridge",
		"bridge": d.Bridge,
		"ipam":   ipam,
		// The node is the pods' gateway. Hairpin mode lets a pod reach itself through its own host port.
		"isGateway": true, "hairpinMode": true,
		// If the configured subnet changes, the new gateway must replace the bridge's address, or all later ADDs would
		// fail. For a subnet from the kubelet, addGateway has already added the new address.
		"forceAddress": true,
	}
	if d.MTU > 0 {
		bridge["mtu"] = d.MTU
	}
	plugins := []map[string]any{
		bridge,
		{"type": "portmap", "snat": true, "capabilities": map[string]bool{capPortMappings: true}},
		{"type": "bandwidth", "capabilities": map[string]bool{capBandwidth: true}},
	}
	norm := confList{Name: defaultNetworkName, CNIVersion: defaultCNIVersion}
	for _, plugin := range plugins {
		data, err := json.Marshal(plugin)
		if err != nil {
			return nil, err
		}
		norm.Plugins = append(norm.Plugins, data)
	}
	list, err := norm.parse()
	if err != nil {
		return nil, fmt.Errorf("embedded default network: %w", err)
	}
	optional := map[string]string{"portmap": capPortMappings, "bandwidth": capBandwidth}
	return &chain{source: defaultSource, list: list, optional: optional, masqueraded: masqueraded, settings: d}, nil
}

// forPod returns the configuration list without the optional plugins whose capability is not in caps.
func (c *chain) forPod(caps map[string]json.RawMessage) (*libcni.NetworkConfigList, error) {
	norm := confList{Name: c.list.Name, CNIVersion: c.list.CNIVersion, DisableCheck: c.list.DisableCheck, DisableGC: c.list.DisableGC}
	for _, plugin := range c.list.Plugins {
		if capability, ok := c.optional[plugin.Network.Type]; ok && caps[capability] == nil {
			continue
		}
		norm.Plugins = append(norm.Plugins, plugin.Bytes)
	}
	if len(norm.Plugins) == len(c.list.Plugins) {
		return c.list, nil
	}
	return norm.parse()
}

// unserved returns the capabilities in caps that no plugin of the chain declares. It considers only port mappings and
// bandwidth.
func (c *chain) unserved(caps map[string]json.RawMessage) []string {
	var missing []string
	for _, capability := range []string{capPortMappings, capBandwidth} {
		takes := func(p *libcni.PluginConfig) bool { return p.Network.Capabilities[capability] }
		if caps[capability] != nil && !slices.ContainsFunc(c.list.Plugins, takes) {
			missing = append(missing, capability)
		}
	}
	return missing
}

// programs returns the names of the executables that the chain needs, that is, the types of its plugins and of their
// IPAM plugins.
func (c *chain) programs() []string {
	var names []string
	for _, plugin := range c.list.Plugins {
		names = append(names, plugin.Network.Type)
		if ipam := plugin.Network.IPAM.Type; ipam != "" {
			names = append(names, ipam)
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}
