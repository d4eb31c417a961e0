package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

const module = "github.com/tripod-run/tripod/"

// repo is what a plan is made from. All paths are relative to the root of the repository.
type repo struct {
	packages map[string]*pkg
	unit     map[string]bool                // the packages with unit tests, as the Makefile defines them
	modules  []string                       // directories of other modules
	tests    map[string]map[string][]string // by package with daemons and file: the names of the tests
	exists   func(file string) bool
	tables
}

// pkg is a package of the repository and what it imports from it.
type pkg struct {
	imports     []string
	testImports []string // also those of its external tests, and the programs that its tests build
	embeds      []string // file names
	hasTests    bool
}

// listed is what `go list -json` prints for a package.
type listed struct {
	ImportPath                                                 string
	Imports, TestImports, XTestImports, EmbedFiles             []string
	TestGoFiles, XTestGoFiles, TestEmbedFiles, XTestEmbedFiles []string
}

// read reads the repository in the working directory.
func read(unit []string) (*repo, error) {
	all, err := list("./...")
	if err != nil {
		return nil, err
	}
	r := &repo{packages: map[string]*pkg{}, unit: map[string]bool{}, tests: map[string]map[string][]string{}, tables: ours}
	r.exists = func(file string) bool { _, err := os.Stat(file); return err == nil }
	for _, l := range all {
		r.packages[strings.TrimPrefix(l.ImportPath, module)] = &pkg{
			imports:     inRepo(l.Imports),
			testImports: slices.Concat(inRepo(l.TestImports, l.XTestImports), programs[strings.TrimPrefix(l.ImportPath, module)]),
			embeds:      l.EmbedFiles,
			hasTests:    len(l.TestGoFiles)+len(l.XTestGoFiles) > 0,
		}
	}
	units, err := list(unit...)
	if err != nil {
		return nil, err
	}
	for _, l := range units {
		r.unit[strings.TrimPrefix(l.ImportPath, module)] = true
	}
	for _, dir := range daemonTests {
		if r.tests[dir], err = testNames(dir); err != nil {
			return nil, err
		}
	}
	mods, err := git("ls-files", "-z", "--", "*/go.mod")
	for _, mod := range fields(mods) {
		r.modules = append(r.modules, path.Dir(mod))
	}
	return r, err
}

// list calls go list. A package with errors is listed too: vet shows its errors.
func list(patterns ...string) ([]listed, error) {
	c := exec.Command("go", append([]string{"list", "-e", "-tags", "failpoints", "-json"}, patterns...)...)
	c.Env = append(os.Environ(), "CGO_ENABLED=1")
	out, err := output(c)
	if err != nil {
		return nil, err
	}
	var all []listed
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		var l listed
		if err := d.Decode(&l); errors.Is(err, io.EOF) {
			return all, nil
		} else if err != nil {
			return nil, fmt.Errorf("read the output of go list: %w", err)
		}
		all = append(all, l)
	}
}

// inRepo returns the packages of the repository among the import paths, once each.
func inRepo(lists ...[]string) []string {
	var in []string
	for _, p := range slices.Concat(lists...) {
		if name, ok := strings.CutPrefix(p, module); ok {
			in = append(in, name)
		}
	}
	slices.Sort(in)
	return slices.Compact(in)
}

// dependents returns the packages that depend on one of those given, also those whose tests do, with their distance: 1
// for those that import it. What a package imports in its tests does not reach those that import the package.
func (r *repo) dependents(of []string) map[string]int {
	distance := map[string]int{}
	for _, p := range of {
		distance[p] = 0
	}
	onlyTests := map[string]int{}
	for at, wave := 1, of; len(wave) > 0; at++ {
		var next []string
		for name, p := range r.packages {
			imports := func(list []string) bool {
				return slices.ContainsFunc(list, func(i string) bool { return slices.Contains(wave, i) })
			}
			if _, known := distance[name]; !known && imports(p.imports) {
				next = append(next, name)
			} else if _, known := onlyTests[name]; !known && imports(p.testImports) {
				onlyTests[name] = at
			}
		}
		for _, name := range next {
			distance[name] = at
		}
		wave = next
	}
	for name, at := range onlyTests {
		if d, ok := distance[name]; !ok || at < d {
			distance[name] = at
		}
	}
	for _, p := range of {
		delete(distance, p)
	}
	return distance
}

// owner returns the package that a file belongs to: the one in the nearest directory above it.
func (r *repo) owner(file string) (name string, ok bool) {
	for dir := path.Dir(file); dir != "."; dir = path.Dir(dir) {
		if _, ok := r.packages[dir]; ok {
			return dir, true
		}
	}
	return "", false
}

// testNames returns the names of the tests in a directory, by file. It only parses, so it needs no build.
func testNames(dir string) (map[string][]string, error) {
	files, err := filepath.Glob(dir + "/*_test.go")
	if err != nil {
		return nil, err
	}
	names := map[string][]string{}
	for _, file := range files {
		f, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		for _, d := range f.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && f.Recv == nil && strings.HasPrefix(f.Name.Name, "Test") && f.Name.Name != "TestMain" {
				names[file] = append(names[file], f.Name.Name)
			}
		}
	}
	return names, nil
}

// changes returns the base and the files that differ from it: committed, not committed, not known to git yet.
func changes(base string) (string, []string, error) {
	untracked, err := git("ls-files", "-z", "--others", "--exclude-standard")
	if err != nil {
		return "", nil, err
	}
	since := func(commit string) ([]string, error) {
		out, err := git("diff", "-z", "--name-only", "--no-renames", commit, "--")
		return append(fields(out), fields(untracked)...), err
	}
	if base == "" {
		base = mergeBase()
	}
	if base != "" {
		files, err := since(base)
		return base, files, err
	}
	files, err := since("HEAD")
	if err == nil && len(files) == 0 {
		files, err = since("HEAD~1")
		return "HEAD~1", files, err
	}
	return "HEAD", files, err
}

// mergeBase returns where this branch left the remote one, or "" if no remote one is known.
func mergeBase() string {
	for _, ref := range []string{"origin/main", "origin/HEAD"} {
		if out, err := git("merge-base", "HEAD", ref); err == nil {
			return strings.TrimSpace(out)
		}
	}
	return ""
}

func git(args ...string) (string, error) {
	out, err := output(exec.Command("git", args...))
	return string(out), err
}

// fields returns the names in the output of git -z.
func fields(out string) []string {
	return strings.FieldsFunc(out, func(r rune) bool { return r == 0 })
}

// output returns what a command prints. The error contains what it prints about its failure.
func output(c *exec.Cmd) ([]byte, error) {
	var stderr bytes.Buffer
	c.Stderr = &stderr
	out, err := c.Output()
	if err != nil {
		return nil, fmt.Errorf("%s: %w\n%s", c, err, stderr.Bytes())
	}
	return out, nil
}
