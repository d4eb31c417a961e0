package config

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"net"
	"net/netip"
	"net/url"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/distribution/reference"

	"github.com/tripod-run/tripod/internal/lazyregexp"
	"github.com/tripod-run/tripod/internal/origin"
)

// maxSocketPath is the size of sun_path in unix(7) without the final zero byte.
const maxSocketPath = 107

// minConnections is the smallest usable number of connections; minHeader and maxHeader limit the size of headers, in
// bytes.
const (
	minConnections = 16
	minHeader      = 4 << 10
	maxHeader      = 1 << 20
	// maxStatsInterval keeps statistics recent enough for a client that computes rates from two lists.
	maxStatsInterval = 10 * time.Second
)

// maxRanges limits the memory of a pull: each range of a blob has a buffer of 4 MiB.
const maxRanges = 64

// podIDs is the number of IDs in a pod's user namespace. The first ones of the node are its own.
const podIDs = 1 << 16

// Complete sets the paths that are derived from other paths, and validates the configuration. The error names every
// invalid key.
func (c *Config) Complete() error {
	c.GRPC.Socket = cmp.Or(c.GRPC.Socket, filepath.Join(c.State, "tripod.sock"))
	c.Network.NetnsDir = cmp.Or(c.Network.NetnsDir, filepath.Join(c.State, "netns"))
	c.Orchestrator.Root = cmp.Or(c.Orchestrator.Root, filepath.Join(filepath.Dir(c.Root), filepath.Base(c.Root)+"-orchestrator"))
	c.completeDelegates()
	v := &validator{}
	c.validatePaths(v)
	c.validateNetwork(v)
	v.oneOf("log.level", strings.ToLower(c.Log.Level), "debug", "info", "warn", "error")
	v.oneOf("log.format", c.Log.Format, "text", "json")
	v.check(c.Log.ContainerSizeMax == 0 || c.Log.ContainerSizeMax >= minLogSize, "log.container_size_max",
		"%d is neither 0 nor at least %d bytes", c.Log.ContainerSizeMax, minLogSize)
	v.oneOf("linux.cgroup_driver", c.Linux.CgroupDriver, "auto", "cgroupfs", "systemd")
	v.notEmpty("linux.runtime", c.Linux.Runtime)
	v.optional("linux.conmon", c.Linux.Conmon)
	v.optional("linux.catatonit", c.Linux.Catatonit)
	c.validateWasm(v)
	c.validateVM(v)
	c.validateNRI(v)
	v.directories("cdi.spec_dirs", c.CDI.SpecDirs)
	v.notEmpty("node.default_handler", c.Node.DefaultHandler)
	c.validateAliases(v)
	c.validateDelegates(v)
	v.notEmpty("node.component_label_prefix", c.Node.ComponentLabelPrefix)
	v.check(c.Image.MaxConcurrentDownloads >= 1, "image.max_concurrent_downloads", "%d is not at least 1", c.Image.MaxConcurrentDownloads)
	v.check(c.Image.RangesPerBlob >= 1 && c.Image.RangesPerBlob <= maxRanges, "image.ranges_per_blob", "%d is not between 1 and %d",
		c.Image.RangesPerBlob, maxRanges)
	v.positive("image.pull_progress_timeout", c.Image.PullProgressTimeout)
	v.positive("network.plugin_timeout", c.Network.PluginTimeout)
	v.positive("node.operation_timeout", c.Node.OperationTimeout)
	v.check(c.Node.StatsInterval >= 0 && time.Duration(c.Node.StatsInterval) <= maxStatsInterval, "node.stats_interval",
		"%q is not between 0s and %s",
		c.Node.StatsInterval.String(), maxStatsInterval)
	v.check(c.Userns.Range.First >= podIDs && c.Userns.Range.Count >= podIDs &&
		uint64(c.Userns.Range.First)+uint64(c.Userns.Range.Count) < math.MaxUint32,
		"userns.range", "%d:%d does not lie between %d and %d, or has fewer than %[3]d IDs", c.Userns.Range.First, c.Userns.Range.Count, podIDs,
		uint32(math.MaxUint32)-1)
	c.validatePeers(v)
	c.validateRoute(v)
	v.address("metrics.address", c.Metrics.Address)
	v.endpoint("tracing.endpoint", c.Tracing.Endpoint)
	c.validateEdge(v)
	c.validateConnections(v)
	return errors.Join(v.errs...)
}

