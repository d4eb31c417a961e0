package main

import (
	"archive/tar"
	"bytes"
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/pierrec/lz4/v4"
)

// kernel is the content of a Debian kernel package.
type kernel struct {
	vmlinuz []byte
	// modules are the kernel modules by name. In the names, "-" is replaced by "_".
	modules map[string][]byte
	// files are their paths in the package, as moduleFile returns them.
	files map[string]string
	// builtin are the names of the modules that are part of the kernel itself.
	builtin []string
}

// Metapackages of the current kernels: the kernel for virtual machines, and the full kernel, which has virtio-9p.
const (
	cloudKernel = "linux-image-cloud-amd64"
	fullKernel  = "linux-image-amd64"
)

var kernelDepends = regexp.MustCompile(`(?m)^(\S+)\n\s*Depends: (linux-image-[0-9]\S+)$`)

// kernelPackages asks apt which kernel package each metapackage depends on.
func kernelPackages(ctx context.Context, metas ...string) map[string]string {
	out, _ := exec.CommandContext(ctx, "apt-cache", append([]string{"depends"}, metas...)...).Output()
	found := map[string]string{}
	for _, m := range kernelDepends.FindAllStringSubmatch(string(out), -1) {
		found[m[1]] = m[2]
	}
	return found
}

// readKernel reads the kernel package pkg from dir, with the modules that want selects by their files' names. The files in
// dir have the given names.
func readKernel(ctx context.Context, dir string, names []string, pkg string, want func(file string) bool) (*kernel, error) {
	i := slices.IndexFunc(names, func(n string) bool { return strings.HasPrefix(n, pkg+"_") })
	if i < 0 {
		return nil, fmt.Errorf("the package %s was not downloaded", pkg)
	}
	c := exec.CommandContext(ctx, "dpkg-deb", "--fsys-tarfile", filepath.Join(dir, names[i]))
	out, err := c.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := c.Start(); err != nil {
		return nil, err
	}
	k := &kernel{modules: map[string][]byte{}, files: map[string]string{}}
	err = k.read(out, want)
	_, _ = io.Copy(io.Discard, out)
	return k, errors.Join(err, c.Wait())
}

func (k *kernel) read(from io.Reader, want func(file string) bool) error {
	for r := tar.NewReader(from); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		name := path.Clean(h.Name)
		switch module, isModule := strings.CutSuffix(path.Base(name), ".ko"); {
		case isModule && !want(module):
		case isModule:
			if k.modules[moduleName(module)], err = io.ReadAll(r); err != nil {
				return err
			}
			k.files[moduleName(module)] = moduleFile(name)
		case strings.HasPrefix(name, "boot/vmlinuz-"):
			if k.vmlinuz, err = io.ReadAll(r); err != nil {
				return err
			}
		case path.Base(name) == "modules.builtin":
			list, err := io.ReadAll(r)
			if err != nil {
				return err
			}
			for file := range strings.FieldsSeq(string(list)) {
				k.builtin = append(k.builtin, moduleName(strings.TrimSuffix(path.Base(file), ".ko")))
			}
		}
	}
}

func moduleName(s string) string { return strings.ReplaceAll(s, "-", "_") }

// guestModules are the modules that the test guest loads, by group. The guest always loads the group "base"; it loads
// virtio-0xNNNN if a device of that kind exists. Modules that the kernel package lacks, or that are built into the
// kernel, are skipped. Dependencies are loaded first.
var guestModules = map[string][]string{
	"base": {"virtio_pci", "isofs", "button", "evdev", "pvpanic_mmio", "pvpanic_pci", "vfat", "nls_cp437", "nls_ascii"},

	"virtio-0x0001": {"virtio_net", "af_packet"},
	"virtio-0x0002": {"virtio_blk", "ext4"},
	"virtio-0x0003": {"virtio_console"},
	"virtio-0x0004": {"virtio_rng"},
	"virtio-0x0005": {"virtio_balloon"},
	"virtio-0x0008": {"virtio_scsi", "sd_mod", "sr_mod", "ext4"},
	"virtio-0x0009": {"9pnet_virtio", "9p"},
	"virtio-0x0018": {"virtio_mem"},
	"virtio-0x001a": {"virtiofs"},
}

