package iso9660

import (
	"bytes"
	"encoding/binary"
	"strings"
	"time"
)

// stamp is used for all timestamps, so that images of the same files are equal. Guests do not need the real times.
var stamp = time.Date(2020, 1, 1, 0, 0, 0, 0, time.UTC)

// Fixed sectors.
const (
	firstDescriptor = 16
	firstFree       = firstDescriptor + 3
	// padding is the number of empty sectors after the last file, as in mkisofs. Linux reads ahead beyond the last
	// file. busybox looks for the signatures of other file systems in the first 68 KiB, and gives up if the disk is
	// smaller.
	padding = 150
)

// layout holds the positions of all parts of an image.
type layout struct {
	dirs  [trees][]*node // in the order of the path tables, level by level
	files []*node
	// table holds the path tables (little-endian, big-endian), and tableAt the tables' first sectors.
	table   [trees][2][]byte
	tableAt [trees][2]uint32
	sectors uint32
}

func newLayout(root *node) *layout {
	l := &layout{sectors: firstFree}
	for tree := range trees {
		l.dirs[tree] = []*node{root}
		for i := 0; i < len(l.dirs[tree]); i++ {
			d := l.dirs[tree][i]
			d.number[tree] = uint16(i + 1)
			for _, c := range d.sorted(tree) {
				switch {
				case c.dir:
					l.dirs[tree] = append(l.dirs[tree], c)
				case tree == primary:
					l.files = append(l.files, c)
				}
			}
		}
		// The positions in path tables and directories are not known yet. But the lengths of path tables and
		// directories do not depend on the positions.
		length := len(l.pathTable(tree, binary.LittleEndian))
		for order := range l.tableAt[tree] {
			l.tableAt[tree][order] = l.take(length)
		}
		for _, d := range l.dirs[tree] {
			d.size[tree] = uint32(len(d.records(tree)))
			d.extent[tree] = l.take(int(d.size[tree]))
		}
	}
	for _, f := range l.files {
		at := l.take(max(len(f.data), 1)) // an empty file also gets a sector
		for tree := range trees {
			f.extent[tree], f.size[tree] = at, uint32(len(f.data))
		}
	}
	l.take(padding * sectorSize)
	for tree := range trees {
		l.table[tree] = [2][]byte{l.pathTable(tree, binary.LittleEndian), l.pathTable(tree, binary.BigEndian)}
	}
	return l
}

// take reserves sectors for the given number of bytes and returns the first of these sectors.
func (l *layout) take(length int) uint32 {
	at := l.sectors
	l.sectors += uint32((length + sectorSize - 1) / sectorSize)
	return at
}

func (l *layout) image(label string) []byte {
	image := make([]byte, int(l.sectors)*sectorSize)
	put := func(sector uint32, b []byte) { copy(image[int(sector)*sectorSize:], b) }
	for tree := range trees {
		put(firstDescriptor+uint32(tree), l.descriptor(tree, label))
		for order, table := range l.table[tree] {
			put(l.tableAt[tree][order], table)
		}
		for _, d := range l.dirs[tree] {
			put(d.extent[tree], d.records(tree))
		}
	}
	put(firstDescriptor+trees, append([]byte{255}, "CD001\x01"...))
	for _, f := range l.files {
		put(f.extent[primary], f.data)
	}
	return image
}

// descriptor returns the volume descriptor of a tree (ECMA-119 8.4, 8.5).
func (l *layout) descriptor(tree int, label string) []byte {
	text := func(s string, length int) []byte {
		if tree == joliet {
			s = string(ucs2(s + strings.Repeat(" ", length/2-len(s))))
		}
		// A Joliet text of odd length ends with a zero byte.
		return append([]byte(s), bytes.Repeat([]byte{' ' * (1 - byte(tree))}, length-len(s))...)
	}
	root := l.dirs[tree][0]
	var b []byte
	b = append(b, byte(tree+1)) // 1: primary, 2: supplementary
	b = append(b, "CD001\x01\x00"...)
	b = append(b, text("", 32)...)    // system
	b = append(b, text(label, 32)...) // volume
	b = append(b, make([]byte, 8)...)
	b = both32(b, l.sectors)
	escape := make([]byte, 32)
	if tree == joliet {
		copy(escape, "%/E") // UCS-2 level 3
	}
	b = append(b, escape...)
	b = both16(b, 1) // volumes in the set
	b = both16(b, 1) // number of this volume
	b = both16(b, sectorSize)
	b = both32(b, uint32(len(l.table[tree][0])))
	b = binary.LittleEndian.AppendUint32(b, l.tableAt[tree][0])
	b = append(b, make([]byte, 4)...)
	b = binary.BigEndian.AppendUint32(b, l.tableAt[tree][1])
	b = append(b, make([]byte, 4)...)
	b = append(b, root.record(tree, []byte{0}, nil)...)
	for range 4 { // volume set, publisher, preparer, application
		b = append(b, text("", 128)...)
	}
	for range 3 { // copyright, abstract and bibliographic file
		b = append(b, text("", 37)...)
	}
	made := stamp.Format("20060102150405") + "00\x00"
	never := strings.Repeat("0", 16) + "\x00"
	b = append(b, made+made+never+never...)
	return append(b, 1) // version of the structure
}

// pathTable returns the path table of a tree (ECMA-119 9.4).
func (l *layout) pathTable(tree int, order binary.AppendByteOrder) []byte {
	var b []byte
	for i, d := range l.dirs[tree] {
		id := d.id(tree)
		if i == 0 {
			id = []byte{0}
		}
		b = append(b, byte(len(id)), 0)
		b = order.AppendUint32(b, d.extent[tree])
		b = order.AppendUint16(b, d.parent.number[tree])
		b = append(b, id...)
		if len(id)%2 == 1 {
			b = append(b, 0)
		}
	}
	return b
}

func both16(b []byte, v uint16) []byte {
	return binary.BigEndian.AppendUint16(binary.LittleEndian.AppendUint16(b, v), v)
}

func both32(b []byte, v uint32) []byte {
	return binary.BigEndian.AppendUint32(binary.LittleEndian.AppendUint32(b, v), v)
}