func (c *Config) validateConnections(v *validator) {
	n := c.Connections
	v.check(n.Max >= minConnections, "connections.max", "%d is not at least %d", n.Max, minConnections)
	v.check(n.MaxPerPeer >= 0, "connections.max_per_peer", "%d is negative", n.MaxPerPeer)
	v.positive("connections.header_timeout", n.HeaderTimeout)
	v.positive("connections.idle_timeout", n.IdleTimeout)
	v.check(n.MaxHeader >= minHeader && n.MaxHeader <= maxHeader, "connections.max_header", "%d is not between %d and %d bytes", n.MaxHeader,
		minHeader, maxHeader)
}

func (c *Config) validateNRI(v *validator) {
	v.socket("nri.socket", c.NRI.Socket)
	v.absolute("nri.plugin_path", c.NRI.PluginPath)
	v.absolute("nri.plugin_config_path", c.NRI.PluginConfigPath)
	v.positive("nri.registration_timeout", c.NRI.RegistrationTimeout)
	v.positive("nri.synchronization_timeout", c.NRI.SynchronizationTimeout)
	v.positive("nri.request_timeout", c.NRI.RequestTimeout)
}

func (c *Config) validatePaths(v *validator) {
	v.absolute("root", c.Root)
	v.absolute("state", c.State)
	v.check(!within(c.Root, c.State) && !within(c.State, c.Root), "state",
		"%q and root %q must not contain each other: only root survives a reboot", c.State, c.Root)
	v.socket("grpc.socket", c.GRPC.Socket)
	if c.Debug.Socket != "" {
		v.socket("debug.socket", c.Debug.Socket)
	}
	v.optional("image.containers_dir", c.Image.ContainersDir)
	v.directories("image.hosts_dirs", c.Image.HostsDirs)
	v.optional("image.docker_config", c.Image.DockerConfig)
	v.optional("image.signature_policy", c.Image.SignaturePolicy)
	v.absolute("image.registries_dir", c.Image.RegistriesDir)
}

func (c *Config) validatePeers(v *validator) {
	p, m := c.Image.Peers, c.Image.Mirror
	for _, host := range p.Hosts {
		v.check(host != "", "image.peers.hosts", "has an empty entry")
		v.endpoint("image.peers.hosts", host)
	}
	v.credentials("image.peers", "", p.CA, p.Certificate, p.Key)
	v.address("image.mirror.address", m.Address)
	v.credentials("image.mirror", "", m.ClientCA, m.Certificate, m.Key)
	v.check(m.ClientCA == "" || m.Certificate != "", "image.mirror.client_ca", "needs certificate and key")
	v.check(m.MaxTransfers >= 1, "image.mirror.max_transfers", "%d is not at least 1", m.MaxTransfers)
	v.check(m.BytesPerSecond >= 0, "image.mirror.bytes_per_second", "%d is negative", m.BytesPerSecond)
}

