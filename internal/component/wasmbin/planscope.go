package wasmbin

// at returns element i of an index space.
func at[T any](all []T, i uint32) (T, error) {
	if uint64(i) >= uint64(len(all)) {
		var none T
		return none, unplanned("the component refers to item %d of %d", i, len(all))
	}
	return all[i], nil
}

// item reads a sort and an index.
func (s *scope) item(c *cursor) (item, error) {
	switch sort := c.u8(); sort {
	case 1:
		return boxed(at(s.funcs, c.u32()))
	case 3:
		return boxed(at(s.types, c.u32()))
	case 4:
		return boxed(at(s.components, c.u32()))
	case 5:
		return boxed(at(s.instances, c.u32()))
	case 0:
		return nil, unplanned("the component passes on a core module")
	default:
		return nil, unplanned("the component has values")
	}
}

func boxed[T any](v T, err error) (item, error) { return v, err }

// add appends an item to its index space.
func (s *scope) add(i item) error {
	switch i := i.(type) {
	case function:
		s.funcs = append(s.funcs, i)
	case typ:
		s.types = append(s.types, i)
	case closure:
		s.components = append(s.components, i)
	case *instance:
		s.instances = append(s.instances, i)
	}
	return nil
}

// imported reads an import. For the outermost component, the host provides it; for others, args do.
func (p *planner) imported(s *scope, c *cursor, args map[string]item) error {
	name := c.externName()
	kind := byte(255)
	if len(c.rest) > 0 {
		kind = c.rest[0]
	}
	c.externDesc()
	if args != nil {
		i, ok := args[name]
		if !ok {
			return unplanned("nothing is passed for the import %s of a nested component", name)
		}
		return s.add(i)
	}
	switch kind {
	case 1:
		return s.add(function{name: name, lift: -1})
	case 3:
		return s.add(typ{name: name})
	case 5:
		return s.add(&instance{iface: name})
	}
	return unplanned("the import %s is neither an interface nor a function", name)
}

// instance reads the instantiation of a component, or a list of exports.
func (p *planner) instance(s *scope, c *cursor) error {
	items := make(map[string]item)
	switch kind := c.u8(); kind {
	case 0:
		component, err := at(s.components, c.u32())
		if err != nil {
			return err
		}
		for n := c.u32(); n > 0 && c.err == nil; n-- {
			name := c.name()
			if items[name], err = s.item(c); err != nil {
				return err
			}
		}
		if c.err != nil {
			return nil
		}
		exports, err := p.instantiate(component, items)
		if err != nil {
			return err
		}
		return s.add(&instance{exports: exports})
	case 1:
		for n := c.u32(); n > 0 && c.err == nil; n-- {
			name := c.externName()
			var err error
			if items[name], err = s.item(c); err != nil {
				return err
			}
		}
		return s.add(&instance{exports: items})
	default:
		return unplanned("an instance of kind %#x", kind)
	}
}

// export returns an export of an instance. The sort is the one of a component item.
func (i *instance) export(sort byte, name string) (item, error) {
	if i.exports != nil {
		e, ok := i.exports[name]
		if !ok {
			return nil, unplanned("an instance has no export %s", name)
		}
		return e, nil
	}
	switch sort {
	case 1:
		return function{iface: i.iface, name: name, lift: -1}, nil
	case 3:
		return typ{i.iface, name}, nil
	}
	return nil, unplanned("the interface %s contains an instance or a component", i.iface)
}

func (p *planner) alias(s *scope, c *cursor) error {
	sort, core := c.u8(), byte(0)
	if sort == 0 {
		core = c.u8()
	}
	switch target := c.u8(); target {
	case 0:
		from, err := at(s.instances, c.u32())
		name := c.name()
		if err != nil {
			return err
		}
		if sort == 0 {
			return unplanned("the component gets a core module from elsewhere")
		}
		i, err := from.export(sort, name)
		if err != nil {
			return err
		}
		return s.add(i)
	case 1:
		from, err := at(s.cores, c.u32())
		name := c.name()
		if err != nil {
			return err
		}
		if Kind(core) > Tag {
			return unplanned("a core alias of kind %#x", core)
		}
		e, err := from.export(Kind(core), name)
		if err != nil {
			return err
		}
		s.core[core] = append(s.core[core], e)
		return nil
	case 2:
		return s.outerAlias(sort, core, c.u32(), c.u32())
	default:
		return unplanned("an alias of kind %#x", target)
	}
}

func (s *scope) outerAlias(sort, core byte, depth, index uint32) error {
	from := s
	for ; depth > 0 && from != nil; depth-- {
		from = from.outer
	}
	if from == nil {
		return unplanned("an alias leads out of the component")
	}
	switch {
	case sort == 3:
		t, err := at(from.types, index)
		s.types = append(s.types, t)
		return err
	case sort == 4:
		c, err := at(from.components, index)
		s.components = append(s.components, c)
		return err
	case sort == 0 && core == 0x11:
		m, err := at(from.modules, index)
		s.modules = append(s.modules, m)
		return err
	case sort == 0 && core == 0x10:
		return nil // a core type
	}
	return unplanned("an outer alias of kind %#x", sort)
}

// export returns an export of a core instance.
func (i coreInstance) export(kind Kind, name string) (core, error) {
	if i.exports == nil {
		return core{kind: kind, instance: i.step, name: name}, nil
	}
	e, ok := i.exports[name]
	if !ok || e.kind != kind {
		return core{}, unplanned("a core instance has no export %s", name)
	}
	return e, nil
}
