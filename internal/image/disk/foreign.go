package disk

import (
	"bytes"
	"errors"
	"io"
	"path"
	"strings"

	"github.com/tripod-run/tripod/internal/image/disk/qcow2"
	"github.com/tripod-run/tripod/internal/image/internal/failure"
)

// foreignFormat is a disk format that machines cannot use.
type foreignFormat struct {
	// name is the common name; qemu is qemu-img's name, "" for archives and compressed files.
	name, qemu string
	// suffixes are suffixes of file names; magics are magic numbers at offset.
	suffixes []string
	magics   []string
	offset   int
}

// foreignFormats lists the formats of files that could be mistaken for raw disks but would not boot. Sources: the
// formats' own specifications, QEMU's block/*.c, and file(1).
var foreignFormats = []foreignFormat{
	{name: "VMDK", qemu: "vmdk", suffixes: []string{".vmdk"}, magics: []string{"KDMV", "COWD", "# Disk DescriptorFile"}},
	{name: "VDI", qemu: "vdi", suffixes: []string{".vdi"}, magics: []string{"\x7f\x10\xda\xbe"}, offset: 64},
	{name: "VHDX", qemu: "vhdx", suffixes: []string{".vhdx", ".avhdx"}, magics: []string{"vhdxfile"}},
	{name: "VHD", qemu: "vpc", suffixes: []string{".vhd"}, magics: []string{"conectix"}},
	{name: "QED", qemu: "qed", suffixes: []string{".qed"}, magics: []string{"QED\x00"}},
	{name: "Parallels", qemu: "parallels", suffixes: []string{".hds"}, magics: []string{"WithoutFreeSpace", "WithouFreSpacExt"}},
	{name: "DMG", qemu: "dmg", suffixes: []string{".dmg"}},
	{name: "qcow (version 1)", qemu: "qcow", suffixes: []string{".qcow"}, magics: []string{qcow2.Magic + "\x00\x00\x00\x01"}},
	{name: "OVA", suffixes: []string{".ova"}},
	{name: "tar", suffixes: []string{".tar"}, magics: []string{"ustar"}, offset: 257},
	{name: "gzip", magics: []string{"\x1f\x8b\x08"}},
	{name: "xz", magics: []string{"\xfd7zXZ\x00"}},
	{name: "zstd", magics: []string{"\x28\xb5\x2f\xfd"}},
	{name: "bzip2", suffixes: []string{".bz2"}, magics: []string{"BZh"}},
	{name: "zip", suffixes: []string{".zip"}, magics: []string{"PK\x03\x04"}},
	{name: "7z", suffixes: []string{".7z"}, magics: []string{"7z\xbc\xaf\x27\x1c"}},
}

// foreignHead is the number of bytes that refuseForeign needs: the boot sector.
const foreignHead = 512

// refuseForeign rejects a supposedly raw disk whose name or first bytes belong to another format. The error is
// errdefs.ErrInvalidArgument and says what to do. A disk with a boot sector always counts as raw.
func refuseForeign(name string, head []byte) error {
	suffix := strings.ToLower(path.Ext(name))
	for _, f := range foreignFormats {
		for _, s := range f.suffixes {
			if suffix == s {
				return f.refusal("by its name " + path.Base(name))
			}
		}
	}
	if len(head) >= foreignHead && head[510] == 0x55 && head[511] == 0xaa {
		return nil
	}
	for _, f := range foreignFormats {
		for _, magic := range f.magics {
			if len(head) > f.offset && bytes.HasPrefix(head[f.offset:], []byte(magic)) {
				return f.refusal("by its content")
			}
		}
	}
	return nil
}

// isISO9660 reports whether a raw disk contains an ISO 9660 file system. A volume descriptor follows the first 32 KiB.
// It begins with a byte for its type and the mark.
func isISO9660(disk io.ReaderAt) (bool, error) {
	const offset, mark = 32<<10 + 1, "CD001"
	got := make([]byte, len(mark))
	_, err := disk.ReadAt(got, offset)
	if err != nil && !errors.Is(err, io.EOF) {
		return false, err
	}
	return string(got) == mark, nil
}

func (f foreignFormat) refusal(by string) error {
	if f.qemu == "" {
		return failure.Invalidf("the disk is a file of the format %s, %s: a machine boots from qcow2 or raw; unpack it", f.name, by)
	}
	return failure.Invalidf("the disk is of the format %s, %s: a machine boots from qcow2 or raw; convert it with `qemu-img convert -f %s -O qcow2 DISK disk.qcow2`", f.name, by, f.qemu)
}
