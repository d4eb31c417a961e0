package check

import (
	"fmt"
	"io"
	"strings"

	"github.com/tripod-run/tripod/internal/health"
)

// Errors counts the findings that prevent pods from running.
func Errors(findings []health.Finding) int {
	n := 0
	for _, f := range findings {
		if f.Level() == "error" {
			n++
		}
	}
	return n
}

// Print writes the findings as text, with their remedies and a summary.
func Print(out io.Writer, findings []health.Finding) error {
	width, notes := 0, 0
	for _, f := range findings {
		width = max(width, len(f.Subject))
		if f.Level() == "note" {
			notes++
		}
	}
	for _, f := range findings {
		if _, err := fmt.Fprintf(out, "%-5s  %-*s  %s\n", f.Level(), width, f.Subject, oneLine(f.Detail)); err != nil {
			return err
		}
		if !f.OK && f.Remedy != "" {
			if _, err := fmt.Fprintf(out, "%-5s  %-*s  → %s\n", "", width, "", oneLine(f.Remedy)); err != nil {
				return err
			}
		}
	}
	summary := "This host can run pods"
	if n := Errors(findings); n > 0 {
		summary = fmt.Sprintf("This host cannot run pods yet: %d of %d findings are errors", n, len(findings))
	}
	_, err := fmt.Fprintf(out, "\n%s (%d notes).\n", summary, notes)
	return err
}

func oneLine(s string) string { return strings.Join(strings.Fields(s), " ") }
