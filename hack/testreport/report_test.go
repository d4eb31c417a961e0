package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// run is what `go test -json` says of a test: one verdict for each run.
func run(pkg, test, output string, verdicts ...string) string {
	var s strings.Builder
	for _, v := range verdicts {
		if v == "fail" {
			fmt.Fprintf(&s, "{\"Action\":\"output\",\"Package\":%q,\"Test\":%q,\"Output\":%q}\n", pkg, test, output)
		}
		fmt.Fprintf(&s, "{\"Action\":%q,\"Package\":%q,\"Test\":%q,\"Elapsed\":1.5}\n", v, pkg, test)
		if !strings.Contains(test, "/") {
			fmt.Fprintf(&s, "{\"Action\":%q,\"Package\":%q,\"Elapsed\":2}\n", v, pkg)
		}
	}
	return s.String()
}

const module = "github.com/tripod-run/tripod/"

// TestVerdict: a test that passes when it is run again is flaky, up to a number of tests, and some failures are never
// excused.
func TestVerdict(t *testing.T) {
	flaky := func(n int) string {
		var s string
		for i := range n {
			s += run(module+"p", fmt.Sprint("TestFlaky", i), "    first output\n", "fail", "pass")
		}
		return s
	}
	for name, c := range map[string]struct {
		events string
		green  bool
		says   string
	}{
		"passed":       {run(module+"p", "TestA", "", "pass"), true, ""},
		"skipped":      {run(module+"p", "TestA", "", "skip"), true, ""},
		"failed":       {run(module+"p", "TestA", "", "fail"), false, "FAILED p TestA\n"},
		"failed twice": {run(module+"p", "TestA", "", "fail", "fail"), false, "FAILED p TestA\n"},
		"three flaky":  {flaky(3), true, "FLAKY p TestFlaky0\nFLAKY p TestFlaky1\nFLAKY p TestFlaky2\n"},
		"four flaky":   {flaky(4), false, "4 tests are flaky, and 3 are the limit"},
		"flaky subtest": {run(module+"p", "TestA/sub", "x", "fail") + run(module+"p", "TestA", "", "fail") +
			run(module+"p", "TestA/sub", "", "pass") + run(module+"p", "TestA", "", "pass"), true, "FLAKY p TestA/sub\n"},
		"data race": {run(module+"p", "TestA", "WARNING: DATA RACE\n", "fail", "pass"), false, "a data race"},
		"panic":     {run(module+"p", "TestA", "panic: oh\n", "fail", "pass"), false, "a panic"},
		"leak":      {run(module+"p", "TestA", "    x.go:1: left behind:\n", "fail", "pass"), false, "something is left behind"},
		"leak of a subtest": {run(module+"p", "TestA/sub", "left behind:\n", "fail", "pass") + run(module+"p", "TestA", "", "fail", "pass"),
			false, "something is left behind"},
		"crash": {run(module+"test/crash", "TestA", "", "fail", "pass"), false, "crash tests are not repeated"},
		"package": {run(module+"p", "TestA", "", "pass") + `{"Action":"fail","Package":"` + module + `p"}` + "\n" +
			`{"Action":"pass","Package":"` + module + `p"}` + "\n", false, "FAILED p\n"},
		"cut off": {run(module+"p", "TestA", "", "fail") + `{"Action":"pa`, false, "FAILED p TestA\n"},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "unit.all.json")
			if err := os.WriteFile(path, []byte(c.events), 0o600); err != nil {
				t.Fatal(err)
			}
			var out strings.Builder
			green, err := part(&out, path)
			if err != nil || green != c.green || !strings.Contains(out.String(), c.says) {
				t.Errorf("green %v, %v, want %v; it says %q, want %q", green, err, c.green, out.String(), c.says)
			}
		})
	}
}

// TestWhole: the report has the sums of each step, keeps the first output of flaky tests and the durations, and says
// which step grew.
func TestWhole(t *testing.T) {
	t.Chdir(t.TempDir())
	write := func(name, text string) {
		if err := os.MkdirAll(filepath.Dir(name), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("docs/testing.md", "| step | seconds |\n|---|---|\n| `lint` | 100 | x |\n| `test-unit` | 100 | x |\n")
	write("d/steps.tsv", "lint\t120\t200\t0\ntest-unit\t130\t200\t0\n")
	write("d/durations.tsv", "other\tTestB\t9.0\n"+module+"p\tTestA\t7.0\n")
	write("d/test-unit.1.json", run(module+"p", "TestA", "", "pass")+run(module+"p", "TestFlaky", "why\n", "fail", "pass"))
	write("d/test-unit.2.json", run(module+"q", "TestSkip", "", "skip"))
	var out strings.Builder
	if green, err := whole(&out, "d"); err != nil || !green {
		t.Fatalf("green %v, %v\n%s", green, err, out.String())
	}
	for _, want := range []string{"FLAKY p TestFlaky\n    why\n", "test-unit took 130 s", "\n2 passed, 0 failed, 1 skipped\n"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the report lacks %q:\n%s", want, out.String())
		}
	}
	if strings.Contains(out.String(), "lint took") {
		t.Errorf("lint is named, which took less than a quarter longer:\n%s", out.String())
	}
	for name, want := range map[string]string{
		"d/flaky.txt": "FLAKY p TestFlaky\nwhy\n", "d/durations.tsv": module + "p\tTestA\t1.5\nother\tTestB\t9.0\n",
	} {
		if got, err := os.ReadFile(name); err != nil || string(got) != want {
			t.Errorf("%s has %q, %v, want %q", name, got, err, want)
		}
	}
	write("d/steps.tsv", "lint\t120\t200\t0\ntest-unit\t130\t200\t2\n")
	if green, err := whole(&out, "d"); err != nil || green {
		t.Errorf("green %v, %v although a step failed", green, err)
	}
}

// TestEveryRun: the list has the tests that failed in any run, and how often.
func TestEveryRun(t *testing.T) {
	path := filepath.Join(t.TempDir(), "flaky.json")
	events := run(module+"p", "TestA", "", "pass", "pass") + run(module+"p", "TestB", "why\n", "pass", "fail", "pass", "pass")
	if err := os.WriteFile(path, []byte(events), 0o600); err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	if green, err := everyRun(&out, path); err != nil || green {
		t.Errorf("green %v, %v, want false", green, err)
	}
	if want := "p TestB\n    why\nred  runs  test\n1    4     p TestB\n"; out.String() != want {
		t.Errorf("got %q, want %q", out.String(), want)
	}
}
