package wasmbin

import (
	"bytes"
	"errors"
	"fmt"
)

// Plan is a component as one core module: its core modules, connected with each other as their instances would be. A host that
// provides the module's imports and calls its exports by the canonical ABI needs no implementation of components.
//
// A Plan exists only for a component whose component instances (nested ones included) have no functions, resources or
// memories that other ones use, because these need more than core instances and a host.
type Plan struct {
	// Module exports its memory, if it has one, as MemoryExport. If it exports StartExport, the host must call it first.
	Module Module
	// Imports are what the module imports, in order. The module is "", and the name is the number.
	Imports []HostFunc
	// Exports are the exported functions by their full name (INTERFACE#NAME, or NAME at the top level).
	Exports map[string]Lift
}

// HostFunc is a function that the host provides, by the canonical ABI.
type HostFunc struct {
	// Interface is the full name of an interface that the component imports, or "" at its top level. Name is the name of a
	// function of that interface, or of a resource, if the function drops it.
	Interface, Name string
	Drop            bool
	Realloc         string // the export that allocates memory for the result, or ""
}

// Lift is an exported function of the component, as exports of the module: a function that follows the canonical ABI, the
// allocator for its parameters, and the function to call when the result has been read. The last two can be "".
type Lift struct{ Func, Realloc, Post string }

// StartExport is the export that runs the start functions of several modules.
const StartExport = "_initialize"

// step makes an instance of a core module.
type step struct {
	module  int    // index in planner.modules
	imports []core // one for each import of the module, in order
}

// core is a core function, table, memory or global.
type core struct {
	kind Kind
	from origin
	// instance is the number of the step and name is the export's name, for fromInstance.
	instance int
	name     string
	// iface is the full name of an interface that the component imports, or "" at its top level. item is the name of
	// a function of that interface (fromHost), or of a resource (fromDrop).
	iface, item string
	// realloc is the allocator for the results of a function of the host, or nil.
	realloc *core
}

// origin says where a core item comes from.
type origin byte

const (
	fromInstance origin = iota // the export of an instance
	fromHost                   // a function that the host provides, by the canonical ABI
	fromDrop                   // the function resource.drop for a resource of the host
	fromTrap                   // a function that traps
)

// lift is an exported function of a component: a core function that follows the canonical ABI. What is a pointer can be nil.
type lift struct {
	fn                    core
	realloc, post, memory *core
}

// Limits of a Plan. A component can make instances of components that make instances of components.
const (
	maxComponents = 32
	maxSteps      = 32
	maxItems      = 100_000 // definitions in all components, and imports of all core instances
)

// errPlan is an error that names why there is no Plan for a component.
type errPlan string

func (e errPlan) Error() string { return string(e) }

func unplanned(format string, args ...any) error { return errPlan(fmt.Sprintf(format, args...)) }

// NewPlan returns the Plan of a component, or nil and the reason why there is none. It returns an error for a binary that
// it cannot read.
func NewPlan(component []byte) (plan *Plan, why string, err error) {
	p := &planner{known: make(map[*byte]int), read: make(map[int]*functions), exported: make(map[string]lift)}
	exports, err := p.instantiate(closure{code: component}, nil)
	if err == nil {
		err = p.finish(exports)
	}
	if err == nil {
		if err = p.fuse(len(component)); err != nil && !errors.As(err, new(errPlan)) {
			err = unplanned("its core modules cannot become one: %v", err) // the engine validates them
		}
	}
	if reason := errPlan(""); errors.As(err, &reason) {
		return nil, string(reason), nil
	}
	if err != nil {
		return nil, "", err
	}
	return &p.Plan, "", nil
}

// planner instantiates a component without running it.
type planner struct {
	Plan
	modules    []Module
	steps      []step // in order
	exported   map[string]lift
	known      map[*byte]int // indices in modules, by the first byte of the code
	read       map[int]*functions
	components int // instances of components
	items      int
	user       *scope // the only component instance that uses the host
	lifts      []lift // of all component instances
	memory     []core // the memories that functions use
}

// closure is a component that has not been instantiated, with the component around it.
type closure struct {
	code  []byte
	outer *scope
}

// An item of a component is one of: function, *instance, typ, closure.
type item any

// function is a function of the host, or one that a component lifts.
type function struct {
	iface, name string
	lift        int    // index in planner.lifts, or -1
	owner       *scope // of the lift
}

// typ is a type. Only resources that the component imports have a name.
type typ struct{ iface, name string }

