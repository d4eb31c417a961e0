package wasmbin

import "fmt"

// maxLEB is the maximum length of a 32-bit number in LEB128, in bytes.
const maxLEB = 5

// cutName splits the content of a custom section into the section's name and the rest.
func cutName(b []byte) (name string, rest []byte, ok bool) {
	c := &cursor{rest: b}
	name = c.name()
	return name, c.rest, c.err == nil
}

// cursor reads the content of a section. After an error, every read returns the zero value.
type cursor struct {
	rest []byte
	err  error
}

func (c *cursor) fail(format string, args ...any) {
	if c.err == nil {
		c.err = fmt.Errorf(format, args...)
	}
	c.rest = nil
}

// each calls the given function once for each element of a vector.
func (c *cursor) each(read func()) {
	for n := c.u32(); n > 0 && c.err == nil; n-- {
		read()
	}
}

func (c *cursor) take(n uint32) []byte {
	if uint64(n) > uint64(len(c.rest)) {
		c.fail("%d bytes needed, %d left (truncated?)", n, len(c.rest))
		return nil
	}
	out := c.rest[:n:n]
	c.rest = c.rest[n:]
	return out
}

func (c *cursor) u8() byte {
	if b := c.take(1); b != nil {
		return b[0]
	}
	return 0
}

func (c *cursor) leb(bits int) (v uint64) {
	for shift := 0; ; shift += 7 {
		b := c.u8()
		if c.err != nil {
			return 0
		}
		if shift >= bits || shift == 63 && b > 1 {
			c.fail("a number of more than %d bits", bits)
			return 0
		}
		v |= uint64(b&0x7f) << shift
		if b < 0x80 {
			return v
		}
	}
}

func (c *cursor) u32() uint32 {
	v := c.leb(32)
	if v > 1<<32-1 {
		c.fail("a number of more than 32 bits")
	}
	return uint32(v)
}

func (c *cursor) name() string { return string(c.take(c.u32())) }

// refType skips a reference or value type: one byte, and a heap type after it if the byte is 0x63 (ref null) or 0x64
// (ref).
func (c *cursor) refType() {
	if b := c.u8(); b == 0x63 || b == 0x64 {
		c.leb(33)
	}
}

func (c *cursor) limits() Limits {
	flags := c.u8()
	l := Limits{Min: c.leb(64), PageSize: PageSize}
	if flags&1 != 0 {
		c.leb(64)
	}
	if flags&8 != 0 { // custom page size, a power of two
		if l.PageSize = 1; c.u8() == 16 {
			l.PageSize = PageSize
		}
	}
	return l
}

// externName reads the name of a component's import or export: a kind byte and the name. If the kind is 2, options
// follow (component-model Binary.md, importname' and exportname').
func (c *cursor) externName() string {
	kind := c.u8()
	name := c.name()
	switch kind {
	case 0, 1:
	case 2:
		c.each(func() {
			c.u8()
			c.name()
		})
	default:
		c.fail("a name of unknown kind %d", kind)
	}
	return name
}

// externDesc skips the type of an import or export.
func (c *cursor) externDesc() {
	switch kind := c.u8(); kind {
	case 0: // core module
		if c.u8() != 0x11 {
			c.fail("a core type that is not a module")
		}
		c.u32()
	case 1, 4, 5: // func, component, instance
		c.u32()
	case 2: // value: equal to another value, or of a type
		c.u8()
		c.u32()
	case 3: // type: equal to another type, or a new resource
		if c.u8() == 0 {
			c.u32()
		}
	default:
		c.fail("a type of unknown kind %d", kind)
	}
}

func (o *Outline) componentImport(c *cursor) {
	name := c.externName()
	c.externDesc()
	if c.err == nil {
		o.Imports = append(o.Imports, name)
	}
}

func (o *Outline) componentExport(c *cursor) {
	name := c.externName()
	if sort := c.u8(); sort == 0 {
		c.u8() // core: the sort follows
	}
	c.u32() // index
	if c.u8() != 0 {
		c.externDesc() // ascribed type
	}
	if c.err == nil {
		o.Exports = append(o.Exports, name)
	}
}

func (o *Outline) moduleImport(c *cursor) {
	if i := c.moduleImport(); c.err == nil {
		o.Imports = append(o.Imports, i.Module+" "+i.Name)
	}
}

func (o *Outline) moduleExport(c *cursor) {
	if name, _ := c.moduleExport(); c.err == nil {
		o.Exports = append(o.Exports, name)
	}
}
