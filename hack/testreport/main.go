// Command testreport says what the test runs of gotestsum mean, which hack/gotest.sh has recorded: which tests failed,
// which are flaky, and where the time went. See docs/testing.md, "A test that is red by chance".
//
//	make STEP ──▶ hack/gotest.sh ──▶ gotestsum ──▶ build/test/STEP.PART.json ──┐
//	   └─ hack/test.sh ──▶ build/test/steps.tsv ─────────────────────────────┴──▶ testreport
package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
)

// maxFlaky is the number of flaky tests with which a whole run is still green.
const maxFlaky = 3

func main() {
	runs := flag.Bool("runs", false, "list the tests of RECORD that did not pass in each of their runs")
	flag.Usage = func() {
		fmt.Fprintf(flag.CommandLine.Output(), "usage: testreport [-runs] DIR [RECORD]\n\n"+
			"Reads the records in DIR. With RECORD, it judges only this one, and says nothing if all is well.\n"+
			"Without, it also writes DIR/flaky.txt and DIR/durations.tsv, and says where the time went.\n"+
			"It exits with 1 if a test failed, if a failure must not be repeated, or if more than %d tests are flaky.\n", maxFlaky)
		flag.PrintDefaults()
	}
	flag.Parse()
	var green bool
	var err error
	path := filepath.Join(flag.Arg(0), flag.Arg(1))
	switch {
	case flag.NArg() == 2 && *runs:
		green, err = everyRun(os.Stdout, path)
	case flag.NArg() == 2:
		green, err = part(os.Stdout, path)
	case flag.NArg() == 1 && !*runs:
		green, err = whole(os.Stdout, path)
	default:
		flag.Usage()
		os.Exit(2)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "testreport:", err)
		os.Exit(2)
	}
	if !green {
		os.Exit(1)
	}
}
