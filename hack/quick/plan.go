package main

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"path"
	"regexp"
	"slices"
	"strings"
)

// plan says what to run. All slices are sorted.
type plan struct {
	base       string
	files      []string
	removed    []string            // directories that are no packages any more
	format     []string            // Go files
	changed    []string            // packages: vet and lint
	dependents []string            // packages: vet, because a change can break their build
	rules      []string            // packages with tests that read the whole repository
	race       []string            // changed packages with unit tests
	plain      []string            // dependents with unit tests, without the race detector
	daemon     map[string][]string // by package with daemons: names of tests
	left       map[string]string   // what is left to make test, with the reason
}

// plan selects what to run after a change of files.
func (r *repo) plan(files []string) *plan {
	p := &plan{files: slices.Sorted(slices.Values(files)), daemon: map[string][]string{}, left: map[string]string{}}
	code := map[string]bool{} // the changed packages: whether more than their tests changed
	for _, file := range p.files {
		r.file(p, file, code)
	}
	p.changed = slices.Sorted(maps.Keys(code))
	cause := slices.Clone(p.removed)
	for name, all := range code {
		if all {
			cause = append(cause, name)
		}
	}
	slices.Sort(cause)
	cause = slices.Compact(cause)
	distance := r.dependents(cause)
	for name := range code {
		delete(distance, name)
	}
	p.dependents = slices.Sorted(maps.Keys(distance))
	if len(p.changed)+len(p.removed) > 0 || slices.ContainsFunc(p.files, document) {
		p.rules = rules
	}
	for _, name := range p.changed {
		if r.unit[name] && r.packages[name].hasTests {
			p.race = append(p.race, name)
		} else if !r.unit[name] && strings.HasPrefix(name, "test/") && !slices.Contains(daemonTests, name) && !slices.Contains(p.rules, name) &&
			r.packages[name].hasTests {
			p.left[name] = "has its own target in the Makefile"
		}
	}
	if slices.Contains(p.files, "go.mod") || slices.Contains(p.files, "go.sum") {
		r.everything(p)
		return p
	}
	r.choose(p, cause, distance)
	r.endToEnd(p, cause)
	return p
}

// file enters a changed file into the plan, and its package into code.
func (r *repo) file(p *plan, file string, code map[string]bool) {
	for _, mod := range r.modules {
		if strings.HasPrefix(file, mod+"/") {
			p.left[mod] = "another module: make lint, make test-unit"
			return
		}
	}
	if readers := documents[file]; readers != nil {
		for _, name := range readers {
			code[name] = code[name] || false
		}
	}
	if dir := path.Dir(file); path.Ext(file) == ".go" && !r.exists(file) && r.packages[dir] == nil {
		p.removed = append(p.removed, dir)
		return
	}
	name, ok := r.owner(file)
	if !ok {
		if !document(file) && file != "go.mod" && file != "go.sum" {
			p.left[file] = "belongs to no package"
		}
		return
	}
	if path.Ext(file) == ".go" && r.exists(file) && !strings.Contains(file, "/testdata/") {
		p.format = append(p.format, file)
	}
	embedded := slices.Contains(r.packages[name].embeds, strings.TrimPrefix(file, name+"/"))
	if document(file) && !embedded {
		return
	}
	onlyTests := strings.HasSuffix(file, "_test.go") || strings.Contains(file, "/testdata/") && !embedded
	code[name] = code[name] || !onlyTests
	// A changed test with a daemon runs itself. A helper beside it runs the core.
	if slices.Contains(daemonTests, name) {
		if tests := r.tests[name][file]; len(tests) > 0 {
			p.addDaemon(name, tests)
		} else if r.exists(file) {
			p.addDaemon(name, r.matching(name, core))
		}
	}
}

func document(file string) bool { return path.Ext(file) == ".md" }