// helpers are the other kernel modules that guestModules depend on. The .modinfo section of a module names the modules
// that it needs.
var helpers = []string{
	"virtio", "virtio_ring", "virtio_pci_modern_dev", "virtio_pci_legacy_dev", "failover", "net_failover", "cdrom", "pvpanic", "fat",
	"scsi_mod", "scsi_common", "t10_pi", "crc_t10dif", "crct10dif_common", "crct10dif_generic", "crc64", "crc64_rocksoft",
	"crc64_rocksoft_generic",
	"9pnet", "netfs", "fscache", "fuse", "jbd2", "mbcache", "crc16", "crc32c_generic", "libcrc32c", "rng_core",
}

func wantModule(file string) bool {
	name := moduleName(file)
	for _, group := range guestModules {
		if slices.Contains(group, name) {
			return true
		}
	}
	return slices.Contains(helpers, name)
}

// install adds the modules to the tree of an initramfs, as lib/modules/NAME.ko. For each group, it adds a list of the
// group's modules in loading order, as lib/modules/GROUP.
func (k *kernel) install(t tree) error {
	for group, names := range guestModules {
		var order []string
		for _, n := range names {
			var err error
			if order, err = k.closure(order, n); err != nil {
				return fmt.Errorf("modules of %s: %w", group, err)
			}
		}
		for _, n := range order {
			t.file("lib/modules/"+n+".ko", 0o644, k.modules[n])
		}
		if len(order) > 0 {
			t.text("lib/modules/"+group, strings.Join(order, "\n")+"\n")
		}
	}
	return nil
}

// closure appends the dependencies of a module, and then the module itself, to a list of modules in loading order.
func (k *kernel) closure(order []string, name string) ([]string, error) {
	if k.modules[name] == nil || slices.Contains(order, name) {
		return order, nil
	}
	info, err := k.modinfo(name)
	if err != nil {
		return nil, err
	}
	for field := range bytes.SplitSeq(info, []byte{0}) {
		list, ok := strings.CutPrefix(string(field), "depends=")
		if !ok || list == "" {
			continue
		}
		for need := range strings.SplitSeq(list, ",") {
			need = moduleName(need)
			if k.modules[need] == nil {
				return nil, fmt.Errorf("%s needs %s, which is not on the list of helpers", name, need)
			}
			if order, err = k.closure(order, need); err != nil {
				return nil, err
			}
		}
	}
	return append(order, name), nil
}

// First bytes of a compressed kernel in vmlinuz: a legacy frame of LZ4, or XZ.
var (
	lz4Magic = []byte{0x02, 0x21, 0x4c, 0x18}
	xzMagic  = []byte("\xfd7zXZ\x00")
)

// vmlinux returns the kernel as an ELF file, which QEMU can start (by PVH) without decompression in the guest. vmlinux
// runs the program xz, because the XZ libraries for Go lack the filter for x86 code.
func (k *kernel) vmlinux(ctx context.Context) ([]byte, error) {
	unpack := func(magic []byte, open func([]byte) ([]byte, error)) []byte {
		for i := 0; ; i++ {
			next := bytes.Index(k.vmlinuz[i:], magic)
			if next < 0 {
				return nil
			}
			i += next
			// Ignore the error: it concerns only the size field, which comes after the compressed data. The kernel is
			// complete.
			if data, _ := open(k.vmlinuz[i:]); bytes.HasPrefix(data, []byte(elf.ELFMAG)) {
				return data
			}
		}
	}
	data := unpack(lz4Magic, func(b []byte) ([]byte, error) { return io.ReadAll(lz4.NewReader(bytes.NewReader(b))) })
	if data == nil {
		data = unpack(xzMagic, func(b []byte) ([]byte, error) {
			c := exec.CommandContext(ctx, "xz", "-dc", "--single-stream")
			c.Stdin = bytes.NewReader(b)
			return c.Output()
		})
	}
	if data == nil {
		return nil, errors.New("no kernel compressed with LZ4 or XZ was found in vmlinuz")
	}
	if _, err := elf.NewFile(bytes.NewReader(data)); err != nil {
		return nil, fmt.Errorf("the kernel in vmlinuz: %w", err)
	}
	return data, nil
}
