package cli

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/tripod-run/tripod/internal/sandbox/wasm/standalone"
)

func TestCompareProfiles(t *testing.T) {
	first := standalone.Profile{Typical: 100 * time.Microsecond,
		Samples: [][]string{{"compile", "match", "handle"}, {"compile", "compile", "match", "handle"}, {"match", "handle"}, {"handle"}}}
	second := standalone.Profile{Typical: 40 * time.Microsecond, Samples: [][]string{{"match", "handle"}, {"handle"}}}
	p := compareProfiles("greets", first, second)
	var out bytes.Buffer
	const want = `greets: where the component is in a call (at 4 and 2 moments), with what a function calls:
  first  second  of an instance
  100µs    40µs  all
  100µs    40µs  handle
   75µs    20µs  match
   50µs      0s  compile
`
	if err := p.print(&out); err != nil || out.String() != want {
		t.Errorf("print: error %v, output\n%s\nwant\n%s", err, out.String(), want)
	}
	for text, p := range map[string]*caseProfile{
		"no profile":            compareProfiles("slow", standalone.Profile{}, standalone.Profile{}),
		"50µs       –  compile": compareProfiles("once", first, standalone.Profile{}),
	} {
		out.Reset()
		if err := p.print(&out); err != nil || !strings.Contains(out.String(), text) {
			t.Errorf("print: error %v, output\n%s\nwant %q", err, out.String(), text)
		}
	}
}
