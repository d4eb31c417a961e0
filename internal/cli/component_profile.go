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
	"github.com/tripod-run/tripod/internal/sandbox/wasm/standalone"
)

// maxProfiled is how many functions a profile shows.
const maxProfiled = 15

// caseProfile compares the first call of an instance with the second one.
type caseProfile struct {
	Name string `json:"name"`
	// First and Second are how long the calls take, or 0 if that is not known, and the moments are how often it was looked.
	First         float64           `json:"firstSeconds"`
	Second        float64           `json:"secondSeconds"`
	FirstMoments  int               `json:"firstMoments"`
	SecondMoments int               `json:"secondMoments"`
	Functions     []functionProfile `json:"functions"`
}

// functionProfile is the time that a call spends in a function and in what the function calls, in seconds.
type functionProfile struct {
	Function string  `json:"function"`
	First    float64 `json:"firstSeconds"`
	Second   float64 `json:"secondSeconds"`
}

// profile finds out where the component is during a case.
func (c *componentCase) profile(ctx context.Context, worker *standalone.Worker, client call.Client) (*caseProfile, error) {
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
func compareProfiles(name string, first, second standalone.Profile) *caseProfile {
	p := &caseProfile{
		Name: name, First: first.Typical.Seconds(), Second: second.Typical.Seconds(), FirstMoments: len(first.Samples),
		SecondMoments: len(second.Samples),
	}
	firsts, seconds := inFunctions(first), inFunctions(second)
	for function := range firsts {
		seconds[function] += 0 // so that it has all functions
	}
	for function, second := range seconds {
		p.Functions = append(p.Functions, functionProfile{function, firsts[function], second})
	}
	slices.SortFunc(p.Functions, func(a, b functionProfile) int {
		return cmp.Or(cmp.Compare(b.First-b.Second, a.First-a.Second), cmp.Compare(a.Function, b.Function))
	})
	p.Functions = p.Functions[:min(len(p.Functions), maxProfiled)]
	return p
}

// inFunctions returns the seconds of a call in each function.
func inFunctions(p standalone.Profile) map[string]float64 {
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
	if p.FirstMoments == 0 {
		_, err := fmt.Fprintf(out, "%s: no profile: the call takes too long, or ends too fast\n", printable(p.Name))
		return err
	}
	micros := func(seconds float64) string {
		return time.Duration(seconds * float64(time.Second)).Round(time.Microsecond).String()
	}
	second := micros
	if p.SecondMoments == 0 { // the instance does not live to it
		second = func(float64) string { return "–" }
	}
	fmt.Fprintf(out, "%s: where the component is in a call (at %d and %d moments), with what a function calls:\n", printable(p.Name),
		p.FirstMoments, p.SecondMoments)
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(w, "first\tsecond\t  of an instance\n%s\t%s\t  all\n", micros(p.First), second(p.Second))
	for _, f := range p.Functions {
		fmt.Fprintf(w, "%s\t%s\t  %s\n", micros(f.First), second(f.Second), printable(f.Function))
	}
	return w.Flush()
}
