package wasmbin

// functions is what there is to know of the functions of a core module.
type functions struct {
	exports  map[string]uint32 // indices of exported functions
	imported uint32            // number of imported functions, which have the first indices
	start    int64             // index of the start function, or -1
	segments bool              // the module has element or data segments
	bodies   []content         // of the functions that the module defines
}

// content is what the body of a function does.
type content byte

const (
	anything     content = iota
	nothingAtAll         // no locals, and end
	onlyTrap             // no locals, unreachable and end
)

// trapBody is the body of a function with the content onlyTrap.
const trapBody = "\x00\x00\x0b"

func contentOf(body []byte) content {
	switch string(body) {
	case "\x00\x0b":
		return nothingAtAll
	case trapBody:
		return onlyTrap
	}
	return anything
}

// functions reads the functions of a module of the plan.
func (p *planner) functions(module int) (*functions, error) {
	if f := p.read[module]; f != nil {
		return f, nil
	}
	f := &functions{exports: make(map[string]uint32), start: -1}
	for _, i := range p.modules[module].Imports {
		if i.Kind == Func {
			f.imported++
		}
	}
	err := bodies(p.modules[module].Code, func(id byte, c *cursor) error {
		switch id {
		case moduleExports:
			c.each(func() {
				name, kind, index := c.name(), Kind(c.u8()), c.u32()
				if kind == Func {
					f.exports[name] = index
				}
			})
		case moduleStart:
			f.start = int64(c.u32())
		case moduleElements, moduleData:
			f.segments = f.segments || c.u32() > 0
		case moduleCode:
			c.each(func() { f.bodies = append(f.bodies, contentOf(c.take(c.u32()))) })
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	p.read[module] = f
	return f, nil
}

// does reports whether a function of the module has the given content. Imported functions have none.
func (f *functions) does(index uint32, what content) bool {
	return index >= f.imported && uint64(index-f.imported) < uint64(len(f.bodies)) && f.bodies[index-f.imported] == what
}

// does reports whether a core function has the given content.
func (p *planner) does(f core, what content) bool {
	if f.from != fromInstance {
		return f.from == fromTrap && what == onlyTrap
	}
	all, err := p.functions(p.steps[f.instance].module)
	if err != nil {
		return false
	}
	index, ok := all.exports[f.name]
	return ok && all.does(index, what)
}

// harmless reports whether the instantiation of a core module does nothing that others could notice, and cannot trap.
func (p *planner) harmless(s step) bool {
	var imported []core
	for _, i := range s.imports {
		if i.kind != Func {
			return false
		}
		imported = append(imported, i)
	}
	f, err := p.functions(s.module)
	switch {
	case err != nil || f.segments:
		return false
	case f.start < 0:
		return true
	case f.start < int64(len(imported)):
		return p.does(imported[f.start], nothingAtAll)
	}
	return f.does(uint32(f.start), nothingAtAll)
}

// prune removes the harmless steps that nothing refers to, and the modules of no step.
func (p *planner) prune() {
	needed := make([]bool, len(p.steps))
	var need func(c core)
	need = func(c core) {
		if c.from == fromInstance {
			needed[c.instance] = true
		}
		if c.realloc != nil {
			need(*c.realloc)
		}
	}
	for _, l := range p.exported {
		l.each(need)
	}
	for _, m := range p.memory {
		need(m)
	}
	for k := len(p.steps) - 1; k >= 0; k-- { // steps refer only to earlier ones
		needed[k] = needed[k] || !p.harmless(p.steps[k])
		for _, i := range p.steps[k].imports {
			if needed[k] {
				need(i)
			}
		}
	}
	p.keep(needed)
}

func (l *lift) each(f func(core)) {
	f(l.fn)
	for _, c := range []*core{l.realloc, l.post} {
		if c != nil {
			f(*c)
		}
	}
}

// keep removes steps, and numbers the others and their modules again.
func (p *planner) keep(needed []bool) {
	numbers, modules := make([]int, len(p.steps)), make(map[int]int)
	steps, kept := p.steps, p.modules
	p.steps, p.modules, p.read = nil, nil, nil
	for k, s := range steps {
		if !needed[k] {
			continue
		}
		numbers[k] = len(p.steps)
		if _, ok := modules[s.module]; !ok {
			modules[s.module] = len(p.modules)
			p.modules = append(p.modules, kept[s.module])
		}
		p.steps = append(p.steps, step{module: modules[s.module], imports: s.imports})
	}
	var renumbered func(c core) core
	at := func(c *core) *core {
		if c == nil {
			return nil
		}
		r := renumbered(*c)
		return &r
	}
	renumbered = func(c core) core {
		if c.from == fromInstance {
			c.instance = numbers[c.instance]
		}
		c.realloc = at(c.realloc)
		return c
	}
	for _, s := range p.steps {
		for k := range s.imports {
			s.imports[k] = renumbered(s.imports[k])
		}
	}
	for name, l := range p.exported {
		p.exported[name] = lift{fn: renumbered(l.fn), realloc: at(l.realloc), post: at(l.post)}
	}
}
