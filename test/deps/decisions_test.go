package deps

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const decisionsIndex = "docs/adr/README.md"

// decision is what a file in docs/adr says about itself, in its first three lines:
//
//	# 65. Memories wait for the next instance
//
//	Status: accepted · 2026-11-23 · `internal/component/engine` · changes the second point of [62](0062-….md)
//
// The fields are the date, the packages or files that the decision is about, and its relations. A relation is a verb, perhaps
// with the part of the other decision that it is about, and links.
type decision struct {
	file, title, date string
	number            int
	paths             []string
	relations         []relation
}

// relation is a relation to other decisions, by their numbers. The text is the whole field.
type relation struct {
	verb, text string
	to         []int
}

// inverse maps what a decision does to earlier ones to what those say about it. Who builds on a decision leaves it as it is,
// so nothing is said there.
var inverse = map[string]string{"replaces": "replaced", "changes": "changed", "extends": "extended", "builds on": ""}

var (
	decisionFile  = regexp.MustCompile(`^docs/adr/(\d{4})-[\w.-]+\.md$`)
	decisionHead  = regexp.MustCompile(`\A# (\d+)\. (.+)\n\nStatus: accepted · (\d{4}-\d\d-\d\d) · ([^·\n]+)((?: · [^·\n]+)*)\n\n`)
	decisionPath  = regexp.MustCompile("^`([\\w./-]+)`$")
	decisionLink  = regexp.MustCompile(`^\[(\d+)\]\((\d{4})-[\w.-]+\.md\)$`)
	sinceNote     = regexp.MustCompile(`\b[Ss]ince \[?ADR (\d+)`)
	relationField = regexp.MustCompile(`^(replaces|changes|extends|builds on|(replaced|changed|extended)(?: in part)? by)( [^\[\]]+ of)? (\[.*)$`)
)

// parseDecision reads the first lines of a decision. A later decision that the text mentions as "since ADR 5" must be on the
// Status line.
func parseDecision(file, text string) (decision, error) {
	d := decision{file: filepath.Base(file)}
	head := decisionHead.FindStringSubmatch(text)
	if head == nil {
		return d, fmt.Errorf("does not begin with \"# NUMBER. TITLE\" and a line \"Status: accepted · DATE · `PATH`, … · RELATION · …\"")
	}
	d.title, d.date = head[2], head[3]
	d.number, _ = strconv.Atoi(head[1])
	if fmt.Sprintf("%04d", d.number) != d.file[:4] {
		return d, fmt.Errorf("has the number %d", d.number)
	}
	for p := range strings.SplitSeq(head[4], ", ") {
		name := decisionPath.FindStringSubmatch(p)
		if name == nil {
			return d, fmt.Errorf("has %q where a path in backquotes should be", p)
		}
		d.paths = append(d.paths, name[1])
	}
	for field := range strings.SplitSeq(strings.TrimPrefix(head[5], " · "), " · ") {
		if field == "" {
			continue
		}
		parts := relationField.FindStringSubmatch(field)
		if parts == nil {
			return d, fmt.Errorf("has the relation %q, want one of replaces, changes, extends, builds on, replaced by, … and links", field)
		}
		r := relation{verb: parts[1], text: field}
		if parts[2] != "" {
			r.verb = parts[2]
		}
		for l := range strings.SplitSeq(parts[4], ", ") {
			link := decisionLink.FindStringSubmatch(l)
			if link == nil || fmt.Sprintf("%04s", link[1]) != link[2] {
				return d, fmt.Errorf("has %q where a link such as [5](0005-….md) should be", l)
			}
			n, _ := strconv.Atoi(link[1])
			r.to = append(r.to, n)
		}
		d.relations = append(d.relations, r)
	}
	for _, note := range sinceNote.FindAllStringSubmatch(text, -1) {
		n, _ := strconv.Atoi(note[1])
		if n > d.number && !slices.ContainsFunc(slices.Collect(maps.Values(inverse)), func(verb string) bool { return d.says(verb, n) }) {
			return d, fmt.Errorf("says %q, and its Status line does not say what %d changed", note[0], n)
		}
	}
	return d, nil
}

