package deps

import (
	"regexp"
	"strings"
	"testing"
)

// ownKey matches a string that begins like a key of an annotation or a label of ours.
var ownKey = regexp.MustCompile(`["` + "`" + `](tripod\.dev|tripod\.run|vimana\.host)/`)

// TestKeysAreInOneFile: the product's own annotations and labels have their keys in package keys, so that all have one domain.
func TestKeysAreInOneFile(t *testing.T) {
	seen := false
	for _, path := range files(t, ".go") {
		if strings.HasSuffix(path, "_test.go") || !strings.HasPrefix(path, "internal/") && !strings.HasPrefix(path, "cmd/") {
			continue
		}
		where := strayKeys(read(t, path))
		if path == "internal/keys/keys.go" {
			seen = len(where) > 0
			continue
		}
		for _, line := range where {
			t.Errorf("%s: %s: the key belongs into internal/keys", path, line)
		}
	}
	if !seen {
		t.Error("no keys in internal/keys/keys.go")
	}
}

// strayKeys returns the lines of a source that have a key of ours outside of comments.
func strayKeys(source string) (lines []string) {
	for line := range strings.Lines(source) {
		code, _, _ := strings.Cut(line, "//")
		if ownKey.MatchString(code) {
			lines = append(lines, strings.TrimSpace(line))
		}
	}
	return lines
}

func TestStrayKeysAreFound(t *testing.T) {
	const source = "const a = \"tripod.dev/a\"\n// or \"tripod.dev/b\"\nx := `vimana.host/c`\ny := \"annotation tripod.dev/d\"\n"
	if got := strayKeys(source); len(got) != 2 {
		t.Errorf("stray keys: got %q, want two", got)
	}
}
