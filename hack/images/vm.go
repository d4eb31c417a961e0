package main

import (
	"context"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	imagestore "github.com/tripod-run/tripod/internal/image"
	"github.com/tripod-run/tripod/internal/sandbox/wasm/artifact"
)

const vm = house + "vm/"

// guest contains the files of the test guest, except busybox and the kernel modules.
//
//go:embed guest
var guest embed.FS

// guestFiles maps each file's name in the directory guest to its path in the guest.
var guestFiles = map[string]string{
	"init": "init", "load": "lib/guest/load", "cloud-init": "bin/cloud-init", "files.awk": "lib/guest/files.awk",
	"network.awk": "lib/guest/network.awk", "dhcp": "lib/guest/dhcp", "power-button": "etc/acpi/PWRF/00000080",
	"info": "www/cgi-bin/info", "blob": "www/cgi-bin/blob", "count": "www/cgi-bin/count",
}

// cmdline is the kernel command line of the images that are booted directly. Without no_timer_check, the kernel would
// mistake its timer for broken hardware on a busy host, and panic.
const cmdline = "console=ttyS0 quiet no_timer_check"

// machines adds the images of virtual machines. It also writes the kernels, the initramfs and the disk to dir, for
// tests that need no registry.
func (s *set) machines(ctx context.Context, dir string) error {
	if err := errors.Join(os.RemoveAll(dir), os.MkdirAll(dir, 0o755)); err != nil {
		return err
	}
	box, err := s.debian.find("bin/busybox-static")
	if err != nil {
		return err
	}
	applets, err := listApplets(ctx, box.data, s.scratch)
	if err != nil {
		return err
	}
	save := func(name string, data []byte) error { return os.WriteFile(filepath.Join(dir, name), data, 0o644) }
	for _, k := range []struct {
		*kernel
		name, suffix string
	}{{s.cloud, "busybox:1", ""}, {s.full, "full:1", "-full"}} {
		initrd, err := guestInitrd(k.kernel, box.data, applets)
		if err != nil {
			return err
		}
		vmlinux, err := k.vmlinux(ctx)
		if err != nil {
			return err
		}
		if err := errors.Join(save("vmlinux"+k.suffix, vmlinux), save("initrd"+k.suffix, initrd)); err != nil {
			return err
		}
		t := tree{}
		t.file("boot/vmlinux", 0o644, vmlinux)
		t.file("boot/initrd", 0o644, initrd)
		t.text("boot/cmdline", cmdline+"\n")
		s.addMachine(vm+k.name, t)
	}
	s.tinyMachines()
	initrd, err := os.ReadFile(filepath.Join(dir, "initrd"))
	if err != nil {
		return err
	}
	disk, err := s.bootDisk(ctx, s.cloud.vmlinuz, initrd)
	if err != nil {
		return err
	}
	t := tree{}
	t.file("disk/disk.qcow2", 0o644, disk)
	s.addMachine(vm+"disk:1", t)
	return errors.Join(save("disk.qcow2", disk), save("cmdline", []byte(cmdline)), s.hostileDisks(ctx))
}

// addMachine adds the image of a machine. The image has one layer and no configuration.
func (s *set) addMachine(name string, t tree) {
	s.images = append(s.images, image{name: name, layers: []v1.Layer{s.layer(t)}})
}

// guestInitrd makes the guest's initramfs, which is the whole file system of the guest.
func guestInitrd(k *kernel, busybox []byte, applets []string) ([]byte, error) {
	t := tree{}
	t.dir(0o755, "bin", "dev", "etc", "mnt", "proc", "root", "run", "sys", "tmp", "var")
	t.file("bin/busybox", 0o755, busybox)
	for _, a := range applets {
		t.symlink("bin/"+a, "busybox")
	}
	t.symlink("var/run", "/run")
	t.text("etc/passwd", passwd)
	t.text("etc/group", group)
	t.text("etc/hosts", "127.0.0.1 localhost\n::1 localhost\n")
	for from, to := range guestFiles {
		data, err := guest.ReadFile(path.Join("guest", from))
		if err != nil {
			return nil, err
		}
		t.file(to, 0o755, data)
	}
	if err := k.install(t); err != nil {
		return nil, err
	}
	return t.cpio(), nil
}

// diskArtifact returns the disk in dir as an OCI artifact with one layer.
func diskArtifact(dir string) (component, error) {
	data, err := os.ReadFile(filepath.Join(dir, "disk.qcow2"))
	if err != nil {
		return component{}, err
	}
	config := imagestore.NewBlob(ocispec.MediaTypeEmptyJSON, []byte("{}"))
	layer := imagestore.NewBlob("application/vnd.tripod.disk.qcow2", data)
	document, err := json.Marshal(ocispec.Manifest{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageManifest,
		Config: config.Descriptor, Layers: []ocispec.Descriptor{layer.Descriptor},
	})
	if err != nil {
		return component{}, fmt.Errorf("manifest of the disk: %w", err)
	}
	return component{vm + "disk-artifact:1", &artifact.Image{
		Manifest: imagestore.NewBlob(ocispec.MediaTypeImageManifest, document), Blobs: []imagestore.Blob{layer, config},
	}}, nil
}
