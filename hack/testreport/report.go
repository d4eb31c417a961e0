package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
)

// part judges one record.
func part(w io.Writer, path string) (bool, error) {
	r, err := readRecord(path)
	if err != nil {
		return false, err
	}
	return judge(w, io.Discard, []*record{r}, 0), nil
}

// everyRun lists the tests of a record that did not pass in each of their runs, with the output of the first failure.
func everyRun(w io.Writer, path string) (bool, error) {
	r, err := readRecord(path)
	if err != nil {
		return false, err
	}
	bad := r.leaves(func(t *result) bool { return t.Failed > 0 })
	for _, t := range bad {
		fmt.Fprintf(w, "%s\n%s", t.name(), indent(t.Output, 40))
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(t, "red\truns\ttest\n")
	for _, b := range bad {
		fmt.Fprintf(t, "%d\t%d\t%s\n", b.Failed, b.Failed+b.Passed+b.Skipped, b.name())
	}
	return len(bad) == 0, t.Flush()
}

// judge names the failed and the flaky tests of some records, with up to the given number of lines of their output. It
// reports whether the tests are green.
func judge(w, flakyFile io.Writer, records []*record, lines int) bool {
	failed, flaky := 0, 0
	for _, r := range records {
		for _, t := range r.leaves((*result).red) {
			failed++
			fmt.Fprintf(w, "FAILED %s", t.name())
			if t.Passed > 0 {
				fmt.Fprintf(w, " passed alone, which does not excuse it: %s", t.final())
			}
			fmt.Fprintf(w, "\n%s", indent(t.Output, lines))
		}
		for _, t := range r.leaves(func(t *result) bool { return t.flaky() && !t.red() }) {
			flaky++
			fmt.Fprintf(w, "FLAKY %s\n%s", t.name(), indent(t.Output, lines))
			fmt.Fprintf(flakyFile, "FLAKY %s\n%s", t.name(), t.Output)
		}
	}
	if flaky > maxFlaky {
		fmt.Fprintf(w, "%d tests are flaky, and %d are the limit\n", flaky, maxFlaky)
	}
	return failed == 0 && flaky <= maxFlaky
}

// indent indents the last lines of a text.
func indent(text string, most int) string {
	if most == 0 {
		return ""
	}
	lines := strings.Split(strings.TrimRight(text, "\n"), "\n")
	if n := len(lines) - most; n > 0 {
		lines = append([]string{fmt.Sprintf("… %d lines before", n)}, lines[n:]...)
	}
	return "    " + strings.Join(lines, "\n    ") + "\n"
}

// step is a line of steps.tsv, which hack/test.sh writes.
type step struct {
	name      string
	seconds   int
	processor int // seconds of processor time
	exit      int
}

func readSteps(path string) ([]step, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var steps []step
	for line := range strings.Lines(string(text)) {
		var s step
		if _, err := fmt.Sscanf(line, "%s\t%d\t%d\t%d", &s.name, &s.seconds, &s.processor, &s.exit); err != nil {
			return nil, fmt.Errorf("%s: line %q: %w", path, line, err)
		}
		steps = append(steps, s)
	}
	return steps, nil
}

// whole reports on a run of `make test`.
func whole(w io.Writer, dir string) (bool, error) {
	steps, err := readSteps(filepath.Join(dir, "steps.tsv"))
	if err != nil {
		return false, err
	}
	paths, err := filepath.Glob(filepath.Join(dir, "*.json"))
	if err != nil {
		return false, err
	}
	var records []*record
	for _, path := range paths {
		r, err := readRecord(path)
		if err != nil {
			return false, err
		}
		records = append(records, r)
	}
	flakyFile, err := os.Create(filepath.Join(dir, "flaky.txt"))
	if err != nil {
		return false, err
	}
	fmt.Fprintln(w)
	green := judge(w, flakyFile, records, 40)
	quiet, err := quietRun()
	err = errors.Join(err, flakyFile.Close(), writeDurations(filepath.Join(dir, "durations.tsv"), records))
	slowest(w, "package", records, func(r *record) []*result { return slices.Collect(maps.Values(r.packages)) })
	slowest(w, "test", records, func(r *record) []*result { return slices.Collect(maps.Values(r.tests)) })
	table(w, steps, records, quiet)
	for _, s := range steps {
		green = green && s.exit == 0
	}
	return green, err
}

// table says where the time went, and ends with the line that counts the tests.
func table(w io.Writer, steps []step, records []*record, quiet map[string]int) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(t, "step\tseconds\tprocessor\tpassed\tfailed\tskipped\tflaky\t\n")
	var all [4]int
	var seconds, processor int
	var notes []string
	for _, s := range steps {
		var n [4]int
		for _, r := range records {
			if r.step == s.name {
				passed, failed, skipped := r.counts()
				for i, v := range []int{passed, failed, skipped, len(r.leaves((*result).flaky))} {
					n[i] += v
				}
			}
		}
		fmt.Fprintf(t, "%s\t%d\t%d\t%d\t%d\t%d\t%d\t\n", s.name, s.seconds, s.processor, n[0], n[1], n[2], n[3])
		if s.exit != 0 {
			notes = append(notes, fmt.Sprintf("%s failed with exit code %d", s.name, s.exit))
		}
		if q := quiet[s.name]; q > 0 && s.seconds > q+max(q/4, 10) {
			notes = append(notes,
				fmt.Sprintf("%s took %d s, more than a quarter longer than the %d s of the quiet run in docs/testing.md", s.name, s.seconds, q))
		}
		seconds += s.seconds
		processor += s.processor
		for i := range all {
			all[i] += n[i]
		}
	}
	fmt.Fprintf(t, "all\t%d\t%d\t%d\t%d\t%d\t%d\t\n", seconds, processor, all[0], all[1], all[2], all[3])
	_ = t.Flush() // to a terminal or a log
	for _, n := range notes {
		fmt.Fprintln(w, n)
	}
	fmt.Fprintf(w, "%d passed, %d failed, %d skipped\n", all[0], all[1], all[2])
}

