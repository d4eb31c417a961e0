package wasmbin

import (
	"bytes"
	"encoding/binary"
	"errors"
	"maps"
	"slices"
	"strconv"
)

// fusion is the module that fuse makes of core instances. It numbers first what the host provides, and then, part by part, what
// the parts define. It does not check what the engine checks in the result, but what cannot be read, or refers to nothing, is
// an error.
type fusion struct {
	parts       []*part
	hosts       []core // the functions of the host
	hostOf      map[hostKey]int
	importTypes []uint32
	types       vector
	functions   vector
	tables      vector
	memories    vector
	globals     vector
	elements    vector
	codes       vector
	data        vector
	names       vector   // of functions
	constants   [][]byte // the globals' initial values
	declared    map[uint32]bool
	referenced  vector            // functions whose references code takes
	starts      []byte            // code: calls of the start functions, and what follows the first of them
	counted     bool              // code refers to data segments
	early       bool              // tables have all their elements before the first start function
	late        bool              // there are elements after it
	usesTables  bool              // code reads or writes elements of tables, other than by calls, or elements replace others
	filled      map[uint32]uint32 // the end of the elements of each table
	left        int               // bytes of code until there is too much
	exports     []place           // each export is named by its number
	exportOf    map[place]int
}

// place is an index in an index space.
type place struct {
	kind  Kind
	index uint32
}

// vector is an encoded vector (5.1.3) without its length.
type vector struct {
	n     uint32
	bytes []byte
}

func (v *vector) add(element []byte) {
	v.n++
	v.bytes = append(v.bytes, element...)
}

// part is a core instance that becomes a part of the module. What it numbers itself is numbered again.
type part struct {
	*fusion
	imports  []core // those that have not been read
	sections [moduleCount + 1]*cursor
	exports  map[string]place  // in the fused module
	index    [Tag + 1][]uint32 // indices in the fused module, by kind and the part's own index
	own      uint32            // the first function that it defines
	// The first of its types and segments in the fused module, and the number of its segments that code can refer to.
	firstType, firstElement, firstData uint32
	numElements, numData               uint32
}

// maxFused bounds the size of all core instances' modules together, in bytes, beyond twice the size of the component.
const maxFused = 4 << 20

// fuse makes one core module of the plan's core instances. An instance of it behaves as all of them together, but its imports
// need not be looked up, and its tables not be filled, for each instance. If modules have start functions, it exports
// StartExport, which must be called first.
//
// Tables get all their elements before the first start function runs, so the engine needs no time for them, unless that could
// make a difference to a component that starts at all: if code reads or writes tables, or later elements replace earlier ones.
func (p *planner) fuse(size int) error {
	f, err := p.join(size, true)
	if err == nil && f.late && f.usesTables {
		f, err = p.join(size, false)
	}
	if err == nil {
		err = p.connect(f)
	}
	if err == nil {
		p.Module, err = parseModule(f.module())
	}
	return err
}

// join copies the modules of all core instances.
func (p *planner) join(size int, early bool) (*fusion, error) {
	f := &fusion{hostOf: make(map[hostKey]int), declared: make(map[uint32]bool), exportOf: make(map[place]int), filled: make(map[uint32]uint32), early: early}
	f.left = maxFused + 2*size
	for _, s := range p.steps {
		m := &p.modules[s.module]
		m.MergeData() // there may be no other chance, if code of another module refers to its segments
		if f.left -= len(m.Code); f.left < 0 {
			return nil, unplanned("it makes too many instances of large core modules")
		}
		part, err := f.part(s, m.Code)
		if err != nil {
			return nil, err
		}
		f.parts = append(f.parts, part)
	}
	f.left = 2 * (maxFused + 2*size) // indices can be longer than they were
	f.importTypes = make([]uint32, len(f.hosts))
	for _, part := range f.parts {
		if err := part.copy(); err != nil {
			return nil, err
		}
	}
	return f, nil
}

