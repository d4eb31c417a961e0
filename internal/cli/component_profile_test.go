package cli

import (
	"bytes"
	"testing"
	"time"

	"github.com/tripod-run/tripod/internal/sandbox/wasm"
)

func TestCompareProfiles(t *testing.T) {
	first := wasm.Profile{Typical: 100 * time.Microsecond, Samples: [][]string{{"compile", "match", "handle"}, {"compile", "compile", "match", "handle"}, {"match", "handle"}, {"handle"}}}
	second := wasm.Profile{Typical: 40 * time.Microsecond, Samples: [][]string{{"match", "handle"}, {"handle"}}}
	p := compareProfiles("greets", first, second)
	var out bytes.Buffer
	const want = `greets: where the component is in a call, with what a function calls:
  first  second  of an instance
  100µs    40µs  all
  100µs    40µs  handle
   75µs    20µs  match
   50µs      0s  compile
`
	if err := p.print(&out); err != nil || out.String() != want {
		t.Errorf("print: error %v, output\n%s\nwant\n%s", err, out.String(), want)
	}
}