func (c *Config) validateNetwork(v *validator) {
	host, port, err := net.SplitHostPort(c.GRPC.StreamingAddress)
	if v.check(err == nil, "grpc.streaming_address", "%q is not host:port", c.GRPC.StreamingAddress) {
		_, err = strconv.ParseUint(port, 10, 16)
		v.check(err == nil, "grpc.streaming_address", "%q is not a port number", port)
		ip, err := netip.ParseAddr(host)
		v.check(err == nil && ip.IsLoopback(), "grpc.streaming_address",
			"%q is not a loopback IP address such as 127.0.0.1 or [::1], because sessions are not encrypted", host)
	}
	v.absolute("network.conf_dir", c.Network.ConfDir)
	v.absolute("network.netns_dir", c.Network.NetnsDir)
	v.check(len(c.Network.BinDirs) > 0, "network.bin_dirs", "is empty: no CNI plugin can be found")
	v.directories("network.bin_dirs", c.Network.BinDirs)
	d := c.Network.Default
	v.check(d.Bridge != "" && len(d.Bridge) <= 15 && !strings.ContainsAny(d.Bridge, "/ \t:"), "network.default.bridge",
		"%q is not the name of an interface (1 to 15 characters, no slash, colon or space)", d.Bridge)
	v.check(d.MTU == 0 || d.MTU >= 68 && d.MTU <= 65535, "network.default.mtu", "%d is neither 0 nor between 68 and 65535", d.MTU)
	v.check(d.SubnetV4 != "" || d.SubnetV6 != "", "network.default", "needs subnet_v4, subnet_v6 or both")
	v.subnet("network.default.subnet_v4", d.SubnetV4, true)
	v.subnet("network.default.subnet_v6", d.SubnetV6, false)
}

// minLogSize is the smallest allowed limit on a container's log, in bytes. This is enough for several of the longest
// lines.
const minLogSize = 1 << 20

const (
	// minWasmMemory is the size of one page of linear memory, in bytes.
	minWasmMemory = 64 << 10
	// minCompileMemory is the memory that the compiler needs even without a component, in bytes.
	minCompileMemory = 64 << 20
	// maxKeyvalueBytes is the largest store of a namespace.
	maxKeyvalueBytes = 64 << 30
	maxUser          = 1<<31 - 1
)

func (c *Config) validateWasm(v *validator) {
	w := c.Wasm
	v.optional("wasm.program", w.Program)
	v.oneOf("wasm.worker", w.Worker, "node", "namespace", "pod")
	v.check(w.User >= 1 && w.User <= maxUser, "wasm.user", "%d is not the number of an unprivileged user", w.User)
	v.check(w.Instances >= 1, "wasm.instances", "%d is not at least 1", w.Instances)
	v.check(w.MaxMemory >= minWasmMemory && w.MaxMemory <= 4<<30, "wasm.max_memory", "%d is not between %d and %d bytes", w.MaxMemory,
		minWasmMemory, uint64(4<<30))
	v.check(w.MaxConcurrency >= 1, "wasm.max_concurrency", "%d is not at least 1", w.MaxConcurrency)
	v.check(w.MaxFiles >= 1, "wasm.max_files", "%d is not at least 1", w.MaxFiles)
	v.check(w.MaxHandles >= 1, "wasm.max_handles", "%d is not at least 1", w.MaxHandles)
	v.check(w.MaxSockets >= 1, "wasm.max_sockets", "%d is not at least 1", w.MaxSockets)
	v.check(w.MaxHostBytes >= 1, "wasm.max_host_bytes", "%d is not at least 1", w.MaxHostBytes)
	v.check(w.KeyvalueBytes >= 0 && w.KeyvalueBytes <= maxKeyvalueBytes, "wasm.keyvalue_bytes", "%d is not between 0 and %d", w.KeyvalueBytes,
		int64(maxKeyvalueBytes))
	v.check(w.KeyvalueKeys >= 1, "wasm.keyvalue_keys", "%d is not at least 1", w.KeyvalueKeys)
	v.check(w.CompileMemory >= minCompileMemory, "wasm.compile_memory", "%d bytes are less than %d", w.CompileMemory, minCompileMemory)
	v.positive("wasm.compile_timeout", w.CompileTimeout)
	v.origins("wasm.cors_origins", w.CORSOrigins)
	v.check(w.CompileParallel >= 0, "wasm.compile_parallel", "%d is negative", w.CompileParallel)
	for i, l := range w.CompiledLayers {
		key := fmt.Sprintf("wasm.compiled_layer[%d]", i)
		v.check(len(l.Repositories) > 0 && len(l.Keys) > 0, key, "needs repositories and keys")
		for _, r := range l.Repositories {
			// A registry alone is completed to a name, because the field's grammar is that of a repository.
			named, err := reference.ParseNamed(r + "/x")
			v.check(err == nil && named.Name() == r+"/x", key+".repositories", "%q is neither a registry nor a repository with its registry", r)
		}
		for _, k := range l.Keys {
			v.absolute(key+".keys", k)
		}
	}
}

