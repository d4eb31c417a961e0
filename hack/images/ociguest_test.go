package main

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestGuestTrees: the initramfs has tripod-init and the modules that lead to the root disk. The disk has everything else, and
// nothing is in both.
func TestGuestTrees(t *testing.T) {
	k := fakeKernel(t, map[string]string{"virtio_blk": "virtio-ring", "ext4": "jbd2,mbcache", "virtio_scsi": "virtio-ring"})
	g, err := newGuest([]byte("the first process"), []byte("the program"), k)
	if err != nil {
		t.Fatal(err)
	}
	early := []string{"virtio_pci", "virtio_ring", "virtio_blk", "erofs", "overlay"}
	if got := moduleList(t, g.initramfs); !slices.Equal(got, early) {
		t.Errorf("modules that the initramfs loads: got %q, want %q", got, early)
	}
	files := []string{"dev", "etc", "etc/modules.tripod", "init", "lib", "lib/modules", "sys"}
	for _, n := range early {
		files = append(files, "lib/modules/"+n+".ko")
	}
	if got := slices.Sorted(maps.Keys(g.initramfs)); !slices.Equal(got, slices.Sorted(slices.Values(files))) {
		t.Errorf("the initramfs has %q, want %q", got, files)
	}
	if bytes.Contains(g.initramfs.cpio(), []byte("the program")) {
		t.Error("the initramfs contains tripod-guest")
	}

	late := moduleList(t, g.root)
	for i, n := range late {
		if slices.Contains(early, n) || slices.Contains(late[:i], n) {
			t.Errorf("module %s is loaded twice", n)
		}
	}
	for _, n := range slices.Concat(ociModules, []string{"jbd2", "mbcache"}) {
		if !slices.Contains(late, n) || g.root["lib/modules/"+n+".ko"] == nil {
			t.Errorf("module %s is missing on the root disk", n)
		}
	}
	if slices.Index(late, "jbd2") > slices.Index(late, "ext4") {
		t.Errorf("ext4 is loaded before jbd2: %q", late)
	}
	if e := g.root["usr/bin/tripod-guest"]; e == nil || e.mode != 0o755 || string(e.data) != "the program" {
		t.Errorf("tripod-guest on the root disk: got %+v", e)
	}
}

// TestGuestModuleIsUnknown: a guest that would lack a module is not made.
func TestGuestModuleIsUnknown(t *testing.T) {
	k := fakeKernel(t, nil)
	delete(k.modules, "overlay")
	if _, err := newGuest(nil, nil, k); err == nil || !strings.Contains(err.Error(), "no module overlay") {
		t.Errorf("newGuest without a module: got %v", err)
	}
	k.builtin = []string{"overlay"}
	if _, err := newGuest(nil, nil, k); err != nil {
		t.Errorf("newGuest with a module in the kernel: got %v", err)
	}
}

// TestModulesOnDemand: the guest has the modules that the kernel may ask for, by their names and aliases, with those that they
// need, but none that is loaded anyway, and none for hardware.
func TestModulesOnDemand(t *testing.T) {
	k := fakeKernel(t, nil)
	for file, m := range map[string]struct {
		needs   string
		aliases []string
	}{
		"drivers/net/tun":                    {"", []string{"devname:net/tun", "char-major-10-200"}},
		"net/ipv4/netfilter/iptable_nat":     {"ip_tables,nf-nat", nil},
		"net/ipv4/netfilter/ip_tables":       {"x_tables", []string{"ipt_icmp"}},
		"net/netfilter/x_tables":             {"", nil},
		"net/netfilter/nf_nat":               {"erofs", nil},
		"crypto/a":                           {"", []string{"crypto-aes"}},
		"crypto/b":                           {"", []string{"crypto-aes"}},
		"drivers/net/ethernet/vendor/driver": {"", []string{"pci:v00008086d*"}},
		"net/ipv6/other":                     {"", []string{"pci:v00001AF4d*"}},
	} {
		name := moduleName(filepath.Base(file))
		k.modules[name], k.files[name] = fakeModule(t, m.needs, m.aliases...), file
	}
	g, err := newGuest([]byte("init"), nil, k)
	if err != nil {
		t.Fatal(err)
	}
	const want = `a /lib/modules/a.ko
b /lib/modules/b.ko
char_major_10_200 /lib/modules/tun.ko
crypto_aes /lib/modules/a.ko
crypto_aes /lib/modules/b.ko
devname:net/tun /lib/modules/tun.ko
ip_tables /lib/modules/x_tables.ko /lib/modules/ip_tables.ko
ipt_icmp /lib/modules/x_tables.ko /lib/modules/ip_tables.ko
iptable_nat /lib/modules/x_tables.ko /lib/modules/ip_tables.ko /lib/modules/nf_nat.ko /lib/modules/iptable_nat.ko
nf_nat /lib/modules/nf_nat.ko
other /lib/modules/other.ko
tun /lib/modules/tun.ko
x_tables /lib/modules/x_tables.ko
`
	if got := string(g.root["lib/modules/aliases"].data); got != want {
		t.Errorf("aliases: got\n%s\nwant\n%s", got, want)
	}
	for path := range strings.FieldsSeq(want) {
		if path, isFile := strings.CutPrefix(path, "/"); isFile && g.root[path] == nil {
			t.Errorf("%s is missing", path)
		}
	}
	if g.root["lib/modules/driver.ko"] != nil {
		t.Error("the guest has a driver of hardware")
	}
	if e := g.root["sbin/modprobe"]; e == nil || e.mode != 0o755 || string(e.data) != "init" {
		t.Errorf("modprobe on the root disk: got %+v", e)
	}
}

