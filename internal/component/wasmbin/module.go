package wasmbin

// Module holds the declarations of a core module.
type Module struct {
	Code []byte
	// Name is the module's name from the custom section "name". It is often empty.
	Name    string
	Imports []Import
	// Exports maps the name of each export to the export's kind.
	Exports map[string]Kind
	// Memories and Tables are the memories and tables that the module defines, without the imported memories and
	// tables.
	Memories, Tables []Limits
	// Functions, Globals and Segments are the numbers of functions, globals and data segments that the module defines.
	Functions, Globals, Segments uint32
	// Counted: a section counts the data segments; without it, no code can refer to them (5.5.15).
	Counted bool
	// Elements is the number of elements in passive element segments, or more.
	Elements uint64
}

// HasExport reports whether the module has an export of that name and kind.
func (m *Module) HasExport(name string, kind Kind) bool {
	got, ok := m.Exports[name]
	return ok && got == kind
}

// Import is an import of a core module.
type Import struct {
	Module, Name string
	Kind         Kind
	Type         uint32 // index of the type of a function
}

// Limits holds the initial size of a memory or table. Min counts pages of PageSize bytes, or elements of a table.
type Limits struct{ Min, PageSize uint64 }

// Kind is the kind of a core import or export.
type Kind byte

// The kinds.
const (
	Func   Kind = 0
	Table  Kind = 1
	Memory Kind = 2
	Global Kind = 3
	Tag    Kind = 4
)

// PageSize is the number of bytes in a page of memory.
const PageSize = 65536

func parseModule(b []byte) (Module, error) {
	m := Module{Code: b, Exports: make(map[string]Kind)}
	err := bodies(b, func(id byte, c *cursor) error {
		switch id {
		case sectionCustom:
			m.custom(c)
		case moduleImports:
			c.each(func() { m.Imports = append(m.Imports, c.moduleImport()) })
		case moduleTables:
			c.each(func() { m.table(c) })
		case moduleMemories:
			c.each(func() { m.Memories = append(m.Memories, c.limits()) })
		case moduleFunctions:
			m.Functions = c.u32()
		case moduleGlobals:
			m.Globals = c.u32()
		case moduleElements:
			m.Elements = c.passiveElements()
		case moduleCount:
			m.Counted = true
		case moduleData:
			m.Segments = c.u32()
		case moduleExports:
			c.each(func() {
				name, kind := c.moduleExport()
				m.Exports[name] = kind
			})
		}
		return nil
	})
	return m, err
}

// custom reads the module's name from the section "name". The name is informative only, so a damaged section is not an
// error.
func (m *Module) custom(c *cursor) {
	if c.name() == "name" && len(c.rest) > 0 && c.u8() == 0 {
		c.u32()
		m.Name = c.name()
	}
	c.err = nil
}

func (c *cursor) moduleImport() Import {
	i := Import{Module: c.name(), Name: c.name(), Kind: Kind(c.u8())}
	switch i.Kind {
	case Func:
		i.Type = c.u32()
	case Table:
		c.refType()
		c.limits()
	case Memory:
		c.limits()
	case Global:
		c.refType()
		c.u8()
	case Tag:
		c.u8()
		c.u32()
	default:
		c.fail("an import of unknown kind %d", i.Kind)
	}
	return i
}

func (c *cursor) moduleExport() (name string, kind Kind) {
	name, kind = c.name(), Kind(c.u8())
	c.u32()
	return name, kind
}

func (m *Module) table(c *cursor) {
	if len(c.rest) > 1 && c.rest[0] == 0x40 { // a table with an initial value, which is skipped
		c.u8()
		c.u8()
		c.refType()
		m.Tables = append(m.Tables, c.limits())
		c.rest = nil
		return
	}
	c.refType()
	m.Tables = append(m.Tables, c.limits())
}

// passiveElements counts the elements in passive element segments (5.5.12). What it cannot read counts as one for each byte.
func (c *cursor) passiveElements() (n uint64) {
	var s state // for constant expressions
	for left := c.u32(); left > 0 && c.err == nil; left-- {
		flags := c.u8()
		if flags&1 == 0 {
			if flags&2 != 0 {
				c.u32() // the table
			}
			s.constant(c)
		}
		if flags&3 != 0 { // the kind or the type of the elements
			if flags&4 != 0 {
				c.refType()
			} else {
				c.u8()
			}
		}
		count := c.u32()
		if flags&3 == 1 {
			n += uint64(count)
		}
		for ; count > 0 && c.err == nil; count-- {
			if flags&4 != 0 {
				s.constant(c)
			} else {
				c.u32()
			}
		}
		if s.reason != "" || flags > 7 || c.err != nil {
			n += uint64(len(c.rest))
			break
		}
	}
	c.err = nil // the engine checks the section
	return n
}