const (
	// minGuestMemory is enough memory, in bytes, for a kernel to report that it needs more.
	minGuestMemory = 16 << 20
	// minOverhead is the memory that QEMU needs to start, in bytes.
	minOverhead = 32 << 20
	maxCPUs     = 255
	// minConsoleBuffer is twice the number of bytes that a console's reader frees at a time.
	minConsoleBuffer = 1 << 20
)

func (c *Config) validateVM(v *validator) {
	m := c.VM
	v.oneOf("vm.driver", m.Driver, "qmp", "libvirt")
	v.oneOf("vm.accel", m.Accel, "auto", "kvm", "tcg")
	v.optional("vm.emulator", m.Emulator)
	v.optional("vm.virtiofsd", m.Virtiofsd)
	v.optional("vm.guest_dir", m.GuestDir)
	v.check(m.Templates >= 0, "vm.templates", "%d is negative", m.Templates)
	v.oneOf("vm.template_scope", m.TemplateScope, "namespace", "node")
	if m.Driver == "libvirt" {
		v.notEmpty("vm.libvirt_uri", m.LibvirtURI)
	}
	v.check(m.UIDBase >= 1 && m.UIDBase <= maxUser, "vm.uid_base", "%d is not the number of an unprivileged user", m.UIDBase)
	v.check(m.UIDCount >= 1 && m.UIDCount <= (maxUser-m.UIDBase)/2, "vm.uid_count", "twice %d users from %d on are not between 1 and %d",
		m.UIDCount, m.UIDBase, maxUser)
	v.check(m.DefaultMemory >= minGuestMemory, "vm.default_memory", "%d bytes are less than %d", m.DefaultMemory, minGuestMemory)
	v.check(m.DefaultCPUs >= 1 && m.DefaultCPUs <= maxCPUs, "vm.default_cpus", "%d is not between 1 and %d", m.DefaultCPUs, maxCPUs)
	v.check(m.MemoryOverhead >= minOverhead, "vm.memory_overhead", "%d bytes are less than %d", m.MemoryOverhead, minOverhead)
	v.check(m.ConsoleBuffer >= minConsoleBuffer, "vm.console_buffer", "%d bytes are less than %d", m.ConsoleBuffer, minConsoleBuffer)
	v.check(m.BootTimeout >= 0, "vm.boot_timeout", "%s is negative", time.Duration(m.BootTimeout))
	v.check(m.ImagePrefix == "" || strings.HasSuffix(m.ImagePrefix, "/") && m.ImagePrefix != "/", "vm.image_prefix",
		"%q does not end with a slash, as in virtlet.cloud/", m.ImagePrefix)
	v.optional("vm.translations_dir", m.TranslationsDir)
}

// handlers are the handler names of all backends, enabled or not.
var handlers = []string{"linux", "wasm", "vm", "vm-oci", "fake", "fake-unit"}

// handlerName matches a RuntimeClass handler: a DNS label.
var handlerName = lazyregexp.New(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)

func (c *Config) validateAliases(v *validator) {
	for _, alias := range slices.Sorted(maps.Keys(c.Node.HandlerAliases)) {
		key, handler := "node.handler_aliases."+alias, c.Node.HandlerAliases[alias]
		_, chained := c.Node.HandlerAliases[handler]
		switch {
		case !handlerName().MatchString(alias):
			v.check(false, key, "%q is not a DNS label, as the handler of a RuntimeClass must be", alias)
		case slices.Contains(handlers, alias):
			v.check(false, key, "%q is already the name of a handler", alias)
		case chained:
			v.check(false, key, "%q is an alias; use the handler itself", handler)
		default:
			v.oneOf(key, handler, handlers...)
		}
	}
}

