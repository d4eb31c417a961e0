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

// prepareNode sets up what a kubelet expects on a node: an address with a default route, the node's name, a directory
// for logs, a cgroup, and kernel settings.
func prepareNode(dir string) error {
	return errors.Join(addAddress(), mountFiles(dir), overlaySysctls(dir), makeCgroups(kubeCgroup()))
}

// addAddress adds a bridge with the node's address and the default route. The bridge has no ports, so it sends no
// packets.
func addAddress() error {
	bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "node0"}}
	addr, err := netlink.ParseAddr(NodeIP + "/24")
	if err != nil {
		return err
	}
	if err := netlink.LinkAdd(bridge); err != nil {
		return fmt.Errorf("add bridge node0: %w", err)
	}
	if err := errors.Join(netlink.AddrAdd(bridge, addr), netlink.LinkSetUp(bridge)); err != nil {
		return fmt.Errorf("give the node its address: %w", err)
	}
	if err := netlink.RouteAdd(&netlink.Route{LinkIndex: bridge.Index, Gw: gateway}); err != nil {
		return fmt.Errorf("add the default route: %w", err)
	}
	// Packets between two pods on a bridge must pass iptables, because answers from a Service need address translation.
	const bridged = "/proc/sys/net/bridge/bridge-nf-call-iptables"
	if err := os.WriteFile(bridged, []byte("1"), 0); err != nil {
		return fmt.Errorf("%w (is the kernel module br_netfilter loaded?)", err)
	}
	return nil
}

// mountFiles mounts the node's own /etc/hosts and /var/log over the host's.
func mountFiles(dir string) error {
	hosts, logs := filepath.Join(dir, "hosts"), filepath.Join(dir, "log")
	err := errors.Join(
		os.WriteFile(hosts, []byte("127.0.0.1 localhost\n"+NodeIP+" "+NodeName+"\n"), 0o644),
		os.Mkdir(logs, 0o755),
	)
	if err != nil {
		return err
	}
	return errors.Join(bind(hosts, "/etc/hosts"), bind(logs, "/var/log"))
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
	return nil
}

// kubeCgroup returns the path of the cgroup that contains all of the kubelet's cgroups. The path is the same in every
// hierarchy.
func kubeCgroup() string { return harness.CgroupParent() + "/kube" }

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
