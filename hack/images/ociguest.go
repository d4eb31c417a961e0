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

// ociModules are the kernel modules that the guest of OCI pods loads at boot. The modules that they need come before
// them. Those that are built into the kernel are skipped.
var ociModules = []string{
	"virtio_pci", "virtio_console", "virtio_blk", "virtio_scsi", "sd_mod", "virtio_net", "virtio_balloon", "virtio_rng",
	"pvpanic_mmio", "pvpanic_pci",
	"overlay", "erofs", "ext4", "fuse", "virtiofs",
	"af_packet", "ipv6",
}

// ociPrograms maps the programs of the guest of OCI pods to their paths in Debian's packages.
var ociPrograms = map[string]string{
	"usr/bin/crun": "usr/bin/crun", "usr/bin/conmon": "usr/bin/conmon", "usr/bin/catatonit": "usr/bin/catatonit",
}

// buildGuest makes the guest of OCI pods in dir, unless it is up to date: vmlinux, initrd and version. The files init and
// program become the guest's /init and /usr/bin/tripod-guest. version is written last. It names the kernel and contains
// a digest of the other two files.
func (s store) buildGuest(ctx context.Context, dir, init, program string) error {
	unlock, err := s.lock()
	if err != nil {
		return err
	}
	defer unlock()
	t := tree{}
	for _, p := range []struct{ name, from string }{{"init", init}, {"usr/bin/tripod-guest", program}} {
		data, err := os.ReadFile(p.from)
		if err != nil {
			return err
		}
		t.file(p.name, 0o755, data)
	}
	debs, err := findDebs(ctx)
	if err != nil {
		return err
	}
	key := guestKey(debs.files, t)
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
	if err := errors.Join(d.ociGuest(t), k.installAll(t, ociModules)); err != nil {
		return err
	}
	vmlinux, err := k.vmlinux(ctx)
	if err != nil {
		return err
	}
	initrd := t.cpio()
	sum := sha256.New()
	sum.Write(vmlinux)
	sum.Write(initrd)
	version := fmt.Sprintf("%s sha256:%x\n", strings.TrimPrefix(debs.cloud, "linux-image-"), sum.Sum(nil))
	for _, f := range []struct {
		name string
		data []byte
	}{{"vmlinux", vmlinux}, {"initrd", initrd}, {"version", []byte(version)}, {"key", key}} {
		if err := replaceFile(filepath.Join(dir, f.name), f.data); err != nil {
			return err
		}
	}
	fmt.Fprintf(os.Stderr, "built %s: %s, initrd %.1f MB, %.1f s\n", dir, debs.cloud, float64(len(initrd))/1e6, time.Since(start).Seconds())
	return nil
}

// guestKey returns a text that contains everything that the guest of OCI pods depends on.
func guestKey(debs []string, programs tree) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "%s\n", strings.Join(debs, "\n"))
	for _, name := range []string{"init", "usr/bin/tripod-guest"} {
		fmt.Fprintf(&b, "%s %x\n", name, sha256.Sum256(programs[name].data))
	}
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
	t.dir(0o755, "dev", "etc", "mnt", "proc", "run", "sys", "var/lib", "var/log")
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

// installAll adds modules, and those that they need, to the tree of an initramfs. It lists their paths in loading order in
// the file that tripod-init reads. A module that is neither in the package nor in the kernel is an error.
func (k *kernel) installAll(t tree, names []string) error {
	var order []string
	for _, n := range names {
		if k.modules[n] == nil && !slices.Contains(k.builtin, n) {
			return fmt.Errorf("the kernel has no module %s", n)
		}
		var err error
		if order, err = k.closure(order, n); err != nil {
			return err
		}
	}
	var list strings.Builder
	for _, n := range order {
		name := "lib/modules/" + n + ".ko"
		t.file(name, 0o644, k.modules[n])
		list.WriteString("/" + name + "\n")
	}
	t.text("etc/modules.tripod", list.String())
	return nil
}
