package iso9660

// records returns a directory's records in a tree, padded to whole sectors. No record crosses a sector boundary.
func (n *node) records(tree int) []byte {
	var b []byte
	add := func(r []byte) {
		if free := sectorSize - len(b)%sectorSize; free < len(r) {
			b = append(b, make([]byte, free)...)
		}
		b = append(b, r...)
	}
	add(n.record(tree, []byte{0}, n.selfUse(tree)))
	add(n.parent.record(tree, []byte{1}, n.parent.attributes(tree)))
	for _, c := range n.sorted(tree) {
		add(c.record(tree, c.id(tree), append(c.attributes(tree), c.alternateName(tree)...)))
	}
	return append(b, make([]byte, (sectorSize-len(b)%sectorSize)%sectorSize)...)
}

// record returns a directory record (ECMA-119 9.1) with the given system use area.
func (n *node) record(tree int, id, use []byte) []byte {
	b := []byte{0, 0}
	b = both32(b, n.extent[tree])
	b = both32(b, n.size[tree])
	b = append(b, byte(stamp.Year()-1900), byte(stamp.Month()), byte(stamp.Day()), byte(stamp.Hour()), byte(stamp.Minute()),
		byte(stamp.Second()), 0)
	flags := byte(0)
	if n.dir {
		flags = 2
	}
	b = append(b, flags, 0, 0)
	b = both16(b, 1)
	b = append(b, byte(len(id)))
	b = append(b, id...)
	if len(b)%2 == 1 {
		b = append(b, 0)
	}
	b = append(b, use...)
	if len(b)%2 == 1 {
		b = append(b, 0)
	}
	b[0] = byte(len(b))
	return b
}

// selfUse returns the system use area of a directory's own record. In the root directory, this area declares that the
// image uses SUSP and Rock Ridge.
func (n *node) selfUse(tree int) []byte {
	if tree != primary || n.parent != n {
		return n.attributes(tree)
	}
	b := []byte{'S', 'P', 7, 1, 0xBE, 0xEF, 0}
	b = append(b, n.attributes(tree)...)
	const name = "RRIP_1991A"
	return append(b, append([]byte{'E', 'R', 8 + byte(len(name)), 1, byte(len(name)), 0, 0, 1}, name...)...)
}

// File types in the mode of a PX entry (POSIX).
const (
	typeDir  = 0o040000
	typeFile = 0o100000
)

// attributes returns the Rock Ridge entry PX: mode, links, user and group.
func (n *node) attributes(tree int) []byte {
	if tree != primary {
		return nil
	}
	mode, links := typeFile|uint32(n.mode), uint32(1)
	if n.dir {
		mode, links = typeDir|uint32(n.mode), 2
		for _, c := range n.children {
			if c.dir {
				links++
			}
		}
	}
	b := []byte{'P', 'X', 36, 1}
	for _, v := range []uint32{mode, links, 0, 0} {
		b = both32(b, v)
	}
	return b
}

// alternateName returns the Rock Ridge entry NM.
func (n *node) alternateName(tree int) []byte {
	if tree != primary {
		return nil
	}
	return append([]byte{'N', 'M', 5 + byte(len(n.name)), 1, 0}, n.name...)
}