// choose selects the dependents whose unit tests run: the nearest and cheapest first, until the seconds of the changed
// rooms are spent. Heavy ones run only for a change of their own room or of the contract, and then always.
func (r *repo) choose(p *plan, cause []string, distance map[string]int) {
	budget := 0
	for _, room := range r.roomsOf(cause) {
		budget = max(budget, room.dependents)
	}
	candidates := slices.DeleteFunc(slices.Clone(p.dependents), func(name string) bool { return !r.unit[name] || !r.packages[name].hasTests })
	slices.SortStableFunc(candidates, func(a, b string) int {
		return cmp.Or(cmp.Compare(distance[a], distance[b]), cmp.Compare(r.cost(a), r.cost(b)), cmp.Compare(a, b))
	})
	for _, name := range candidates {
		switch {
		case r.heavy[name] && slices.ContainsFunc(cause, func(c string) bool { return below(c, machines) || c == contract }):
			p.plain = append(p.plain, name)
		case r.heavy[name]:
			p.left[name] = "boots machines"
		case r.cost(name) <= budget:
			budget -= r.cost(name)
			p.plain = append(p.plain, name)
		default:
			p.left[name] = fmt.Sprintf("a dependent of some %d s", r.cost(name))
		}
	}
	slices.Sort(p.plain)
}

// endToEnd selects the tests with daemons of the changed rooms.
func (r *repo) endToEnd(p *plan, cause []string) {
	for _, room := range r.roomsOf(cause) {
		p.addDaemon("test/e2e", r.matching("test/e2e", room.e2e))
		p.addDaemon("test/crash", r.matching("test/crash", room.crash))
	}
}

// everything is for a changed dependency: it can change any package, so all are vetted and linted, and the cheap ones
// tested.
func (r *repo) everything(p *plan) {
	p.changed, p.dependents, p.rules, p.race = slices.Sorted(maps.Keys(r.packages)), nil, rules, nil
	for _, name := range p.changed {
		if !r.unit[name] || !r.packages[name].hasTests {
			continue
		} else if r.heavy[name] || r.cost(name) > cheap {
			p.left[name] = fmt.Sprintf("takes some %d s", r.cost(name))
		} else {
			p.plain = append(p.plain, name)
		}
	}
	p.addDaemon("test/e2e", r.matching("test/e2e", core))
}

// matching returns the tests of a package whose names match a pattern.
func (r *repo) matching(name, pattern string) []string {
	var found []string
	if pattern == "" {
		return nil
	}
	expr := regexp.MustCompile(pattern)
	for _, tests := range r.tests[name] {
		for _, test := range tests {
			if expr.MatchString(test) {
				found = append(found, test)
			}
		}
	}
	return found
}

func (p *plan) addDaemon(name string, tests []string) {
	if all := slices.Concat(p.daemon[name], tests); len(all) > 0 {
		slices.Sort(all)
		p.daemon[name] = slices.Compact(all)
	}
}

// endToEnd returns the number of tests with daemons.
func (p *plan) endToEnd() (n int) {
	for _, tests := range p.daemon {
		n += len(tests)
	}
	return n
}

// print prints what changed and what does not run. The steps print themselves.
func (p *plan) print(w io.Writer) {
	fmt.Fprintf(w, "%d files have changed since %s, in %d packages; %d packages depend on them.\n", len(p.files), p.base, len(p.changed),
		len(p.dependents))
	line := func(what string, names []string) {
		if len(names) > 0 {
			fmt.Fprintf(w, "  %-10s %s\n", what, strings.Join(names, " "))
		}
	}
	line("changed", p.changed)
	line("dependents", p.plain)
	for _, name := range daemonTests {
		line(path.Base(name), p.daemon[name])
	}
	if len(p.left) > 0 {
		fmt.Fprintln(w, "Left to make test:")
	}
	for _, name := range slices.Sorted(maps.Keys(p.left)) {
		fmt.Fprintf(w, "  %s: %s\n", name, p.left[name])
	}
}