// TestErofs: the same tree makes the same disk, wherever and when it is made.
func TestErofs(t *testing.T) {
	a := tree{}
	a.dir(0o1777, "tmp")
	a.dir(0o700, "root")
	a.symlink("var/run", "/run")
	for _, name := range []string{"usr/bin/tripod-guest", "etc/passwd", "lib/c", "lib/a", "lib/b"} {
		a.file(name, 0o755, bytes.Repeat([]byte(name), 1000))
	}
	shm, err := os.MkdirTemp("/dev/shm", "erofs-test-") // a tmpfs, which lists its files in another order
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(shm)
	dirs := []string{t.TempDir(), shm}
	var disks [2][]byte
	for i, dir := range dirs {
		if disks[i], err = a.erofs(t.Context(), dir); err != nil {
			t.Fatal(err)
		}
		if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
			t.Errorf("temporary files are left: %v, %v", left, err)
		}
	}
	if !bytes.Equal(disks[0], disks[1]) {
		t.Error("the same tree made two disks")
	}
	if block := a["usr/bin/tripod-guest"].data[:4096]; !bytes.Contains(disks[0], block) {
		t.Error("the disk is compressed, or the file is missing")
	}
}

func moduleList(t *testing.T, from tree) (names []string) {
	t.Helper()
	list := from["etc/modules.tripod"]
	if list == nil {
		t.Fatal("the list of modules is missing")
	}
	for line := range strings.FieldsSeq(string(list.data)) {
		names = append(names, strings.TrimSuffix(filepath.Base(line), ".ko"))
	}
	return names
}

// fakeKernel returns a kernel with all modules of the guest. The map has the modules that modules need.
func fakeKernel(t *testing.T, needs map[string]string) *kernel {
	t.Helper()
	k := &kernel{modules: map[string][]byte{}, files: map[string]string{}}
	for _, n := range slices.Concat(rootModules, ociModules) {
		k.modules[n] = fakeModule(t, needs[n])
		for need := range strings.SplitSeq(needs[n], ",") {
			if need != "" {
				k.modules[moduleName(need)] = fakeModule(t, "")
			}
		}
	}
	return k
}

// fakeModule returns an ELF file with no more than the section that names a module's dependencies and aliases.
func fakeModule(t *testing.T, needs string, aliases ...string) []byte {
	t.Helper()
	const names = "\x00.modinfo\x00.shstrtab\x00"
	info := "license=GPL\x00depends=" + needs + "\x00"
	for _, a := range aliases {
		info += "alias=" + a + "\x00"
	}
	header := elf.Header64{Type: uint16(elf.ET_REL), Machine: uint16(elf.EM_X86_64), Version: 1, Ehsize: 64, Shentsize: 64, Shnum: 3,
		Shstrndx: 2}
	copy(header.Ident[:], elf.ELFMAG+"\x02\x01\x01")
	header.Shoff = uint64(64 + len(info) + len(names))
	sections := []elf.Section64{{},
		{Name: 1, Type: uint32(elf.SHT_PROGBITS), Off: 64, Size: uint64(len(info))},
		{Name: 10, Type: uint32(elf.SHT_STRTAB), Off: uint64(64 + len(info)), Size: uint64(len(names))},
	}
	var b bytes.Buffer
	for _, part := range []any{header, []byte(info + names), sections} {
		if err := binary.Write(&b, binary.LittleEndian, part); err != nil {
			t.Fatal(err)
		}
	}
	return b.Bytes()
}
