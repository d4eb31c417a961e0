package deps

import (
	"bytes"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/printer"
	"go/token"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// sameLines is the number of lines from which identical statements in two kinds of pod are an error.
const sameLines = 6

// kinds maps each kind of pod to its directories.
var kinds = map[string][]string{
	"linux": {"internal/sandbox/linux"},
	"vm":    {"internal/sandbox/vm"},
	"wasm":  {"internal/sandbox/wasm"},
}

// run is the location of consecutive statements.
type run struct {
	kind, file string
	from, to   int
}

func (r run) String() string { return fmt.Sprintf("%s:%d-%d", r.file, r.from, r.to) }

// runs maps the text of statements to their locations. A run is as short as possible with at least sameLines lines. The
// text leaves out comments, layout and string literals, so that statements with different messages are the same.
type runs map[string][]run

// read adds the runs of a file.
func (rs runs) read(kind, name string, source any) error {
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, name, source, parser.SkipObjectResolution)
	if err != nil {
		return err
	}
	ast.Inspect(file, func(n ast.Node) bool {
		if lit, ok := n.(*ast.BasicLit); ok && lit.Kind == token.STRING {
			lit.Value = `""`
		}
		return true
	})
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.BlockStmt:
			err = errors.Join(err, rs.list(kind, name, files, n.List))
		case *ast.CaseClause:
			err = errors.Join(err, rs.list(kind, name, files, n.Body))
		case *ast.CommClause:
			err = errors.Join(err, rs.list(kind, name, files, n.Body))
		}
		return true
	})
	return err
}

func (rs runs) list(kind, name string, files *token.FileSet, list []ast.Stmt) error {
	texts := make([]string, len(list))
	for i, s := range list {
		var text bytes.Buffer
		if err := printer.Fprint(&text, token.NewFileSet(), s); err != nil {
			return err
		}
		texts[i] = text.String()
	}
	line := func(p token.Pos) int { return files.Position(p).Line }
	for i := range list {
		lines := 0
		for j := i; j < len(list); j++ {
			if lines += line(list[j].End()) - line(list[j].Pos()) + 1; lines >= sameLines {
				key := strings.Join(texts[i:j+1], "\n")
				rs[key] = append(rs[key], run{kind, name, line(list[i].Pos()), line(list[j].End())})
				break
			}
		}
	}
	return nil
}

// shared returns the runs that more than one kind has.
func (rs runs) shared() [][]run {
	var found [][]run
	for _, places := range rs {
		if slices.ContainsFunc(places, func(r run) bool { return r.kind != places[0].kind }) {
			found = append(found, places)
		}
	}
	slices.SortFunc(found, func(a, b []run) int { return strings.Compare(a[0].String(), b[0].String()) })
	return found
}

// TestKindsShareNoStatements: common code of two kinds of pod is in a shared package, below internal/sandbox or in a
// service.
func TestKindsShareNoStatements(t *testing.T) {
	found, n := runs{}, 0
	for _, kind := range slices.Sorted(maps.Keys(kinds)) {
		for _, dir := range kinds[kind] {
			err := filepath.WalkDir(filepath.Join("../..", dir), func(name string, e fs.DirEntry, err error) error {
				if err != nil || e.IsDir() || !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") {
					return err
				}
				n++
				return found.read(kind, name, nil)
			})
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	if n < 100 {
		t.Fatalf("files read: got %d, want at least 100", n)
	}
	for _, places := range found.shared() {
		t.Errorf("%d or more identical lines in two kinds; move them to a shared package: %v", sameLines, places)
	}
}

func TestSharedStatementsAreFound(t *testing.T) {
	const shared = `
	a := open("x")
	if a == nil {
		return
	}
	b := a.next()
	%s
	b.use("y")`
	for name, c := range map[string]struct {
		one, other string
		want       bool
	}{
		"the same":       {fmt.Sprintf(shared, ""), fmt.Sprintf(shared, ""), true},
		"other comments": {fmt.Sprintf(shared, "// why"), fmt.Sprintf(shared, ""), true},
		"other strings":  {fmt.Sprintf(shared, ""), strings.ReplaceAll(fmt.Sprintf(shared, ""), `"x"`, `"z"`), true},
		"within a block": {fmt.Sprintf(shared, ""), "for range 3 {" + fmt.Sprintf(shared, "") + "\n}", true},
		"other names":    {fmt.Sprintf(shared, ""), strings.ReplaceAll(fmt.Sprintf(shared, ""), "b", "c"), false},
		"too short":      {"a()\nb()\nc()\nd()\ne()", "a()\nb()\nc()\nd()\ne()", false},
	} {
		found := runs{}
		for kind, body := range map[string]string{"linux": c.one, "vm": c.other} {
			if err := found.read(kind, kind+".go", "package p\nfunc f() {\n"+body+"\n}"); err != nil {
				t.Fatal(err)
			}
		}
		if got := found.shared(); (got != nil) != c.want {
			t.Errorf("%s: shared() = %v, want a result: %t", name, got, c.want)
		}
	}
}
