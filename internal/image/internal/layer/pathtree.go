package layer

import "path"

// pathTree knows which paths lie below which, for the directories of an archive whose later entries may replace them. Paths are
// clean and absolute.
type pathTree map[string]map[string]bool

// add adds a path and its parents.
func (t pathTree) add(name string) {
	for ; name != "/"; name = path.Dir(name) {
		parent := path.Dir(name)
		if t[parent][name] {
			return
		}
		if t[parent] == nil {
			t[parent] = map[string]bool{}
		}
		t[parent][name] = true
	}
}

// cut removes what lies below a path, and the path, and calls gone for each.
func (t pathTree) cut(name string, gone func(name string)) {
	for below := range t[name] {
		t.cut(below, gone)
	}
	delete(t, name)
	delete(t[path.Dir(name)], name)
	gone(name)
}
