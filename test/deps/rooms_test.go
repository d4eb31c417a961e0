package deps

import (
	"fmt"
	"go/parser"
	"go/token"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// subpackage matches a line of the list of subpackages in a package comment.
var subpackage = regexp.MustCompile(`(?m)^\t([a-z][\w/]*) {2,}\S`)

// TestRoomsNameTheirPackages: a package comment lists the packages below the package, under "# Subpackages". A package
// belongs to the list of the nearest package above it. Packages for tests are left out.
func TestRoomsNameTheirPackages(t *testing.T) {
	var packages []string
	ours(t, func(p *pkg, _ map[string]*pkg) {
		if name := strings.TrimPrefix(p.ImportPath, module); strings.HasPrefix(name, "internal/") && p.Name != "" {
			packages = append(packages, name)
		}
	})
	rooms := subpackages(packages)
	if len(rooms) < 10 {
		t.Errorf("packages with subpackages: got %d, want at least 10", len(rooms))
	}
	for _, room := range packages {
		for _, complaint := range unlisted(packageComment(t, room), rooms[room]) {
			t.Errorf("the package comment of %s %s", room, complaint)
		}
	}
}

// subpackages maps each package to those below it, as paths relative to it. It leaves out packages for tests: those
// below a directory test, and those whose name ends with it.
func subpackages(packages []string) map[string][]string {
	rooms := map[string][]string{}
	for _, p := range packages {
		if strings.HasSuffix(p, "test") || strings.Contains(p, "/test/") {
			continue
		}
		for room := filepath.Dir(p); room != "."; room = filepath.Dir(room) {
			if slices.Contains(packages, room) {
				rooms[room] = append(rooms[room], strings.TrimPrefix(p, room+"/"))
				break
			}
		}
	}
	return rooms
}

// unlisted returns what is wrong with the list of subpackages in a package comment.
func unlisted(comment string, want []string) (complaints []string) {
	_, list, _ := strings.Cut(comment, "\n# Subpackages\n")
	list, _, _ = strings.Cut(list, "\n# ")
	var listed []string
	for _, line := range subpackage.FindAllStringSubmatch(list, -1) {
		listed = append(listed, line[1])
		if !slices.Contains(want, line[1]) {
			complaints = append(complaints, fmt.Sprintf("lists %s, which is no package below it", line[1]))
		}
	}
	for _, name := range want {
		if !slices.Contains(listed, name) {
			complaints = append(complaints, fmt.Sprintf("does not list %s under \"# Subpackages\"", name))
		}
	}
	return complaints
}

// packageComment returns the package comment of a directory.
func packageComment(t *testing.T, dir string) string {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(root, dir, "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ParseComments|parser.PackageClauseOnly)
		if err != nil {
			t.Fatal(err)
		}
		if file.Doc != nil && !strings.HasSuffix(name, "_test.go") {
			return file.Doc.Text()
		}
	}
	return ""
}

func TestMissingSubpackagesAreFound(t *testing.T) {
	const comment = "Package p is a room.\n\n\tdiagram  x\n\n# Subpackages\n\n\tone    is the first\n\tinternal/two   is the second\n\n" +
		"# More\n\n\tthree  is no list\n"
	for _, c := range []struct {
		comment string
		below   []string
		want    int
	}{
		{comment, []string{"one", "internal/two"}, 0},
		{comment, []string{"one", "internal/two", "three"}, 1},
		{comment, []string{"one"}, 1},
		{"Package p names one.\n\n\tone   outside of the list\n", []string{"one"}, 1},
		{"Package p is alone.", nil, 0},
	} {
		if got := unlisted(c.comment, c.below); len(got) != c.want {
			t.Errorf("unlisted of %q for %v = %q, want %d complaints", c.comment, c.below, got, c.want)
		}
	}
	packages := []string{"internal/a", "internal/a/b", "internal/a/b/internal/c", "internal/a/atest", "internal/a/test/d", "internal/e"}
	if got, want := fmt.Sprint(subpackages(packages)), "map[internal/a:[b] internal/a/b:[internal/c]]"; got != want {
		t.Errorf("subpackages = %s, want %s", got, want)
	}
}

var (
	commandCall = regexp.MustCompile(`\b(\w+Command)\(`)
	commandFunc = regexp.MustCompile(`(?s)\nfunc (?:\(a \*App\) )?(\w+Command)\(.*?\bUse:\s+"([\w-]+)`)
	newRootFunc = regexp.MustCompile(`(?s)\nfunc newRoot\(.*?\n}\n`)
)

// TestCommandsOfTheProgram: the package comment of cmd/tripod names the commands that newRoot adds one by one.
func TestCommandsOfTheProgram(t *testing.T) {
	uses := map[string]string{}
	for _, file := range files(t, ".go") {
		if dir := filepath.Dir(file); dir != "cmd/tripod" && dir != "internal/cli" {
			continue
		}
		for _, f := range commandFunc.FindAllStringSubmatch(read(t, file), -1) {
			uses[f[1]] = f[2]
		}
	}
	added := newRootFunc.FindString(read(t, "cmd/tripod/main.go"))
	for _, name := range unnamedCommands(added, packageComment(t, "cmd/tripod"), uses) {
		t.Errorf("the package comment of cmd/tripod does not name the command %s", name)
	}
	if len(uses) < 40 || !strings.Contains(added, "daemonCommand()") {
		t.Errorf("functions that make commands: got %d, want at least 40; newRoot: got %q, want the daemon in it", len(uses), added)
	}
}

// unnamedCommands returns the commands that source adds and that the comment does not name. uses maps the functions that
// make commands to the names of the commands.
func unnamedCommands(source, comment string, uses map[string]string) (missing []string) {
	for _, call := range commandCall.FindAllStringSubmatch(source, -1) {
		if call[1] == "AddCommand" {
			continue // cobra's
		}
		name := uses[call[1]]
		if name == "" || !regexp.MustCompile(`(?m)[─,] `+regexp.QuoteMeta(name)+`\b`).MatchString(comment) {
			missing = append(missing, fmt.Sprintf("%s (%s)", name, call[1]))
		}
	}
	return missing
}

func TestUnnamedCommandsAreFound(t *testing.T) {
	uses := map[string]string{"oneCommand": "one", "twoCommand": "two", "threeCommand": "three"}
	source, comment := "root.AddCommand(oneCommand(), twoCommand(app), threeCommand(), fourCommand())", "├─ one, two ── three or so"
	if got, want := unnamedCommands(source, comment, uses), []string{" (fourCommand)"}; !slices.Equal(got, want) {
		t.Errorf("unnamedCommands = %q, want %q", got, want)
	}
	if got, want := unnamedCommands(source, "├─ one, twofold", uses), 3; len(got) != want {
		t.Errorf("unnamedCommands = %q, want %d", got, want)
	}
}

// maxFile bounds a file, and maxRoot the root package of a kind without its tests, in lines.
const (
	maxFile = 500
	maxRoot = 3500
)

// TestRoomsAreNotCrowded: what has become larger than one can read at a sitting is divided.
func TestRoomsAreNotCrowded(t *testing.T) {
	roots := map[string]int{}
	for _, path := range files(t, ".go") {
		text := read(t, path)
		n := strings.Count(text, "\n")
		if n > maxFile && !strings.HasPrefix(text, "// Code generated ") {
			t.Errorf("%s has %d lines, want at most %d", path, n, maxFile)
		}
		if !strings.HasSuffix(path, "_test.go") {
			roots[filepath.Dir(path)] += n
		}
	}
	for _, kind := range []string{"internal/sandbox/linux", "internal/sandbox/vm", "internal/sandbox/wasm"} {
		if n := roots[kind]; n == 0 || n > maxRoot {
			t.Errorf("the root package %s has %d lines, want at most %d", kind, n, maxRoot)
		}
	}
}
