package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// The disk has a master boot record and one FAT16 partition with the kernel, the initramfs, SYSLINUX and free space.
const (
	sectorSize     = 512
	partitionStart = 2048 // in sectors; partitioning tools use the same number by default
	partitionSize  = 39 << 20
	bootLabel      = "TRIPODBOOT"

	syslinuxConfig = "SERIAL 0 115200\nPROMPT 0\nTIMEOUT 1\nDEFAULT guest\n" +
		"LABEL guest\nKERNEL vmlinuz\nAPPEND initrd=initrd " + cmdline + " tripod.boot=" + bootLabel + "\n"
)

// diskTools maps the name of each program that helps to make the disk to the program's path in Debian's packages.
var diskTools = map[string]string{
	"syslinux": "usr/bin/syslinux", "mkfs.fat": "sbin/mkfs.fat", "mcopy": "usr/bin/mtools", "mattrib": "usr/bin/mtools",
	"mmove": "usr/bin/mtools",
}

// bootDisk makes a qcow2 disk that PC firmware can boot. The dates of files are fixed, so that the same content always
// gives the same disk.
func (s *set) bootDisk(ctx context.Context, vmlinuz, initrd []byte) ([]byte, error) {
	dir, err := filepath.Abs(filepath.Join(s.scratch, "disk"))
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(filepath.Join(dir, "bin"), 0o755); err != nil {
		return nil, err
	}
	for name, in := range diskTools {
		e, err := s.debian.find(in)
		if err != nil {
			return nil, err
		}
		if err := os.WriteFile(filepath.Join(dir, "bin", name), e.data, 0o755); err != nil {
			return nil, err
		}
	}
	run := func(args ...string) error {
		name := args[0]
		if _, fromDebian := diskTools[name]; fromDebian {
			name = filepath.Join(dir, "bin", name)
		}
		c := exec.CommandContext(ctx, name, args[1:]...)
		c.Dir = dir
		c.Env = append(os.Environ(), "PATH="+filepath.Join(dir, "bin")+":"+os.Getenv("PATH"), "SOURCE_DATE_EPOCH=315532800", "TZ=UTC",
			"MTOOLSRC=/dev/null")
		if out, err := c.CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w\n%s", args[0], err, out)
		}
		return nil
	}
	for name, data := range map[string][]byte{"vmlinuz": vmlinuz, "initrd": initrd, "syslinux.cfg": []byte(syslinuxConfig)} {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o644); err != nil {
			return nil, err
		}
	}
	for _, step := range [][]string{
		{"mkfs.fat", "--invariant", "-F", "16", "-n", bootLabel, "-h", fmt.Sprint(partitionStart), "-C", "part", fmt.Sprint(partitionSize >> 10)},
		{"mcopy", "-i", "part", "vmlinuz", "initrd", "syslinux.cfg", "::"},
		{"syslinux", "--install", "part"},
	} {
		if err := run(step...); err != nil {
			return nil, err
		}
	}
	part, err := os.ReadFile(filepath.Join(dir, "part"))
	if err != nil {
		return nil, err
	}
	boot, err := s.debian.find("usr/lib/syslinux/mbr/mbr.bin")
	if err != nil {
		return nil, err
	}
	disk := make([]byte, partitionStart*sectorSize, partitionStart*sectorSize+len(part))
	masterBootRecord(disk, boot.data, len(part)/sectorSize)
	if err := os.WriteFile(filepath.Join(dir, "disk"), append(disk, part...), 0o644); err != nil {
		return nil, err
	}
	if err := run("qemu-img", "convert", "-f", "raw", "-O", "qcow2", "disk", "disk.qcow2"); err != nil {
		return nil, err
	}
	return os.ReadFile(filepath.Join(dir, "disk.qcow2"))
}

// masterBootRecord writes the boot code and the partition table. The table has one active partition with the given
// number of sectors.
func masterBootRecord(disk, code []byte, sectors int) {
	copy(disk, code)
	entry := disk[446:462]
	entry[0] = 0x80 // active
	entry[4] = 0x0e // FAT16 with LBA
	copy(entry[1:4], "\xfe\xff\xff")
	copy(entry[5:8], "\xfe\xff\xff")
	binary.LittleEndian.PutUint32(entry[8:], partitionStart)
	binary.LittleEndian.PutUint32(entry[12:], uint32(sectors))
	disk[510], disk[511] = 0x55, 0xaa
}

// hostileDisks adds images with disks that a node must refuse (fault I5 in docs/faults.md).
func (s *set) hostileDisks(ctx context.Context) error {
	file := filepath.Join(s.scratch, "backing.qcow2")
	out, err := exec.CommandContext(ctx, "qemu-img", "create", "-q", "-f", "qcow2", "-u", "-F", "raw", "-b", "/etc/shadow", file,
		"16M").CombinedOutput()
	if err != nil {
		return fmt.Errorf("qemu-img create: %w\n%s", err, out)
	}
	data, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	t := tree{}
	t.file("disk/disk.qcow2", 0o644, data)
	s.addMachine(vm+"backing:1", t)

	t = tree{}
	t.file("disk/a.img", 0o644, make([]byte, 1<<20))
	t.file("disk/b.img", 0o644, make([]byte, 1<<20))
	s.addMachine(vm+"two-disks:1", t)
	return nil
}
