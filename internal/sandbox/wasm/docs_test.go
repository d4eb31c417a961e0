package wasm

import (
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/tripod-run/tripod/internal/component/wasi"
)

// TestHarmlessIsDocumented checks that docs/wasm-fields.md ends with the table of fields that are accepted without
// effect.
func TestHarmlessIsDocumented(t *testing.T) {
	var table strings.Builder
	for _, field := range slices.Sorted(maps.Keys(Harmless)) {
		fmt.Fprintf(&table, "| %s | %s |\n", field, Harmless[field])
	}
	if !strings.HasSuffix(document(t, "docs/wasm-fields.md"), table.String()) {
		t.Errorf("docs/wasm-fields.md does not end with\n%s", table.String())
	}
}

func document(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile("../../../" + path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

var quoted = regexp.MustCompile("`([^`]+)`")

// code returns what a text has in backticks.
func codeOf(text string) []string {
	var all []string
	for _, m := range quoted.FindAllStringSubmatch(text, -1) {
		all = append(all, m[1])
	}
	return all
}

// TestWaysOutAreDocumented: SECURITY.md names all packages by which guests call out, and no others.
func TestWaysOutAreDocumented(t *testing.T) {
	_, rest, found := strings.Cut(document(t, "SECURITY.md"), "it calls out only by ")
	sentence, _, ended := strings.Cut(rest, ", from its pod's network namespace")
	if !found || !ended {
		t.Fatal("SECURITY.md does not say by which interfaces guests call out")
	}
	want := map[string]bool{}
	for _, name := range append([]string{storeInterface}, egressInterfaces...) {
		if pkg, _, _ := strings.Cut(name, "/"); strings.HasPrefix(pkg, "wasi:") {
			name = pkg
		}
		want[name] = true
	}
	if got := slices.Sorted(slices.Values(codeOf(sentence))); !slices.Equal(got, slices.Sorted(maps.Keys(want))) {
		t.Errorf("SECURITY.md names %v, and guests call out by %v", got, slices.Sorted(maps.Keys(want)))
	}
}

// interfacesIn returns the interfaces of a table, whose first column has the names, without package after the first one, and then
// the versions: `wasi:p/a`, `b`, `@1` or `@2`.
func interfacesIn(table string) []string {
	var all []string
	for line := range strings.Lines(table) {
		if !strings.HasPrefix(line, "| `") {
			continue
		}
		var names, versions []string
		for _, word := range codeOf(strings.Split(line, "|")[1]) {
			name, version, _ := strings.Cut(word, "@")
			if name != "" {
				names = append(names, name)
			}
			if version != "" {
				versions = append(versions, version)
			}
		}
		pkg, _, _ := strings.Cut(names[0], "/")
		for _, name := range names {
			for _, version := range versions {
				all = append(all, pkg+"/"+strings.TrimPrefix(name, pkg+"/")+"@"+version)
			}
		}
	}
	return slices.Sorted(slices.Values(all))
}

// TestProposalsAreDocumented: docs/wasm-guests.md lists the proposals that the host provides, with their versions, and SCOPE.md counts
// them.
func TestProposalsAreDocumented(t *testing.T) {
	if got, want := interfacesIn("| x |\n|---|\n| `wasi:p/a`, `b`, `@1` or `@2` | `c` |\n| `wasi:q/d@3` | |\n"),
		[]string{"wasi:p/a@1", "wasi:p/a@2", "wasi:p/b@1", "wasi:p/b@2", "wasi:q/d@3"}; !slices.Equal(got, want) {
		t.Fatalf("interfacesIn() = %v, want %v", got, want)
	}
	_, rest, _ := strings.Cut(document(t, "docs/wasm-guests.md"), "| interface | what it gives |\n")
	table, _, _ := strings.Cut(rest, "\n\n")
	want := slices.Sorted(slices.Values(wasi.Drafts()))
	if got := interfacesIn(table); !slices.Equal(got, want) {
		t.Errorf("docs/wasm-guests.md lists %v, and the host provides %v", got, want)
	}
	packages := map[string]bool{}
	for _, name := range want {
		pkg, _, _ := strings.Cut(name, "/")
		packages[pkg] = true
	}
	numbers := []string{"no", "one", "two", "three", "four", "five", "six", "seven", "eight"}
	if text := "[" + numbers[len(packages)] + " proposals](docs/wasm-guests.md#interfaces)"; !strings.Contains(document(t, "SCOPE.md"), text) {
		t.Errorf("SCOPE.md does not say %q", text)
	}
}
