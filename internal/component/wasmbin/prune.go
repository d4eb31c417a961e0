package wasmbin

// functions is where the functions of a core module are.
type functions struct {
	exports  map[string]uint32 // indices of exported functions
	imported uint32            // number of imported functions, which have the first indices
	start    int64             // index of the start function, or -1
	segments bool              // the module has element or data segments
	code     []byte            // the content of the code section
}

// functions reads where the module's functions are.
func (m *Module) functions() (functions, error) {
	f := functions{exports: make(map[string]uint32), start: -1}
	for _, i := range m.Imports {
		if i.Kind == Func {
			f.imported++
		}
	}
	err := bodies(m.Code, func(id byte, c *cursor) error {
		switch id {
		case moduleExports:
			c.each(func() {
				name, kind, index := c.name(), Kind(c.u8()), c.u32()
				if kind == Func {
					f.exports[name] = index
				}
			})
		case 8:
			f.start = int64(c.u32())
		case 9, 11: // elements, data
			f.segments = f.segments || c.u32() > 0
		case 10:
			f.code = c.rest
		}
		return nil
	})
	return f, err
}

// The bodies of functions that do nothing, or nothing but trap: no locals, and end, or unreachable and end.
const (
	emptyBody = "\x00\x0b"
	trapBody  = "\x00\x00\x0b"
)

// body returns the body of a function that the module defines, or "" if it imports the function.
func (f *functions) body(index uint32) string {
	if index < f.imported {
		return ""
	}
	c := &cursor{rest: f.code}
	for n := c.u32(); n > 0 && c.err == nil; n-- {
		body := c.take(c.u32())
		if index == f.imported {
			return string(body)
		}
		index--
	}
	return ""
}

// hasBody reports whether a core function has the given body.
func (p *Plan) hasBody(f Core, body string) bool {
	if f.From != FromInstance {
		return f.From == FromTrap && body == trapBody
	}
	all, err := p.Modules[p.Steps[f.Instance].Module].functions()
	index, ok := all.exports[f.Name]
	return err == nil && ok && all.body(index) == body
}

// harmless reports whether the instantiation of a core module does nothing that others could notice, and cannot trap.
func (p *Plan) harmless(s Step) bool {
	m := &p.Modules[s.Module]
	var imported []Core
	for _, i := range s.Imports {
		if i.Kind != Func {
			return false
		}
		imported = append(imported, i)
	}
	f, err := m.functions()
	switch {
	case err != nil || f.segments:
		return false
	case f.start < 0:
		return true
	case f.start < int64(len(imported)):
		return p.hasBody(imported[f.start], emptyBody)
	}
	return f.body(uint32(f.start)) == emptyBody
}

// prune removes the harmless steps that nothing refers to, and the modules of no step.
func (p *Plan) prune() {
	needed := make([]bool, len(p.Steps))
	var need func(c Core)
	need = func(c Core) {
		if c.From == FromInstance {
			needed[c.Instance] = true
		}
		if c.Realloc != nil {
			need(*c.Realloc)
		}
	}
	for _, l := range p.Exports {
		l.each(need)
	}
	if p.Memory != nil {
		need(*p.Memory)
	}
	for k := len(p.Steps) - 1; k >= 0; k-- { // steps refer only to earlier ones
		needed[k] = needed[k] || !p.harmless(p.Steps[k])
		for _, i := range p.Steps[k].Imports {
			if needed[k] {
				need(i)
			}
		}
	}
	p.keep(needed)
}

func (l *Lift) each(f func(Core)) {
	f(l.Func)
	for _, c := range []*Core{l.Realloc, l.Post} {
		if c != nil {
			f(*c)
		}
	}
}

// keep removes steps, and numbers the others and their modules again.
func (p *Plan) keep(needed []bool) {
	numbers, modules := make([]int, len(p.Steps)), make(map[int]int)
	steps, kept := p.Steps, p.Modules
	p.Steps, p.Modules = nil, nil
	for k, s := range steps {
		if !needed[k] {
			continue
		}
		numbers[k] = len(p.Steps)
		if _, ok := modules[s.Module]; !ok {
			modules[s.Module] = len(p.Modules)
			p.Modules = append(p.Modules, kept[s.Module])
		}
		p.Steps = append(p.Steps, Step{Module: modules[s.Module], Imports: s.Imports})
	}
	var renumbered func(c Core) Core
	at := func(c *Core) *Core {
		if c == nil {
			return nil
		}
		r := renumbered(*c)
		return &r
	}
	renumbered = func(c Core) Core {
		if c.From == FromInstance {
			c.Instance = numbers[c.Instance]
		}
		c.Realloc = at(c.Realloc)
		return c
	}
	for _, s := range p.Steps {
		for k := range s.Imports {
			s.Imports[k] = renumbered(s.Imports[k])
		}
	}
	for name, l := range p.Exports {
		p.Exports[name] = Lift{Func: renumbered(l.Func), Realloc: at(l.Realloc), Post: at(l.Post)}
	}
	p.Memory = at(p.Memory)
}
