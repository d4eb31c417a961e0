package main

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io/fs"
	"maps"
	"slices"
)

// cpio packs the tree as an initramfs, in the "newc" format that the kernel documents in
// Documentation/driver-api/early-userspace/buffer-format.rst. The initramfs is uncompressed, because an emulated
// machine is slow at decompressing. Hard links become symbolic links.
func (t tree) cpio() []byte {
	var b bytes.Buffer
	inode := 0
	write := func(name string, mode fs.FileMode, data []byte) {
		inode++
		fmt.Fprintf(&b, "070701%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X",
			inode, uint32(mode), 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name)+1, 0)
		b.WriteString(name)
		b.WriteByte(0)
		b.Write(make([]byte, -b.Len()&3))
		b.Write(data)
		b.Write(make([]byte, -b.Len()&3))
	}
	for _, name := range slices.Sorted(maps.Keys(t)) {
		e := t[name]
		mode := fs.FileMode(e.mode)
		switch e.typ {
		case tar.TypeDir:
			write(name, 0o040000|mode, nil)
		case tar.TypeSymlink:
			write(name, 0o120777, []byte(e.link))
		case tar.TypeLink:
			write(name, 0o120777, []byte("/"+e.link))
		default:
			write(name, 0o100000|mode, e.data)
		}
	}
	inode = -1
	write("TRAILER!!!", 0, nil)
	return b.Bytes()
}
