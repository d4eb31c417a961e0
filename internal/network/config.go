package network

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"
	"time"

	"github.com/containerd/errdefs"
	"github.com/vishvananda/netlink"
)

// Defaults of Config.
const (
	DefaultConfDir       = "/etc/cni/net.d"
	DefaultNetnsDir      = "/run/tripod/netns"
	DefaultCacheDir      = "/var/lib/tripod/cni"
	DefaultBridge        = "tripod0"
	DefaultSubnetV4      = "10.88.0.0/16"
	DefaultPluginTimeout = time.Minute
)

// DefaultBinDirs returns the default plugin directories: upstream's, Debian's and Fedora's.
func DefaultBinDirs() []string {
	return []string{"/opt/cni/bin", "/usr/lib/cni", "/usr/libexec/cni"}
}

// Config configures a Manager. Fields that are zero get their defaults.
type Config struct {
	// ConfDir holds CNI configuration files (*.conflist, *.conf, *.json). The file whose name sorts first is used.
	ConfDir string
	// BinDirs are searched for plugins, in order.
	BinDirs []string
	// CacheDir holds state that must outlive the daemon: records, ADD results, leases of the default chain.
	CacheDir string
	// NetnsDir holds the pods' network namespaces. Nothing else may use it, and a reboot should empty it.
	NetnsDir string
	// Default configures the embedded default chain, which is used while ConfDir has no configuration.
	Default DefaultNetwork
	// Executables runs every plugin as an executable, even the plugins that package builtin can run in this process.
	Executables bool
	// PluginTimeout limits each execution of a plugin.
	PluginTimeout time.Duration
	// IsBackendLink reports whether a link in a pod's namespace was made by the pod's backend. If there is such a link,
	// the backend has taken over the addresses of the pod's interfaces, so Stats omits the link, and Check does not run
	// the plugins. If IsBackendLink is nil, backends make no links.
	IsBackendLink func(netlink.Link) bool
	// Logger logs background events; nil means slog.Default.
	Logger *slog.Logger
}

// DefaultNetwork configures the embedded default chain.
type DefaultNetwork struct {
	// Off disables the default chain, so a node without CNI configuration has no pod network.
	Off bool
	// Bridge is the name of the bridge interface.
	Bridge string
	// SubnetV4 and SubnetV6 are the CIDRs of the pods' addresses. One of them may be empty. If both are empty, SubnetV4
	// gets its default.
	SubnetV4 string
	SubnetV6 string
	// MTU is the MTU of the pods' interfaces and the bridge; 0 means the uplink's (UplinkMTU).
	MTU int
}

func (c Config) withDefaults() Config {
	c.ConfDir = cmp.Or(c.ConfDir, DefaultConfDir)
	c.CacheDir = cmp.Or(c.CacheDir, DefaultCacheDir)
	c.NetnsDir = cmp.Or(c.NetnsDir, DefaultNetnsDir)
	c.PluginTimeout = cmp.Or(c.PluginTimeout, DefaultPluginTimeout)
	c.Default.Bridge = cmp.Or(c.Default.Bridge, DefaultBridge)
	c.Logger = cmp.Or(c.Logger, slog.Default())
	if len(c.BinDirs) == 0 {
		c.BinDirs = DefaultBinDirs()
	}
	if c.Default.SubnetV4 == "" && c.Default.SubnetV6 == "" {
		c.Default.SubnetV4 = DefaultSubnetV4
	}
	if c.IsBackendLink == nil {
		c.IsBackendLink = func(netlink.Link) bool { return false }
	}
	return c
}

// validate finds mistakes that would otherwise appear only with the first pod.
func (c Config) validate() error {
	for field, dir := range map[string]string{"ConfDir": c.ConfDir, "CacheDir": c.CacheDir, "NetnsDir": c.NetnsDir} {
		if !filepath.IsAbs(dir) {
			return invalidf("network configuration: %s %q is not an absolute path", field, dir)
		}
	}
	if len(c.Default.Bridge) > 15 {
		return invalidf("network configuration: bridge name %q is longer than 15 bytes", c.Default.Bridge)
	}
	if c.Default.MTU < 0 || c.PluginTimeout < 0 {
		return invalidf("network configuration: MTU and plugin timeout must not be negative")
	}
	return c.Default.validateSubnets()
}

func (d DefaultNetwork) validateSubnets() error {
	v4, err4 := parseSubnet(d.SubnetV4)
	v6, err6 := parseSubnet(d.SubnetV6)
	if err := errors.Join(err4, err6); err != nil {
		return err
	}
	if v4.IsValid() && !v4.Addr().Is4() {
		return invalidf("network configuration: %s is not an IPv4 subnet", v4)
	}
	if v6.IsValid() && !v6.Addr().Is6() {
		return invalidf("network configuration: %s is not an IPv6 subnet", v6)
	}
	return nil
}

// parseSubnet parses a CIDR, which must have room for a gateway and a pod. For "" it returns the zero Prefix.
func parseSubnet(cidr string) (netip.Prefix, error) {
	if cidr == "" {
		return netip.Prefix{}, nil
	}
	prefix, err := netip.ParsePrefix(cidr)
	if err != nil {
		return prefix, invalidf("subnet %q: %v", cidr, err)
	}
	if prefix.Addr().BitLen()-prefix.Bits() < 2 {
		return prefix, invalidf("subnet %s has no room for a gateway and a pod: use a shorter prefix", prefix)
	}
	return prefix.Masked(), nil
}

func invalidf(format string, args ...any) error {
	return fmt.Errorf(format+": %w", append(args, errdefs.ErrInvalidArgument)...)
}