// LogLevel converts log.level for slog.
func (c *Config) LogLevel() slog.Level {
	var l slog.Level
	if err := l.UnmarshalText([]byte(c.Log.Level)); err != nil {
		return slog.LevelInfo // Complete rejects an invalid level
	}
	return l
}

func (c *Config) validateRoute(v *validator) {
	r := c.Route
	v.address("route.address", r.Address)
	v.address("route.cleartext_address", r.CleartextAddress)
	v.optional("route.certificate", r.Certificate)
	v.optional("route.key", r.Key)
	v.optional("route.client_ca", r.ClientCA)
	v.check((r.Certificate == "") == (r.Key == ""), "route.key", "certificate and key must be set together")
	v.check(r.ClientCA == "" || r.CleartextAddress == "", "route.cleartext_address",
		"cannot be used with route.client_ca: clear text has no client certificates")
}

type validator struct{ errs []error }

func (v *validator) check(ok bool, key, format string, args ...any) bool {
	if !ok {
		v.errs = append(v.errs, fmt.Errorf("%s: %s", key, fmt.Sprintf(format, args...)))
	}
	return ok
}

func (v *validator) notEmpty(key, value string) { v.check(value != "", key, "is empty") }

func (v *validator) absolute(key, path string) bool {
	return v.check(filepath.IsAbs(path) && filepath.Clean(path) == path && path != "/", key,
		"%q is not a clean absolute path below /", path)
}

// optional accepts an absolute path, and also "".
func (v *validator) optional(key, path string) {
	if path != "" {
		v.absolute(key, path)
	}
}

func (v *validator) directories(key string, dirs []string) {
	for i, dir := range dirs {
		v.absolute(fmt.Sprintf("%s[%d]", key, i), dir)
	}
}

func (v *validator) socket(key, path string) {
	if v.absolute(key, path) {
		v.check(len(path) <= maxSocketPath, key, "%q has %d bytes; the kernel allows %d in a socket path", path, len(path), maxSocketPath)
	}
}

func (v *validator) oneOf(key, value string, allowed ...string) {
	v.check(slices.Contains(allowed, value), key, "%q is not one of %s", value, strings.Join(allowed, ", "))
}

func (v *validator) positive(key string, d Duration) {
	v.check(d > 0, key, "%q is not positive", Duration(d).String())
}

// address accepts HOST:PORT, and also "".
func (v *validator) address(key, address string) {
	if address == "" {
		return
	}
	_, port, err := net.SplitHostPort(address)
	if err == nil {
		_, err = strconv.ParseUint(port, 10, 16)
	}
	v.check(err == nil, key, "%q is not HOST:PORT", address)
}

func (v *validator) origins(key string, origins []string) {
	for _, o := range origins {
		err := origin.Check(o)
		v.check(err == nil, key, "%v", err)
	}
}

// endpoint accepts a URL without a path, and also "".
func (v *validator) endpoint(key, text string) {
	if text == "" {
		return
	}
	u, err := url.Parse(text)
	v.check(err == nil && (u.Scheme == "http" || u.Scheme == "https") && u.Port() != "" && (u.Path == "" || u.Path == "/"), key,
		"%q is not http://HOST:PORT or https://HOST:PORT", text)
}

func (d Duration) String() string { t, _ := d.MarshalText(); return string(t) }

func (v *validator) subnet(key, cidr string, four bool) {
	if cidr == "" {
		return
	}
	prefix, err := netip.ParsePrefix(cidr)
	if !v.check(err == nil && prefix.Masked() == prefix, key, "%q is not a network such as 10.88.0.0/16", cidr) {
		return
	}
	family, room := "IPv6", 128
	if four {
		family, room = "IPv4", 32
	}
	v.check(prefix.Addr().Is4() == four, key, "%q is not %s", cidr, family)
	v.check(room-prefix.Bits() >= 2, key, "%q is too small for a gateway and a pod", cidr)
}

func within(dir, path string) bool {
	return path == dir || strings.HasPrefix(path, strings.TrimSuffix(dir, "/")+"/")
}
