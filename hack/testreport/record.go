package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// event is an event of `go test -json` (go doc test2json).
type event struct {
	Action, Package, Test, Output string
	Elapsed                       float64 // seconds
}

// result is what a record has about a test. If Test is empty, it is about a package whose run failed without a failed
// test: it did not build, panicked, reached its timeout, or left something behind.
type result struct {
	Package, Test           string
	Passed, Failed, Skipped int // number of runs
	Seconds                 float64
	Cached                  bool   // the result is that of an earlier run
	Output                  string // of the first failure, including that of subtests
}

// flaky reports whether a test passed when it was run again.
func (r *result) flaky() bool { return r.Failed > 0 && r.Passed > 0 }

// red reports whether a test has failed: always, or in a way that a repetition does not excuse.
func (r *result) red() bool { return r.Failed > 0 && (r.Passed == 0 || r.final() != "") }

// final returns why a failure counts even if the test passes when it is run again, or "".
func (r *result) final() string {
	for _, f := range []struct{ text, why string }{
		{"WARNING: DATA RACE", "a data race"},
		{"race detected during execution of test", "a data race"},
		{"panic: ", "a panic"},
		{"left behind:", "something is left behind"}, // harness.Daemon, at the end of a test
	} {
		if strings.Contains(r.Output, f.text) {
			return f.why
		}
	}
	switch {
	case r.Test == "":
		return "not a failure of one test"
	case strings.HasSuffix(r.Package, "/test/crash"):
		return "crash tests are not repeated"
	}
	return ""
}

func (r *result) name() string {
	_, short, _ := strings.Cut(r.Package, "/tripod/")
	return strings.TrimSpace(cmp.Or(short, r.Package) + " " + r.Test)
}

// record is one run of gotestsum.
type record struct {
	step     string // the make target
	tests    map[[2]string]*result
	packages map[string]*result
}

// readRecord reads a file STEP.PART.json.
func readRecord(path string) (*record, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	step, _, _ := strings.Cut(filepath.Base(path), ".")
	r := &record{step: step, tests: map[[2]string]*result{}, packages: map[string]*result{}}
	if err := r.read(f); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return r, nil
}

func (r *record) read(from io.Reader) error {
	failedTests := map[string]int{} // in the present run of a package
	output := map[[2]string][]byte{}
	in := bufio.NewReader(from)
	for {
		line, err := in.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			return nil // a killed run can leave half an event
		}
		if err != nil {
			return err
		}
		var e event
		if json.Unmarshal(line, &e) != nil || e.Package == "" {
			continue // build-output events, which gotestsum shows
		}
		key := [2]string{e.Package, e.Test}
		switch e.Action {
		case "output":
			r.output(output, e)
			continue
		case "pass", "fail", "skip":
		default:
			continue
		}
		if e.Test == "" {
			alone := e.Action == "fail" && failedTests[e.Package] == 0
			delete(failedTests, e.Package)
			p := at(r.packages, e.Package, e)
			p.Cached = strings.Contains(string(output[key]), "\t(cached)\n")
			if !alone {
				e.Action = "" // the tests tell
			}
			count(p, e, string(output[key]))
		} else {
			if e.Action == "fail" {
				failedTests[e.Package]++
			}
			count(at(r.tests, key, e), e, string(output[key]))
		}
		delete(output, key)
	}
}

// output keeps a line of output for its test and for the tests that this one is part of.
func (r *record) output(output map[[2]string][]byte, e event) {
	if strings.HasPrefix(e.Output, "=== ") {
		return
	}
	for name := e.Test; ; {
		key := [2]string{e.Package, name}
		output[key] = append(output[key], e.Output...)
		at := strings.LastIndexByte(name, '/')
		if at < 0 {
			return
		}
		name = name[:at]
	}
}

func at[K comparable](results map[K]*result, key K, e event) *result {
	if results[key] == nil {
		results[key] = &result{Package: e.Package, Test: e.Test}
	}
	return results[key]
}

func count(r *result, e event, output string) {
	r.Seconds += e.Elapsed
	switch e.Action {
	case "pass":
		r.Passed++
	case "skip":
		r.Skipped++
	case "fail":
		if r.Failed++; r.Failed == 1 {
			r.Output = output
		}
	}
}

// leaves returns the results that satisfy the condition, without those tests that satisfy it because a subtest does.
func (r *record) leaves(is func(*result) bool) []*result {
	parents := map[[2]string]bool{}
	var all []*result
	for _, t := range r.tests {
		if !is(t) {
			continue
		}
		all = append(all, t)
		for name := t.Test; strings.Contains(name, "/"); {
			name = name[:strings.LastIndexByte(name, '/')]
			parents[[2]string{t.Package, name}] = true
		}
	}
	all = slices.DeleteFunc(all, func(t *result) bool { return parents[[2]string{t.Package, t.Test}] })
	for _, p := range r.packages {
		if is(p) {
			all = append(all, p)
		}
	}
	slices.SortFunc(all, func(a, b *result) int { return cmp.Compare(a.name(), b.name()) })
	return all
}

// counts returns the numbers of passed, failed and skipped tests, subtests included. A flaky test has passed.
func (r *record) counts() (passed, failed, skipped int) {
	failed = len(r.leaves((*result).red))
	for _, t := range r.tests {
		switch {
		case t.Failed > 0 && t.Passed == 0:
		case t.Passed > 0 && !t.red():
			passed++
		case t.Skipped > 0:
			skipped++
		}
	}
	return passed, failed, skipped
}
