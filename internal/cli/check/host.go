package check

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/tripod-run/tripod/internal/config"
	"github.com/tripod-run/tripod/internal/health"
	"github.com/tripod-run/tripod/internal/network"
	"github.com/tripod-run/tripod/internal/sandbox"
)

// Host is the source of the checks' data. System returns the real one; tests substitute their own.
type Host struct {
	// Proc is the mount point of procfs.
	Proc string
	// UID is the effective user.
	UID int
	// Overlay tries an overlay mount with directories below dir.
	Overlay func(dir string) error
	// NAT tries to add a masquerading rule in a separate network namespace.
	NAT func(ctx context.Context) error
	// Forwarding returns why the host's firewall drops what pods send and receive, or nil.
	Forwarding func(ctx context.Context) error
	// Statfs is statfs(2).
	Statfs func(path string) (unix.Statfs_t, error)
	// FileLimit is the hard limit on open files.
	FileLimit func() (uint64, error)
	// Clock returns the time and reports whether it is synchronised.
	Clock      func() (now time.Time, synchronised bool)
	LoopbackUp func() bool
	// UplinkMTU returns the MTU of the node's way out; 0 if there is none.
	UplinkMTU func() (int, error)
	// DNS returns the name servers for pods without DNS configuration, and what is wrong with them.
	DNS    func() (dns *runtimeapi.DNSConfig, notice string, err error)
	Config *config.Config
}

// System returns the host that the program runs on, whose firewall the given function checks.
func System(c *config.Config, forwarding func(context.Context) error) Host {
	return Host{
		Proc: "/proc", UID: os.Geteuid(), Overlay: tryOverlay, NAT: tryNAT, Statfs: statfs,
		Forwarding: forwarding, FileLimit: fileLimit, Clock: clock, LoopbackUp: loopbackUp, UplinkMTU: network.UplinkMTU, Config: c,
		DNS: func() (*runtimeapi.DNSConfig, string, error) { return sandbox.NodeDNS("/") },
	}
}

// Findings runs all checks, in the order in which a person would fix the problems.
func (h Host) Findings(ctx context.Context) []health.Finding {
	findings := []health.Finding{h.root(), h.kernel(), h.namespaces(), h.seccomp(), h.overlay(), h.disk(), h.files(), h.loopback(), h.nat(ctx),
		h.forwarding(ctx)}
	findings = append(findings, h.network()...)
	return append(findings, h.nameServers(), h.clock())
}

func (h Host) root() health.Finding {
	return health.Finding{Subject: "root", Required: true, OK: h.UID == 0, Detail: fmt.Sprintf("running as uid %d", h.UID),
		Remedy: "run as root: only root can make namespaces, mounts and cgroups (some findings below are wrong otherwise)"}
}

// kernelNeeded is the first kernel with both openat2 and pidfd_open; kernelWanted is the first with mount_setattr,
// which recursive read-only mounts need.
var (
	kernelNeeded = [2]int{5, 6}
	kernelWanted = [2]int{5, 12}
)

func (h Host) kernel() health.Finding {
	f := health.Finding{Subject: "kernel", Required: true, Remedy: "install a kernel of 5.12 or later"}
	text, err := os.ReadFile(filepath.Join(h.Proc, "sys/kernel/osrelease"))
	if err != nil {
		f.Detail, f.Remedy = err.Error(), "mount procfs at /proc"
		return f
	}
	release := strings.TrimSpace(string(text))
	version, err := kernelVersion(release)
	f.Detail = release
	switch {
	case err != nil:
		f.Detail, f.Required = err.Error(), false
	case slices.Compare(version[:], kernelNeeded[:]) < 0:
		f.Detail += ": openat2 and pidfds are missing"
	case slices.Compare(version[:], kernelWanted[:]) < 0:
		f.Detail, f.Required = f.Detail+": recursive read-only mounts will be refused", false
	default:
		f.OK = true
	}
	return f
}

func kernelVersion(release string) (v [2]int, err error) {
	parts := strings.FieldsFunc(release, func(r rune) bool { return r < '0' || r > '9' })
	if len(parts) < 2 {
		return v, fmt.Errorf("release %q has no version number", release)
	}
	for i := range v {
		if v[i], err = strconv.Atoi(parts[i]); err != nil {
			return v, fmt.Errorf("release %q has no version number", release)
		}
	}
	return v, nil
}

