package deps

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// missing maps what SCOPE.md and README.md call missing to what shows in the code that it is. Who builds one of these changes the
// code, and is reminded here of the documents.
var missing = map[string]struct {
	// file has a text, or if lacks is set, no file below the directory has it.
	file, text string
	lacks      bool
}{
	"checkpoint and restore":             {file: "internal/cri/unimplemented.go", text: "errCheckpoint"},
	"keyless signatures (Fulcio, Rekor)": {file: "internal/image/policy/requirement.go", text: "signatures are checked only with keys"},
	"live migration":                     {file: "internal/sandbox/vm/internal/qemu/", text: `"tcp:`, lacks: true},
	"snapshots on demand":                {file: "internal/sandbox/vm/", text: `"snapshot-save"`, lacks: true},
	"Secure Boot":                        {file: "internal/sandbox/vm/internal/boot/find.go", text: "without Secure Boot"},
	"passthrough of GPUs and other devices that are not disks": {file: "internal/cdi/cdi.go", text: "only block devices are possible"},
	"hot-plug of memory and CPUs": {file: "internal/sandbox/vm/define.go",
		text: "if b.cfg.Plug {\n\t\td.Growth = "},
	// The table in README.md.
	"scaling to load, device management": {file: "internal/", text: "autoscaling/v2", lacks: true},
	"Windows, years in production":       {file: "CHANGELOG.md", text: "Nothing has been released yet"},
}

// rowsAfter returns the first cells of the rows that follow a row of a table.
func rowsAfter(text, row string) (cells []string, err error) {
	_, rest, found := strings.Cut(text, row)
	if !found {
		return nil, fmt.Errorf("there is no row %q", row)
	}
	for line := range strings.Lines(rest) {
		line = strings.TrimSpace(line)
		if line == "" && cells == nil || strings.HasPrefix(line, "|--") {
			continue
		}
		if !strings.HasPrefix(line, "|") {
			break
		}
		cells = append(cells, strings.TrimSpace(strings.Split(line, "|")[1]))
	}
	if len(cells) == 0 {
		return nil, fmt.Errorf("no row follows %q", row)
	}
	return cells, nil
}

// announced returns the lines of a changelog that announce what a name means, other than as an exception.
func announced(changelog, name string) []string {
	words, _, _ := strings.Cut(name, " (")
	pattern := regexp.MustCompile(`(?i)\b` + regexp.QuoteMeta(words) + `\b`)
	return slices.DeleteFunc(slices.Collect(strings.Lines(changelog)), func(line string) bool {
		at := pattern.FindStringIndex(line)
		return at == nil || strings.Contains(line[:at[0]], " except ")
	})
}

// TestNotYet: what README.md and SCOPE.md call missing is missing: the code refuses it or lacks it, and the changelog does not
// announce it.
func TestNotYet(t *testing.T) {
	for _, document := range []struct{ path, row string }{
		{"SCOPE.md", "| not yet | for |"}, {"README.md", "| **Not in Tripod yet** | | | | | | | |"},
	} {
		names, err := rowsAfter(read(t, document.path), document.row)
		if err != nil {
			t.Errorf("%s: %v", document.path, err)
		}
		for _, name := range names {
			proof, known := missing[name]
			if !known {
				t.Errorf("%s says that %q is missing; what shows that, in this test?", document.path, name)
				continue
			}
			if proof.lacks {
				for _, file := range files(t, ".go") {
					if strings.HasPrefix(file, proof.file) && !strings.HasSuffix(file, "_test.go") && strings.Contains(read(t, file), proof.text) {
						t.Errorf("%s says that %q is missing, but %s has %q", document.path, name, file, proof.text)
					}
				}
			} else if !strings.Contains(read(t, proof.file), proof.text) {
				t.Errorf("%s says that %q is missing, but %s does not say %q any more", document.path, name, proof.file, proof.text)
			}
			for _, line := range announced(read(t, "CHANGELOG.md"), name) {
				t.Errorf("%s says that %q is missing, and CHANGELOG.md announces it: %s", document.path, name, line)
			}
		}
	}
}

// TestNotYetCatches: the parts of TestNotYet find what they look for.
func TestNotYetCatches(t *testing.T) {
	cells, err := rowsAfter("| a | b |\n|---|---|\n| c | d |\n| e | f |\n\n| g |\n", "| a | b |")
	if err != nil || !slices.Equal(cells, []string{"c", "e"}) {
		t.Errorf("rowsAfter() = %q, %v; want c and e", cells, err)
	}
	if _, err := rowsAfter("| a |\n\ntext\n", "| a |"); err == nil {
		t.Error("rowsAfter() accepts a table without rows")
	}
	got := announced("- All calls except live migration.\n- Live migration of machines.\n- Others.\n", "live migration")
	if !slices.Equal(got, []string{"- Live migration of machines.\n"}) {
		t.Errorf("announced() = %q, want the line that announces it", got)
	}
}
