package prose

import (
	"bytes"
	"fmt"
	"go/parser"
	"go/scanner"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// banned lists phrases and their replacements. If a pattern matches good prose, make the pattern narrower.
var banned = []struct {
	phrase *regexp.Regexp
	better string
}{
	{phrase(`of before`), "previous, earlier"},
	{phrase(`anew`), "again, new"},
	{phrase(`tells? of`), "reports, mentions"},
	{phrase(`told of`), "notified of, knows about"},
	{phrase(`is told`), "gets, is given, learns"},
	{phrase(`does without`), "needs no, works without"},
	{phrase(`for else`), "otherwise"},
	{phrase(`go(es)? over to`), "switches to, moves to"},
	{phrase(`without that there`), "unless, although there is no"},
	{phrase(`what has come`), "what has arrived; name it"},
	{regexp.MustCompile(`\belse[.;]`), "otherwise"},
}

// suspect matches every line that could contain a banned phrase. Most lines need no other check.
var suspect = regexp.MustCompile(`(?i)before|anew|tells?|told|without|else|over to|what has`)

// pronoun matches the good uses of "else": nothing else, who else.
var pronoun = regexp.MustCompile(`(?i)\b((no|some|any|every) ?(thing|body|one|where)|what|who|where) else\b`)

func phrase(words string) *regexp.Regexp { return regexp.MustCompile(`(?i)\b` + words + `\b`) }

func TestProse(t *testing.T) {
	root := filepath.Join("..", "..")
	out, err := exec.Command("git", "-C", root, "ls-files", "-co", "--exclude-standard", "*.go", "*.md").Output()
	if err != nil {
		t.Fatalf("git ls-files: %v", err)
	}
	for _, name := range strings.Fields(string(out)) {
		text, err := os.ReadFile(filepath.Join(root, name))
		if os.IsNotExist(err) {
			continue // removed, and not yet committed
		}
		if err != nil {
			t.Fatal(err)
		}
		// The first two files list the phrases.
		if name == "test/prose/prose_test.go" || name == "CONTRIBUTING.md" || strings.Contains(name, "/testdata/") ||
			bytes.Contains(text, []byte("DO NOT EDIT")) {
			continue
		}
		for _, found := range check(name, text) {
			t.Error(found)
		}
	}
}

// check returns a line for each banned phrase in the prose of a file.
func check(name string, text []byte) (found []string) {
	lines := goProse
	if filepath.Ext(name) == ".md" {
		lines = markdownProse
	}
	for _, l := range lines(text) {
		if !suspect.MatchString(l.text) {
			continue
		}
		for _, b := range banned {
			if match := b.phrase.FindString(pronoun.ReplaceAllString(l.text, "")); match != "" {
				found = append(found, fmt.Sprintf("%s:%d: %q → %s", name, l.number, match, b.better))
			}
		}
	}
	return found
}

// line is a line of prose.
type line struct {
	number int
	text   string
}

// goProse returns the comments and string literals of a Go file.
func goProse(text []byte) (lines []line) {
	files := token.NewFileSet()
	file := files.AddFile("", -1, len(text))
	var s scanner.Scanner
	s.Init(file, text, nil, scanner.ScanComments)
	for {
		pos, tok, literal := s.Scan()
		if tok == token.EOF {
			return lines
		}
		if tok == token.COMMENT || tok == token.STRING {
			lines = append(lines, split(literal, file.Line(pos))...)
		}
	}
}

// markdownProse returns the lines of a document that are not in code blocks.
func markdownProse(text []byte) (lines []line) {
	fenced := false
	for _, l := range split(string(text), 1) {
		if strings.HasPrefix(strings.TrimSpace(l.text), "```") {
			fenced = !fenced
		} else if !fenced && !strings.HasPrefix(l.text, "    ") {
			lines = append(lines, l)
		}
	}
	return lines
}

func split(text string, first int) (lines []line) {
	for i, l := range strings.Split(text, "\n") {
		lines = append(lines, line{first + i, l})
	}
	return lines
}

func TestCheck(t *testing.T) {
	source := "package p\n\n// This one tells of it.\nvar anew = \"say it\\n anew\" // nowhere else, or else.\n\nfunc f() { if anew != `` {} else {} }\n"
	if _, err := parser.ParseFile(token.NewFileSet(), "x.go", source, 0); err != nil {
		t.Fatal(err)
	}
	want := []string{`x.go:3: "tells of"`, `x.go:4: "anew"`, `x.go:4: "else."`}
	got := check("x.go", []byte(source))
	if !slices.EqualFunc(got, want, strings.HasPrefix) {
		t.Errorf("check of a Go file: got %q, want %q", got, want)
	}
	document := "Write it anew.\n\n```\nanew\n```\n\n    anew\n"
	if got := check("x.md", []byte(document)); len(got) != 1 || !strings.HasPrefix(got[0], "x.md:1:") {
		t.Errorf("check of a Markdown file: got %q, want only line 1", got)
	}
}