// says reports whether the decision has a relation to another one.
func (d decision) says(verb string, other int) bool {
	return slices.ContainsFunc(d.relations, func(r relation) bool { return r.verb == verb && slices.Contains(r.to, other) })
}

// oneSided returns the relations of which one decision says nothing, and those that lead the wrong way.
func oneSided(all map[int]decision) (complaints []string) {
	for _, d := range all {
		for _, r := range d.relations {
			for _, n := range r.to {
				other, known := all[n]
				if passive, active := inverse[r.verb]; active {
					if !known || n >= d.number {
						complaints = append(complaints, fmt.Sprintf("%d %s %d, which is not an earlier decision", d.number, r.verb, n))
					} else if passive != "" && !other.says(passive, d.number) {
						complaints = append(complaints, fmt.Sprintf("%d %s %d, which does not say \"%s by [%d]\"", d.number, r.verb, n, passive, d.number))
					}
					continue
				}
				for active, passive := range inverse {
					if passive == r.verb && !other.says(active, d.number) {
						complaints = append(complaints, fmt.Sprintf("%d is %s by %d, which does not say \"%s [%d]\"", d.number, r.verb, n, active, d.number))
					}
				}
			}
		}
	}
	slices.Sort(complaints)
	return complaints
}

// programs maps the programs in cmd to the parts of Tripod to which they belong.
var programs = map[string]string{
	"tripod": "daemon", "tripod-agent": "vm", "tripod-guest": "vm", "tripod-init": "vm", "tripod-vmwrap": "vm", "tripod-wasm": "wasm",
}

// part returns the part of Tripod to which a path belongs: the kind of pod, the directory below internal, or the first
// directory.
func part(path string) string {
	elements := strings.Split(path, "/")
	switch {
	case path == "internal":
		return "all"
	case elements[0] == "internal" && len(elements) > 2 && kinds[elements[2]] != nil:
		return elements[2]
	case elements[0] == "internal":
		return elements[1]
	case elements[0] == "cmd":
		return programs[elements[1]]
	case elements[0] == "hack":
		return "build"
	case elements[0] == "test":
		return "tests"
	}
	return elements[0]
}

// index returns the list of decisions as a document.
func index(all []decision) string {
	var text strings.Builder
	text.WriteString("# Decisions\n\nWhy Tripod is as it is: one file for each decision. " +
		"This list is made of the files' first lines; `UPDATE=1 go test ./test/deps -run TestDecisions` writes it.\n\n" +
		"| | decision | about | date | since then |\n|---:|---|---|---|---|\n")
	for _, d := range all {
		var parts, later []string
		for _, p := range d.paths {
			if name := part(p); !slices.Contains(parts, name) {
				parts = append(parts, name)
			}
		}
		for _, r := range d.relations {
			if _, active := inverse[r.verb]; !active {
				later = append(later, r.text)
			}
		}
		fmt.Fprintf(&text, "| [%d](%s) | %s | %s | %s | %s |\n",
			d.number, d.file, d.title, strings.Join(parts, ", "), d.date, strings.Join(later, "; "))
	}
	return text.String()
}

