package kube

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tripod-run/tripod/test/harness"
	"github.com/tripod-run/tripod/test/harness/testns"
)

// bridgeName is the bridge that connects the nodes. It has the first node's address. Without other nodes it has no
// ports, so it sends no packets.
const bridgeName = "node0"

// prepareHost sets up what a kubelet expects on a node: an address with a default route, the nodes' names, a directory
// for logs, a cgroup, and kernel settings.
func (n *Node) prepareHost() error {
	sysctls := func() error { return overlaySysctls(n.Dir) }
	return errors.Join(n.addLink(), n.mountFiles(), n.do(sysctls), makeCgroups(n.kubeCgroup()))
}

// addLink adds the network interface of the node, with its address and the default route.
func (n *Node) addLink() error {
	if n.own != nil {
		return errors.Join(n.plugIn(), n.own.Do(func() error {
			link, err := netlink.LinkByName(n.Name)
			if err != nil {
				return err
			}
			return errors.Join(unix.Sethostname([]byte(n.Name)), n.setUp(link))
		}))
	}
	bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: bridgeName}}
	if err := netlink.LinkAdd(bridge); err != nil {
		return fmt.Errorf("add bridge %s: %w", bridgeName, err)
	}
	return n.setUp(bridge)
}

// plugIn connects the node's own namespaces to the bridge by a pair of interfaces that are both named after the node.
func (n *Node) plugIn() error {
	bridge, err := netlink.LinkByName(bridgeName)
	if err != nil {
		return err
	}
	if old, err := netlink.LinkByName(n.Name); err == nil { // of the killed node, whose namespaces the kernel is removing
		_ = netlink.LinkDel(old)
	}
	pair := &netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: n.Name, MasterIndex: bridge.Attrs().Index},
		PeerName:  n.Name, PeerNamespace: netlink.NsPid(n.own.Pid()),
	}
	if err := errors.Join(netlink.LinkAdd(pair), netlink.LinkSetUp(pair)); err != nil {
		return fmt.Errorf("connect %s to the bridge: %w", n.Name, err)
	}
	return nil
}

func (n *Node) setUp(link netlink.Link) error {
	addr, err := netlink.ParseAddr(n.IP + "/24")
	if err != nil {
		return err
	}
	if err := errors.Join(netlink.AddrAdd(link, addr), netlink.LinkSetUp(link)); err != nil {
		return fmt.Errorf("give %s its address: %w", n.Name, err)
	}
	if err := netlink.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Gw: gateway}); err != nil {
		return fmt.Errorf("add the default route: %w", err)
	}
	// Packets between two pods on a bridge must pass iptables, because answers from a Service need address translation.
	const bridged = "/proc/sys/net/bridge/bridge-nf-call-iptables"
	if err := os.WriteFile(bridged, []byte("1"), 0); err != nil {
		return fmt.Errorf("%w (is the kernel module br_netfilter loaded?)", err)
	}
	return nil
}

// pluginDir is where a kubelet listens for device plugins, whatever its root directory.
const pluginDir = "/var/lib/kubelet/device-plugins"

// mountFiles mounts the node's own /etc/hosts, /var/log, /var/lib/cni and pluginDir over the host's. They outlive the
// node's namespaces, as on a disk.
func (n *Node) mountFiles() error {
	hosts, logs, leases, plugins := n.path("hosts"), n.path("log"), n.path("cni"), n.path("device-plugins")
	text := "127.0.0.1 localhost\n"
	for _, other := range n.cluster.Nodes {
		text += other.IP + " " + other.Name + "\n"
	}
	err := errors.Join(os.WriteFile(hosts, []byte(text), 0o644), os.MkdirAll(logs, 0o755), os.MkdirAll(leases, 0o755),
		os.MkdirAll(plugins, 0o755))
	if err != nil {
		return err
	}
	return n.do(func() error {
		return errors.Join(bind(hosts, "/etc/hosts"), bind(logs, "/var/log"), os.MkdirAll("/var/lib/cni", 0o755), bind(leases, "/var/lib/cni"),
			os.MkdirAll(pluginDir, 0o755), bind(plugins, pluginDir))
	})
}

func bind(source, target string) error {
	if err := unix.Mount(source, target, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("bind %s: %w", target, err)
	}
	return nil
}

// overlaySysctls shows the kubelet the kernel settings that it expects, because the kubelet would otherwise change the
// settings for the whole host.
func overlaySysctls(dir string) error {
	for name, value := range map[string]string{
		"vm/overcommit_memory": "1", "vm/panic_on_oom": "0", "kernel/panic": "10", "kernel/panic_on_oops": "1",
		"kernel/keys/root_maxkeys": "1000000", "kernel/keys/root_maxbytes": "25000000",
	} {
		path := "/proc/sys/" + name
		if have, err := os.ReadFile(path); err != nil || string(bytes.TrimSpace(have)) == value {
			continue
		}
		file := filepath.Join(dir, "sysctl-"+filepath.Base(name))
		if err := errors.Join(os.WriteFile(file, []byte(value+"\n"), 0o444), bind(file, path)); err != nil {
			return err
		}
	}
	return mountWholeProc(filepath.Join(dir, "proc"))
}

// mountWholeProc mounts /proc a second time, without the files over its settings. In a user namespace, the kernel mounts
// /proc only if the mount namespace has one in which nothing is covered.
func mountWholeProc(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	if err := unix.Mount("proc", dir, "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("mount proc on %s: %w", dir, err)
	}
	return nil
}

// cgroup returns the path of the cgroup that contains the node's. The path is the same in every hierarchy.
func (n *Node) cgroup() string {
	if harness.Installed() {
		return "" // systemd owns the hierarchy
	}
	if n.own == nil {
		return harness.CgroupParent()
	}
	return harness.CgroupParent() + "/" + n.Name
}

// kubeCgroup returns the path of the cgroup that contains all of the kubelet's cgroups.
func (n *Node) kubeCgroup() string { return n.cgroup() + "/kube" }

// podShares is the CPU weight of all pods together. It is high, so that machines boot even while a compiler runs. A
// process in no cgroup has the weight 1024.
const podShares = "8192"

// makeCgroups creates the cgroup in every hierarchy. In the cpuset hierarchy each level starts without CPUs and memory
// nodes, and accepts no process until these are set.
func makeCgroups(path string) error {
	for _, root := range testns.CgroupRoots() {
		if err := os.MkdirAll(root+path, 0o755); err != nil {
			return err
		}
		parent := root
		for part := range strings.SplitSeq(strings.Trim(path, "/"), "/") {
			dir := filepath.Join(parent, part)
			for _, name := range []string{"cpuset.cpus", "cpuset.mems"} {
				value, err := os.ReadFile(filepath.Join(parent, name))
				if errors.Is(err, os.ErrNotExist) {
					continue // another hierarchy
				}
				if err = errors.Join(err, os.WriteFile(filepath.Join(dir, name), value, 0)); err != nil {
					return err
				}
			}
			shares := filepath.Join(dir, "cpu.shares")
			if _, err := os.Stat(shares); err == nil {
				if err := os.WriteFile(shares, []byte(podShares), 0); err != nil {
					return err
				}
			}
			parent = dir
		}
	}
	return nil
}