// part finds the sections of a core module, and numbers the functions of the host that it imports.
func (f *fusion) part(s step, module []byte) (*part, error) {
	p := &part{fusion: f, imports: s.imports, exports: make(map[string]place)}
	for _, c := range p.imports {
		if _, ok := f.hostOf[c.key()]; !ok && (c.from == fromHost || c.from == fromDrop) {
			f.hostOf[c.key()] = len(f.hosts)
			f.hosts = append(f.hosts, c)
		}
	}
	err := bodies(module, func(id byte, c *cursor) error {
		if id == sectionCustom {
			name, rest, ok := cutName(c.rest)
			if !ok || name != "name" || p.sections[id] != nil {
				return nil
			}
			c.rest = rest
		}
		if int(id) >= len(p.sections) || p.sections[id] != nil {
			return damaged("a core module has a section %d, or two of them", id)
		}
		p.sections[id] = &cursor{rest: c.rest}
		return nil
	})
	return p, err
}

// hostKey identifies a function of the host with its allocator.
type hostKey struct{ function, realloc core }

func (c core) key() hostKey {
	k := hostKey{function: c}
	if k.function.realloc = nil; c.realloc != nil {
		k.realloc = *c.realloc
	}
	return k
}

// copy copies the part into the module.
func (p *part) copy() error {
	p.firstType, p.firstElement, p.firstData = p.types.n, p.elements.n, p.data.n
	p.numElements, p.numData = p.count(moduleElements), p.count(moduleCount)
	for _, s := range []struct {
		id byte
		do func(*cursor)
	}{
		{moduleTypes, p.funcType},
		{moduleImports, p.imported},
		{moduleFunctions, p.function},
		{moduleTables, p.table},
		{moduleMemories, p.memory},
		{moduleGlobals, p.global},
		{moduleExports, p.export},
		{moduleElements, p.element},
		{moduleCode, p.body},
		{moduleData, p.segment},
	} {
		if err := p.section(s.id, s.do); err != nil {
			return err
		}
	}
	if c := p.sections[moduleStart]; c != nil {
		p.starts = append(p.starts, opCall)
		p.starts = binary.AppendUvarint(p.starts, uint64(p.at(c, Func)))
		if c.err != nil {
			return damaged("the start function of a core module: %v", c.err)
		}
	}
	p.functionNames()
	return nil
}

// count returns the number at the beginning of a section, or 0.
func (p *part) count(id byte) uint32 {
	if p.sections[id] == nil {
		return 0
	}
	return (&cursor{rest: p.sections[id].rest}).u32()
}

// section calls do for each element of a section.
func (p *part) section(id byte, do func(*cursor)) error {
	c := p.sections[id]
	if c == nil {
		return nil
	}
	if c.each(func() { do(c) }); c.err == nil && len(c.rest) > 0 {
		c.fail("%d bytes after its last element", len(c.rest))
	}
	if odd := errPlan(""); errors.As(c.err, &odd) {
		return odd
	}
	if c.err != nil {
		return damaged("section %d of a core module: %v", id, c.err)
	}
	return nil
}

// refuse ends the reading of a section, because the component must take the component path.
func (c *cursor) refuse(format string, args ...any) {
	if c.err == nil {
		c.err = unplanned(format, args...)
	}
	c.rest = nil
}

// at reads an index of the part, and returns the one in the module.
func (p *part) at(c *cursor, kind Kind) uint32 {
	n := c.u32()
	if c.err == nil && uint64(n) >= uint64(len(p.index[kind])) {
		c.fail("there is no item %d of kind %d", n, kind)
	}
	if c.err != nil {
		return 0
	}
	return p.index[kind][n]
}

// first checks that the part has a first item of a kind, which an instruction or segment refers to without an index.
func (p *part) first(c *cursor, kind Kind) uint32 {
	if len(p.index[kind]) == 0 {
		c.fail("there is no item 0 of kind %d", kind)
		return 0
	}
	return p.index[kind][0]
}