func (h Host) namespaces() health.Finding {
	f := health.Finding{Subject: "namespaces", Required: true, Remedy: "use a kernel with CONFIG_NAMESPACES and all its namespaces"}
	var have, lack []string
	for _, kind := range []string{"mnt", "net", "pid", "ipc", "uts", "cgroup", "user"} {
		if _, err := os.Lstat(filepath.Join(h.Proc, "self/ns", kind)); err == nil {
			have = append(have, kind)
		} else {
			lack = append(lack, kind)
		}
	}
	f.OK = len(lack) == 0
	f.Detail = strings.Join(have, " ")
	if !f.OK {
		f.Detail = "missing: " + strings.Join(lack, " ")
		// Most pods use neither user nor cgroup namespaces, so a host without these can still run pods.
		f.Required = slices.ContainsFunc(lack, func(kind string) bool { return kind != "user" && kind != "cgroup" })
	}
	return f
}

func (h Host) seccomp() health.Finding {
	f := health.Finding{Subject: "seccomp", Required: true, Remedy: "use a kernel with CONFIG_SECCOMP_FILTER"}
	text, err := os.ReadFile(filepath.Join(h.Proc, "sys/kernel/seccomp/actions_avail"))
	actions := strings.Fields(string(text))
	f.OK = err == nil && slices.Contains(actions, "errno")
	f.Detail = "filters with " + strings.Join(actions, " ")
	if !f.OK {
		f.Detail = "no seccomp filters: the RuntimeDefault profile cannot be enforced"
	}
	return f
}

func (h Host) overlay() health.Finding {
	dir := existing(h.Config.Root)
	f := health.Finding{Subject: "overlayfs", Required: true, Detail: "works below " + dir,
		Remedy: "`modprobe overlay`, and put root on a file system that supports upper layers (ext4, xfs with ftype=1, tmpfs), not on an overlay itself"}
	if err := h.Overlay(dir); err != nil {
		f.Detail = fmt.Sprintf("does not work below %s: %v", dir, err)
		return f
	}
	f.OK = true
	return f
}

// existing returns path or its nearest existing parent directory.
func existing(path string) string {
	for {
		if _, err := os.Stat(path); err == nil || path == "/" {
			return path
		}
		path = filepath.Dir(path)
	}
}

// Free space below the root directory in bytes: the minimum, for a few small images, and the recommended value.
const (
	diskNeeded = 256 << 20
	diskWanted = 5 << 30
)

func (h Host) disk() health.Finding {
	dir := existing(h.Config.Root)
	f := health.Finding{Subject: "disk", Required: true, Remedy: "make room, or set root to a directory on a larger file system"}
	st, err := h.Statfs(dir)
	if err != nil {
		f.Detail = err.Error()
		return f
	}
	free := st.Bavail * uint64(st.Bsize)
	f.Detail = fmt.Sprintf("%.1f GiB free for %s", float64(free)/(1<<30), h.Config.Root)
	switch {
	case st.Flags&unix.ST_RDONLY != 0:
		f.Detail, f.Remedy = dir+" is read-only", "remount it read-write"
	case st.Flags&unix.ST_NOEXEC != 0:
		f.Detail, f.Remedy = dir+" is mounted noexec: containers cannot run programs", "remount it with exec"
	case free < diskNeeded:
	case st.Files > 0 && st.Ffree < st.Files/50:
		f.Detail = fmt.Sprintf("only %d of %d inodes are free for %s", st.Ffree, st.Files, h.Config.Root)
	case free < diskWanted:
		f.Required = false
	default:
		f.OK = true
	}
	return f
}

// Limits on open files. The daemon needs a few descriptors for each running container.
const (
	filesNeeded = 1024
	filesWanted = 16384
)

func (h Host) files() health.Finding {
	f := health.Finding{Subject: "open files", Required: true,
		Remedy: "raise the hard limit (LimitNOFILE= in the systemd unit, or ulimit -Hn)"}
	limit, err := h.FileLimit()
	if err != nil {
		f.Detail = err.Error()
		return f
	}
	f.OK, f.Required = limit >= filesWanted, limit < filesNeeded
	f.Detail = fmt.Sprintf("hard limit %d", limit)
	return f
}

