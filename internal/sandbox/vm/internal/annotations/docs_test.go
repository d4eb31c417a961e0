package annotations

import (
	"fmt"
	"os"
	"strings"
	"testing"
)

// TestAnnotationsAreDocumented: docs/vm.md has the table of all annotations between two marks. UPDATE=1 in the
// environment writes the table.
func TestAnnotationsAreDocumented(t *testing.T) {
	const path, from, to = "../../../../../docs/vm.md", "<!-- annotations: made by internal/sandbox/vm/internal/annotations, UPDATE=1 -->\n", "<!-- end of annotations -->\n"
	var table strings.Builder
	table.WriteString("| `tripod.dev/vm.…` | Virtlet's name | Value | Without it | What it does |\n|---|---|---|---|---|\n")
	for _, a := range Known {
		virtlet := "—"
		if a.Virtlet != "" {
			virtlet = "`" + a.Virtlet + "`"
		}
		byDefault := a.Default
		if byDefault == "" {
			byDefault = "—"
		}
		fmt.Fprintf(&table, "| `%s` | %s | %s | %s | %s |\n", a.Name, virtlet, a.Allowed, byDefault, a.Meaning)
	}
	doc, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok := strings.Cut(string(doc), from)
	is, after, ok2 := strings.Cut(rest, to)
	switch {
	case !ok || !ok2:
		t.Fatalf("%s lacks the marks\n%s%s", path, from, to)
	case is == table.String():
	case os.Getenv("UPDATE") != "":
		if err := os.WriteFile(path, []byte(before+from+table.String()+to+after), 0o644); err != nil {
			t.Fatal(err)
		}
	default:
		t.Errorf("the table of annotations in %s is not up to date; UPDATE=1 go test writes it:\n%s", path, table.String())
	}
}
