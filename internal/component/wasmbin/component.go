package wasmbin

import (
	"bytes"
	"fmt"
)

// Binary describes a module or component: what its core modules declare, and which functions of the core modules the
// component exports.
type Binary struct {
	Component bool
	// Modules are the core modules at the top level of the component, in order. If the binary is a core module, Modules
	// contains only this module. Nested are the core modules of nested components.
	Modules, Nested []Module
	// Lifted are the functions that the component lifts from its first core module. Foreign are the functions that it
	// lifts from other modules.
	Lifted  map[string]bool
	Foreign []string
	// Unsupported is the reason why a caller cannot use the canonical ABI on the first core module alone, or "" if it
	// can.
	Unsupported string

	// Index spaces of the component's core instances and functions, as far as they are needed to find core modules.
	coreInstances []int       // for each instance, the index of its module, or -1
	coreFuncs     []coreAlias // for each function, where it comes from
}

// coreAlias is an export of a core instance. The instance is -1 for a function that the component itself defines.
type coreAlias struct {
	instance int
	name     string
}

// ModuleHeader and ComponentHeader are the first bytes of modules and components.
const (
	ModuleHeader    = "\x00asm\x01\x00\x00\x00"
	ComponentHeader = "\x00asm\x0d\x00\x01\x00"
)

// maxNesting is the maximum depth of components within components.
const maxNesting = 100

// Parse reads the structure of a binary. The result shares memory with b.
func Parse(b []byte) (*Binary, error) {
	component, err := preamble(bytes.NewReader(b), int64(len(b)))
	if err != nil {
		return nil, err
	}
	if !component {
		m, err := parseModule(b)
		return &Binary{Modules: []Module{m}}, err
	}
	out := &Binary{Component: true}
	err = out.parseComponent(b, 0)
	return out, err
}

func (b *Binary) parseComponent(code []byte, depth int) error {
	if depth > maxNesting {
		return damaged("components nested more than %d deep", maxNesting)
	}
	return bodies(code, func(id byte, c *cursor) error {
		switch id {
		case 1:
			if !bytes.HasPrefix(c.rest, []byte(ModuleHeader)) {
				return damaged("a core module within the component has no module header")
			}
			m, err := parseModule(c.rest)
			if err != nil {
				return err
			}
			if depth == 0 {
				b.Modules = append(b.Modules, m)
			} else {
				b.Nested = append(b.Nested, m)
			}
		case 4:
			if !bytes.HasPrefix(c.rest, []byte(ComponentHeader)) {
				return damaged("a component within the component has no component header")
			}
			return b.parseComponent(c.rest, depth+1)
		case 2, 6, 8:
			if depth == 0 {
				b.topLevel(id, c)
			} else if id == 8 {
				b.Unsupported = "a nested component lifts or lowers functions"
			}
		case 9:
			b.Unsupported = "the component has a start function"
		}
		return nil
	})
}

// topLevel reads one section to find out which modules the component's core functions come from. If it cannot find this
// out, it sets Unsupported and skips the section.
func (b *Binary) topLevel(id byte, c *cursor) {
	for n := c.u32(); n > 0 && c.err == nil && b.Unsupported == ""; n-- {
		switch id {
		case 2:
			b.coreInstance(c)
		case 6:
			b.alias(c)
		case 8:
			b.canon(c)
		}
	}
	if b.Unsupported != "" {
		c.err = nil
	}
}

func (b *Binary) coreInstance(c *cursor) {
	module := -1
	switch kind := c.u8(); kind {
	case 0:
		module = int(c.u32())
		fallthrough
	case 1:
		c.each(func() {
			c.name()
			c.u8()
			c.u32()
		})
	default:
		b.Unsupported = fmt.Sprintf("core instance of kind %#x", kind)
	}
	b.coreInstances = append(b.coreInstances, module)
}

// alias records aliases of core functions. For aliases of core modules and core instances, it sets Unsupported.
func (b *Binary) alias(c *cursor) {
	sort, core := c.u8(), byte(0)
	if sort == 0 {
		core = c.u8()
	}
	switch target := c.u8(); target {
	case 0, 1:
		instance := int(c.u32())
		name := c.name()
		if target == 1 && sort == 0 && Kind(core) == Func {
			b.coreFuncs = append(b.coreFuncs, coreAlias{instance, name})
		}
	case 2:
		c.u32()
		c.u32()
	default:
		b.Unsupported = fmt.Sprintf("alias of kind %#x", target)
	}
	if sort == 0 && core > 0x10 {
		b.Unsupported = "core modules from elsewhere"
	}
}

// canon sets Unsupported for anything that the core path does not support: encodings other than UTF-8, asynchronous
// functions, resources that the guest defines, and functions of core modules other than the first.
func (b *Binary) canon(c *cursor) {
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
		b.Unsupported = "the guest defines resources"
	default:
		b.Unsupported = fmt.Sprintf("canonical function %#x", op)
	}
	b.coreFuncs = append(b.coreFuncs, coreAlias{instance: -1})
}

func (b *Binary) lift(f int) {
	if f >= len(b.coreFuncs) {
		b.Unsupported = "a lifted function does not exist"
		return
	}
	from := b.coreFuncs[f]
	if from.instance < 0 || from.instance >= len(b.coreInstances) || b.coreInstances[from.instance] != 0 {
		// The exported function of a command belongs to the preview 1 adapter, which calls _start.
		b.Foreign = append(b.Foreign, from.name)
		return
	}
	if b.Lifted == nil {
		b.Lifted = make(map[string]bool)
	}
	b.Lifted[from.name] = true
}

func (b *Binary) canonOptions(c *cursor) {
	for n := c.u32(); n > 0 && c.err == nil; n-- {
		switch opt := c.u8(); opt {
		case 0: // UTF-8
		case 3, 4, 5: // memory, realloc, post-return
			c.u32()
		case 1, 2:
			b.Unsupported = "strings in UTF-16 or Latin-1"
		default:
			b.Unsupported = fmt.Sprintf("canonical option %#x", opt)
			return
		}
	}
}