// TestDecisions: each decision names its date, what it is about, which exists, and its relations; relations are said on both
// sides; and docs/adr/README.md lists them all. UPDATE=1 in the environment writes that list.
func TestDecisions(t *testing.T) {
	var list []decision
	all := map[int]decision{}
	for _, file := range files(t, ".md") {
		if !decisionFile.MatchString(file) {
			continue
		}
		d, err := parseDecision(file, read(t, file))
		if err != nil {
			t.Errorf("%s %v", file, err)
			continue
		}
		for _, p := range d.paths {
			if _, err := os.Stat(filepath.Join(root, p)); err != nil {
				t.Errorf("%s is about %s, which does not exist", file, p)
			}
		}
		list, all[d.number] = append(list, d), d
	}
	if len(list) < 80 {
		t.Fatalf("decisions: got %d, want at least 80", len(list))
	}
	for _, complaint := range oneSided(all) {
		t.Errorf("docs/adr: %s", complaint)
	}
	if os.Getenv("UPDATE") != "" {
		if err := os.WriteFile(filepath.Join(root, decisionsIndex), []byte(index(list)), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if read(t, decisionsIndex) != index(list) {
		t.Errorf("%s is not what the decisions say; run UPDATE=1 go test ./test/deps -run TestDecisions", decisionsIndex)
	}
}

func TestDecisionsAreChecked(t *testing.T) {
	const begin = "Status: accepted · 2026-11-23 · "
	for status, want := range map[string]string{
		begin + "`internal/node`": "",
		begin + "`internal/node`, `cmd/tripod` · changes [1](0001-a.md)":                                 "",
		begin + "`test` · replaces a part of [1](0001-a.md), [2](0002-b.md) · changed by [5](0005-c.md)": "",
		begin + "`test` · replaced in part by [5](0005-c.md)":                                            "",
		"Status: accepted":                                         "does not begin with",
		"Status: accepted · `internal/node`":                       "does not begin with",
		begin + "`internal/node` ·\nchanges [1](0001-a.md)":        "does not begin with",
		begin + "packages `internal/node`":                         "path in backquotes",
		begin + "`internal/node` · corrects [1](0001-a.md)":        "has the relation",
		begin + "`internal/node` · changes [1](0002-a.md)":         "where a link",
		begin + "`internal/node` · changes [1](0001-a.md) and [2]": "where a link",
	} {
		_, err := parseDecision("docs/adr/0003-x.md", "# 3. X\n\n"+status+"\n\nText.\n")
		if got := fmt.Sprint(err); want == "" && err != nil || !strings.Contains(got, want) {
			t.Errorf("%s: got error %v, want %q", status, err, want)
		}
	}
	for text, valid := range map[string]bool{
		"# 3. X\n\n" + begin + "`test` · changed by [5](0005-c.md)\n\nIt is (since ADR 5, not). Since [ADR 2](0002-b.md), it was.\n": true,
		"# 3. X\n\n" + begin + "`test`\n\nIt is. (Since [ADR 5](0005-c.md), it is not.)\n":                                           false,
		"# 4. X\n\n" + begin + "`test`\n\nThe file has another number.\n":                                                            false,
	} {
		if _, err := parseDecision("docs/adr/0003-x.md", text); (err == nil) != valid {
			t.Errorf("%q: got error %v, want valid: %t", text, err, valid)
		}
	}

	of := func(number int, verb string, to int) decision {
		return decision{number: number, relations: []relation{{verb: verb, to: []int{to}}}}
	}
	for _, c := range []struct {
		one, two decision
		want     int
	}{
		{of(1, "changed", 2), of(2, "changes", 1), 0},
		{decision{number: 1}, of(2, "builds on", 1), 0},
		{decision{number: 1}, of(2, "changes", 1), 1},
		{of(1, "extended", 2), of(2, "replaces", 1), 2},
		{of(1, "replaced", 2), decision{number: 2}, 1},
		{of(1, "changes", 2), of(2, "changed", 1), 1},
		{of(1, "changed", 3), decision{number: 2}, 1},
	} {
		if got := oneSided(map[int]decision{1: c.one, 2: c.two}); len(got) != c.want {
			t.Errorf("%v, %v: got complaints %q, want %d", c.one, c.two, got, c.want)
		}
	}

	for path, want := range map[string]string{
		"internal": "all", "internal/node/store": "node", "internal/sandbox": "sandbox", "internal/sandbox/ledger": "sandbox",
		"internal/sandbox/vm/guestnode": "vm", "cmd/tripod": "daemon", "cmd/tripod-wasm": "wasm", "hack/unit.sh": "build",
		"test/harness": "tests", "sdk/go": "sdk",
	} {
		if got := part(path); got != want {
			t.Errorf("part(%s) = %s, want %s", path, got, want)
		}
	}
}
