package deps

import (
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode"
)

const root = "../.."

// files returns the files in the repository that have one of the suffixes, as paths relative to its root.
func files(t *testing.T, suffixes ...string) []string {
	t.Helper()
	var found []string
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := entry.Name()
		if entry.IsDir() && (name == "node_modules" || name == ".venv" || path == filepath.Join(root, "build") ||
			path == filepath.Join(root, ".git")) {
			return fs.SkipDir
		}
		if !entry.IsDir() && slices.ContainsFunc(suffixes, func(s string) bool { return strings.HasSuffix(name, s) }) {
			path, err = filepath.Rel(root, path)
			found = append(found, path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

func read(t *testing.T, path string) string {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(root, path))
	if err != nil {
		t.Fatal(err)
	}
	return string(content)
}

var (
	fence   = regexp.MustCompile("(?ms)^ *```.*?^ *```$")
	link    = regexp.MustCompile(`\[([^\]\[]*)\]\(([^()\s]+)\)`)
	heading = regexp.MustCompile(`(?m)^#+ (.*)$`)
	scheme  = regexp.MustCompile(`^[a-z]+:`)

	identifier = regexp.MustCompile("^`([\\w.]+)`$")
)

// TestLinksOfDocuments: the file and the heading that a link names exist. If the text of a link to a Go file is an
// identifier in backquotes, the file declares it.
func TestLinksOfDocuments(t *testing.T) {
	n := 0
	for _, document := range files(t, ".md") {
		text := fence.ReplaceAllString(read(t, document), "")
		for _, l := range link.FindAllStringSubmatch(text, -1) {
			if scheme.MatchString(l[2]) {
				continue
			}
			n++
			if err := follow(t, document, l[1], l[2]); err != nil {
				t.Errorf("%s: the link %s: %v", document, l[0], err)
			}
		}
	}
	if n < 50 {
		t.Errorf("links found: got %d, want at least 50", n)
	}
}

func follow(t *testing.T, document, text, target string) error {
	t.Helper()
	file, anchor, _ := strings.Cut(target, "#")
	path := document
	if file != "" {
		path = filepath.Join(filepath.Dir(document), file)
	}
	if _, err := os.Stat(filepath.Join(root, path)); err != nil {
		return err
	}
	if anchor != "" && !slices.Contains(anchors(read(t, path)), anchor) {
		return fmt.Errorf("%s has no heading %q", path, anchor)
	}
	if name := identifier.FindStringSubmatch(text); name != nil && strings.HasSuffix(path, ".go") && !declares(read(t, path), name[1]) {
		return fmt.Errorf("%s does not declare %s", path, name[1])
	}
	return nil
}

// anchors returns the anchors that GitHub generates for a document's headings.
func anchors(document string) []string {
	var names []string
	for _, h := range heading.FindAllStringSubmatch(fence.ReplaceAllString(document, ""), -1) {
		name := regexp.MustCompile(`[^\p{L}\p{N} _-]`).ReplaceAllString(strings.ToLower(h[1]), "")
		names = append(names, strings.ReplaceAll(name, " ", "-"))
	}
	return names
}

// declares reports whether Go source declares an identifier, or the method for "Type.Method".
func declares(source, name string) bool {
	receiver := `(?:\([^)]*\) )?`
	if owner, method, ok := strings.Cut(name, "."); ok {
		receiver, name = `\((?:\w+ )?\*?`+regexp.QuoteMeta(owner)+`\) `, method
		return regexp.MustCompile(`(?m)^func ` + receiver + regexp.QuoteMeta(name) + `\b`).MatchString(source)
	}
	name = regexp.QuoteMeta(name)
	return regexp.MustCompile(`(?m)^func ` + receiver + name + `\b|^(?:\t|type |var |const )` + name + `\b`).MatchString(source)
}

var path = regexp.MustCompile("`((?:cmd|docs|dist|examples|hack|internal|test)/[\\w./-]*\\w)`")

// TestPathsInDocuments: a path in backquotes exists. Decisions (docs/adr) and the change log refer to earlier trees.
func TestPathsInDocuments(t *testing.T) {
	for _, document := range files(t, ".md") {
		if strings.HasPrefix(document, "docs/adr/") || document == "CHANGELOG.md" {
			continue
		}
		for _, p := range path.FindAllStringSubmatch(read(t, document), -1) {
			if _, err := os.Stat(filepath.Join(root, p[1])); err != nil {
				t.Errorf("%s names %s, which does not exist", document, p[1])
			}
		}
	}
}

var (
	testFunc  = regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)\w*)\(`)
	suiteCase = regexp.MustCompile(`\{"([CEINVW]\d+[A-Z]\w*)", `)
	cited     = regexp.MustCompile(`^(?:(?:Test|Fuzz)(?:Fault)?)?_?([CEINVW]\d+)(?:[A-Z_]|$)`)
	citedLast = regexp.MustCompile(`[a-z]([CEIN]\d+)$`) // V and W also begin versions and widths
	faultRow  = regexp.MustCompile(`(?m)^\| ([CEINVW]\d+) \|.*\| (.*) \|$`)
	testName  = regexp.MustCompile("`((?:Test|Fuzz)\\w*|[CEINVW]\\d+[A-Z]\\w*)(?:/\\w+)?(…?)`")
)

// testNames returns the names of all tests and fuzz targets, and of the cases of the backends' suite.
func testNames(t *testing.T) map[string]bool {
	t.Helper()
	names := map[string]bool{}
	for _, file := range files(t, "_test.go", "suite.go") {
		source := read(t, file)
		for _, found := range slices.Concat(testFunc.FindAllStringSubmatch(source, -1), suiteCase.FindAllStringSubmatch(source, -1)) {
			names[found[1]] = true
		}
	}
	if len(names) < 500 {
		t.Fatalf("tests found: got %d, want at least 500", len(names))
	}
	return names
}

// mentioned returns the tests that a text names. "Prefix…" names all tests with the prefix.
func mentioned(t *testing.T, where, text string, all map[string]bool) map[string]bool {
	t.Helper()
	names := map[string]bool{}
	for _, m := range testName.FindAllStringSubmatch(text, -1) {
		found := false
		for name := range all {
			if rest, ok := strings.CutPrefix(name, m[1]); ok && (rest == "" || m[2] != "" && !unicode.IsDigit(rune(rest[0]))) {
				names[name], found = true, true
			}
		}
		if !found {
			t.Errorf("%s names %s, which is not a test", where, m[0])
		}
	}
	return names
}

// TestRowsOfFaults: each row of docs/faults.md that a test name cites exists and names the test, and all tests in
// docs/faults.md exist.
func TestRowsOfFaults(t *testing.T) {
	all := testNames(t)
	rows := map[string]map[string]bool{}
	for _, r := range faultRow.FindAllStringSubmatch(read(t, "docs/faults.md"), -1) {
		if rows[r[1]] != nil {
			t.Errorf("docs/faults.md has row %s twice", r[1])
		}
		rows[r[1]] = mentioned(t, "row "+r[1]+" of docs/faults.md", r[2], all)
		if len(rows[r[1]]) == 0 {
			t.Errorf("row %s of docs/faults.md names no test", r[1])
		}
	}
	for name := range all {
		for _, pattern := range []*regexp.Regexp{cited, citedLast} {
			if row := pattern.FindStringSubmatch(name); row != nil && !rows[row[1]][name] {
				t.Errorf("%s cites row %s of docs/faults.md, which does not name the test", name, row[1])
			}
		}
	}
}

// TestTestsInDocuments: a test that a document names exists.
func TestTestsInDocuments(t *testing.T) {
	all := testNames(t)
	for _, document := range files(t, ".md") {
		if !strings.HasPrefix(document, "docs/adr/") {
			mentioned(t, document, read(t, document), all)
		}
	}
}

var runPattern = regexp.MustCompile(`\bgo test [^\n]*-run '?\^?(Test\w*)`)

// TestCommandsInDocuments: a command that runs tests by name matches a test.
func TestCommandsInDocuments(t *testing.T) {
	all, n := testNames(t), 0
	for _, document := range files(t, ".md") {
		for _, m := range runPattern.FindAllStringSubmatch(read(t, document), -1) {
			n++
			if !slices.ContainsFunc(slices.Collect(maps.Keys(all)), func(name string) bool { return strings.Contains(name, m[1]) }) {
				t.Errorf("%s: no test matches -run %s", document, m[1])
			}
		}
	}
	if n == 0 {
		t.Error("found no command in the documents")
	}
}

// TestReadmeShowsWhatTheDemonstrationPrints: each line of the README's sample output is in hack/run.sh.
func TestReadmeShowsWhatTheDemonstrationPrints(t *testing.T) {
	script, n := read(t, "hack/run.sh"), 0
	for line := range strings.Lines(read(t, "README.md")) {
		text, checked := strings.CutPrefix(strings.TrimSpace(line), "✔ ")
		if !checked {
			continue
		}
		n++
		text, _, _ = strings.Cut(text, "  ")       // a remark follows
		text, _, _ = strings.Cut(text, ", 10.88.") // an address of that run
		text = strings.TrimPrefix(text, "greeter-1 ")
		if !strings.Contains(script, text) {
			t.Errorf("README.md shows %q, which hack/run.sh does not print", text)
		}
	}
	if n == 0 {
		t.Error("found no sample output in README.md")
	}
}