func (h Host) loopback() health.Finding {
	return health.Finding{Subject: "loopback", Required: true, OK: h.LoopbackUp(),
		Detail: "exec, attach and port-forward stream over " + h.Config.GRPC.StreamingAddress,
		Remedy: "`ip link set lo up`"}
}

func (h Host) nat(ctx context.Context) health.Finding {
	f := health.Finding{Subject: "NAT", Detail: "iptables works: pods reach outside networks and can have host ports", OK: true,
		Remedy: "`apt-get install iptables`, and use a kernel with nftables or iptables NAT; without it pods reach only each other and the node"}
	if err := h.NAT(ctx); err != nil {
		f.OK, f.Detail = false, err.Error()
	}
	return f
}

func (h Host) forwarding(ctx context.Context) health.Finding {
	f := health.Finding{Subject: "firewall", Detail: "forwards what pods send and receive", OK: true}
	if err := h.Forwarding(ctx); err != nil {
		f.OK, f.Detail, f.Remedy = false, oneLine(err.Error()), "change the firewall as the message says; until then pods reach only the node"
	}
	return f
}

func (h Host) nameServers() health.Finding {
	f := health.Finding{Subject: "name servers",
		Remedy: "name a server in " + sandbox.ResolvConf + " that is not on loopback, or set dnsConfig in the pods"}
	dns, notice, err := h.DNS()
	switch {
	case err != nil:
		f.Detail = err.Error()
	case notice != "":
		f.Detail = notice
	default:
		f.OK, f.Detail = true, "pods without a DNS configuration ask "+strings.Join(dns.GetServers(), " ")
	}
	return f
}

func (h Host) clock() health.Finding {
	now, synchronised := h.Clock()
	f := health.Finding{Subject: "clock", OK: synchronised, Detail: "synchronised", Remedy: "run chrony or systemd-timesyncd"}
	if !synchronised {
		f.Detail = "not synchronised (adjtimex)"
	}
	if now.Year() < 2026 {
		f.OK, f.Required = false, true
		f.Detail = fmt.Sprintf("set to %s: registries' certificates are not valid yet at that time", now.UTC().Format(time.DateOnly))
	}
	return f
}

// network checks the active CNI configuration and each plugin in it.
func (h Host) network() []health.Finding {
	f := health.Finding{Subject: "CNI configuration", Required: true, OK: true}
	plugins := []string{"loopback", "bridge", "host-local", "portmap"}
	file, named, mtu, err := h.cniConfiguration()
	switch {
	case err != nil:
		f.OK, f.Detail, f.Remedy = false, err.Error(), "correct the file, or move it away to use the embedded default"
	case file == "":
		d := h.Config.Network.Default
		mtu = d.MTU
		f.Detail = fmt.Sprintf("none in %s: the embedded default is used (bridge %s, %s)", h.Config.Network.ConfDir, d.Bridge,
			strings.TrimSpace(d.SubnetV4+" "+d.SubnetV6))
	default:
		f.Detail, plugins = file, append([]string{"loopback"}, named...)
	}
	return []health.Finding{f, h.plugins(plugins), h.mtu(mtu)}
}

// mtu compares the MTU that pods are configured to have with the uplink's; 0 if it is not known, or the uplink's.
func (h Host) mtu(pods int) health.Finding {
	f := health.Finding{Subject: "MTU", Remedy: "lower mtu in the CNI configuration, or network.default.mtu, to the uplink's"}
	uplink, err := h.UplinkMTU()
	switch {
	case err != nil:
		f.Detail = err.Error()
	case uplink > 0 && pods > uplink:
		f.Detail = fmt.Sprintf("pods have %d, and the interface of the default route %d: large packets can vanish", pods, uplink)
	case uplink == 0:
		f.OK, f.Detail = true, "there is no default route"
	default:
		f.OK, f.Detail = true, fmt.Sprintf("the interface of the default route has %d, and no configuration of pods more", uplink)
	}
	return f
}

