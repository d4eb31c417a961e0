package engine

import (
	"bytes"
	"fmt"
	"strings"

	"github.com/containerd/errdefs"
)

// wasmBinary is what the engine's own API does not tell about a guest: what its core modules declare, and whether the
// component has the shape that the core path needs. The engine validates; this only looks, and believes no length.
type wasmBinary struct {
	component bool
	modules   []coreModule // of a component: those at its top level, in order
	nested    []coreModule // those of components within it
	odd       string       // why the core path cannot be taken

	// Index spaces of the component's own core instances and functions, as far as they lead to core modules.
	coreInstances []int           // the module that each one instantiates, or -1
	coreFuncs     []coreAlias     // where each one comes from
	lifted        map[string]bool // functions of the first module that are lifted
	foreign       []string        // functions of other modules that are
}

// coreAlias is an export of a core instance; instance -1: a function that the component itself defines.
type coreAlias struct {
	instance int
	name     string
}

type coreModule struct {
	code     []byte
	name     string
	imports  []coreImport
	exports  map[string]byte // name → kind
	memories []limits
	tables   []limits
}

type coreImport struct {
	module, name string
	kind         byte
}

type limits struct {
	min      uint64
	pageSize uint64
}

// Kinds of core imports and exports.
const (
	coreFunc   = 0
	coreTable  = 1
	coreMemory = 2
	coreGlobal = 3
	coreTag    = 4
)

const (
	moduleHeader    = "\x00asm\x01\x00\x00\x00"
	componentHeader = "\x00asm\x0d\x00\x01\x00"
	wasmPage        = 65536
	maxNesting      = 100
)

func parseBinary(b []byte) (*wasmBinary, error) {
	switch {
	case bytes.HasPrefix(b, []byte(moduleHeader)):
		m, err := parseModule(b)
		return &wasmBinary{modules: []coreModule{m}}, err
	case bytes.HasPrefix(b, []byte(componentHeader)):
		out := &wasmBinary{component: true}
		err := out.parseComponent(b, 0)
		return out, err
	case bytes.HasPrefix(b, []byte(moduleHeader[:4])):
		return nil, invalid("WebAssembly of unknown version % x", b[4:min(len(b), 8)])
	}
	return nil, invalid("not WebAssembly: it begins with %q", b[:min(len(b), 8)])
}

func invalid(format string, args ...any) error {
	return fmt.Errorf(format+": %w", append(args, errdefs.ErrInvalidArgument)...)
}

// sections calls f for each section of a module or component.
func sections(b []byte, f func(id byte, body *cursor) error) error {
	c := &cursor{b: b[8:]}
	for len(c.b) > 0 && c.err == nil {
		id := c.u8()
		body := &cursor{b: c.take(c.u32())}
		if c.err != nil {
			break
		}
		if err := f(id, body); err != nil {
			return err
		}
		if body.err != nil {
			return body.err
		}
	}
	return c.err
}

func parseModule(b []byte) (coreModule, error) {
	m := coreModule{code: b, exports: make(map[string]byte)}
	err := sections(b, func(id byte, c *cursor) error {
		switch id {
		case 0:
			m.custom(c)
		case 2:
			for n := c.u32(); n > 0 && c.err == nil; n-- {
				m.importEntry(c)
			}
		case 4:
			for n := c.u32(); n > 0 && c.err == nil; n-- {
				m.table(c)
			}
		case 5:
			for n := c.u32(); n > 0 && c.err == nil; n-- {
				m.memories = append(m.memories, c.limits())
			}
		case 7:
			for n := c.u32(); n > 0 && c.err == nil; n-- {
				name := c.name()
				m.exports[name] = c.u8()
				c.u32()
			}
		}
		return nil
	})
	return m, err
}

// custom reads the module's own name from the section "name". That is for people: damage there is no error.
func (m *coreModule) custom(c *cursor) {
	if c.name() == "name" && len(c.b) > 0 && c.u8() == 0 {
		c.u32()
		m.name = c.name()
	}
	c.err = nil
}

