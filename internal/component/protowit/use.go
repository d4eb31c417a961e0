package protowit

import (
	"strings"
)

// uses are what an interface calls the items it uses: its functions and resources keep their names, and a used item
// that is called like one of them gets another name in there.
type uses struct {
	taken scope
	local map[string]string // "types.hello-request" → name here
}

func newUses(taken []string) *uses {
	u := &uses{taken: make(scope), local: make(map[string]string)}
	for _, t := range taken {
		u.taken[t] = true
	}
	return u
}

// of is the text for an item of an interface, or for a type without a name of its own (a scalar).
func (u *uses) of(from, name string) string { return ident(u.local[from+"."+name]) }

// clause writes the use statement for items of one interface; "" and repeated ones are left out.
func (u *uses) clause(w *writer, from string, items []string, suffix string) {
	var parts []string
	for _, name := range items {
		key := from + "." + name
		if name == "" || u.local[key] != "" {
			continue
		}
		local := name
		if u.taken[name] {
			local += suffix
		}
		local = u.taken.name(local)
		u.local[key] = local
		if local == name {
			parts = append(parts, ident(name))
		} else {
			parts = append(parts, ident(name)+" as "+ident(local))
		}
	}
	if len(parts) > 0 {
		w.line("use %s.{%s};", from, strings.Join(parts, ", "))
	}
}

// typ is the text for the type of a message.
func (u *uses) typ(m *Message) string {
	if m.Type.Name != "" {
		return u.of(typesName, m.Type.Name)
	}
	return typeText(m.Type)
}
