package cli

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/tripod-run/tripod/internal/cli/call"
	"github.com/tripod-run/tripod/internal/sandbox/wasm"
)

// maxProfiled is how many functions a profile shows.
const maxProfiled = 15

// caseProfile compares the first call of an instance with the second one.
type caseProfile struct {
	Name      string            `json:"name"`
	First     float64           `json:"firstSeconds"`
	Second    float64           `json:"secondSeconds"`
	Functions []functionProfile `json:"functions"`
}

// functionProfile is the time that a call spends in a function and in what the function calls, in seconds.
type functionProfile struct {
	Function string  `json:"function"`
	First    float64 `json:"firstSeconds"`
	Second   float64 `json:"secondSeconds"`
}

// profile finds out where the component is during a case.
func (c *componentCase) profile(ctx context.Context, worker *wasm.Standalone, client call.Client) (*caseProfile, error) {
	again := func(ctx context.Context) { _ = c.run(ctx, client) } // most calls are ended
	first, err := worker.Profile(ctx, 1, again)
	if err != nil {
		return nil, err
	}
	second, err := worker.Profile(ctx, 2, again)
	if err != nil {
		return nil, err
	}
	return compareProfiles(c.Name, first, second), nil
}

// compareProfiles lists the functions, those first that take more of the first call than of the second one.
func compareProfiles(name string, first, second wasm.Profile) *caseProfile {
	p := &caseProfile{Name: name, First: first.Typical.Seconds(), Second: second.Typical.Seconds()}
	firsts, seconds := inFunctions(first), inFunctions(second)
	for function, seconds := range seconds {
		p.Functions = append(p.Functions, functionProfile{function, firsts[function], seconds})
	}
	for function, first := range firsts {
		if _, ok := seconds[function]; !ok {
			p.Functions = append(p.Functions, functionProfile{function, first, 0})
		}
	}
	slices.SortFunc(p.Functions, func(a, b functionProfile) int {
		return cmp.Or(cmp.Compare(b.First-b.Second, a.First-a.Second), cmp.Compare(a.Function, b.Function))
	})
	p.Functions = p.Functions[:min(len(p.Functions), maxProfiled)]
	return p
}

// inFunctions returns the seconds of a call in each function.
func inFunctions(p wasm.Profile) map[string]float64 {
	times := make(map[string]float64)
	for _, functions := range p.Samples {
		slices.Sort(functions)
		for _, f := range slices.Compact(functions) {
			times[f] += p.Typical.Seconds() / float64(len(p.Samples))
		}
	}
	return times
}

func (p *caseProfile) print(out io.Writer) error {
	micros := func(seconds float64) time.Duration {
		return time.Duration(seconds * float64(time.Second)).Round(time.Microsecond)
	}
	fmt.Fprintf(out, "%s: where the component is in a call, with what a function calls:\n", printable(p.Name))
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(w, "first\tsecond\t  of an instance\n%v\t%v\t  all\n", micros(p.First), micros(p.Second))
	for _, f := range p.Functions {
		fmt.Fprintf(w, "%v\t%v\t  %s\n", micros(f.First), micros(f.Second), printable(f.Function))
	}
	return w.Flush()
}