// instance is an instance of an interface: one that the component imports, or a list of exports.
type instance struct {
	iface   string
	exports map[string]item // nil for an imported interface
}

// scope is an instance of a component: its index spaces.
type scope struct {
	outer      *scope
	modules    []int
	instances  []*instance
	components []closure
	funcs      []function
	types      []typ
	cores      []coreInstance
	core       [Tag + 1][]core // by kind
}

// coreInstance is the number of a step, or a list of exports.
type coreInstance struct {
	step    int
	exports map[string]core // nil for the instance of a module
}

// instantiate makes an instance of a component. The args of the outermost component are nil.
func (p *planner) instantiate(c closure, args map[string]item) (map[string]item, error) {
	if p.components++; p.components > maxComponents {
		return nil, unplanned("the component has more than %d instances of components", maxComponents)
	}
	s := &scope{outer: c.outer}
	exports := make(map[string]item)
	err := bodies(c.code, func(id byte, body *cursor) error {
		switch id {
		case 1:
			return p.module(s, body.rest)
		case 4:
			s.components = append(s.components, closure{body.rest, s})
			return p.count(1)
		case sectionCustom:
			return nil
		case 3: // core types: only modules without code refer to them
			return p.count(1)
		case 7:
			n := body.u32()
			if err := p.count(int(n)); err != nil {
				return err
			}
			s.types = append(s.types, make([]typ, n)...)
			return nil
		}
		for n := body.u32(); n > 0 && body.err == nil; n-- {
			if err := p.count(1); err != nil {
				return err
			}
			if err := p.definition(s, id, body, args, exports); err != nil && body.err == nil {
				return err
			}
		}
		return nil
	})
	return exports, err
}

func (p *planner) count(n int) error {
	if n > maxItems-p.items {
		return unplanned("the component has more than %d definitions and imports of core instances", maxItems)
	}
	p.items += n
	return nil
}

func (p *planner) module(s *scope, code []byte) error {
	if !bytes.HasPrefix(code, []byte(ModuleHeader)) {
		return damaged("a core module within the component has no module header")
	}
	n, ok := p.known[&code[0]]
	if !ok {
		m, err := parseModule(code)
		if err != nil {
			return err
		}
		n = len(p.modules)
		p.known[&code[0]] = n
		p.modules = append(p.modules, m)
	}
	s.modules = append(s.modules, n)
	return p.count(1)
}

// definition reads one definition of a section.
func (p *planner) definition(s *scope, section byte, c *cursor, args, exports map[string]item) error {
	switch section {
	case 2:
		return p.coreInstance(s, c)
	case 5:
		return p.instance(s, c)
	case 6:
		return p.alias(s, c)
	case 8:
		return p.canon(s, c)
	case componentImports:
		return p.imported(s, c, args)
	case componentExports:
		name := c.externName()
		i, err := s.item(c)
		if err != nil {
			return err
		}
		if c.u8() != 0 {
			c.externDesc()
		}
		exports[name] = i
		return s.add(i)
	}
	return unplanned("the component has a section %d", section)
}

// coreInstance reads the instantiation of a core module, or a list of exports.
func (p *planner) coreInstance(s *scope, c *cursor) error {
	switch kind := c.u8(); kind {
	case 0:
		module, err := at(s.modules, c.u32())
		if err != nil {
			return err
		}
		args := make(map[string]coreInstance)
		for n := c.u32(); n > 0 && c.err == nil; n-- {
			name := c.name()
			c.u8()
			if args[name], err = at(s.cores, c.u32()); err != nil {
				return err
			}
		}
		return p.step(s, module, args)
	case 1:
		exports := make(map[string]core)
		for n := c.u32(); n > 0 && c.err == nil; n-- {
			name, kind := c.name(), c.u8()
			if Kind(kind) > Tag {
				return unplanned("a core export of kind %#x", kind)
			}
			e, err := at(s.core[kind], c.u32())
			if err != nil {
				return err
			}
			exports[name] = e
		}
		s.cores = append(s.cores, coreInstance{exports: exports})
		return nil
	default:
		return unplanned("a core instance of kind %#x", kind)
	}
}

func (p *planner) step(s *scope, module int, args map[string]coreInstance) error {
	if len(p.steps) == maxSteps {
		return unplanned("the component has more than %d core instances", maxSteps)
	}
	imports := p.modules[module].Imports
	if err := p.count(len(imports)); err != nil {
		return err
	}
	next := step{module: module}
	for _, i := range imports {
		from, ok := args[i.Module]
		if !ok {
			return unplanned("nothing is passed for the import %s of a core module", i.Module)
		}
		e, err := from.export(i.Kind, i.Name)
		if err != nil {
			return err
		}
		next.imports = append(next.imports, e)
	}
	s.cores = append(s.cores, coreInstance{step: len(p.steps)})
	p.steps = append(p.steps, next)
	return nil
}

