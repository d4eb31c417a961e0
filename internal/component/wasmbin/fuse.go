package wasmbin

import (
	"encoding/binary"
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
	f := &fusion{hostOf: make(map[hostKey]int), declared: make(map[uint32]bool), exportOf: make(map[place]int),
		filled: make(map[uint32]uint32), early: early}
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
		{moduleGlobals, f.globals}, {moduleExports, exports}, {moduleElements, f.elements}, {moduleCount, vector{n: f.data.n}},
		{moduleCode, f.codes},
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
