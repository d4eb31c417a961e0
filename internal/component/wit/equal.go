package wit

import "fmt"

// Equal returns nil if two types are equal, and otherwise an error that names the first difference and its path. As in
// the component model, types are equal if they have the same shape: the names of fields and cases matter, the names of
// types do not. The names of resources matter if both types name a resource.
func Equal(a, b *Type) error {
	return equal("", a, b, make(map[[2]*Type]bool))
}

// equal compares two types. The map seen contains the pairs that equal has already compared. Without this map, equal
// could take exponential time for types that share parts.
func equal(path string, a, b *Type, seen map[[2]*Type]bool) error {
	if a == nil && b == nil || seen[[2]*Type{a, b}] {
		return nil
	}
	seen[[2]*Type{a, b}] = true
	if a == nil || b == nil || a.Kind != b.Kind {
		return differ(path, a, b)
	}
	if err := equalParts(path, a, b, seen); err != nil {
		return err
	}
	if len(a.Cases) != len(b.Cases) {
		return fmt.Errorf("%s%d cases (%v), not %d (%v)", at(path), len(a.Cases), a, len(b.Cases), b)
	}
	for i, c := range a.Cases {
		d := b.Cases[i]
		if c.Name != d.Name {
			return fmt.Errorf("%scase %d is %q, not %q", at(path), i, c.Name, d.Name)
		}
		if err := equal(join(path, c.Name), c.Type, d.Type, seen); err != nil {
			return err
		}
	}
	return nil
}

func equalParts(path string, a, b *Type, seen map[[2]*Type]bool) error {
	switch a.Kind {
	case List:
		return equal(path+"[]", a.Elem, b.Elem, seen)
	case Option:
		return equal(path+"?", a.Elem, b.Elem, seen)
	case Own, Borrow:
		if a.Name != b.Name && a.Name != "" && b.Name != "" {
			return differ(path, a, b)
		}
	case Result:
		if err := equal(join(path, "ok"), a.Ok, b.Ok, seen); err != nil {
			return err
		}
		return equal(join(path, "error"), a.Err, b.Err, seen)
	case Record, Tuple:
		return equalFields(path, a, b, seen)
	}
	return nil
}

func equalFields(path string, a, b *Type, seen map[[2]*Type]bool) error {
	if len(a.Fields) != len(b.Fields) {
		return fmt.Errorf("%s%d fields (%v), not %d (%v)", at(path), len(a.Fields), a, len(b.Fields), b)
	}
	for i, f := range a.Fields {
		g := b.Fields[i]
		if f.Name != g.Name {
			return fmt.Errorf("%sfield %d is %q, not %q", at(path), i, f.Name, g.Name)
		}
		name := f.Name
		if a.Kind == Tuple {
			name = fmt.Sprint(i)
		}
		if err := equal(join(path, name), f.Type, g.Type, seen); err != nil {
			return err
		}
	}
	return nil
}

func differ(path string, a, b *Type) error {
	return fmt.Errorf("%s%v, not %v", at(path), a, b)
}

func at(path string) string {
	if path == "" {
		return ""
	}
	return path + ": "
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}