// options are the canonical options of a function.
type options struct{ memory, realloc, post *core }

func (s *scope) options(c *cursor) (o options, err error) {
	ref := func(all []core) *core {
		e, missing := at(all, c.u32())
		if missing != nil {
			err = missing
		} else if e.from != fromInstance {
			err = unplanned("it allocates by a function that is not a core module's")
		}
		return &e
	}
	for n := c.u32(); n > 0 && c.err == nil; n-- {
		switch opt := c.u8(); opt {
		case 0: // UTF-8
		case 1, 2:
			return o, unplanned("strings in UTF-16 or Latin-1")
		case 3:
			o.memory = ref(s.core[Memory])
		case 4:
			o.realloc = ref(s.core[Func])
		case 5:
			o.post = ref(s.core[Func])
		default:
			return o, unplanned("canonical option %#x", opt)
		}
	}
	return o, err
}

func (p *planner) canon(s *scope, c *cursor) error {
	switch op := c.u8(); op {
	case 0:
		c.u8()
		f, err := at(s.core[Func], c.u32())
		o, badOptions := s.options(c)
		c.u32()
		if err := errors.Join(err, badOptions); err != nil {
			return err
		}
		p.lifts = append(p.lifts, lift{fn: f, realloc: o.realloc, post: o.post, memory: o.memory})
		return s.add(function{lift: len(p.lifts) - 1, owner: s})
	case 1:
		c.u8()
		f, err := at(s.funcs, c.u32())
		o, badOptions := s.options(c)
		if err := errors.Join(err, badOptions); err != nil {
			return err
		}
		return p.lower(s, f, o)
	case 3:
		t, err := at(s.types, c.u32())
		if err != nil {
			return err
		}
		if t.name == "" {
			return unplanned("the guest defines resources")
		}
		s.core[Func] = append(s.core[Func], core{kind: Func, from: fromDrop, iface: t.iface, item: t.name})
		return p.uses(s)
	case 2, 4:
		return unplanned("the guest defines resources")
	default:
		return unplanned("canonical function %#x", op)
	}
}

// lower makes a core function of a function of the host. A function of another component instance would need a copy of
// the parameters and results between two memories; only those that trap at once are supported.
func (p *planner) lower(s *scope, f function, o options) error {
	if f.lift < 0 {
		s.core[Func] = append(s.core[Func], core{kind: Func, from: fromHost, iface: f.iface, item: f.name, realloc: o.realloc})
		if o.memory != nil {
			p.memory = append(p.memory, *o.memory)
		}
		return p.uses(s)
	}
	if !p.does(p.lifts[f.lift].fn, onlyTrap) {
		return unplanned("a component instance calls another one")
	}
	s.core[Func] = append(s.core[Func], core{kind: Func, from: fromTrap})
	return nil
}

// uses records that a component instance uses the host. Each component instance has handles of its own, so only one may.
func (p *planner) uses(s *scope) error {
	if p.user != nil && p.user != s {
		return unplanned("several component instances use the host")
	}
	p.user = s
	return nil
}

// finish collects the exports of the outermost component.
func (p *planner) finish(exports map[string]item) error {
	for name, e := range exports {
		switch e := e.(type) {
		case function:
			if err := p.export(name, e); err != nil {
				return err
			}
		case *instance:
			for member, f := range e.exports {
				if f, ok := f.(function); ok {
					if err := p.export(name+"#"+member, f); err != nil {
						return err
					}
				}
			}
			if e.exports == nil {
				return unplanned("the component exports the imported interface %s", e.iface)
			}
		case closure:
			return unplanned("the component exports a component")
		}
	}
	p.prune()
	memories := 0
	for _, s := range p.steps {
		memories += len(p.modules[s.module].Memories)
	}
	if memories > 1 {
		return unplanned("its core modules have %d memories", memories)
	}
	return nil
}

func (p *planner) export(name string, f function) error {
	if f.lift < 0 {
		return unplanned("the component exports the function %s, which it imports", f.name)
	}
	if err := p.uses(f.owner); err != nil {
		return err
	}
	l := p.lifts[f.lift]
	if l.memory != nil {
		p.memory = append(p.memory, *l.memory)
	}
	p.exported[name] = l
	return nil
}