// slowest names the ten results that took longest. It leaves out what Go's test cache answered.
func slowest(w io.Writer, what string, records []*record, of func(*record) []*result) {
	var all []*result
	for _, r := range records {
		all = append(all, slices.DeleteFunc(of(r), func(t *result) bool {
			return strings.Contains(t.Test, "/") || r.packages[t.Package] != nil && r.packages[t.Package].Cached
		})...)
	}
	slices.SortFunc(all, func(a, b *result) int { return cmp.Compare(b.Seconds, a.Seconds) })
	fmt.Fprintf(w, "\nslowest %ss, in seconds\n", what)
	for _, t := range all[:min(10, len(all))] {
		fmt.Fprintf(w, "%8.1f  %s\n", t.Seconds, t.name())
	}
	fmt.Fprintln(w)
}

// writeDurations writes how long each test took, for the next run: package, test, seconds. It keeps the durations of
// tests that did not run.
func writeDurations(path string, records []*record) error {
	lines := map[string]string{}
	old, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	for line := range strings.Lines(string(old)) {
		if i := strings.LastIndexByte(line, '\t'); i > 0 {
			lines[line[:i]] = line[i:]
		}
	}
	for _, r := range records {
		for _, t := range r.tests {
			if !strings.Contains(t.Test, "/") && t.Passed == 1 && t.Failed == 0 && !r.packages[t.Package].cached() {
				lines[t.Package+"\t"+t.Test] = fmt.Sprintf("\t%.1f\n", t.Seconds)
			}
		}
	}
	var text strings.Builder
	for _, name := range slices.Sorted(maps.Keys(lines)) {
		text.WriteString(name + lines[name])
	}
	return os.WriteFile(path, []byte(text.String()), 0o644)
}

func (r *result) cached() bool { return r != nil && r.Cached }

// quietRow is a row of the table of steps in docs/testing.md: name and seconds.
var quietRow = regexp.MustCompile("(?m)^\\| `([a-z-]+)` \\| ([0-9]+) \\|")

// quietRun returns the seconds of each step in the table in docs/testing.md.
func quietRun() (map[string]int, error) {
	text, err := os.ReadFile("docs/testing.md")
	if err != nil {
		return nil, err
	}
	quiet := map[string]int{}
	for _, row := range quietRow.FindAllStringSubmatch(string(text), -1) {
		if quiet[row[1]], err = strconv.Atoi(row[2]); err != nil {
			return nil, err
		}
	}
	return quiet, nil
}