// typeAt reads an index of a type.
func (p *part) typeAt(c *cursor) uint32 {
	n := c.u32()
	if c.err == nil && n >= p.types.n-p.firstType {
		c.fail("there is no type %d", n)
	}
	return p.firstType + n
}

// next numbers the part's next item of a kind.
func (p *part) next(kind Kind, index uint32) { p.index[kind] = append(p.index[kind], index) }

// funcType copies a type of functions (5.3.6): the only types that are not part of the garbage collection proposal.
func (p *part) funcType(c *cursor) {
	from := c.rest
	if form := c.u8(); form != typeFunc {
		c.refuse("a core module has a type of the form %#x", form)
	}
	for range 2 {
		c.each(func() { c.valType() })
	}
	p.types.add(cut(from, c))
}

// valType reads a type of values that is one byte.
func (c *cursor) valType() {
	if t := c.u8(); t < typeExternref || t > typeI32 {
		c.refuse("a core module has values of the type %#x", t)
	}
}

// cut returns what a cursor has read.
func cut(from []byte, c *cursor) []byte { return from[:len(from)-len(c.rest)] }

// imported reads an import, which gets the index of what it imports.
func (p *part) imported(c *cursor) {
	i := c.moduleImport()
	switch {
	case i.Kind >= Tag:
		c.refuse("a core module imports an item of kind %d", i.Kind)
	case i.Kind == Func && i.Type >= p.types.n-p.firstType:
		c.fail("there is no type %d", i.Type)
	case len(p.imports) == 0:
		c.fail("an import more than there were")
	}
	if c.err != nil {
		return
	}
	if i.Kind == Func {
		p.own++
	}
	p.next(i.Kind, p.resolve(c, p.imports[0], i.Kind, p.firstType+i.Type))
	p.imports = p.imports[1:]
}

// resolve returns the index of what a part imports. The type is that of a function.
func (p *part) resolve(c *cursor, from core, kind Kind, typ uint32) uint32 {
	switch {
	case from.from == fromInstance:
		e, ok := p.parts[from.instance].exports[from.name]
		if !ok || e.kind != kind {
			c.fail("a core instance does not export %s", from.name)
		}
		return e.index
	case kind != Func:
		c.fail("the host provides functions only")
		return 0
	case from.from == fromTrap:
		return p.define(typ, []byte(trapBody))
	}
	n := p.hostOf[from.key()]
	p.importTypes[n] = typ
	return uint32(n)
}

// define adds a function to the module.
func (f *fusion) define(typ uint32, body []byte) uint32 {
	f.functions.add(binary.AppendUvarint(nil, uint64(typ)))
	if body != nil {
		f.codes.add(append(binary.AppendUvarint(nil, uint64(len(body))), body...))
	}
	return uint32(len(f.hosts)) + f.functions.n - 1
}

// function declares a function, whose body follows in the code section.
func (p *part) function(c *cursor) { p.next(Func, p.define(p.typeAt(c), nil)) }

func (p *part) table(c *cursor) {
	from := c.rest
	c.valType()
	c.limits()
	p.next(Table, p.tables.n)
	p.tables.add(cut(from, c))
}

func (p *part) memory(c *cursor) {
	from := c.rest
	c.limits()
	p.next(Memory, p.memories.n)
	p.memories.add(cut(from, c))
}

func (p *part) global(c *cursor) {
	from := c.rest
	c.valType()
	c.u8()
	typ := cut(from, c)
	value := p.constant(c)
	p.next(Global, p.globals.n)
	p.constants = append(p.constants, bytes.TrimSuffix(value, []byte{opEnd}))
	p.globals.n++
	p.globals.bytes = append(append(p.globals.bytes, typ...), value...)
}

func (p *part) export(c *cursor) {
	name, kind := c.name(), Kind(c.u8())
	if kind >= Tag {
		c.refuse("a core module exports an item of kind %d", kind)
		return
	}
	p.exports[name] = place{kind, p.at(c, kind)}
}

