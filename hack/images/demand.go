package main

import (
	"bytes"
	"debug/elf"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
)

// demandDirs are the directories of the kernel package whose modules the guest of OCI pods loads when a container needs them,
// and demandFiles are such modules in other directories: for the rules and tunnels of service meshes and VPNs, for bridges,
// and for what privileged containers mount. Drivers of hardware are left out.
var (
	demandDirs = []string{
		"arch/x86/crypto", "crypto", "lib", "drivers/md", "drivers/net/bonding", "drivers/net/ipvlan", "drivers/net/vxlan",
		"drivers/net/wireguard",
		"fs/btrfs", "fs/exfat", "fs/fat", "fs/fscache", "fs/isofs", "fs/lockd", "fs/netfs", "fs/nfs", "fs/nfs_common", "fs/nls", "fs/squashfs",
		"fs/udf", "fs/xfs",
		"net/802", "net/8021q", "net/bridge", "net/ipv4", "net/ipv6", "net/key", "net/llc", "net/mpls", "net/netfilter", "net/sched", "net/sctp",
		"net/sunrpc", "net/xfrm",
	}
	demandFiles = []string{
		"drivers/block/loop", "drivers/block/nbd", "drivers/net/dummy", "drivers/net/geneve", "drivers/net/ifb", "drivers/net/macvlan",
		"drivers/net/macvtap",
		"drivers/net/tap", "drivers/net/tun", "drivers/net/veth", "drivers/net/vrf", "fs/fuse/cuse", "net/core/pktgen",
	}
)

// onDemand reports whether the module in a file of the kernel package, relative to the modules and without the suffix .ko, is
// one that the guest loads when it is needed.
func onDemand(file string) bool {
	return slices.Contains(demandFiles, file) ||
		slices.ContainsFunc(demandDirs, func(dir string) bool { return strings.HasPrefix(file, dir+"/") })
}

// aliasFile lists what the kernel may ask for (see modprobe(8)), one name a line, with the paths of the modules to load, in
// order. A name for which several modules exist, such as a cipher, has several lines. In the names, "-" is replaced by "_".
// tripod-init reads it.
const aliasFile = "lib/modules/aliases"

// installDemanded adds the modules that are loaded when they are needed to a tree, with those that they need, except those that
// are loaded already, and aliasFile.
func (k *kernel) installDemanded(t tree, loaded []string) error {
	var lines []string
	for _, name := range slices.Sorted(maps.Keys(k.files)) {
		if !onDemand(k.files[name]) || slices.Contains(loaded, name) {
			continue
		}
		order, err := k.closure(slices.Clone(loaded), name)
		if err != nil {
			return err
		}
		var list []string
		for _, n := range order[len(loaded):] {
			file := "lib/modules/" + n + ".ko"
			t.file(file, 0o644, k.modules[n])
			list = append(list, "/"+file)
		}
		aliases, err := k.aliases(name)
		if err != nil {
			return err
		}
		for _, a := range append(aliases, name) {
			lines = append(lines, a+" "+strings.Join(list, " ")+"\n")
		}
	}
	slices.Sort(lines)
	t.text(aliasFile, strings.Join(slices.Compact(lines), ""))
	return nil
}

// aliases returns the names by which the kernel asks for a module. Patterns, which are those of hardware, are left out.
func (k *kernel) aliases(name string) ([]string, error) {
	info, err := k.modinfo(name)
	if err != nil {
		return nil, err
	}
	var found []string
	for field := range bytes.SplitSeq(info, []byte{0}) {
		if alias, ok := strings.CutPrefix(string(field), "alias="); ok && !strings.ContainsAny(alias, "*?[ ") {
			found = append(found, moduleName(alias))
		}
	}
	return found, nil
}

// modinfo returns a module's section .modinfo: fields of the form KEY=VALUE that end with a zero byte.
func (k *kernel) modinfo(name string) ([]byte, error) {
	f, err := elf.NewFile(bytes.NewReader(k.modules[name]))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	info, err := f.Section(".modinfo").Data()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return info, nil
}

// moduleFile returns the path of a module relative to the modules of its package, without the suffix .ko, or "".
func moduleFile(name string) string {
	_, file, _ := strings.Cut(path.Clean(name), "/kernel/")
	return strings.TrimSuffix(file, ".ko")
}