func (m *coreModule) importEntry(c *cursor) {
	i := coreImport{module: c.name(), name: c.name(), kind: c.u8()}
	switch i.kind {
	case coreFunc:
		c.u32()
	case coreTable:
		c.refType()
		c.limits()
	case coreMemory:
		c.limits()
	case coreGlobal:
		c.refType()
		c.u8()
	case coreTag:
		c.u8()
		c.u32()
	default:
		c.fail("an import of unknown kind %d", i.kind)
	}
	m.imports = append(m.imports, i)
}

func (m *coreModule) table(c *cursor) {
	if len(c.b) > 1 && c.b[0] == 0x40 { // a table with an initial value: its expression is not worth parsing
		c.u8()
		c.u8()
		c.refType()
		m.tables = append(m.tables, c.limits())
		c.b = nil
		return
	}
	c.refType()
	m.tables = append(m.tables, c.limits())
}

// declared checks what the module asks for before it does anything.
func (m *coreModule) declared(cfg Config) error {
	if n := len(m.memories); n > 1 {
		return invalid("%s has %d memories, limit 1", m, n)
	}
	for _, l := range m.memories {
		if size := l.min * l.pageSize; l.min > 1<<32 || size > cfg.MaxMemory {
			return invalid("%s declares %s of memory, limit %s", m, size2(size), size2(cfg.MaxMemory))
		}
	}
	for _, l := range m.tables {
		if l.min > uint64(cfg.MaxTableElements) {
			return invalid("%s declares a table of %d elements, limit %d", m, l.min, cfg.MaxTableElements)
		}
	}
	return nil
}

func (m *coreModule) String() string {
	if m.name != "" {
		return fmt.Sprintf("core module %q", m.name)
	}
	return "the core module"
}

// minMemory is the sum of the memories that the module defines, in bytes.
func (m *coreModule) minMemory() (sum uint64) {
	for _, l := range m.memories {
		sum += l.min * l.pageSize
	}
	return sum
}

func size2(n uint64) string {
	switch {
	case n >= 1<<30 && n%(1<<30) == 0:
		return fmt.Sprintf("%d GiB", n>>30)
	case n >= 1<<20 && n%(1<<20) == 0:
		return fmt.Sprintf("%d MiB", n>>20)
	}
	return fmt.Sprintf("%d KiB", n>>10)
}

func (b *wasmBinary) parseComponent(code []byte, depth int) error {
	if depth > maxNesting {
		return invalid("components nested more than %d deep", maxNesting)
	}
	return sections(code, func(id byte, c *cursor) error {
		switch id {
		case 1:
			if !bytes.HasPrefix(c.b, []byte(moduleHeader)) {
				return invalid("a core module within the component has no module header")
			}
			m, err := parseModule(c.b)
			if err != nil {
				return err
			}
			if depth == 0 {
				b.modules = append(b.modules, m)
			} else {
				b.nested = append(b.nested, m)
			}
		case 4:
			if !bytes.HasPrefix(c.b, []byte(componentHeader)) {
				return invalid("a component within the component has no component header")
			}
			return b.parseComponent(c.b, depth+1)
		case 2, 6, 8:
			if depth == 0 {
				b.topLevel(id, c)
			} else if id == 8 {
				b.odd = "a nested component lifts or lowers functions"
			}
		case 9:
			b.odd = "the component has a start function"
		}
		return nil
	})
}

// topLevel follows the component's core functions back to the module that they are from. Where it loses its way, the
// component is odd, and the rest of the section does not matter.
func (b *wasmBinary) topLevel(id byte, c *cursor) {
	for n := c.u32(); n > 0 && c.err == nil && b.odd == ""; n-- {
		switch id {
		case 2:
			b.coreInstance(c)
		case 6:
			b.alias(c)
		case 8:
			b.canon(c)
		}
	}
	if b.odd != "" {
		c.err = nil
	}
}

func (b *wasmBinary) coreInstance(c *cursor) {
	module := -1
	switch kind := c.u8(); kind {
	case 0:
		module = int(c.u32())
		for n := c.u32(); n > 0 && c.err == nil; n-- {
			c.name()
			c.u8()
			c.u32()
		}
	case 1:
		for n := c.u32(); n > 0 && c.err == nil; n-- {
			c.name()
			c.u8()
			c.u32()
		}
	default:
		b.odd = fmt.Sprintf("core instance of kind %#x", kind)
	}
	b.coreInstances = append(b.coreInstances, module)
}