func (h Host) plugins(names []string) health.Finding {
	f := health.Finding{Subject: "CNI plugins", Required: true,
		Remedy: "`apt-get install containernetworking-plugins`, or set network.bin_dirs"}
	var lack []string
	for _, name := range names {
		found := slices.ContainsFunc(h.Config.Network.BinDirs, func(dir string) bool {
			info, err := os.Stat(filepath.Join(dir, name))
			return err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0
		})
		if !found {
			lack = append(lack, name)
		}
	}
	f.OK = len(lack) == 0
	f.Detail = strings.Join(names, " ")
	if !f.OK {
		f.Detail = fmt.Sprintf("%s not found in %s", strings.Join(lack, " "), strings.Join(h.Config.Network.BinDirs, ", "))
	}
	return f
}

// cniConf contains the checked fields of a CNI configuration (CNI SPEC 1.0, section 1): a list of plugins or, in the
// older form, one plugin.
type cniConf struct {
	Name    string      `json:"name"`
	Plugins []cniPlugin `json:"plugins"`
	cniPlugin
}

type cniPlugin struct {
	Type string `json:"type"`
	MTU  int    `json:"mtu"`
	IPAM struct {
		Type string `json:"type"`
	} `json:"ipam"`
}

// kernelMTU is the MTU of the interfaces that plugins make if the configuration sets none.
var kernelMTU = map[string]int{"bridge": 1500, "ptp": 1500}

// cniConfiguration returns the active file, the plugins in it, and the MTU that they give pods, or 0 if that cannot be
// seen. The file is "" if there is none.
func (h Host) cniConfiguration() (file string, plugins []string, mtu int, err error) {
	entries, err := os.ReadDir(h.Config.Network.ConfDir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return "", nil, 0, err
	}
	// The first match is the active file, because ReadDir sorts by name.
	i := slices.IndexFunc(entries, func(e os.DirEntry) bool {
		return !e.IsDir() && slices.Contains([]string{".conflist", ".conf", ".json"}, filepath.Ext(e.Name()))
	})
	if i < 0 {
		return "", nil, 0, nil
	}
	file = filepath.Join(h.Config.Network.ConfDir, entries[i].Name())
	text, err := os.ReadFile(file)
	if err != nil {
		return file, nil, 0, err
	}
	var conf cniConf
	if err := json.Unmarshal(text, &conf); err != nil {
		return file, nil, 0, fmt.Errorf("%s: %w", file, err)
	}
	if conf.Type != "" {
		conf.Plugins = append(conf.Plugins, conf.cniPlugin)
	}
	if conf.Name == "" || len(conf.Plugins) == 0 {
		return file, nil, 0, fmt.Errorf("%s: the network name or the plugins are missing", file)
	}
	for _, p := range conf.Plugins {
		plugins, mtu = append(plugins, p.Type), cmp.Or(p.MTU, mtu, kernelMTU[p.Type])
		if p.IPAM.Type != "" {
			plugins = append(plugins, p.IPAM.Type)
		}
	}
	slices.Sort(plugins)
	return file, slices.Compact(plugins), mtu, nil
}

func statfs(path string) (st unix.Statfs_t, err error) {
	err = unix.Statfs(path, &st)
	return st, err
}

func fileLimit() (uint64, error) {
	var limit unix.Rlimit
	err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit)
	return limit.Max, err
}

func clock() (time.Time, bool) {
	var tx unix.Timex
	state, err := unix.Adjtimex(&tx)
	return time.Now(), err == nil && state != unix.TIME_ERROR && tx.Status&unix.STA_UNSYNC == 0
}

func loopbackUp() bool {
	lo, err := net.InterfaceByName("lo")
	return err == nil && lo.Flags&net.FlagUp != 0
}

// tryNAT adds a rule as the bridge plugin does, in a network namespace that ends with the command.
func tryNAT(ctx context.Context) error {
	path, err := exec.LookPath("iptables")
	if err != nil {
		return errors.New("iptables is not installed")
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	c := exec.CommandContext(ctx, path, "-w", "-t", "nat", "-A", "POSTROUTING", "-s", "192.0.2.0/24", "-m", "comment", "--comment", "trial",
		"-j", "MASQUERADE")
	c.SysProcAttr = &unix.SysProcAttr{Cloneflags: unix.CLONE_NEWNET}
	if out, err := c.CombinedOutput(); err != nil {
		return fmt.Errorf("iptables cannot add a NAT rule: %w: %s", err, oneLine(string(out)))
	}
	return nil
}