// element copies an element segment (5.5.12).
func (p *part) element(c *cursor) {
	flags := byte(min(c.u32(), 8))
	if flags > 7 {
		c.fail("an element segment of an unknown kind")
	}
	expressions := flags&4 != 0
	out := []byte{flags}
	var start func(uint32) []byte
	var table, first uint32
	if flags&1 == 0 { // it is active
		if flags&2 != 0 {
			table = p.at(c, Table)
		} else {
			table = p.first(c, Table)
		}
		offset := p.constant(c)
		if first = offsetOf(offset); len(p.starts) > 0 {
			p.late = true
			p.usesTables = p.usesTables || first < p.filled[table]
		}
		if len(p.starts) == 0 || p.early {
			out[0] |= 2 // the table is named
			out = append(binary.AppendUvarint(out, uint64(table)), offset...)
		} else {
			out[0] = flags&^2 | 1 // passive
			start = p.initialize(offset, opTableInit, opElemDrop, p.elements.n, table)
		}
	}
	switch {
	case flags&3 != 0: // the kind or type of the elements
		out = append(out, c.u8())
	case expressions:
		out = append(out, typeFuncref)
	default:
		out = append(out, 0)
	}
	n := c.u32()
	out = binary.AppendUvarint(out, uint64(n))
	if start != nil {
		p.starts = append(p.starts, start(n)...)
	}
	if flags&1 == 0 {
		p.filled[table] = max(p.filled[table], first+n)
	}
	for ; n > 0 && c.err == nil; n-- {
		if expressions {
			out = append(out, p.constant(c)...)
		} else {
			out = binary.AppendUvarint(out, uint64(p.at(c, Func)))
		}
	}
	p.elements.add(out)
}

// offsetOf returns the value of an encoded i32.const.
func offsetOf(constant []byte) uint32 {
	c := &cursor{rest: constant}
	c.u8()
	return uint32(c.signed())
}

// initialize returns the code that does what an active segment does (4.5.4), for a number of elements or bytes.
func (p *part) initialize(offset []byte, init, drop uint32, segment, to uint32) func(n uint32) []byte {
	return func(n uint32) []byte {
		code := append(bytes.TrimSuffix(offset, []byte{opEnd}), opI32Const, 0, opI32Const)
		code = append(appendSigned(code, int64(int32(n))), opMore)
		code = binary.AppendUvarint(binary.AppendUvarint(code, uint64(init)), uint64(segment))
		code = append(binary.AppendUvarint(code, uint64(to)), opMore)
		return binary.AppendUvarint(binary.AppendUvarint(code, uint64(drop)), uint64(segment))
	}
}

// segment copies a data segment (5.5.14).
func (p *part) segment(c *cursor) {
	out := []byte{0}
	var start func(uint32) []byte
	switch flags := c.u32(); flags {
	case 0, 2:
		if flags == 2 {
			p.at(c, Memory)
		} else {
			p.first(c, Memory)
		}
		if offset := p.constant(c); len(p.starts) == 0 {
			out = append(out, offset...)
		} else {
			out[0], p.counted = 1, true
			start = p.initialize(offset, opMemoryInit, opDataDrop, p.data.n, 0)
		}
	case 1:
		out[0] = 1
	default:
		c.fail("a data segment of kind %d", flags)
	}
	content := c.take(c.u32())
	if start != nil {
		p.starts = append(p.starts, start(uint32(len(content)))...)
	}
	p.data.add(binary.AppendUvarint(out, uint64(len(content))))
	p.data.bytes = append(p.data.bytes, content...)
}

// functionNames copies the names of functions (the section "name", 7.4), which traps show.
func (p *part) functionNames() {
	c := p.sections[sectionCustom]
	for c != nil && len(c.rest) > 0 {
		id, content := c.u8(), &cursor{rest: c.take(c.u32())}
		if id != 1 {
			continue
		}
		last := int64(-1)
		content.each(func() {
			n, name := content.u32(), content.name()
			if content.err != nil || int64(n) <= last || n < p.own || uint64(n) >= uint64(len(p.index[Func])) {
				return
			}
			last = int64(n)
			p.names.add(appendName(binary.AppendUvarint(nil, uint64(p.index[Func][n])), name))
		})
	}
}

