package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// rootModules are the kernel modules that the guest of OCI pods loads from its initramfs, to reach its root disk. ociModules
// are those that it loads from that disk. The modules that they need come before them. Those that are built into the kernel
// are skipped.
var rootModules = []string{"virtio_pci", "virtio_blk", "erofs", "overlay"}

var ociModules = []string{
	"virtio_console", "virtio_scsi", "sd_mod", "virtio_net", "virtio_balloon", "virtio_mem", "virtio_rng",
	"pvpanic_mmio", "pvpanic_pci",
	"ext4", "fuse", "virtiofs",
	"af_packet", "ipv6",
}

// ociPrograms maps the programs of the guest of OCI pods to their paths in Debian's packages.
var ociPrograms = map[string]string{
	"usr/bin/crun": "usr/bin/crun", "usr/bin/conmon": "usr/bin/conmon", "usr/bin/catatonit": "usr/bin/catatonit",
}

// guestTrees are the files of the guest of OCI pods: initramfs has what it needs to mount root, which is a disk.
type guestTrees struct{ initramfs, root tree }

// buildGuest makes the guest of OCI pods in dir, unless it is up to date: vmlinux, initrd, root.erofs and version. The files
// init and program become /init in the initramfs and /usr/bin/tripod-guest on the disk. version is written last. It names the
// kernel and contains a digest of the other files.
func (s store) buildGuest(ctx context.Context, dir, init, program string) error {
	unlock, err := s.lock()
	if err != nil {
		return err
	}
	defer unlock()
	initData, err1 := os.ReadFile(init)
	programData, err2 := os.ReadFile(program)
	if err := errors.Join(err1, err2); err != nil {
		return err
	}
	debs, err := findDebs(ctx)
	if err != nil {
		return err
	}
	key := guestKey(debs.files, initData, programData)
	keyFile := filepath.Join(dir, "key")
	if have, err := os.ReadFile(keyFile); err == nil && bytes.Equal(have, key) {
		return nil
	}
	start := time.Now()
	if err := errors.Join(os.MkdirAll(dir, 0o755), os.RemoveAll(keyFile), debs.fetch(ctx, s.path("debs"))); err != nil {
		return err
	}
	d, err1 := readDebs(ctx, s.path("debs"), debs.files)
	k, err2 := readKernel(ctx, s.path("debs"), debs.files, debs.cloud, func(string) bool { return true })
	if err := errors.Join(err1, err2); err != nil {
		return err
	}
	g, err := newGuest(initData, programData, k)
	if err != nil {
		return err
	}
	if err := d.ociGuest(g.root); err != nil {
		return err
	}
	vmlinux, err1 := k.vmlinux(ctx)
	root, err2 := g.root.erofs(ctx, string(s))
	if err := errors.Join(err1, err2); err != nil {
		return err
	}
	initrd := g.initramfs.cpio()
	sum := sha256.New()
	for _, data := range [][]byte{vmlinux, initrd, root} {
		sum.Write(data)
	}
	version := fmt.Sprintf("%s sha256:%x\n", strings.TrimPrefix(debs.cloud, "linux-image-"), sum.Sum(nil))
	for _, f := range []struct {
		name string
		data []byte
	}{{"vmlinux", vmlinux}, {"initrd", initrd}, {"root.erofs", root}, {"version", []byte(version)}, {"key", key}} {
		if err := replaceFile(filepath.Join(dir, f.name), f.data); err != nil {
			return err
		}
	}
	fmt.Fprintf(os.Stderr, "built %s: %s, initrd %.1f MB, root.erofs %.1f MB, %.1f s\n", dir, debs.cloud,
		float64(len(initrd))/1e6, float64(len(root))/1e6, time.Since(start).Seconds())
	return nil
}

// newGuest returns a guest with Tripod's programs and the kernel's modules.
func newGuest(init, program []byte, k *kernel) (guestTrees, error) {
	g := guestTrees{tree{}, tree{}}
	g.initramfs.file("init", 0o755, init)
	g.initramfs.dir(0o755, "dev", "sys") // mount points
	g.root.file("usr/bin/tripod-guest", 0o755, program)
	loaded, err1 := k.installAll(g.initramfs, rootModules, nil)
	loaded, err2 := k.installAll(g.root, ociModules, loaded)
	if err := errors.Join(err1, err2); err != nil {
		return g, err
	}
	g.root.file("sbin/modprobe", 0o755, init) // which the kernel runs
	return g, k.installDemanded(g.root, loaded)
}

// guestKey returns a text that contains everything that the guest of OCI pods depends on.
func guestKey(debs []string, init, program []byte) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "%s\ninit %x\nprogram %x\n", strings.Join(debs, "\n"), sha256.Sum256(init), sha256.Sum256(program))
	writeSources(&b)
	return b.Bytes()
}

// replaceFile writes a file that another process may have open, as a machine does that boots from it.
func replaceFile(name string, data []byte) error {
	if err := os.WriteFile(name+".new", data, 0o644); err != nil {
		return err
	}
	return os.Rename(name+".new", name)
}

// ociGuest adds what the guest of OCI pods has besides Tripod's programs and kernel modules.
func (d debian) ociGuest(t tree) error {
	t.dir(0o755, "dev", "etc", "mnt", "proc", "run", "scratch", "sys", "var/lib", "var/log")
	t.dir(0o700, "root")
	t.dir(0o1777, "tmp", "var/tmp")
	t.symlink("var/run", "/run")
	for name, from := range ociPrograms {
		if err := d.install(t, from, name); err != nil {
			return err
		}
	}
	t.text("etc/passwd", passwd)
	t.text("etc/group", group)
	t.text("etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\n")
	t.text("etc/hosts", "127.0.0.1 localhost\n::1 localhost\n")
	return nil
}

// installAll adds modules, and those that they need, to a tree, except those that are loaded before. It lists their paths in
// loading order in the file that tripod-init reads, and returns the names of all modules that are then loaded. A module that
// is neither in the package nor in the kernel is an error.
func (k *kernel) installAll(t tree, names, loaded []string) ([]string, error) {
	order := slices.Clone(loaded)
	for _, n := range names {
		if k.modules[n] == nil && !slices.Contains(k.builtin, n) {
			return nil, fmt.Errorf("the kernel has no module %s", n)
		}
		var err error
		if order, err = k.closure(order, n); err != nil {
			return nil, err
		}
	}
	var list strings.Builder
	for _, n := range order[len(loaded):] {
		name := "lib/modules/" + n + ".ko"
		t.file(name, 0o644, k.modules[n])
		list.WriteString("/" + name + "\n")
	}
	t.text("etc/modules.tripod", list.String())
	return order, nil
}
