package protowit

import (
	"strings"
)

// localNames maps each item that an interface imports to the item's name in that interface. If that name would clash
// with a function or resource of the interface itself, the item is renamed.
type localNames struct {
	taken scope
	local map[string]string // "types.hello-request" → name in this interface
}

func newLocalNames(taken []string) *localNames {
	u := &localNames{taken: make(scope), local: make(map[string]string)}
	for _, t := range taken {
		u.taken[t] = true
	}
	return u
}

// ref returns the local name of an item from another interface, as WIT text.
func (u *localNames) ref(from, name string) string { return ident(u.local[from+"."+name]) }

// use writes the use statement for items of one interface. It skips empty and repeated names.
func (u *localNames) use(w *writer, from string, items []string, suffix string) {
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

// typ returns the WIT text for the type of a message.
func (u *localNames) typ(m *Message) string {
	if m.Type.Name != "" {
		return u.ref(typesName, m.Type.Name)
	}
	return typeText(m.Type)
}
