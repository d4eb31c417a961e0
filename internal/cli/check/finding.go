package check

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
)

// Finding is the result of one check.
type Finding struct {
	// Subject names what was checked: "overlayfs", "CNI plugins" …
	Subject string
	// OK means that the check passed. Required means that pods cannot run unless it passes.
	OK, Required bool
	// Detail describes the result. Remedy says what to do if OK is false.
	Detail, Remedy string
}

// Level returns the severity of a finding: "ok", "note" or "error".
func (f Finding) Level() string {
	switch {
	case f.OK:
		return "ok"
	case f.Required:
		return "error"
	default:
		return "note"
	}
}

// MarshalJSON adds the level.
func (f Finding) MarshalJSON() ([]byte, error) {
	return json.Marshal(map[string]any{
		"subject": f.Subject, "level": f.Level(), "ok": f.OK, "required": f.Required, "detail": f.Detail, "remedy": f.Remedy,
	})
}

// Errors counts the findings that prevent pods from running.
func Errors(findings []Finding) int {
	n := 0
	for _, f := range findings {
		if f.Level() == "error" {
			n++
		}
	}
	return n
}

// Print writes the findings as text, with their remedies and a summary.
func Print(out io.Writer, findings []Finding) error {
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
