package e2enode

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/tripod-run/tripod/test/harness"
)

// known maps the specs that fail to the reason. "prefix…" stands for all specs with the prefix.
type known map[string]string

// matches reports whether a row of known stands for a spec.
func matches(row, spec string) bool {
	beginning, many := strings.CutSuffix(row, "…")
	return row == spec || many && strings.HasPrefix(spec, beginning)
}

// heading is the heading of the list in docs/conformance.md. The list ends at the next heading.
const heading = "### Known failures\n"

func readKnown() (known, error) {
	data, err := os.ReadFile(filepath.Join(harness.Root(), "docs", "conformance.md"))
	if err != nil {
		return nil, err
	}
	return parseKnown(string(data))
}

// parseKnown parses the list, which is a table of specs and reasons.
func parseKnown(document string) (known, error) {
	_, list, found := strings.Cut(document, "\n"+heading)
	if !found {
		return nil, fmt.Errorf("docs/conformance.md has no heading %q", heading)
	}
	list, _, _ = strings.Cut(list, "\n#")
	k := known{}
	for line := range strings.Lines(list) {
		cells := strings.Split(strings.TrimSpace(line), "|")
		if len(cells) == 1 || strings.HasPrefix(cells[1], "--") || strings.TrimSpace(cells[1]) == "spec" {
			continue
		}
		if len(cells) != 4 || strings.TrimSpace(cells[2]) == "" {
			return nil, fmt.Errorf("docs/conformance.md: the row is not a spec with a reason: %s", line)
		}
		k[strings.TrimSpace(cells[1])] = strings.TrimSpace(cells[2])
	}
	return k, nil
}

// report holds the results of the specs.
type report struct {
	passed, skipped int
	failed          map[string]string // spec to message
	ended           map[string]bool   // specs that passed or failed
	trouble         []string          // errors of the whole run
}

// suite is the part of a ginkgo report that the test reads.
type suite struct {
	SpecialSuiteFailureReasons []string
	SpecReports                []struct {
		ContainerHierarchyTexts []string
		LeafNodeType            string
		LeafNodeText            string
		State                   string
		Failure                 struct {
			Message  string
			Location struct {
				FileName   string
				LineNumber int
			}
		}
	}
}

func readReport() (*report, error) {
	data, err := os.ReadFile(filepath.Join(output(), "report.json"))
	if err != nil {
		return nil, err
	}
	var suites []suite
	if err := json.Unmarshal(data, &suites); err != nil {
		return nil, err
	}
	return newReport(suites), nil
}

func newReport(suites []suite) *report {
	r := &report{failed: map[string]string{}, ended: map[string]bool{}}
	for _, s := range suites {
		r.trouble = append(r.trouble, s.SpecialSuiteFailureReasons...)
		for _, spec := range s.SpecReports {
			name := strings.Join(append(spec.ContainerHierarchyTexts, spec.LeafNodeText), " ")
			failure := fmt.Sprintf("%s at %s:%d: %s", spec.State, spec.Failure.Location.FileName, spec.Failure.Location.LineNumber,
				spec.Failure.Message)
			switch {
			case spec.LeafNodeType != "It" && spec.State != "passed":
				r.trouble = append(r.trouble, fmt.Sprintf("%s %s %s", spec.LeafNodeType, name, failure))
			case spec.LeafNodeType != "It":
			case spec.State == "passed":
				r.passed++
				r.ended[name] = true
			case spec.State == "skipped" && spec.Failure.Message != "": // by the spec itself rather than the filter
				r.skipped++
			case spec.State == "skipped", spec.State == "pending":
			default:
				r.failed[name] = failure
				r.ended[name] = true
			}
		}
	}
	return r
}

// compare returns the differences between the report and the list.
func (r *report) compare(known known) []string {
	trouble := slices.Clone(r.trouble)
	if len(r.ended) < minSpecs {
		trouble = append(trouble, fmt.Sprintf("only %d specs were run, want at least %d", len(r.ended), minSpecs))
	}
	rows := slices.Sorted(maps.Keys(known))
	for _, spec := range slices.Sorted(maps.Keys(r.failed)) {
		if !slices.ContainsFunc(rows, func(row string) bool { return matches(row, spec) }) {
			trouble = append(trouble, fmt.Sprintf("failed: %s\n%s", spec, r.failed[spec]))
		}
	}
	for _, row := range rows {
		ran := false
		for _, spec := range slices.Sorted(maps.Keys(r.ended)) {
			if !matches(row, spec) {
				continue
			}
			ran = true
			if r.failed[spec] == "" {
				trouble = append(trouble, "in the list of known failures, but passed; remove it: "+spec)
			}
		}
		if !ran {
			trouble = append(trouble, "in the list of known failures, but was not run: "+row)
		}
	}
	return trouble
}

// TestCompare tests the comparison itself.
func TestCompare(t *testing.T) {
	k, err := parseKnown("# Title\n\n### Known failures\n\nText.\n\n| spec | reason |\n|---|---|\n| suite a [x] | the kernel |\n| suite b | the image |\n| suite f… | time |\n\n## Next\n\n| c | d |\n")
	if err != nil || len(k) != 3 || k["suite a [x]"] != "the kernel" {
		t.Fatalf("parseKnown: got %v, error %v; want three rows", k, err)
	}
	for _, bad := range []string{"no list", "\n### Known failures\n| suite a | |\n", "\n### Known failures\n| suite a |\n"} {
		if k, err := parseKnown(bad); err == nil {
			t.Errorf("parseKnown(%q) = %v, want an error", bad, k)
		}
	}
	var suites []suite
	err = json.Unmarshal([]byte(`[{"SpecialSuiteFailureReasons": ["timed out"], "SpecReports": [
		{"LeafNodeType": "SynchronizedBeforeSuite", "State": "passed"},
		{"LeafNodeType": "It", "ContainerHierarchyTexts": ["suite"], "LeafNodeText": "a [x]", "State": "passed"},
		{"LeafNodeType": "It", "ContainerHierarchyTexts": ["suite"], "LeafNodeText": "c", "State": "timedout", "Failure": {"Message": "late"}},
		{"LeafNodeType": "It", "ContainerHierarchyTexts": ["suite"], "LeafNodeText": "d", "State": "skipped", "Failure": {"Message": "no GPU"}},
		{"LeafNodeType": "It", "ContainerHierarchyTexts": ["suite"], "LeafNodeText": "e", "State": "skipped"},
		{"LeafNodeType": "It", "ContainerHierarchyTexts": ["suite"], "LeafNodeText": "f 1", "State": "failed"},
		{"LeafNodeType": "It", "ContainerHierarchyTexts": ["suite"], "LeafNodeText": "f 2", "State": "passed"},
		{"LeafNodeType": "ReportAfterSuite", "State": "failed"}]}]`), &suites)
	if err != nil {
		t.Fatal(err)
	}
	r := newReport(suites)
	if r.passed != 2 || len(r.failed) != 2 || r.skipped != 1 {
		t.Errorf("report: got %+v, want 2 passed, 2 failed, 1 skipped", r)
	}
	found := strings.Join(r.compare(k), "\n")
	for _, want := range []string{
		"timed out", "ReportAfterSuite", "only 4 specs", "failed: suite c", "passed; remove it: suite a [x]", "was not run: suite b",
		"remove it: suite f 2",
	} {
		if !strings.Contains(found, want) {
			t.Errorf("compare: got\n%s\nwant it to contain %q", found, want)
		}
	}
	if strings.Contains(found, "suite f 1") {
		t.Errorf("compare: got\n%s\nwant it without the known failure \"suite f 1\"", found)
	}
}
