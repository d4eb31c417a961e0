package wasmbin

// maxLEB is the length of the longest 32-bit number in LEB128.
const maxLEB = 5

// uvarint reads an unsigned 32-bit LEB128 number and its length; 0 when it is cut off or too large.
func uvarint(b []byte) (value uint32, n int) {
	for i, c := range b[:min(len(b), maxLEB)] {
		if i == maxLEB-1 && c > 0x0f {
			return 0, 0
		}
		value |= uint32(c&0x7f) << (7 * i)
		if c < 0x80 {
			return value, i + 1
		}
	}
	return 0, 0
}

// cutName takes a name off the front of a custom section.
func cutName(b []byte) (name string, rest []byte, ok bool) {
	c := &cursor{rest: b}
	name = c.name()
	return name, c.rest, !c.bad
}

// cursor reads through the content of a section. Once something is wrong, bad stays set and all else reads as zero.
type cursor struct {
	rest []byte
	bad  bool
}

func (c *cursor) fail() {
	c.rest, c.bad = nil, true
}

func (c *cursor) byte() byte {
	if len(c.rest) == 0 {
		c.fail()
		return 0
	}
	b := c.rest[0]
	c.rest = c.rest[1:]
	return b
}

func (c *cursor) u32() uint32 {
	v, n := uvarint(c.rest)
	if n == 0 {
		c.fail()
		return 0
	}
	c.rest = c.rest[n:]
	return v
}

func (c *cursor) name() string {
	n := c.u32()
	if uint64(n) > uint64(len(c.rest)) {
		c.fail()
		return ""
	}
	s := string(c.rest[:n])
	c.rest = c.rest[n:]
	return s
}

// externName reads the name of a component's import or export: a kind byte, then the name; kind 2 has options after it
// (component-model Binary.md, importname' and exportname').
func (c *cursor) externName() string {
	kind := c.byte()
	name := c.name()
	switch kind {
	case 0, 1:
	case 2:
		for n := c.u32(); n > 0 && !c.bad; n-- {
			c.byte()
			c.name()
		}
	default:
		c.fail()
	}
	return name
}

// externDesc skips the type of an import or export.
func (c *cursor) externDesc() {
	switch kind := c.byte(); kind {
	case 0: // core module
		if c.byte() != 0x11 {
			c.fail()
		}
		c.u32()
	case 1, 4, 5: // func, component, instance
		c.u32()
	case 2: // value: equal to another, or of a type
		c.byte()
		c.u32()
	case 3: // type: equal to another, or a new resource
		if c.byte() == 0 {
			c.u32()
		}
	default:
		c.fail()
	}
}

func (o *Outline) componentImport(c *cursor) {
	name := c.externName()
	c.externDesc()
	if !c.bad {
		o.Imports = append(o.Imports, name)
	}
}

func (o *Outline) componentExport(c *cursor) {
	name := c.externName()
	if sort := c.byte(); sort == 0 {
		c.byte() // core: the sort follows
	}
	c.u32() // index
	if c.byte() != 0 {
		c.externDesc() // ascribed type
	}
	if !c.bad {
		o.Exports = append(o.Exports, name)
	}
}

func (o *Outline) moduleImport(c *cursor) {
	module, name := c.name(), c.name()
	switch c.byte() {
	case 0: // function: type index
		c.u32()
	case 1: // table: reference type, limits
		c.byte()
		c.limits()
	case 2: // memory
		c.limits()
	case 3: // global: value type, mutability
		c.byte()
		c.byte()
	case 4: // tag: attribute, type index
		c.byte()
		c.u32()
	default:
		c.fail()
	}
	if !c.bad {
		o.Imports = append(o.Imports, module+" "+name)
	}
}

func (c *cursor) limits() {
	flags := c.byte()
	c.u64()
	if flags&1 != 0 {
		c.u64()
	}
}

// u64 skips a number of up to 64 bits.
func (c *cursor) u64() {
	for range 10 {
		if c.byte() < 0x80 {
			return
		}
	}
	c.fail()
}

func (o *Outline) moduleExport(c *cursor) {
	name := c.name()
	c.byte()
	c.u32()
	if !c.bad {
		o.Exports = append(o.Exports, name)
	}
}
