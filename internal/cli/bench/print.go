package bench

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
)

// Markdown writes reports side by side, one column each. With two or more reports, a last column has the ratio of the
// last report's p50 to the first's; above 1 means that the first is faster.
func Markdown(out io.Writer, reports []*Report) error {
	w := &writer{out: out}
	for i := range rounds(reports) {
		first := reports[0].Rounds[i]
		w.printf("\n### %d pods, %d at a time (network: %s)\n\n", first.Pods, first.Parallel, reports[0].Network)
		w.figures(reports, func(r *Report) []Figure { return r.Rounds[i].Figures })
		w.summary("pods/s (up phase)", reports, func(r *Report) string { return fmt.Sprintf("%.1f", r.Rounds[i].PodsPerSecond) })
		w.summary("helpers' PSS per idle pod", reports, func(r *Report) string {
			return fmt.Sprintf("%.2f MiB (%s)", float64(r.Rounds[i].Memory.HelperPSS)/(1<<20), counts(r.Rounds[i].Memory.Helpers))
		})
		w.summary("daemons' growth per idle pod (PSS)", reports, func(r *Report) string {
			return fmt.Sprintf("%.2f MiB", float64(r.Rounds[i].Memory.DaemonGrowth)/(1<<20))
		})
	}
	if len(reports) > 0 && reports[0].ListPods > 0 {
		w.printf("\n### Lists and status with %d pods\n\n", reports[0].ListPods)
		w.figures(reports, func(r *Report) []Figure { return r.Lists })
		w.summary("all pods running after", reports, func(r *Report) string { return fmt.Sprintf("%.1f s", r.ListUp) })
		w.summary("daemons' memory (PSS)", reports, func(r *Report) string { return fmt.Sprintf("%.0f MiB", float64(r.ListDaemons)/(1<<20)) })
	}
	return w.err
}

// rounds returns the number of rounds in the report that has the fewest rounds.
func rounds(reports []*Report) int {
	if len(reports) == 0 {
		return 0
	}
	n := len(reports[0].Rounds)
	for _, r := range reports {
		n = min(n, len(r.Rounds))
	}
	return n
}

func counts(m map[string]int) string {
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(m)) {
		parts = append(parts, fmt.Sprintf("%d %s", m[name], name))
	}
	if len(parts) == 0 {
		return "none"
	}
	return strings.Join(parts, ", ")
}

// writer formats text for out and keeps the first error.
type writer struct {
	out io.Writer
	err error
}

func (w *writer) printf(format string, args ...any) {
	if w.err == nil {
		_, w.err = fmt.Fprintf(w.out, format, args...)
	}
}

func (w *writer) figures(reports []*Report, of func(*Report) []Figure) {
	head, rule := "| p50 / p95 in ms |", "|---|"
	for _, r := range reports {
		head += " " + r.Runtime + " |"
		rule += "---:|"
	}
	if len(reports) > 1 {
		head, rule = head+" last : first |", rule+"---:|"
	}
	w.printf("%s\n%s\n", head, rule)
	for _, f := range of(reports[0]) {
		row := "| " + f.Call + " |"
		p50 := make([]float64, len(reports))
		for i, r := range reports {
			at := slices.IndexFunc(of(r), func(g Figure) bool { return g.Call == f.Call })
			if at < 0 {
				row += " – |"
				continue
			}
			p50[i] = of(r)[at].P50
			row += fmt.Sprintf(" %s / %s |", millis(p50[i]), millis(of(r)[at].P95))
		}
		if len(reports) > 1 {
			row += " " + ratio(p50[len(p50)-1], p50[0]) + " |"
		}
		w.printf("%s\n", row)
	}
}

// millis formats milliseconds with three significant digits.
func millis(v float64) string {
	if v < 10 {
		return fmt.Sprintf("%.2f", v)
	}
	return fmt.Sprintf("%.1f", v)
}

func ratio(last, first float64) string {
	if last == 0 || first == 0 {
		return "–"
	}
	return fmt.Sprintf("%.2f", last/first)
}

func (w *writer) summary(what string, reports []*Report, of func(*Report) string) {
	row := "| " + what + " |"
	for _, r := range reports {
		row += " " + of(r) + " |"
	}
	if len(reports) > 1 {
		row += " |"
	}
	w.printf("%s\n", row)
}