// alias notes those of core functions. Others matter only if they make core modules or instances that we do not know.
func (b *wasmBinary) alias(c *cursor) {
	sort, core := c.u8(), byte(0)
	if sort == 0 {
		core = c.u8()
	}
	switch target := c.u8(); target {
	case 0, 1:
		instance := int(c.u32())
		name := c.name()
		if target == 1 && sort == 0 && core == coreFunc {
			b.coreFuncs = append(b.coreFuncs, coreAlias{instance, name})
		}
	case 2:
		c.u32()
		c.u32()
	default:
		b.odd = fmt.Sprintf("alias of kind %#x", target)
	}
	if sort == 0 && core > 0x10 {
		b.odd = "core modules from elsewhere"
	}
}

// canon looks for what the core path does not speak: encodings other than UTF-8, asynchronous functions, resources that
// the guest defines itself, and functions of any but the first core module.
func (b *wasmBinary) canon(c *cursor) {
	switch op := c.u8(); op {
	case 0:
		c.u8()
		f := int(c.u32())
		b.canonOptions(c)
		c.u32()
		b.lift(f)
		return
	case 1:
		c.u8()
		c.u32()
		b.canonOptions(c)
	case 3: // resource.drop
		c.u32()
	case 2, 4: // resource.new, resource.rep
		b.odd = "the guest defines resources"
	default:
		b.odd = fmt.Sprintf("canonical function %#x", op)
	}
	b.coreFuncs = append(b.coreFuncs, coreAlias{instance: -1})
}

func (b *wasmBinary) lift(f int) {
	if f >= len(b.coreFuncs) {
		b.odd = "a function from nowhere"
		return
	}
	from := b.coreFuncs[f]
	if from.instance < 0 || from.instance >= len(b.coreInstances) || b.coreInstances[from.instance] != 0 {
		// Commands are exported by the adapter of preview 1, which calls _start.
		b.foreign = append(b.foreign, from.name)
		return
	}
	if b.lifted == nil {
		b.lifted = make(map[string]bool)
	}
	b.lifted[from.name] = true
}

func (b *wasmBinary) canonOptions(c *cursor) {
	for n := c.u32(); n > 0 && c.err == nil; n-- {
		switch opt := c.u8(); opt {
		case 0: // UTF-8
		case 3, 4, 5: // memory, realloc, post-return
			c.u32()
		case 1, 2:
			b.odd = "strings in UTF-16 or Latin-1"
		default:
			b.odd = fmt.Sprintf("canonical option %#x", opt)
			return
		}
	}
}

// coreShape tells why the core path cannot be taken, or "".
func (b *wasmBinary) coreShape() string {
	if !b.component || b.odd != "" || len(b.modules) == 0 {
		return b.odd
	}
	if len(b.nested) > 0 {
		return "a nested component has core modules"
	}
	for _, i := range b.modules[0].imports {
		if i.kind != coreFunc {
			return fmt.Sprintf("the core module imports %s.%s, which is no function", i.module, i.name)
		}
		if strings.HasPrefix(i.module, "[export]") {
			return "the guest defines resources"
		}
	}
	return ""
}

// cursor reads a binary; after a failure every read gives zero.
type cursor struct {
	b   []byte
	err error
}

func (c *cursor) fail(format string, args ...any) {
	if c.err == nil {
		c.err = invalid("damaged WebAssembly: "+format, args...)
	}
	c.b = nil
}

func (c *cursor) take(n uint32) []byte {
	if uint64(n) > uint64(len(c.b)) {
		c.fail("%d bytes wanted, %d left (truncated?)", n, len(c.b))
		return nil
	}
	out := c.b[:n:n]
	c.b = c.b[n:]
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

// refType skips a reference or value type: one byte, or a heap type after (ref null? ...).
func (c *cursor) refType() {
	if b := c.u8(); b == 0x63 || b == 0x64 {
		c.leb(33)
	}
}

func (c *cursor) limits() limits {
	flags := c.u8()
	l := limits{min: c.leb(64), pageSize: wasmPage}
	if flags&1 != 0 {
		c.leb(64)
	}
	if flags&8 != 0 { // custom page size, a power of two
		if l.pageSize = 1; c.u8() == 16 {
			l.pageSize = wasmPage
		}
	}
	return l
}
