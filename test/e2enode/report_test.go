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

// known are the specs that fail, each with the reason. One that ends in "…" stands for all that begin so.
type known map[string]string

// means reports whether a spec is one of those that a row of known stands for.
func means(row, spec string) bool {
	beginning, many := strings.CutSuffix(row, "…")
	return row == spec || many && strings.HasPrefix(spec, beginning)
}

// heading is that of the list in docs/conformance.md, which goes on to the next heading.
const heading = "### Known failures\n"

func readKnown() (known, error) {
	data, err := os.ReadFile(filepath.Join(harness.Root(), "docs", "conformance.md"))
	if err != nil {
		return nil, err
	}
	return parseKnown(string(data))
}

// parseKnown reads the list: a table of specs and reasons.
func parseKnown(document string) (known, error) {
	_, list, found := strings.Cut(document, "\n"+heading)
	if !found {
		return nil, fmt.Errorf("docs/conformance.md has no %q", heading)
	}
	list, _, _ = strings.Cut(list, "\n#")
	k := known{}
	for line := range strings.Lines(list) {
		cells := strings.Split(strings.TrimSpace(line), "|")
		if len(cells) == 1 || strings.HasPrefix(cells[1], "--") || strings.TrimSpace(cells[1]) == "spec" {
			continue
		}
		if len(cells) != 4 || strings.TrimSpace(cells[2]) == "" {
			return nil, fmt.Errorf("docs/conformance.md: this is no spec with a reason: %s", line)
		}
		k[strings.TrimSpace(cells[1])] = strings.TrimSpace(cells[2])
	}
	return k, nil
}

// report is what became of the specs.
type report struct {
	passed, skipped int
	failed          map[string]string // spec to message
	ended           map[string]bool   // those that passed or failed
	trouble         []string          // of the run as a whole
}

// suite is what is read of a report of ginkgo's.
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
			failure := fmt.Sprintf("%s at %s:%d: %s", spec.State, spec.Failure.Location.FileName, spec.Failure.Location.LineNumber, spec.Failure.Message)
			switch {
			case spec.LeafNodeType != "It" && spec.State != "passed":
				r.trouble = append(r.trouble, fmt.Sprintf("%s %s %s", spec.LeafNodeType, name, failure))
			case spec.LeafNodeType != "It":
			case spec.State == "passed":
				r.passed++
				r.ended[name] = true
			case spec.State == "skipped" && spec.Failure.Message != "": // by itself, not by the filter
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

// compare says what is not as the list has it.
func (r *report) compare(known known) []string {
	trouble := slices.Clone(r.trouble)
	if len(r.ended) < fewest {
		trouble = append(trouble, fmt.Sprintf("only %d specs were run, expected are %d at least", len(r.ended), fewest))
	}
	rows := slices.Sorted(maps.Keys(known))
	for _, spec := range slices.Sorted(maps.Keys(r.failed)) {
		if !slices.ContainsFunc(rows, func(row string) bool { return means(row, spec) }) {
			trouble = append(trouble, fmt.Sprintf("failed: %s\n%s", spec, r.failed[spec]))
		}
	}
	for _, row := range rows {
		ran := false
		for _, spec := range slices.Sorted(maps.Keys(r.ended)) {
			if !means(row, spec) {
				continue
			}
			ran = true
			if r.failed[spec] == "" {
				trouble = append(trouble, "on the list of known failures, but passed; take it off: "+spec)
			}
		}
		if !ran {
			trouble = append(trouble, "on the list of known failures, but was not run: "+row)
		}
	}
	return trouble
}

// TestCompare is the test of the check itself.
func TestCompare(t *testing.T) {
	k, err := parseKnown("# Title\n\n### Known failures\n\nText.\n\n| spec | reason |\n|---|---|\n| suite a [x] | the kernel |\n| suite b | the image |\n| suite f… | time |\n\n## Next\n\n| c | d |\n")
	if err != nil || len(k) != 3 || k["suite a [x]"] != "the kernel" {
		t.Fatalf("read: %v %v", k, err)
	}
	for _, bad := range []string{"no list", "\n### Known failures\n| suite a | |\n", "\n### Known failures\n| suite a |\n"} {
		if k, err := parseKnown(bad); err == nil {
			t.Errorf("%q is read as %v", bad, k)
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
		t.Errorf("counted %+v", r)
	}
	found := strings.Join(r.compare(k), "\n")
	for _, want := range []string{
		"timed out", "ReportAfterSuite", "only 4 specs", "failed: suite c", "passed; take it off: suite a [x]", "was not run: suite b",
		"take it off: suite f 2",
	} {
		if !strings.Contains(found, want) {
			t.Errorf("%q is not in\n%s", want, found)
		}
	}
	if strings.Contains(found, "suite f 1") {
		t.Errorf("a known failure is reported:\n%s", found)
	}
}