// exported returns the name of an export of the fused module: what a core instance exports.
func (f *fusion) exported(c core) (string, error) {
	if c.from != fromInstance {
		return "", unplanned("it exports or allocates by a function that is not a core module's")
	}
	e, ok := f.parts[c.instance].exports[c.name]
	if !ok || e.kind != c.kind {
		return "", unplanned("a core instance does not export %s", c.name)
	}
	n, ok := f.exportOf[e]
	if !ok {
		n = len(f.exports)
		f.exportOf[e], f.exports = n, append(f.exports, e)
	}
	return strconv.Itoa(n), nil
}

// connect names in the plan what the fused module exports and imports.
func (p *planner) connect(f *fusion) error {
	name := func(c *core, to *string, err error) error {
		if c == nil || err != nil {
			return err
		}
		*to, err = f.exported(*c)
		return err
	}
	p.Exports = make(map[string]Lift)
	for _, item := range slices.Sorted(maps.Keys(p.exported)) {
		var e Lift
		l := p.exported[item]
		err := name(&l.fn, &e.Func, nil)
		err = name(l.realloc, &e.Realloc, err)
		if err = name(l.post, &e.Post, err); err != nil {
			return err
		}
		p.Exports[item] = e
	}
	for _, h := range f.hosts {
		i := HostFunc{Interface: h.iface, Name: h.item, Drop: h.from == fromDrop}
		if err := name(h.realloc, &i.Realloc, nil); err != nil {
			return err
		}
		p.Imports = append(p.Imports, i)
	}
	return nil
}

// module encodes the module.
func (f *fusion) module() []byte {
	var imports, exports vector
	for n, typ := range f.importTypes {
		i := append(appendName([]byte{0}, strconv.Itoa(n)), byte(Func))
		imports.add(binary.AppendUvarint(i, uint64(typ)))
	}
	export := func(name string, e place) {
		exports.add(binary.AppendUvarint(append(appendName(nil, name), byte(e.kind)), uint64(e.index)))
	}
	for n, e := range f.exports {
		export(strconv.Itoa(n), e)
	}
	if f.memories.n > 0 {
		export(MemoryExport, place{Memory, 0})
	}
	if len(f.starts) > 0 {
		f.types.add([]byte{typeFunc, 0, 0})
		body := append(append([]byte{0}, f.starts...), opEnd)
		export(StartExport, place{Func, f.define(f.types.n-1, body)})
	}
	if f.referenced.n > 0 {
		declared := append([]byte{3, 0}, binary.AppendUvarint(nil, uint64(f.referenced.n))...)
		f.elements.add(append(declared, f.referenced.bytes...))
	}
	out := []byte(ModuleHeader)
	for _, s := range []struct {
		id byte
		v  vector
	}{
		{moduleTypes, f.types}, {moduleImports, imports}, {moduleFunctions, f.functions}, {moduleTables, f.tables}, {moduleMemories, f.memories},
		{moduleGlobals, f.globals}, {moduleExports, exports}, {moduleElements, f.elements}, {moduleCount, vector{n: f.data.n}}, {moduleCode, f.codes},
		{moduleData, f.data},
	} {
		if s.v.n > 0 && (s.id != moduleCount || f.counted) {
			out = appendSection(out, s.id, append(binary.AppendUvarint(nil, uint64(s.v.n)), s.v.bytes...))
		}
	}
	if f.names.n > 0 {
		names := append(binary.AppendUvarint(nil, uint64(f.names.n)), f.names.bytes...)
		out = appendSection(out, sectionCustom, appendSection(appendName(nil, "name"), 1, names))
	}
	return out
}
