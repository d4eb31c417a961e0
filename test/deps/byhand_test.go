package deps

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

const byHand = "docs/adr/0039-what-stays-by-hand.md"

var (
	handRow  = regexp.MustCompile(`(?m)^\| ([^|]*) \| ([\d ]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$`)
	tableRow = regexp.MustCompile(`(?m)^\| .*$`)
	handPath = regexp.MustCompile("`([^` ]*/[^` ]*)`")
)

// TestLinesByHand compares the table in docs/adr/0039-*.md to the code; UPDATE=1 in the environment writes the numbers.
func TestLinesByHand(t *testing.T) {
	text := read(t, byHand)
	fixed, complaints := countByHand(text, codeLines)
	if n := len(handRow.FindAllString(text, -1)); n < 20 {
		t.Errorf("rows of %s: got %d, want at least 20", byHand, n)
	}
	if os.Getenv("UPDATE") != "" {
		if err := os.WriteFile(filepath.Join(root, byHand), []byte(fixed), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	for _, c := range complaints {
		t.Errorf("%s: %s", byHand, c)
	}
}

// countByHand returns the document with true numbers of lines, and what is wrong with its rows: no path, a path without
// code, an empty cell, a number in another format, or one that is off by more than a tenth.
func countByHand(text string, lines func(path string) (int, error)) (fixed string, complaints []string) {
	complain := func(format string, args ...any) { complaints = append(complaints, fmt.Sprintf(format, args...)) }
	fixed = tableRow.ReplaceAllStringFunc(text, func(row string) string {
		cells := handRow.FindStringSubmatch(row)
		if strings.HasPrefix(row, "| part |") {
			return row
		}
		if cells == nil {
			complain("not a row of five cells with a number: %s", row)
			return row
		}
		paths := handPath.FindAllStringSubmatch(cells[1], -1)
		if paths == nil {
			complain("%s: the row names no path", cells[1])
		}
		n := 0
		for _, p := range paths {
			some, err := lines(p[1])
			if err != nil {
				complain("%s: %v", cells[1], err)
			}
			n += some
		}
		said, _ := strconv.Atoi(strings.ReplaceAll(cells[2], " ", ""))
		if thousands(said) != cells[2] || max(said-n, n-said)*10 > n {
			complain("%s: says %s lines, want about %s", cells[1], cells[2], thousands(n))
		}
		return strings.Replace(row, "| "+cells[2]+" |", "| "+thousands(n)+" |", 1)
	})
	return fixed, complaints
}

// thousands formats a number below a million as the documents do: 1 234.
func thousands(n int) string {
	if n < 1000 {
		return strconv.Itoa(n)
	}
	return fmt.Sprintf("%d %03d", n/1000, n%1000)
}

// codeLines counts the lines of the files and directories that a pattern matches, without tests. Of directories it counts
// the Go files.
func codeLines(pattern string) (n int, err error) {
	matches, err := filepath.Glob(filepath.Join(root, pattern))
	if err != nil {
		return 0, err
	}
	for _, match := range matches {
		err := filepath.WalkDir(match, func(path string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() || strings.HasSuffix(path, "_test.go") || path != match && !strings.HasSuffix(path, ".go") {
				return err
			}
			content, err := os.ReadFile(path)
			n += strings.Count(string(content), "\n")
			return err
		})
		if err != nil {
			return 0, err
		}
	}
	if n == 0 {
		return 0, fmt.Errorf("%s has no code", pattern)
	}
	return n, nil
}

func TestLinesByHandAreChecked(t *testing.T) {
	const table = "| part | lines | instead of | why by hand | what would retire it |\n|---|---:|---|---|---|\n%s\n"
	lines := func(path string) (int, error) {
		if path != "internal/x" {
			return 0, fmt.Errorf("%s has no code", path)
		}
		return 1000, nil
	}
	for row, want := range map[string]string{
		"| x (`internal/x`) | 1 000 | lib | why | when |": "",
		"| x (`internal/x`) | 905 | lib | why | when |":   "",
		"| x (`internal/x`) | 899 | lib | why | when |":   "says 899 lines, want about 1 000",
		"| x (`internal/x`) | 1 101 | lib | why | when |": "says 1 101 lines",
		"| x (`internal/x`) | 1000 | lib | why | when |":  "says 1000 lines",
		"| x | 1 000 | lib | why | when |":                "names no path",
		"| x (`internal/y`) | 1 000 | lib | why | when |": "internal/y has no code",
		"| x (`internal/x`) | 1 000 | lib | why |":        "not a row of five cells",
		"| x (`internal/x`) | many | lib | why | when |":  "not a row of five cells",
	} {
		fixed, got := countByHand(fmt.Sprintf(table, row), lines)
		if joined := strings.Join(got, "\n"); !strings.Contains(joined, want) || (want == "") != (joined == "") {
			t.Errorf("%s: complaints are %q, want %q", row, joined, want)
		}
		if strings.HasPrefix(want, "says") && !strings.Contains(fixed, "| 1 000 |") {
			t.Errorf("%s: corrected to %q, want 1 000", row, fixed)
		}
	}
	if _, err := codeLines("internal/nowhere"); err == nil {
		t.Error("codeLines of a missing directory reports no error")
	}
}
